"""Attempts at requests on a worker's instance, and the gateways that read their tokens.

Here on the worker's main thread a gateway's words become requests of the LiveBatcher, and what
comes of them is told to gateway and controller. An attempt may come from another worker and may go
back; who owns it is the gateway's to say (`pool_backend.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.run import Emission, SequenceSpec
from livescale.messages.events import RequestEnded
from livescale.runtime.wire import (
    AttemptFailed,
    AttemptReturned,
    AttemptTaken,
    Examined,
    FromTokenServer,
    Submit,
    Token,
    Tokens,
    WorkerEvent,
)
from livescale.types import InstanceId, Outcome, RequestId, TokenLogprobs, WorkerRef

_GIVEN_MAX = 4096
"""Attempts that others took over, as remembered: the oldest are forgotten first."""


class Reporter(Protocol):
    """Where an instance's words go. Both calls may come from any thread and never block."""

    def to_controller(self, event: WorkerEvent | Examined) -> None: ...

    def to_gateway(self, gateway: str, message: FromTokenServer) -> None: ...


@dataclass(frozen=True, slots=True)
class _Given:
    """An attempt that a partner took over, and when that was heard."""

    partner: WorkerRef
    gateway: str
    request: RequestId
    attempt: int
    heard_ns: int


class HostedAttempts:
    """What this worker runs for which gateway. All methods are called by the main thread."""

    def __init__(self, worker: WorkerRef, reporter: Reporter, telling_ns: int) -> None:
        """`telling_ns`: whoever takes an attempt over has told its gateway after that time."""
        self._worker = worker
        self._reporter = reporter
        self._telling_ns = telling_ns
        #: what others took over, the earliest first; of earlier instances, too
        self._given: deque[_Given] = deque(maxlen=_GIVEN_MAX)
        self._instance: InstanceId | None = None
        self._live: LiveBatcher | None = None
        self._gateway_of: dict[RequestId, str] = {}

    # -- the instance ---------------------------------------------------------------------------

    def open(self, instance: InstanceId, live: LiveBatcher) -> None:
        """From now on attempts run there."""
        self._instance, self._live = instance, live

    def close(self) -> None:
        """The instance goes: what it still has runs elsewhere."""
        assert self._live is not None
        for request, attempt in self._live.give_back():
            self._give_back(self._gateway_of[request], request, attempt)
        self._gateway_of.clear()
        self._instance = self._live = None

    def gateway_of(self, request: RequestId) -> str:
        """Who asked for it; "" if nobody wants it any more."""
        return self._gateway_of.get(request, "")

    # -- the gateways' words --------------------------------------------------------------------

    def submit(self, gateway: str, message: Submit) -> None:
        """Queue an attempt on the instance, or say why not."""
        request, attempt = message.request, message.attempt
        if self._live is None or self._instance != message.instance:
            # A live instance goes with its load, while requests are on their way to it.
            self._give_back(gateway, request, attempt)
            return
        ids, generated_ids = message.prompt_ids, message.generated_ids
        spec = SequenceSpec(request, attempt, ids, message.sampling, generated_ids)
        try:
            self._live.add(spec)
        except ValueError as error:
            self._reporter.to_gateway(gateway, AttemptFailed(request, attempt, str(error)))
            self._end(request, attempt, Outcome.FAILED)
        else:
            self._gateway_of[request] = gateway

    def cancel(self, request: RequestId, attempt: int) -> None:
        """Nobody wants the attempt any more: free its KV at once."""
        if self.disown(request, attempt):
            self._end(request, attempt, Outcome.CANCELLED)

    def disown(self, request: RequestId, attempt: int) -> bool:
        """Somebody else runs the attempt, or a newer one: forget it without a word. False if it is
        not here."""
        is_here = self._live is not None and self._live.cancel(request, attempt)
        if is_here:
            self._gateway_of.pop(request, None)
        return is_here

    def gateway_gone(self, gateway: str) -> None:
        """Nobody here can tell this gateway anything. Whether it lives, and what it wants, is the
        controller's to say: the gateway may have lost the wire alone."""
        for request, attempt in self._live.requests() if self._live is not None else ():
            self.gateway_unknown(gateway, request, attempt)

    def gateway_unknown(self, gateway: str, request: RequestId, attempt: int) -> None:
        """No wire leads to the gateway of an attempt that was taken over: only the controller can
        tell whether that lives."""
        if self._gateway_of.get(request) == gateway and self.disown(request, attempt):
            self._end(request, attempt, Outcome.RETURNED)

    # -- what comes of attempts -----------------------------------------------------------------

    def taken(
        self,
        request: RequestId,
        attempt: int,
        gateway: str,
        repeated_ids: Sequence[int] = (),
        moves: int = 1,
    ) -> None:
        """The attempt is this worker's; its gateway hears of it before any token. The first tokens
        are told again, because they may be on their way from another worker still."""
        if moves > 1:
            # Maybe it was given away here and has come back: who had it meanwhile may die.
            known = request, attempt
            back = [given for given in self._given if (given.request, given.attempt) == known]
            for given in back:
                self._given.remove(given)
        self._gateway_of[request] = gateway
        self._reporter.to_gateway(gateway, AttemptTaken(request, attempt, moves))
        if repeated_ids:
            tokens = (Token(request, attempt, n, t, None) for n, t in enumerate(repeated_ids))
            self._reporter.to_gateway(gateway, Tokens(tuple(tokens)))

    def given(self, partner: WorkerRef, attempts: Sequence[tuple[RequestId, int]]) -> None:
        """These are the partner's from now on. It tells the gateways, but may die before."""
        now_ns = time.monotonic_ns()
        self._forget_told(now_ns)
        for request, attempt in attempts:
            gateway = self._gateway_of.pop(request)
            self._given.append(_Given(partner, gateway, request, attempt, now_ns))

    def partner_lost(self, partner: WorkerRef) -> None:
        """Nobody may have heard what it took over last: this worker says that it has not got it.
        Who has heard of the partner takes no notice of that."""
        self._forget_told(time.monotonic_ns())
        lost = [given for given in self._given if given.partner == partner]
        for given in lost:
            self._given.remove(given)
            self._give_back(given.gateway, given.request, given.attempt)

    def emitted(
        self, emissions: list[Emission], logprobs: Mapping[RequestId, TokenLogprobs]
    ) -> None:
        """Send a Run's tokens to those who read them."""
        by_gateway: dict[str, list[Token]] = {}
        for e in emissions:
            gateway = self._gateway_of[e.request]
            token = Token(
                request=e.request,
                attempt=e.attempt,
                index=e.index,
                token_id=e.token_id,
                finish_reason=e.finish_reason,
                logprobs=logprobs.get(e.request),
                cached_tokens=e.cached_tokens,
            )
            by_gateway.setdefault(gateway, []).append(token)
        for gateway, tokens in by_gateway.items():
            self._reporter.to_gateway(gateway, Tokens(tuple(tokens)))
        for e in emissions:
            if e.finish_reason is not None:
                del self._gateway_of[e.request]
                self._end(e.request, e.attempt, Outcome.FINISHED, e.index + 1)

    # -- helpers, in the order used -------------------------------------------------------------

    def _forget_told(self, now_ns: int) -> None:
        while self._given and self._given[0].heard_ns + self._telling_ns < now_ns:
            self._given.popleft()

    def _give_back(self, gateway: str, request: RequestId, attempt: int) -> None:
        self._reporter.to_gateway(gateway, AttemptReturned(request, attempt))
        self._end(request, attempt, Outcome.RETURNED)

    def _end(
        self, request: RequestId, attempt: int, outcome: Outcome, output_tokens: int = 0
    ) -> None:
        ended = RequestEnded(request, attempt, outcome, output_tokens, self._worker)
        self._reporter.to_controller(ended)

    def __repr__(self) -> str:
        return f"<HostedAttempts at {len(self._gateway_of)} requests on {self._worker}>"
