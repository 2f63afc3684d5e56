"""Attempts at requests on a worker's instance, and the gateways that read their tokens.

A gateway's messages become requests of the instance, and what becomes of them is sent to gateway
and controller. An attempt may come from another worker and may go back; who owns it is for the
gateway's Ledger to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from livescale.batching.contract.serving import Serving
from livescale.batching.runs.run import EmittedTokens, SequenceSpec
from livescale.member.effects import Answer, Effect, Emit, Report
from livescale.messages.attempts import AttemptFailed, AttemptReturned, AttemptTaken
from livescale.messages.events import RequestEnded
from livescale.values.types import InstanceId, Outcome, RequestId, WorkerRef

_GIVEN_MAX = 4096
"""Attempts that others took over, as remembered: the oldest are forgotten first. No time ends that:
a partner that is silent may have told its gateway nothing since, and is lost only much later."""


@dataclass(frozen=True, slots=True)
class _Given:
    """An attempt that a partner took over."""

    partner: WorkerRef
    gateway: str
    request: RequestId
    attempt: int


class HostedAttempts:
    """What one worker runs for which gateway."""

    def __init__(self, worker: WorkerRef, emit: Callable[[Effect], None]) -> None:
        self._worker = worker
        self._emit = emit
        #: what others took over, the earliest first; of earlier instances, too
        self._given: deque[_Given] = deque(maxlen=_GIVEN_MAX)
        self._instance: InstanceId | None = None
        self._serving: Serving | None = None
        self._gateway_of: dict[RequestId, str] = {}
        #: what was taken over and given back, and no gateway was told of
        self._unknown: deque[RequestEnded] = deque(maxlen=_GIVEN_MAX)
        #: of what was taken over, how often
        self._moves: dict[RequestId, int] = {}
        #: attempts that were taken over, and their gateway cannot be reached: nobody reads their
        #: tokens
        self._cut_off: dict[RequestId, int] = {}

    # -- the instance ---------------------------------------------------------------------------

    def open(self, instance: InstanceId, serving: Serving) -> None:
        """From now on attempts run there."""
        self._instance, self._serving = instance, serving

    def close(self) -> None:
        """The instance goes: what it still has runs elsewhere."""
        assert self._serving is not None
        for request, attempt in self._serving.give_back():
            self._give_back(self._gateway_of[request], request, attempt)
        self._gateway_of.clear()
        self._moves.clear()
        self._cut_off.clear()
        self._instance = self._serving = None

    def gateway_of(self, request: RequestId) -> str:
        """The gateway that asked for the request; "" if it is not wanted any more."""
        return self._gateway_of.get(request, "")

    # -- what gateways ask for ------------------------------------------------------------------

    def submit(self, gateway: str, instance: InstanceId, spec: SequenceSpec) -> None:
        """Queue an attempt on the instance, or answer why not."""
        if self._serving is None or self._instance != instance:
            # A live instance goes with its load, while requests are on their way to it.
            self._give_back(gateway, spec.request, spec.attempt)
            return
        try:
            self._serving.add(spec)
        except ValueError as error:
            self._fail(gateway, spec.request, spec.attempt, str(error))
        else:
            self._gateway_of[spec.request] = gateway
            self._moves.pop(spec.request, None)

    def cancel(self, request: RequestId, attempt: int) -> None:
        """The attempt is not wanted any more: free its KV at once."""
        if self.disown(request, attempt):
            self._end(request, attempt, Outcome.CANCELLED)

    def disown(self, request: RequestId, attempt: int, moves: int | None = None) -> bool:
        """Another worker runs the attempt, taken over `moves` times by then, or a newer one: forget
        the attempt without an answer. False if it is not here, or was taken over here later."""
        if moves is not None and self._moves.get(request, 0) > moves:
            return False
        is_here = self._serving is not None and self._serving.cancel(request, attempt)
        if is_here and request in self._gateway_of:
            self._leaves(request)
        return is_here

    def gateway_gone(self, gateway: str) -> None:
        """Nothing can be sent to this gateway. Whether it lives, and what it wants, is the
        controller's to say: the gateway may have lost the connection alone."""
        for request, attempt in self._serving.requests() if self._serving is not None else ():
            self.gateway_unknown(gateway, request, attempt)

    def gateway_unknown(self, gateway: str, request: RequestId, attempt: int) -> None:
        """No connection leads to the gateway of an attempt that was taken over: only the controller
        can tell whether that lives."""
        moves = self._moves.get(request, 0)
        if self._gateway_of.get(request) == gateway and self.disown(request, attempt):
            self._returns_unheard(request, attempt, moves)

    def cut_off(self, gateway: str, request: RequestId, attempt: int) -> None:
        """As `gateway_unknown`, which may have to wait for the Run in flight: what ends with that
        has ended for nobody, if the gateway may not know that it was taken over."""
        if self._gateway_of.get(request) == gateway and self._moves.get(request, 0):
            self._cut_off[request] = attempt

    def cut_off_all(self, gateway: str) -> None:
        """As `gateway_gone`, which may have to wait, too."""
        for request, attempt in self._serving.requests() if self._serving is not None else ():
            self.cut_off(gateway, request, attempt)

    def met_controller(self) -> None:
        """A controller that is new knows of attempts what their gateways know."""
        for ended in self._unknown:
            self._emit(Report(ended))

    # -- what becomes of attempts ---------------------------------------------------------------

    def taken(self, gateway: str, spec: SequenceSpec, *, is_decoding: bool) -> None:
        """The attempt is this worker's; its gateway learns that before any token. The first tokens
        of one that decodes are sent again: they may be on their way from another worker still."""
        request, attempt = spec.request, spec.attempt
        # Maybe it was given away here and has come back: who had it meanwhile may die.
        for given in [g for g in self._given if (g.request, g.attempt) == (request, attempt)]:
            self._given.remove(given)
        self._gateway_of[request], self._moves[request] = gateway, spec.moves
        self._emit(Answer(gateway, AttemptTaken(request, attempt, spec.moves)))
        if is_decoding:
            repeated = EmittedTokens(request, attempt, 0, spec.generated_ids, None)
            self._emit(Emit(gateway, (repeated,), is_repeated=True))

    def given(self, partner: WorkerRef, attempts: Sequence[tuple[RequestId, int]]) -> None:
        """These are the partner's from now on. It tells the gateways, but may die before."""
        for request, attempt in attempts:
            gateway = self._leaves(request)
            self._given.append(_Given(partner, gateway, request, attempt))

    def returned(self, request: RequestId, attempt: int) -> None:
        """The instance has forgotten the attempt: it is to run elsewhere."""
        self._give_back(self._leaves(request), request, attempt)

    def refused(self, attempts: Sequence[tuple[RequestId, int, str]]) -> None:
        """The instance has forgotten these attempts, which can never run there, and why."""
        for request, attempt, reason in attempts:
            self._fail(self._leaves(request), request, attempt, reason)

    def partner_lost(self, partner: WorkerRef) -> None:
        """What it took over last may be known to no gateway: this worker says that it has not got
        it. A gateway that knows the partner's part takes no notice of that."""
        lost = [given for given in self._given if given.partner == partner]
        for given in lost:
            self._given.remove(given)
            self._give_back(given.gateway, given.request, given.attempt)

    def emitted(self, emitted: Sequence[EmittedTokens]) -> None:
        """Send a Run's tokens to those who read them."""
        by_gateway: dict[str, list[EmittedTokens]] = {}
        for tokens in emitted:
            by_gateway.setdefault(self._gateway_of[tokens.request], []).append(tokens)
        for gateway, its in by_gateway.items():
            self._emit(Emit(gateway, its))
        for tokens in emitted:
            if tokens.finish_reason is not None:
                self._finishes(tokens)

    # -- helpers, in the order used -------------------------------------------------------------

    def _finishes(self, last: EmittedTokens) -> None:
        request, attempt = last.request, last.attempt
        is_heard, moves = self._cut_off.get(request) != attempt, self._moves.get(request, 0)
        self._leaves(request)
        if is_heard:
            self._end(request, attempt, Outcome.FINISHED, last.index + len(last.token_ids))
        else:
            self._returns_unheard(request, attempt, moves)

    def _returns_unheard(self, request: RequestId, attempt: int, moves: int) -> None:
        """The attempt is to run elsewhere. If it was taken over, its gateway may not know that."""
        ended = RequestEnded(request, attempt, Outcome.RETURNED, 0, self._worker, moves)
        if moves:
            self._unknown.append(ended)
        self._emit(Report(ended))

    def _leaves(self, request: RequestId) -> str:
        """The request is not here any more. Returns its gateway."""
        self._moves.pop(request, None)
        self._cut_off.pop(request, None)
        return self._gateway_of.pop(request)

    def _give_back(self, gateway: str, request: RequestId, attempt: int) -> None:
        self._emit(Answer(gateway, AttemptReturned(request, attempt)))
        self._end(request, attempt, Outcome.RETURNED)

    def _fail(self, gateway: str, request: RequestId, attempt: int, reason: str) -> None:
        self._emit(Answer(gateway, AttemptFailed(request, attempt, reason)))
        self._end(request, attempt, Outcome.FAILED)

    def _end(
        self, request: RequestId, attempt: int, outcome: Outcome, output_tokens: int = 0
    ) -> None:
        ended = RequestEnded(request, attempt, outcome, output_tokens, self._worker)
        self._emit(Report(ended))

    def __repr__(self) -> str:
        return f"<HostedAttempts at {len(self._gateway_of)} requests on {self._worker}>"
