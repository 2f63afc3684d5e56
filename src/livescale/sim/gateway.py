"""The simulated gateway: transcripts, the line that clients share, and who runs what.

The rules are those of a real gateway: each token index is accepted once, and only from the worker
that runs the current attempt; a transcript outlives workers and controllers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from livescale.batching.run import EmittedTokens, SequenceSpec
from livescale.fair_line import FairLine
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.sim.channel import SimChannel
from livescale.sim.checkers import Checkers
from livescale.sim.clock import Clock
from livescale.sim.worker_messages import (
    FromWorkerMessage,
    SimAttemptFailed,
    SimAttemptTaken,
    SimCancel,
    SimDisown,
    SimSubmit,
    SimTokens,
    ToWorkerMessage,
)
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
    generated: int = 0
    token_ns: list[int] = field(default_factory=list)
    attempt: int = 0
    #: who runs the current attempt (None: it waits in the router, or somebody is about to say that
    #: he took it over)
    worker: WorkerRef | None = None
    last_worker: WorkerRef | None = None
    #: tokens that the one before may have sent, too: the attempt was taken over
    repeated_max: int = 0
    #: how often the current attempt was taken over
    moves: int = 0
    dispatched_ns: int | None = None
    #: announced to a restarted controller, which may have missed how its attempt ended
    is_announced_again: bool = False


class SimGateway:
    """Accepts requests, sends attempts to workers, gathers tokens, writes RequestLines."""

    def __init__(
        self,
        clock: Clock,
        queue_requests_max: int,
        client_weights: tuple[int, ...],
        checkers: Checkers,
        say: Callable[[GatewayEvent], None],
        write: Callable[[RequestLine], None],
    ) -> None:
        """There are as many clients as there are weights."""
        self._clock = clock
        self._queue_requests_max = queue_requests_max
        self._client_weights = client_weights
        self._arrivals = 0
        self._checkers = checkers
        self._say = say
        self._write = write
        #: names of models that requests may ask for
        self._served: dict[str, None] = {}
        self._transcripts: dict[RequestId, _Transcript] = {}
        self._workers: dict[WorkerRef, SimChannel[ToWorkerMessage]] = {}
        #: per model, requests that no worker has
        self._waiting: dict[str, FairLine] = {}
        #: how requests ended, for dispatches that cross their end
        self._ended: dict[RequestId, Outcome] = {}

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
        client = self._next_client()
        transcript = _Transcript(
            request,
            model,
            row.input_tokens,
            row.output_tokens,
            self._clock.now_ns,
            # One that is alone has no name, as in worlds without clients.
            f"client-{client}" if len(self._client_weights) > 1 else "",
            self._client_weights[client],
        )
        self._checkers.arrived(request)
        self._transcripts[request] = transcript
        line = self._waiting.setdefault(model, FairLine(self._queue_requests_max))
        is_taken = line.takes_requests(transcript.client, 1)
        line.add(transcript.client, 1, row.input_tokens)
        if model not in self._served:
            self._finish(transcript, Outcome.FAILED, f"{model} is not served")
        elif not is_taken:
            self._finish(transcript, Outcome.FAILED, f"{line.requests - 1} requests wait already")
        else:
            self._announce(transcript)

    def _next_client(self) -> int:
        """The first client sends every other request, the others take turns with the rest."""
        number, others = self._arrivals, len(self._client_weights) - 1
        self._arrivals += 1
        return 0 if not others or number % 2 == 0 else 1 + number // 2 % others

    def cancel(self, request: RequestId) -> None:
        """The client goes away, if it is still there."""
        transcript = self._transcripts.get(request)
        if transcript is None:
            return
        self._cancel_attempt(transcript)
        self._say(RequestCancelled(request))
        self._finish(transcript, Outcome.CANCELLED)

    def _cancel_attempt(self, t: _Transcript) -> None:
        """Whoever runs it computes for nobody."""
        if t.worker is not None:
            self._workers[t.worker].send(SimCancel(t.request, t.attempt))

    # -- the controller -------------------------------------------------------------------------

    def joined(self) -> None:
        """A new controller is there: tell it of every unfinished request."""
        for transcript in self._transcripts.values():
            transcript.is_announced_again = True
            self._announce(transcript)

    def take_order(self, order: GatewayOrder) -> None:
        transcript = self._transcripts.get(order.request)
        if isinstance(order, Dispatch):
            self._dispatch(order, transcript)
        elif transcript is not None:
            self._cancel_attempt(transcript)
            self._finish(transcript, Outcome.FAILED, order.reason)

    def _announce(self, t: _Transcript) -> None:
        self._say(
            RequestArrived(
                t.request,
                t.model,
                t.prompt_tokens,
                t.output_tokens,
                t.attempt,
                t.worker,
                client=t.client,
                weight=t.weight,
                moves=t.moves,
            )
        )

    def _dispatch(self, order: Dispatch, t: _Transcript | None) -> None:
        """Send the prompt to the worker, or say why there is nothing to send."""
        if t is None:
            self._say(RequestEnded(order.request, order.attempt, self._ended[order.request]))
            return
        self._checkers.dispatched(order, t.attempt, t.worker)
        if t.worker is not None and t.worker != order.worker:
            # The controller did not know that it was taken over.
            self._workers[t.worker].send(SimDisown(t.request, t.attempt))
        t.attempt, t.repeated_max, t.moves = order.attempt, 0, 0
        channel = self._workers.get(order.worker)
        if channel is None:
            self._hand(t, None)
            self._say(RequestEnded(order.request, order.attempt, Outcome.WORKER_LOST))
            return
        self._hand(t, order.worker)
        t.dispatched_ns = self._clock.now_ns
        spec = SequenceSpec(
            order.request,
            order.attempt,
            range(t.prompt_tokens),
            SamplingParams(t.output_tokens),
            tuple(range(t.prompt_tokens, t.prompt_tokens + t.generated)),
            content=order.request,
        )
        channel.send(SimSubmit(order.instance, spec))

    # -- the workers ----------------------------------------------------------------------------

    def meet(self, worker: WorkerRef, channel: SimChannel[ToWorkerMessage]) -> None:
        """A connection to a worker is open."""
        self._workers[worker] = channel

    def channel_to(self, worker: WorkerRef) -> SimChannel[ToWorkerMessage] | None:
        """None: there is no connection."""
        return self._workers.get(worker)

    def worker_gone(self, worker: WorkerRef) -> None:
        """Requests of a lost worker wait again; the controller decides where they go on.

        They are announced again, as by a real gateway: the controller may have heard of an end
        that never came here.
        """
        self._workers.pop(worker).cut(self._clock.now_ns)
        for t in self._transcripts.values():
            if t.worker == worker:
                self._wait_again(t, Outcome.WORKER_LOST)

    def _hand(self, t: _Transcript, worker: WorkerRef | None) -> None:
        """The request is this worker's from now on, or waits in the router."""
        line = self._waiting[t.model]
        if t.worker is None:
            line.remove(t.client, 1, t.prompt_tokens)
        if worker is None:
            line.add(t.client, 1, t.prompt_tokens)
        t.worker = worker
        t.last_worker = worker or t.last_worker

    def _wait_again(self, t: _Transcript, outcome: Outcome) -> None:
        self._hand(t, None)
        self._say(RequestEnded(t.request, t.attempt, outcome))
        self._announce(t)

    def workers_with_requests(self) -> list[WorkerRef]:
        """Who is taken to run something."""
        return sorted({t.worker for t in self._transcripts.values() if t.worker is not None})

    def take_message(self, worker: WorkerRef, message: FromWorkerMessage) -> None:
        """What the worker says of attempts."""
        if isinstance(message, SimTokens):
            delay_ns = self._clock.now_ns - message.step_ns[-1]
            came_ns = [step_ns + delay_ns for step_ns in message.step_ns]
            for emitted in message.emitted:
                self._take(worker, emitted, came_ns)
        elif isinstance(message, SimAttemptTaken):
            self._taken(worker, message)
        else:
            t = self._transcripts.get(message.request)
            if t is None or (t.attempt, t.worker) != (message.attempt, worker):
                return
            if isinstance(message, SimAttemptFailed):
                self._finish(t, Outcome.FAILED, message.reason)
            else:
                self._wait_again(t, Outcome.RETURNED)

    def _taken(self, worker: WorkerRef, message: SimAttemptTaken) -> None:
        """The worker runs the attempt from now on, if it is the current one, whoever ran it; but
        not if another one has taken it over since, whose word came first."""
        t = self._transcripts.get(message.request)
        if t is None:
            self._workers[worker].send(SimCancel(message.request, message.attempt))
        elif t.attempt != message.attempt:
            self._workers[worker].send(SimDisown(message.request, message.attempt))
        elif message.moves >= t.moves:
            t.repeated_max, t.moves = t.generated, message.moves
            self._hand(t, worker)

    def _take(self, worker: WorkerRef, emitted: EmittedTokens, came_ns: list[int]) -> None:
        """Accept tokens if they are of the current attempt, and from the one who runs it."""
        t = self._transcripts.get(emitted.request)
        if t is None or t.attempt != emitted.attempt:
            return
        if t.worker != worker:
            self._workers[worker].send(SimDisown(emitted.request, emitted.attempt))
            return
        repeated = min(t.generated, t.repeated_max) - emitted.index
        if repeated > 0:
            emitted = _without(emitted, repeated)
        count = len(emitted.token_ids)
        if not count:
            return
        self._checkers.tokens(emitted, t.generated, t.prompt_tokens)
        t.generated += count
        t.token_ns += came_ns if count == len(came_ns) else came_ns[-count:]
        if emitted.finish_reason is not None:
            self._finish(t, Outcome.FINISHED)

    # -- the end of a request -------------------------------------------------------------------

    def _finish(self, t: _Transcript, outcome: Outcome, error: str | None = None) -> None:
        del self._transcripts[t.request]
        if t.worker is None:
            self._waiting[t.model].remove(t.client, 1, t.prompt_tokens)
        self._ended[t.request] = outcome
        self._checkers.ended(t.request, outcome, t.generated, t.output_tokens)
        if t.is_announced_again and t.worker is not None:
            self._say(RequestEnded(t.request, t.attempt, outcome, t.generated))
        self._write(
            RequestLine(
                request=t.request,
                model=t.model,
                prompt_tokens=t.prompt_tokens,
                output_tokens_max=t.output_tokens,
                queued_ns=t.queued_ns,
                finished_ns=self._clock.now_ns,
                outcome=outcome,
                attempts=t.attempt,
                dispatched_ns=t.dispatched_ns,
                token_ns=tuple(t.token_ns),
                worker=t.last_worker,
                error=error,
            )
        )


def _without(emitted: EmittedTokens, count: int) -> EmittedTokens:
    """Tokens behind the first ones, which are known already."""
    return msgspec.structs.replace(
        emitted, index=emitted.index + count, token_ids=emitted.token_ids[count:]
    )
