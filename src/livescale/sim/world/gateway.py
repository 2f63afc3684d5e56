"""The simulated gateway: requests and their times, the line that clients share, and connections.

A Ledger decides which worker owns which attempt and which tokens are accepted (`member/ledger.py`);
its effects go out over channels here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from livescale.batching.runs.run import EmittedTokens, SequenceSpec
from livescale.common.fair_line import FairLine
from livescale.load.traces import TraceRow
from livescale.member.inputs import Submitted
from livescale.member.ledger import Announce, Finish, Forget, Ledger, LedgerEffect, Moved, Send
from livescale.member.waits import Waits
from livescale.messages import attempts
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SimConfig
from livescale.sim.base.poison import Poison
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.fencing import FenceChecker
from livescale.sim.checkers.requests import RequestChecker
from livescale.sim.links.channel import SimChannel
from livescale.telemetry.record.record import RequestLine
from livescale.values.types import Outcome, RequestId, SamplingParams, WorkerRef


@dataclass(frozen=True, slots=True)
class SimTokens:
    """Worker to gateway: what a Run brought, with positions in the place of token ids. `step_ns`
    are the times at which its steps ended; the tokens of a request are those of the last steps."""

    step_ns: list[int]
    emitted: list[EmittedTokens]


GatewayEvent = RequestArrived | RequestCancelled | RequestEnded
GatewayOrder = Dispatch | FailRequest
ToWorkerMessage = Submitted | attempts.Cancel | attempts.Disown
FromWorkerMessage = (
    SimTokens | attempts.AttemptFailed | attempts.AttemptTaken | attempts.AttemptReturned
)


@dataclass(slots=True)
class _Transcript:
    """One request until it is over, and what was asked first."""

    asked: RequestArrived
    queued_ns: int
    token_ns: list[int] = field(default_factory=list)
    last_worker: WorkerRef | None = None
    dispatched_ns: int | None = None


@dataclass(frozen=True, slots=True)
class GatewayWorld:
    """What all gateways of a world share. `serves` says whether requests may ask for a model; `say`
    sends an event of the gateway of this name to the controller, if there is one; `write` gets
    RequestLines."""

    config: SimConfig
    clock: Clock
    failures: FailureChecker
    poison: Poison
    fences: FenceChecker
    serves: Callable[[str], bool]
    say: Callable[[str, GatewayEvent], None]
    write: Callable[[RequestLine], None]


class SimGateway:
    """Accepts requests, sends attempts to workers, gathers tokens, writes RequestLines."""

    def __init__(self, name: str, world: GatewayWorld) -> None:
        self.name = name
        self._world = world
        self._clock = world.clock
        self._config = world.config
        self._arrivals = 0
        self._checkers = RequestChecker(world.config, world.failures, world.poison)
        self._fences = world.fences
        self._is_dead = False
        self._transcripts: dict[RequestId, _Transcript] = {}
        self._ledger = Ledger()
        self._workers: dict[WorkerRef, SimChannel[ToWorkerMessage]] = {}
        #: per model, requests that no worker has
        self._waiting: dict[str, FairLine] = {}
        self._waits = Waits(world.config.queue_timeout_ns)
        #: when the clock ends the next wait, and its ticket (None: it ends none)
        self._alarm: tuple[int, int] | None = None

    # -- clients --------------------------------------------------------------------------------

    def arrive(self, request: RequestId, model: str, row: TraceRow) -> None:
        """Accept the request and report it to the controller; reject it when the queue is full."""
        weights, client = self._config.client_weights, self._next_client()
        asked = RequestArrived(
            request=request,
            model=model,
            prompt_tokens=row.input_tokens,
            output_tokens_max=row.output_tokens,
            # One that is alone has no name, as in worlds without clients.
            client=f"client-{client}" if len(weights) > 1 else "",
            weight=weights[client],
        )
        t = _Transcript(asked, self._clock.now_ns)
        self._checkers.arrived(t.queued_ns, asked)
        refusal = self._refusal(asked)
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

    def die(self) -> None:
        """Its requests end with it, whose clients lose their connections."""
        self._is_dead = True
        for t in self._transcripts.values():
            self._waits.end(t.asked.request)
            entry = self._ledger.get(t.asked.request)
            tried = 0 if entry is None else entry.attempt
            self._write(t, Outcome.FAILED, "its gateway was lost", tried)
        self._set_alarm()
        self._transcripts.clear()
        self._workers.clear()

    def _next_client(self) -> int:
        """The first client sends every other request, the others take turns with the rest."""
        number, others = self._arrivals, len(self._config.client_weights) - 1
        self._arrivals += 1
        return 0 if not others or number % 2 == 0 else 1 + number // 2 % others

    def _refusal(self, asked: RequestArrived) -> str | None:
        """Why the request cannot wait here; None if it can."""
        config = self._config
        if not self._world.serves(asked.model):
            return f"{asked.model} is not served"
        line = self._waiting.setdefault(
            asked.model, FairLine(config.queue_requests_max, config.queue_prompt_tokens_max)
        )
        if not line.takes_requests(asked.client, 1):
            return f"{line.requests} requests wait already"
        if not line.takes_prompt_tokens(asked.client, asked.prompt_tokens):
            return f"{line.prompt_tokens} prompt tokens wait already"
        return None

    # -- the line -------------------------------------------------------------------------------

    def _wait(self, t: _Transcript) -> None:
        """The request waits for a worker from now on."""
        self._waiting[t.asked.model].add(t.asked.client, 1, t.asked.prompt_tokens)
        self._waits.begin(t.asked.request, self._clock.now_ns)
        self._set_alarm()

    def _leave_line(self, t: _Transcript) -> None:
        self._waiting[t.asked.model].remove(t.asked.client, 1, t.asked.prompt_tokens)
        self._waits.end(t.asked.request)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """The clock ends the next wait, and no other: a world is over when nothing is to come."""
        due_ns = self._waits.next_ns
        if self._alarm is not None:
            if self._alarm[0] == due_ns:
                return
            self._clock.cancel(self._alarm[1])
        self._alarm = None if due_ns is None else (due_ns, self._clock.at(due_ns, self._end_waits))

    def _end_waits(self) -> None:
        self._alarm = None
        while (request := self._waits.take_over(self._clock.now_ns)) is not None:
            reason = f"no instance of {self._transcripts[request].asked.model} took it in time"
            self._carry_out(self._ledger.cancel(request, Outcome.FAILED, reason))
        self._set_alarm()

    def all_ended(self) -> None:
        """The world is over: every request has ended."""
        self._checkers.all_ended()

    # -- the controller -------------------------------------------------------------------------

    def later_than(self, epoch: ControllerEpoch) -> ControllerEpoch | None:
        """The life of the controller for which this one is refused (None: it may be met)."""
        return self._ledger.fence.meet(epoch)

    def joined(self, epoch: ControllerEpoch) -> None:
        """A new controller is there: report every unfinished request."""
        self._fences.met(self.name, epoch)
        self._carry_out(self._ledger.controller_joined(epoch))

    def take_order(self, order: GatewayOrder, *, epoch: ControllerEpoch) -> None:
        """An order of a controller, in whichever life."""
        entry = self._ledger.get(order.request)
        before = None if entry is None else (entry.attempt, entry.owner)
        if isinstance(order, FailRequest):
            effects = self._ledger.failed(order.request, order.reason, epoch)
        else:
            is_reachable = order.worker in self._workers
            effects = self._ledger.dispatched(order, epoch, is_reachable=is_reachable)
        if effects:
            self._fences.carried_out(self.name, order, epoch.number)
            if before is not None and isinstance(order, Dispatch):
                self._checkers.dispatched(order, *before)
        self._carry_out(effects)

    # -- the workers ----------------------------------------------------------------------------

    def meet(self, worker: WorkerRef, channel: SimChannel[ToWorkerMessage]) -> None:
        """A connection to a worker is open."""
        self._workers[worker] = channel

    def worker_gone(self, worker: WorkerRef) -> None:
        """The connection to a worker is lost."""
        if not self._is_dead:
            self._workers.pop(worker).cut(self._clock.now_ns)
            self._carry_out(self._ledger.worker_gone(worker))

    def workers_with_requests(self) -> list[WorkerRef]:
        """Workers that own a request."""
        if self._is_dead:
            return []
        return sorted({entry.owner for entry in self._ledger if entry.owner is not None})

    def take_message(self, worker: WorkerRef, message: FromWorkerMessage) -> None:
        """Tokens and reports of a worker."""
        if self._is_dead:
            # A worker that was lost before this gateway had sent them.
            return
        if isinstance(message, SimTokens):
            delay_ns = self._clock.now_ns - message.step_ns[-1]
            came_ns = [step_ns + delay_ns for step_ns in message.step_ns]
            for emitted in message.emitted:
                self._take(worker, emitted, came_ns)
            return
        self._carry_out(self._ledger.reported(worker, message))

    def _take(self, worker: WorkerRef, emitted: EmittedTokens, came_ns: list[int]) -> None:
        """Note the times of tokens that are accepted."""
        request, index = emitted.request, emitted.index
        t = self._transcripts.get(request)
        is_next = t is not None and index == len(t.token_ns)
        if not is_next:
            self._check_repeated(worker, emitted)
        accepted, effects = self._ledger.came(
            worker,
            request,
            emitted.attempt,
            index=index,
            count=len(emitted.token_ids),
            is_last=emitted.finish_reason is not None,
        )
        if accepted and t is not None:
            if is_next:
                self._checkers.tokens(emitted, index)
            t.token_ns += came_ns if accepted == len(came_ns) else came_ns[-accepted:]
        if effects:
            self._carry_out(effects)

    def _check_repeated(self, worker: WorkerRef, emitted: EmittedTokens) -> None:
        """Tokens of the owner are the next ones, behind those that an owner may repeat."""
        entry = self._ledger.get(emitted.request)
        if entry is None or not entry.is_run_by(worker, emitted.attempt):
            return
        repeated = max(min(entry.tokens, entry.repeated_max) - emitted.index, 0)
        left = emitted.token_ids[repeated:]
        if left:
            index = emitted.index + repeated
            emitted = msgspec.structs.replace(emitted, index=index, token_ids=left)
            self._checkers.tokens(emitted, entry.tokens)

    # -- what follows ---------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[LedgerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.order)
            elif isinstance(effect, Forget):
                self._workers[effect.worker].send(effect.message)
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
                self._report(effect)

    def _send(self, order: Dispatch) -> None:
        t, entry = self._transcripts[order.request], self._ledger.get(order.request)
        assert entry is not None
        t.dispatched_ns, prompt_tokens = self._clock.now_ns, t.asked.prompt_tokens
        spec = SequenceSpec(
            order.request,
            order.attempt,
            range(prompt_tokens),
            SamplingParams(t.asked.output_tokens_max),
            tuple(range(prompt_tokens, prompt_tokens + entry.tokens)),
            content=order.request,
        )
        self._workers[order.worker].send(Submitted(self.name, order.instance, spec))

    def _move(self, moved: Moved) -> None:
        t = self._transcripts[moved.request]
        self._checkers.moved(self._clock.now_ns, moved.request, moved.after)
        if moved.before is None:
            self._leave_line(t)
        if moved.after is None:
            self._wait(t)
        t.last_worker = moved.after or t.last_worker

    def _announce(self, announced: Announce) -> None:
        asked, attempt = self._transcripts[announced.request].asked, announced.attempt
        worker, moves = announced.owner, announced.moves
        self._report(msgspec.structs.replace(asked, attempt=attempt, worker=worker, moves=moves))

    def _report(self, event: GatewayEvent) -> None:
        self._checkers.reported(event)
        self._world.say(self.name, event)

    def _close(self, t: _Transcript, end: Finish) -> None:
        self._checkers.ended(self._clock.now_ns, end)
        self._write(t, end.outcome, end.reason, end.attempts)

    def _write(self, t: _Transcript, outcome: Outcome, reason: str, attempts: int) -> None:
        asked = t.asked
        self._world.write(
            RequestLine(
                request=asked.request,
                model=asked.model,
                prompt_tokens=asked.prompt_tokens,
                output_tokens_max=asked.output_tokens_max,
                queued_ns=t.queued_ns,
                finished_ns=self._clock.now_ns,
                outcome=outcome,
                attempts=attempts,
                dispatched_ns=t.dispatched_ns,
                token_ns=tuple(t.token_ns),
                worker=t.last_worker,
                error=reason or None,
            )
        )
