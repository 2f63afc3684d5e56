"""The simulated gateway: requests and their times, the line that clients share, and connections.

A Ledger decides which worker owns which attempt and which tokens are accepted (`member/ledger.py`);
its effects go out over channels here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from livescale.batching.run import EmittedTokens, SequenceSpec
from livescale.fair_line import FairLine
from livescale.member.ledger import Announce, Finish, Forget, Ledger, LedgerEffect, Moved, Send
from livescale.messages.attempts import AttemptFailed, AttemptTaken, Cancel, Disown
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.sim.checkers.requests import RequestChecker
from livescale.sim.clock import Clock
from livescale.sim.config import SimConfig
from livescale.sim.links.channel import SimChannel
from livescale.sim.worker_messages import FromWorkerMessage, SimSubmit, SimTokens, ToWorkerMessage
from livescale.telemetry.record import RequestLine
from livescale.types import Outcome, RequestId, SamplingParams, WorkerRef

GatewayEvent = RequestArrived | RequestCancelled | RequestEnded
GatewayOrder = Dispatch | FailRequest


class Row(Protocol):
    """One request of a load, such as a line of a trace."""

    @property
    def arrival_ns(self) -> int: ...

    @property
    def input_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


@dataclass(slots=True)
class _Transcript:
    """One request until it is over."""

    request: RequestId
    model: str
    prompt_tokens: int
    output_tokens: int
    queued_ns: int
    client: str = ""
    weight: int = 1
    token_ns: list[int] = field(default_factory=list)
    last_worker: WorkerRef | None = None
    dispatched_ns: int | None = None
    #: while it waits: what the clock does when that takes too long
    alarm: int | None = None


class SimGateway:
    """Accepts requests, sends attempts to workers, gathers tokens, writes RequestLines."""

    def __init__(
        self,
        clock: Clock,
        config: SimConfig,
        checkers: RequestChecker,
        say: Callable[[GatewayEvent], None],
        write: Callable[[RequestLine], None],
    ) -> None:
        self._clock = clock
        self._config = config
        self._arrivals = 0
        self._checkers = checkers
        self._say = say
        self._write = write
        #: names of models that requests may ask for
        self._served: dict[str, None] = {}
        self._transcripts: dict[RequestId, _Transcript] = {}
        self._ledger = Ledger()
        self._workers: dict[WorkerRef, SimChannel[ToWorkerMessage]] = {}
        #: per model, requests that no worker has
        self._waiting: dict[str, FairLine] = {}

    # -- models ---------------------------------------------------------------------------------

    def serve(self, model: str) -> None:
        """Requests for the model are accepted from now on."""
        self._served[model] = None

    def withdraw(self, model: str) -> None:
        """No new requests; those that are here go on."""
        self._served.pop(model, None)

    # -- clients --------------------------------------------------------------------------------

    def arrive(self, request: RequestId, model: str, row: Row) -> None:
        """Accept the request and tell the controller; reject it when the queue is full."""
        weights, client = self._config.client_weights, self._next_client()
        t = _Transcript(
            request=request,
            model=model,
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            queued_ns=self._clock.now_ns,
            # One that is alone has no name, as in worlds without clients.
            client=f"client-{client}" if len(weights) > 1 else "",
            weight=weights[client],
        )
        self._checkers.arrived(
            t.queued_ns, request, model, t.client, row.input_tokens, row.output_tokens
        )
        refusal = self._refusal(t)
        if refusal is not None:
            refused = Finish(
                request, Outcome.FAILED, attempts=0, owner=None, tokens=0, reason=refusal
            )
            self._close(t, refused)
            return
        self._transcripts[request] = t
        self._wait(t)
        self._carry_out(self._ledger.open(request))

    def cancel(self, request: RequestId) -> None:
        """The client goes away, if it is still there."""
        self._carry_out(self._ledger.cancel(request))

    def _next_client(self) -> int:
        """The first client sends every other request, the others take turns with the rest."""
        number, others = self._arrivals, len(self._config.client_weights) - 1
        self._arrivals += 1
        return 0 if not others or number % 2 == 0 else 1 + number // 2 % others

    def _refusal(self, t: _Transcript) -> str | None:
        """Why the request cannot wait here; None if it can."""
        config = self._config
        if t.model not in self._served:
            return f"{t.model} is not served"
        line = self._waiting.setdefault(
            t.model, FairLine(config.queue_requests_max, config.queue_prompt_tokens_max)
        )
        if not line.takes_requests(t.client, 1):
            return f"{line.requests} requests wait already"
        if not line.takes_prompt_tokens(t.client, t.prompt_tokens):
            return f"{line.prompt_tokens} prompt tokens wait already"
        return None

    # -- the line -------------------------------------------------------------------------------

    def _wait(self, t: _Transcript) -> None:
        """The request waits for a worker from now on."""
        self._waiting[t.model].add(t.client, 1, t.prompt_tokens)
        timeout_ns = self._config.queue_timeout_ns
        if timeout_ns is not None:
            due_ns = self._clock.now_ns + timeout_ns
            t.alarm = self._clock.at(due_ns, partial(self._waited_too_long, t))

    def _leave_line(self, t: _Transcript) -> None:
        self._waiting[t.model].remove(t.client, 1, t.prompt_tokens)
        if t.alarm is not None:
            self._clock.cancel(t.alarm)
            t.alarm = None

    def _waited_too_long(self, t: _Transcript) -> None:
        reason = f"no instance of {t.model} took it in time"
        self._carry_out(self._ledger.cancel(t.request, Outcome.FAILED, reason))

    # -- the controller -------------------------------------------------------------------------

    def joined(self) -> None:
        """A new controller is there: tell it of every unfinished request."""
        self._carry_out(self._ledger.controller_joined())

    def take_order(self, order: GatewayOrder) -> None:
        if isinstance(order, FailRequest):
            self._carry_out(self._ledger.failed(order.request, order.reason))
            return
        entry = self._ledger.get(order.request)
        if entry is not None:
            self._checkers.dispatched(order, entry.attempt, entry.owner)
        is_reachable = order.worker in self._workers
        self._carry_out(self._ledger.dispatched(order, is_reachable=is_reachable))

    # -- the workers ----------------------------------------------------------------------------

    def meet(self, worker: WorkerRef, channel: SimChannel[ToWorkerMessage]) -> None:
        """A connection to a worker is open."""
        self._workers[worker] = channel

    def channel_to(self, worker: WorkerRef) -> SimChannel[ToWorkerMessage] | None:
        """None: there is no connection."""
        return self._workers.get(worker)

    def worker_gone(self, worker: WorkerRef) -> None:
        """The connection to a worker is lost."""
        self._workers.pop(worker).cut(self._clock.now_ns)
        self._carry_out(self._ledger.worker_gone(worker))

    def workers_with_requests(self) -> list[WorkerRef]:
        """Workers that own a request."""
        return sorted({entry.owner for entry in self._ledger if entry.owner is not None})

    def take_message(self, worker: WorkerRef, message: FromWorkerMessage) -> None:
        """Tokens and reports of a worker."""
        ledger = self._ledger
        if isinstance(message, SimTokens):
            delay_ns = self._clock.now_ns - message.step_ns[-1]
            came_ns = [step_ns + delay_ns for step_ns in message.step_ns]
            for emitted in message.emitted:
                self._take(worker, emitted, came_ns)
            return
        request, attempt = message.request, message.attempt
        if isinstance(message, AttemptTaken):
            effects = ledger.taken(worker, request, attempt, message.moves)
        elif isinstance(message, AttemptFailed):
            effects = ledger.broke(worker, request, attempt, message.reason)
        else:
            effects = ledger.returned(worker, request, attempt)
        self._carry_out(effects)

    def _take(self, worker: WorkerRef, emitted: EmittedTokens, came_ns: list[int]) -> None:
        """Note the times of tokens that are accepted."""
        request, attempt = emitted.request, emitted.attempt
        entry = self._ledger.get(request)
        if entry is not None and entry.is_run_by(worker, attempt):
            self._check(emitted, entry.tokens, entry.repeated_max)
        accepted, effects = self._ledger.came(
            worker,
            request,
            attempt,
            index=emitted.index,
            count=len(emitted.token_ids),
            is_last=emitted.finish_reason is not None,
        )
        if accepted:
            self._transcripts[request].token_ns += came_ns[-accepted:]
        if effects:
            self._carry_out(effects)

    def _check(self, emitted: EmittedTokens, known: int, repeated_max: int) -> None:
        """Tokens of the owner are the next ones, behind those that an owner may repeat."""
        repeated = min(known, repeated_max) - emitted.index
        if repeated > 0:
            emitted = msgspec.structs.replace(
                emitted,
                index=emitted.index + repeated,
                token_ids=emitted.token_ids[repeated:],
            )
        if emitted.token_ids:
            prompt_tokens = self._transcripts[emitted.request].prompt_tokens
            self._checkers.tokens(emitted, known, prompt_tokens)

    # -- what follows ---------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[LedgerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.order)
            elif isinstance(effect, Forget):
                forget = Cancel if effect.is_over else Disown
                self._workers[effect.worker].send(forget(effect.request, effect.attempt))
            elif isinstance(effect, Moved):
                self._move(effect)
            elif isinstance(effect, Announce):
                self._announce(effect)
            elif isinstance(effect, Finish):
                t = self._transcripts.pop(effect.request)
                if effect.owner is None:
                    self._leave_line(t)
                self._close(t, effect)
            else:
                self._say(effect)

    def _send(self, order: Dispatch) -> None:
        t, entry = self._transcripts[order.request], self._ledger.get(order.request)
        assert entry is not None
        t.dispatched_ns = self._clock.now_ns
        spec = SequenceSpec(
            order.request,
            order.attempt,
            range(t.prompt_tokens),
            SamplingParams(t.output_tokens),
            tuple(range(t.prompt_tokens, t.prompt_tokens + entry.tokens)),
            content=order.request,
        )
        self._workers[order.worker].send(SimSubmit(order.instance, spec))

    def _move(self, moved: Moved) -> None:
        t = self._transcripts[moved.request]
        self._checkers.moved(self._clock.now_ns, t.request, moved.after)
        if moved.before is None:
            self._leave_line(t)
        if moved.after is None:
            self._wait(t)
        t.last_worker = moved.after or t.last_worker

    def _announce(self, announced: Announce) -> None:
        t = self._transcripts[announced.request]
        self._say(
            RequestArrived(
                request=t.request,
                model=t.model,
                prompt_tokens=t.prompt_tokens,
                output_tokens_max=t.output_tokens,
                attempt=announced.attempt,
                worker=announced.owner,
                client=t.client,
                weight=t.weight,
                moves=announced.moves,
            )
        )

    def _close(self, t: _Transcript, end: Finish) -> None:
        now_ns = self._clock.now_ns
        self._checkers.ended(now_ns, t.request, end.outcome, end.tokens, t.output_tokens)
        self._write(
            RequestLine(
                request=t.request,
                model=t.model,
                prompt_tokens=t.prompt_tokens,
                output_tokens_max=t.output_tokens,
                queued_ns=t.queued_ns,
                finished_ns=now_ns,
                outcome=end.outcome,
                attempts=end.attempts,
                dispatched_ns=t.dispatched_ns,
                token_ns=tuple(t.token_ns),
                worker=t.last_worker,
                error=end.reason or None,
            )
        )
