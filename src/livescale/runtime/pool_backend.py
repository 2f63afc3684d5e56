"""The gateway's Backend over a real pool: transcripts, queue bound, and who runs what.

A transcript keeps prompt and generated tokens until the request is over, so that another worker
can go on where one died, and so that a restarted controller can be told what is under way. Each
token index is accepted once, from the current attempt only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from livescale.gateway.backend import (
    GenerateRequest,
    GenerationFailed,
    ModelCard,
    QueueFull,
    TokenChunk,
    Unavailable,
)
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.runtime.boot import GatewayBoot
from livescale.runtime.wire import (
    AttemptFailed,
    Cancel,
    FromTokenServer,
    GatewayHello,
    Peer,
    Peers,
    PoolStatus,
    RequestTimed,
    Submit,
    ToGateway,
    Token,
    Tokens,
    Wire,
    open_wire,
)
from livescale.slo import RequestTiming, SloAbsolute, parse_slo
from livescale.telemetry.record import RequestLine
from livescale.types import InstanceState, Outcome, RequestId, WorkerRef

_log = logging.getLogger(__name__)
_RECONNECT_S = (0.05, 1.0)
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Transcript:
    """One request until it is over."""

    asked: GenerateRequest
    queued_ns: int
    #: what the client's handler reads; None ends the stream
    chunks: asyncio.Queue[TokenChunk | GenerationFailed | None] = field(
        default_factory=asyncio.Queue
    )
    generated: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    attempt: int = 0
    #: who runs the current attempt (None: it waits in the router)
    worker: WorkerRef | None = None
    last_worker: WorkerRef | None = None
    dispatched_ns: int | None = None
    #: announced to a restarted controller, which may have missed the worker's RequestEnded
    is_announced_again: bool = False


class _Stream:
    """TokenStream of one transcript."""

    def __init__(self, backend: PoolBackend, transcript: _Transcript) -> None:
        self._backend = backend
        self._transcript = transcript

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while (chunk := await self._transcript.chunks.get()) is not None:
            if isinstance(chunk, GenerationFailed):
                raise chunk
            yield chunk

    def cancel(self) -> None:
        self._backend.cancel(self._transcript, Outcome.CANCELLED)

    def stop(self) -> None:
        self._backend.cancel(self._transcript, Outcome.FINISHED)


class PoolBackend:
    """Turns requests into dispatches and tokens. Lives on the gateway's event loop."""

    def __init__(self, boot: GatewayBoot) -> None:
        self._boot = boot
        created_s = int(time.time())
        self._cards = tuple(
            ModelCard(
                name=entry.spec.name,
                model_tokens_max=entry.request_tokens_max,
                created_s=created_s,
                eos_token_ids=entry.eos_token_ids,
                directory=Path(entry.directory),
                sampling_defaults=entry.sampling_defaults,
            )
            for entry in boot.models
        )
        slo = parse_slo(boot.slo)
        # A multiple of the mean is known only when the run is over.
        self._slo = slo if isinstance(slo, SloAbsolute) else None
        self._transcripts: dict[RequestId, _Transcript] = {}
        self._controller: Wire[ToGateway] | None = None
        self._controllers_met = 0
        self._workers: dict[WorkerRef, Wire[FromTokenServer]] = {}
        self._readers: dict[WorkerRef, asyncio.Task[None]] = {}
        #: dispatches to workers whose connection is still being made
        self._unsent: dict[WorkerRef, list[Submit]] = {}
        self._status = PoolStatus({}, 0)
        self.is_settled = asyncio.Event()

    # -- Backend --------------------------------------------------------------------------------

    def models(self) -> tuple[ModelCard, ...]:
        return self._cards

    def is_ready(self) -> bool:
        """Every model has an instance that serves. (A lost controller does not change that.)"""
        serving = InstanceState.SERVING.value
        return all(
            self._status.instances.get(card.name, {}).get(serving, 0) > 0 for card in self._cards
        )

    def submit(self, request: GenerateRequest) -> _Stream:
        waiting = sum(
            1
            for t in self._transcripts.values()
            if t.worker is None and t.asked.model == request.model
        )
        if waiting >= self._boot.queue_requests_max:
            raise QueueFull(_RETRY_AFTER_S)
        if self._controller is None and not self._controllers_met:
            raise Unavailable("the pool is starting")
        transcript = _Transcript(request, time.monotonic_ns())
        self._transcripts[request.request] = transcript
        self._announce(transcript)
        return _Stream(self, transcript)

    def gauges(self) -> dict[str, int]:
        waiting = sum(1 for t in self._transcripts.values() if t.worker is None)
        gauges = {
            "num_requests_waiting": waiting,
            "num_requests_running": len(self._transcripts) - waiting,
            "workers": self._status.workers,
        }
        for model, states in sorted(self._status.instances.items()):
            for state, count in sorted(states.items()):
                gauges[f'instances{{model="{model}",state="{state}"}}'] = count
        return gauges

    def cancel(self, transcript: _Transcript, outcome: Outcome) -> None:
        """Nobody wants more tokens: free the request everywhere and record it as `outcome`."""
        request = transcript.asked.request
        if self._transcripts.get(request) is not transcript:
            return
        wire = self._workers.get(transcript.worker) if transcript.worker else None
        if wire is not None:
            wire.send(Cancel(request, transcript.attempt))
        self._tell_controller(RequestCancelled(request))
        self._finish(transcript, outcome)

    # -- the controller -------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay connected to a controller, whichever life it is in."""
        pause_s = _RECONNECT_S[0]
        while True:
            try:
                wire: Wire[ToGateway] = await open_wire(self._boot.controller, ToGateway)
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RECONNECT_S[1])
                continue
            pause_s = _RECONNECT_S[0]
            await self._listen(wire)
            await asyncio.sleep(pause_s)

    async def _listen(self, wire: Wire[ToGateway]) -> None:
        wire.send(GatewayHello(self._boot.secret, self._boot.gateway))
        self._controller = wire
        self._controllers_met += 1
        for transcript in self._transcripts.values():
            transcript.is_announced_again = True
            self._announce(transcript)
        async for message in wire:
            if isinstance(message, Dispatch):
                self._dispatch(message)
            elif isinstance(message, Peers):
                self._meet(message)
            elif isinstance(message, PoolStatus):
                self._status = message
                if self.is_ready():
                    self.is_settled.set()
            elif isinstance(message, FailRequest):
                self._fail(message)
        self._controller = None
        _log.info("the controller is gone (%s); streams go on", wire.error)

    def _announce(self, transcript: _Transcript) -> None:
        asked = transcript.asked
        self._tell_controller(
            RequestArrived(
                asked.request,
                asked.model,
                len(asked.prompt_ids),
                asked.sampling.output_tokens_max,
                transcript.attempt,
                transcript.worker,
            )
        )

    def _tell_controller(
        self, event: RequestArrived | RequestCancelled | RequestEnded | RequestTimed
    ) -> None:
        # While no controller is there nothing is lost: the next one hears of every transcript.
        if self._controller is not None:
            self._controller.send(event)

    def _dispatch(self, command: Dispatch) -> None:
        """Send the prompt to the worker, or say why there is nothing to send."""
        transcript = self._transcripts.get(command.request)
        if transcript is None:
            ended = RequestEnded(command.request, command.attempt, Outcome.CANCELLED)
            self._tell_controller(ended)
            return
        transcript.attempt = command.attempt
        if command.worker not in self._readers:
            # The controller knows too: it told us of this worker's end before the dispatch.
            transcript.worker = None
            ended = RequestEnded(command.request, command.attempt, Outcome.WORKER_LOST)
            self._tell_controller(ended)
            return
        transcript.worker = transcript.last_worker = command.worker
        transcript.dispatched_ns = time.monotonic_ns()
        submit = Submit(
            command.request,
            command.attempt,
            command.instance,
            transcript.asked.prompt_ids,
            tuple(transcript.generated),
            transcript.asked.sampling,
        )
        wire = self._workers.get(command.worker)
        if wire is not None:
            wire.send(submit)
        else:
            self._unsent.setdefault(command.worker, []).append(submit)

    def _fail(self, command: FailRequest) -> None:
        transcript = self._transcripts.get(command.request)
        if transcript is not None:
            self._finish(transcript, Outcome.FAILED, command.reason)

    # -- the workers ----------------------------------------------------------------------------

    def _meet(self, message: Peers) -> None:
        """Keep one wire to every living worker."""
        living = {peer.worker: peer for peer in message.peers}
        for worker, peer in living.items():
            if worker not in self._readers:
                self._readers[worker] = asyncio.create_task(self._read_tokens(peer))

    async def _read_tokens(self, peer: Peer) -> None:
        worker = peer.worker
        try:
            wire: Wire[FromTokenServer] = await open_wire(peer.token_address, FromTokenServer)
        except OSError as error:
            _log.warning("worker %s cannot be reached: %s", worker, error)
        else:
            wire.send(GatewayHello(self._boot.secret, self._boot.gateway))
            self._workers[worker] = wire
            self._send_unsent(worker, wire)
            async for message in wire:
                if isinstance(message, Tokens):
                    for token in message.tokens:
                        self._take(token)
                else:
                    self._attempt_failed(message)
            del self._workers[worker]
        del self._readers[worker]
        self._unsent.pop(worker, None)
        self._worker_gone(worker)

    def _send_unsent(self, worker: WorkerRef, wire: Wire[FromTokenServer]) -> None:
        for submit in self._unsent.pop(worker, []):
            if submit.request in self._transcripts:
                wire.send(submit)
            else:
                ended = RequestEnded(submit.request, submit.attempt, Outcome.CANCELLED)
                self._tell_controller(ended)

    def _take(self, token: Token) -> None:
        """Accept a token if it is the next one of the current attempt."""
        transcript = self._transcripts.get(token.request)
        if transcript is None or token.attempt != transcript.attempt:
            return
        if token.index != len(transcript.generated):
            return
        transcript.generated.append(token.token_id)
        transcript.token_ns.append(time.monotonic_ns())
        transcript.chunks.put_nowait(
            TokenChunk(token.index, token.token_id, token.finish_reason, token.logprobs)
        )
        if token.finish_reason is not None:
            self._finish(transcript, Outcome.FINISHED)

    def _attempt_failed(self, message: AttemptFailed) -> None:
        transcript = self._transcripts.get(message.request)
        if transcript is not None and transcript.attempt == message.attempt:
            self._finish(transcript, Outcome.FAILED, message.reason)

    def _worker_gone(self, worker: WorkerRef) -> None:
        """Requests of a lost worker wait again; the controller decides where they go on.

        It may have heard from the worker that a request is finished whose last tokens never came
        here, and have forgotten it. So the request is announced again; a controller that still
        knows it ignores that.
        """
        for transcript in self._transcripts.values():
            if transcript.worker == worker:
                transcript.worker = None
                request = transcript.asked.request
                ended = RequestEnded(request, transcript.attempt, Outcome.WORKER_LOST)
                self._tell_controller(ended)
                self._announce(transcript)

    # -- the end of a request -------------------------------------------------------------------

    def _finish(self, transcript: _Transcript, outcome: Outcome, error: str | None = None) -> None:
        asked = transcript.asked
        del self._transcripts[asked.request]
        transcript.chunks.put_nowait(GenerationFailed(error) if error is not None else None)
        if transcript.is_announced_again and transcript.worker is not None:
            # The worker may have told this to the controller's earlier life only.
            ended = RequestEnded(
                asked.request, transcript.attempt, outcome, len(transcript.generated)
            )
            self._tell_controller(ended)
        self._tell_controller(RequestTimed(self._line(transcript, outcome, error)))

    def _line(self, transcript: _Transcript, outcome: Outcome, error: str | None) -> RequestLine:
        asked = transcript.asked
        finished_ns = time.monotonic_ns()
        timing = RequestTiming(
            request=asked.request,
            scheduled_ns=transcript.queued_ns,
            sent_ns=transcript.queued_ns,
            token_ns=tuple(transcript.token_ns),
            finished_ns=finished_ns,
            ok=outcome is Outcome.FINISHED,
        )
        return RequestLine(
            request=asked.request,
            model=asked.model,
            prompt_tokens=len(asked.prompt_ids),
            output_tokens_max=asked.sampling.output_tokens_max,
            queued_ns=transcript.queued_ns,
            finished_ns=finished_ns,
            outcome=outcome,
            attempts=transcript.attempt,
            dispatched_ns=transcript.dispatched_ns,
            token_ns=tuple(transcript.token_ns),
            client_request=asked.client_request_id,
            worker=transcript.last_worker,
            slo_met=self._slo.is_met(timing) if self._slo is not None else None,
            error=error,
        )
