"""Rules about requests at the gateway of a world, over all lives of the controller.

A request ends once, with all its tokens, or fails because its world makes that inevitable: at its
arrival the model was not served, or as many requests waited as may; or it waited too long; or a
controller failed it, for which there are rules of their own (`failures.py`); or no device
could hold it; or no executor can compute it (`sim/base/poison.py`).
"""

from __future__ import annotations

from collections import Counter

from livescale.batching.runs.run import EmittedTokens
from livescale.common.fair_line import OVERFULL
from livescale.member.ledger import Finish
from livescale.messages.commands import Dispatch
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.sim.base.config import SimConfig
from livescale.sim.base.poison import Poison
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import UnexplainedFailure, require
from livescale.values.stages import stage_name
from livescale.values.types import Outcome, RequestId, WorkerRef


class RequestChecker:
    """What the gateway receives, and how its requests end."""

    def __init__(self, config: SimConfig, failures: FailureChecker, poison: Poison) -> None:
        self._config = config
        self._poison = poison
        self._failures = failures
        self._requests: dict[RequestId, RequestArrived] = {}
        self._outcomes: dict[RequestId, Outcome] = {}
        #: requests that no worker has, since when, and by model and client their number and tokens
        self._waiting: dict[RequestId, int] = {}
        self._lines: dict[str, Counter[str]] = {}
        self._prompts: dict[str, Counter[str]] = {}
        #: why requests that have just arrived must be refused ("": they must not)
        self._refusals: dict[RequestId, str] = {}

    def arrived(self, now_ns: int, asked: RequestArrived) -> None:
        """Before the request is accepted or refused."""
        request = asked.request
        require(request not in self._requests, "request ids are unique", request)
        self._requests[request] = asked
        self._refusals[request] = self._refusal(now_ns, asked)
        self._wait(now_ns, request)

    def moved(self, now_ns: int, request: RequestId, worker: WorkerRef | None) -> None:
        """The worker has the request from now on (None: it waits)."""
        if worker is None:
            self._wait(now_ns, request)
        else:
            self._leave_line(now_ns, request)

    def reported(self, event: RequestArrived | RequestCancelled | RequestEnded) -> None:
        """The gateway sends this to the controller, or would if there were one."""
        if isinstance(event, RequestArrived):
            refusal = self._refusals.pop(event.request, "")
            require(not refusal, "what must be refused is not accepted", event, refusal)
        elif isinstance(event, RequestEnded) and event.outcome is Outcome.WORKER_LOST:
            self._failures.lost(event.request, event.attempt)

    def dispatched(self, order: Dispatch, attempt: int, worker: WorkerRef | None) -> None:
        require(order.attempt > attempt, "attempts grow", order, attempt, worker)

    def tokens(self, emitted: EmittedTokens, accepted: int) -> None:
        first = self._requests[emitted.request].prompt_tokens + emitted.index
        expected = range(first, first + len(emitted.token_ids))
        # The busiest of all rules: nothing is put together for the one that holds.
        if emitted.index != accepted or emitted.token_ids != expected:
            require(emitted.index == accepted, "each index comes once, in order", emitted, accepted)
            are_same = list(emitted.token_ids) == list(expected)
            require(are_same, "a retry goes on with the same tokens", emitted)

    def ended(self, now_ns: int, end: Finish) -> None:
        request, outcome = end.request, end.outcome
        require(request not in self._outcomes, "a request ends once", request)
        self._outcomes[request] = outcome
        waited_ns = self._leave_line(now_ns, request)
        refusal = self._refusals.pop(request, "")
        most = self._poison.tokens_max(request)
        is_poison = most is None or end.tokens <= most
        require(is_poison, "nothing comes of what cannot be computed", end, most)
        if outcome is Outcome.FINISHED:
            has_all = end.tokens == self._requests[request].output_tokens_max
            require(has_all, "a finished request has all its tokens", request, end.tokens)
        elif outcome is Outcome.FAILED and not refusal:
            self._check_failure(request, waited_ns)

    def all_ended(self) -> None:
        waiting = [request for request in self._requests if request not in self._outcomes]
        require(not waiting, "every request ends", waiting)

    # -- helpers --------------------------------------------------------------------------------

    def _check_failure(self, request: RequestId, waited_ns: int) -> None:
        """The request was accepted, and fails."""
        asked, timeout_ns = self._requests[request], self._config.queue_timeout_ns
        was_late = timeout_ns is not None and waited_ns >= timeout_ns
        tokens = asked.prompt_tokens + asked.output_tokens_max
        could_run = tokens <= self._tokens_held_max(asked.model)
        is_due = was_late or request in self._failures.failed or self._poison.raises(request)
        if could_run and not is_due:
            raise UnexplainedFailure(f"a request fails that need not: {request} of {asked.model}")

    def _refusal(self, now_ns: int, asked: RequestArrived) -> str:
        """Why the request is refused now ("": it is not)."""
        config, model, client = self._config, asked.model, asked.client
        if not self._is_served(now_ns, model):
            return "its model is not served"
        if not self._lines.get(model):
            return ""
        if _is_full(self._lines[model], client, 1, config.queue_requests_max):
            return "too many requests wait"
        most = config.queue_prompt_tokens_max
        if most is not None and _is_full(self._prompts[model], client, asked.prompt_tokens, most):
            return "too many prompt tokens wait"
        return ""

    def _is_served(self, now_ns: int, model: str) -> bool:
        is_there = any(p.spec.offered_as == model for p in self._config.controller.models)
        for change in self._config.changes:
            if change.at_ns <= now_ns:
                if change.added is not None and change.added.spec.offered_as == model:
                    is_there = True
                is_there = is_there and change.removed not in (model, stage_name(model, 0))
        return is_there

    def _tokens_held_max(self, model: str) -> int:
        """Of one request, by the device that holds most."""
        config = self._config
        spec = next(p.spec for p in config.policies if p.spec.offered_as == model)
        fitting = [d for d in config.devices if d.arena_bytes >= spec.size_bytes]
        limits = [config.batcher(spec, device) for device in fitting]
        return max((b.kv_blocks * b.block_tokens for b in limits), default=0)

    def _wait(self, now_ns: int, request: RequestId) -> None:
        if request not in self._waiting:
            self._waiting[request] = now_ns
            asked = self._requests[request]
            self._lines.setdefault(asked.model, Counter())[asked.client] += 1
            self._prompts.setdefault(asked.model, Counter())[asked.client] += asked.prompt_tokens

    def _leave_line(self, now_ns: int, request: RequestId) -> int:
        """For how long the request has waited."""
        waited_ns = now_ns - self._waiting.get(request, now_ns)
        timeout_ns = self._config.queue_timeout_ns
        is_in_time = timeout_ns is None or waited_ns <= timeout_ns
        require(is_in_time, "no request waits for too long", request, waited_ns)
        if self._waiting.pop(request, None) is not None:
            asked = self._requests[request]
            amounts = ((self._lines, 1), (self._prompts, asked.prompt_tokens))
            for lines, amount in amounts:
                line = lines[asked.model]
                line[asked.client] -= amount
                if not line[asked.client]:
                    del line[asked.client]
        return waited_ns


def _is_full(line: Counter[str], client: str, more: int, most: int) -> bool:
    """So many more of the client do not fit in. Clients below their share of the line get places
    beyond its bound."""
    total, own, clients = line.total() + more, line[client], len({*line, client})
    if total <= most:
        return False
    is_below = not own or (own + more) * clients <= most
    return not is_below or total > OVERFULL * most
