"""The gateway's Backend over a real pool: who is told what, and who runs what.

A transcript (`transcripts.py`) keeps prompt and generated tokens until the request is over, so
that another worker can go on where one died, and so that a restarted controller can be told what
is under way. Each token index is accepted once, from the current attempt only, and only from the
worker that owns it: attempts may move from a loading worker to another one, who says so
(AttemptTaken) before its first token. Whoever else runs one is told to forget it (Disown).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from livescale.gateway.backend import (
    CannotLoad,
    Client,
    GenerateRequest,
    GenerationFailed,
    ModelCard,
    ModelStatus,
    NewModel,
    Reading,
    SettingValue,
    TokenChunk,
    Unavailable,
    WaitedTooLong,
)
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.runtime.boot import GatewayBoot
from livescale.runtime.doors import CONTROLLER_DOOR, token_door
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.model_shelf import ModelShelf
from livescale.runtime.open_questions import OpenQuestions, Question
from livescale.runtime.transcripts import StopWords, Transcript, Transcripts
from livescale.runtime.wire import (
    AddModel,
    AttemptFailed,
    AttemptReturned,
    AttemptTaken,
    Cancel,
    Catalog,
    ChangeModel,
    Disown,
    FromTokenServer,
    GatewayHello,
    ModelAnswer,
    Peer,
    Peers,
    PoolStatus,
    RemoveModel,
    RequestTimed,
    Submit,
    ToGateway,
    Token,
    Tokens,
    Wire,
    open_wire,
)
from livescale.slo import SloAbsolute, parse_slo
from livescale.types import Outcome, WorkerRef

_log = logging.getLogger(__name__)
_RECONNECT_S = (0.05, 1.0)


class _Stream:
    """TokenStream of one transcript."""

    def __init__(self, backend: PoolBackend, transcript: Transcript) -> None:
        self._backend = backend
        self._transcript = transcript

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while (chunk := await self._transcript.chunks.get()) is not None:
            if isinstance(chunk, GenerationFailed):
                raise chunk
            yield chunk

    @property
    def queued_s(self) -> float | None:
        transcript = self._transcript
        if transcript.first_dispatched_ns is None:
            return None
        return (transcript.first_dispatched_ns - transcript.queued_ns) / 1e9

    def cancel(self) -> None:
        self._backend.cancel(self._transcript, Outcome.CANCELLED)

    def stop(self) -> None:
        self._backend.cancel(self._transcript, Outcome.FINISHED)


class PoolBackend:
    """Turns requests into dispatches and tokens. Lives on the gateway's event loop."""

    def __init__(self, boot: GatewayBoot) -> None:
        self._boot = boot
        self._shelf = ModelShelf(boot.models)
        self._watchers: list[Callable[[], None]] = []
        slo = parse_slo(boot.slo)
        # A multiple of the mean is known only when the run is over.
        self.slo = slo if isinstance(slo, SloAbsolute) else None
        self._transcripts = Transcripts(
            boot.queue_requests_max,
            boot.queue_prompt_tokens_max,
            boot.queue_timeout_s,
            self._waited_too_long,
        )
        self._transcripts.offer(card.name for card in self._shelf.cards)
        self._controller: Wire[ToGateway] | None = None
        self._controllers_met = 0
        #: when the last controller sent something last (None: one is there and sends)
        self._away_since_ns: int | None = time.monotonic_ns()
        self._heartbeats = Heartbeats(boot.lost_after_ms)
        self._peers: dict[WorkerRef, Peer] = {}
        self._workers: dict[WorkerRef, Wire[FromTokenServer]] = {}
        self._readers: dict[WorkerRef, asyncio.Task[None]] = {}
        #: dispatches to workers whose connection is still being made
        self._unsent: dict[WorkerRef, list[Submit]] = {}
        self._stop_words = StopWords()
        self._questions = OpenQuestions(boot.gateway)
        self.is_settled = asyncio.Event()
        #: the controller has said how the pool is
        self.is_known = asyncio.Event()

    # -- Backend --------------------------------------------------------------------------------

    def models(self) -> tuple[ModelCard, ...]:
        return self._shelf.cards

    def watch_models(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def model_states(self) -> tuple[ModelStatus, ...]:
        return self._shelf.states()

    async def add_model(self, model: NewModel) -> str:
        answer = await self._ask(
            AddModel(self._questions.next_call(), model.directory, model.name, dict(model.settings))
        )
        return answer.name

    async def change_model(self, name: str, settings: Mapping[str, SettingValue]) -> None:
        await self._ask(ChangeModel(self._questions.next_call(), name, dict(settings)))

    async def remove_model(self, name: str) -> None:
        await self._ask(RemoveModel(self._questions.next_call(), name))

    def is_ready(self) -> bool:
        """Every model has what it should have at least, as far as the controller says; one that is
        just being replaced changes nothing."""
        away_ns = self._away_since_ns
        lost_after_ns = self._boot.lost_after_ms * 1_000_000
        is_away = away_ns is not None and time.monotonic_ns() - away_ns >= lost_after_ns
        return self._shelf.is_ready and not is_away

    @contextmanager
    def admit(
        self, model: str, requests: int, prompt_tokens: int, client: Client
    ) -> Iterator[None]:
        self._check_started()
        with self._transcripts.holding(model, requests, prompt_tokens, client.name):
            yield

    def submit(self, requests: Sequence[GenerateRequest]) -> list[_Stream]:
        self._check_started()
        opened = self._transcripts.open(requests)
        for transcript in opened:
            self._announce(transcript)
        return [_Stream(self, transcript) for transcript in opened]

    def readings(self) -> list[Reading]:
        return [*self._transcripts.readings(), *self._shelf.readings()]

    def _check_started(self) -> None:
        if self._controller is None and not self._controllers_met:
            raise Unavailable("the pool is starting")

    def cancel(self, transcript: Transcript, outcome: Outcome) -> None:
        """Nobody wants more tokens: free the request everywhere and record it as `outcome`."""
        request = transcript.asked.request
        if self._transcripts.get(request) is not transcript:
            return
        if transcript.worker is not None:
            self._stop(transcript.worker, Cancel(request, transcript.attempt))
        self._tell_controller(RequestCancelled(request))
        self._finish(transcript, outcome)

    # -- the controller -------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay connected to a controller, whichever life it is in, and to the workers."""
        try:
            await asyncio.gather(self._stay_connected(), self._heartbeats.run())
        finally:
            for reader in self._readers.values():
                reader.cancel()
            await asyncio.gather(*self._readers.values(), return_exceptions=True)

    async def _stay_connected(self) -> None:
        pause_s = _RECONNECT_S[0]
        while True:
            try:
                wire: Wire[ToGateway] = await open_wire(
                    self._boot.controller,
                    ToGateway,
                    secret=self._boot.secret,
                    door=CONTROLLER_DOOR,
                )
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RECONNECT_S[1])
                continue
            pause_s = _RECONNECT_S[0]
            await self._listen(wire)
            await asyncio.sleep(pause_s)

    async def _listen(self, wire: Wire[ToGateway]) -> None:
        wire.send(GatewayHello(self._boot.gateway))
        self._heartbeats.add(wire)
        self._controller = wire
        self._controllers_met += 1
        for transcript in self._transcripts:
            transcript.is_announced_again = True
            self._announce(transcript)
        async for message in wire:
            self._away_since_ns = None
            if isinstance(message, Dispatch):
                self._dispatch(message)
            elif isinstance(message, Peers):
                self._meet(message)
            elif isinstance(message, PoolStatus):
                self._shelf.status = message
                self.is_known.set()
                if self.is_ready():
                    self.is_settled.set()
            elif isinstance(message, Catalog):
                self._take_catalog(message)
            elif isinstance(message, ModelAnswer):
                self._questions.answer(message)
            elif isinstance(message, FailRequest):
                self._fail(message)
        self._controller = None
        self._away_since_ns = wire.received_ns or self._away_since_ns
        self._questions.leave_unanswered()
        _log.info("the controller is gone (%s); streams go on", wire.error)

    def _announce(self, transcript: Transcript) -> None:
        asked = transcript.asked
        self._tell_controller(
            RequestArrived(
                asked.request,
                asked.model,
                len(asked.prompt_ids),
                asked.sampling.output_tokens_max,
                transcript.attempt,
                transcript.worker,
                client=asked.client.name,
                weight=asked.client.weight,
                moves=transcript.moves,
            )
        )

    def _take_catalog(self, message: Catalog) -> None:
        """Take up and drop models. Requests that were accepted go on, whatever comes of theirs."""
        self._shelf.take(message)
        self._transcripts.offer(card.name for card in self._shelf.cards)
        for changed in self._watchers:
            changed()
        names = {state.name for state in self._shelf.states()}
        for transcript in list(self._transcripts):
            # The controller may have forgotten the model before it heard of the request. (What a
            # worker runs ends by itself: its last tokens may be on the way.)
            if transcript.worker is None and transcript.asked.model not in names:
                gone = GenerationFailed(f"the model '{transcript.asked.model}' was removed")
                self._finish(transcript, Outcome.FAILED, gone)

    async def _ask(self, question: Question) -> ModelAnswer:
        """Ask the controller. Raises ModelRefused or Unavailable."""
        self._check_started()
        if self._controller is None:
            raise Unavailable("the controller is being restarted")
        return await self._questions.ask(question, self._controller.send)

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
        if transcript.worker not in (None, command.worker):
            # It took the last attempt over when the controller had given that up.
            self._stop(transcript.worker, Disown(command.request, transcript.attempt))
        transcript.attempt, transcript.moves = command.attempt, 0
        if command.worker not in self._readers:
            # The controller knows too: it told us of this worker's end before the dispatch.
            self._transcripts.wait_again(transcript)
            ended = RequestEnded(command.request, command.attempt, Outcome.WORKER_LOST)
            self._tell_controller(ended)
            return
        self._transcripts.place(transcript, command.worker)
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
        if transcript is None:
            return
        failure = GenerationFailed(command.reason)
        if command.retry_after_ns is not None:
            why = f"the model '{transcript.asked.model}' cannot be loaded: {command.reason}"
            failure = CannotLoad(why, command.retry_after_ns / 1e9)
        self._finish(transcript, Outcome.FAILED, failure)

    def _waited_too_long(self, transcript: Transcript) -> None:
        asked = transcript.asked
        self._tell_controller(RequestCancelled(asked.request))
        waited = f"no instance of '{asked.model}' took it in {self._boot.queue_timeout_s:g} s"
        retry_after_s = self._transcripts.wait_s(asked.model, asked.client.name)
        self._finish(transcript, Outcome.FAILED, WaitedTooLong(waited, retry_after_s))

    # -- the workers ----------------------------------------------------------------------------

    def _meet(self, message: Peers) -> None:
        """Keep one wire to every living worker."""
        self._peers = {peer.worker: peer for peer in message.peers}
        for worker in self._peers:
            self._connect(worker)

    def _connect(self, worker: WorkerRef) -> None:
        """Open a wire to the worker if there is none and the controller names it."""
        if worker in self._peers and worker not in self._readers:
            reading = self._read_tokens(self._peers[worker])
            self._readers[worker] = asyncio.create_task(reading)

    async def _read_tokens(self, peer: Peer) -> None:
        worker = peer.worker
        try:
            wire: Wire[FromTokenServer] = await open_wire(
                peer.token_address,
                FromTokenServer,
                secret=self._boot.secret,
                door=token_door(worker),
            )
        except OSError as error:
            _log.warning("worker %s cannot be reached: %s", worker, error)
        else:
            wire.send(GatewayHello(self._boot.gateway))
            self._heartbeats.add(wire)
            self._workers[worker] = wire
            self._send_unsent(worker, wire)
            async for message in wire:
                if isinstance(message, Tokens):
                    for token in message.tokens:
                        self._take(worker, token)
                elif isinstance(message, AttemptTaken):
                    self._attempt_taken(worker, message)
                elif isinstance(message, AttemptReturned):
                    self._attempt_returned(worker, message)
                else:
                    self._attempt_failed(worker, message)
            _log.info("worker %s is gone: %s", worker, wire.error)
            del self._workers[worker]
        del self._readers[worker]
        self._unsent.pop(worker, None)
        self._worker_gone(worker)
        # By then the controller has given it up, too, unless the trouble is on the way to here.
        await asyncio.sleep(self._boot.lost_after_ms / 2000)
        self._connect(worker)

    def _stop(self, worker: WorkerRef, message: Cancel | Disown) -> None:
        """Tell the worker, unless it was. One without a wire has lost, or never got, what this is
        about."""
        wire = self._workers.get(worker)
        if wire is not None and self._stop_words.is_new(worker, message.request, message.attempt):
            wire.send(message)

    def _send_unsent(self, worker: WorkerRef, wire: Wire[FromTokenServer]) -> None:
        for submit in self._unsent.pop(worker, []):
            if self._transcripts.get(submit.request) is not None:
                wire.send(submit)
            else:
                ended = RequestEnded(submit.request, submit.attempt, Outcome.CANCELLED)
                self._tell_controller(ended)

    def _take(self, worker: WorkerRef, token: Token) -> None:
        """Accept a token if it is the next one of the current attempt, from its owner. A new owner
        may repeat what the last one had sent."""
        request, attempt = token.request, token.attempt
        transcript = self._transcripts.get(request)
        if transcript is None:
            self._stop(worker, Cancel(request, attempt))
            return
        if not transcript.is_run_by(worker, attempt):
            self._stop(worker, Disown(request, attempt))
            return
        known = len(transcript.generated)
        if token.index > known or (token.index < known and token.finish_reason is not None):
            # What leads from here to there was the last owner's, or went elsewhere.
            self._stop(worker, Disown(request, attempt))
            self._return(transcript, is_told=False)
            return
        if token.index < known:
            return
        transcript.generated.append(token.token_id)
        transcript.token_ns.append(time.monotonic_ns())
        transcript.chunks.put_nowait(
            TokenChunk(
                token.index,
                token.token_id,
                token.finish_reason,
                token.logprobs,
                token.cached_tokens,
            )
        )
        if token.finish_reason is not None:
            self._finish(transcript, Outcome.FINISHED)

    def _attempt_taken(self, worker: WorkerRef, message: AttemptTaken) -> None:
        """The worker owns the attempt from now on, if that is the current one; but not if another
        one has taken it over since, whose word came first."""
        request, attempt = message.request, message.attempt
        # It may have been told to stop before it took over.
        self._stop_words.forget(worker, request, attempt)
        transcript = self._transcripts.get(request)
        if transcript is None:
            self._stop(worker, Cancel(request, attempt))
        elif attempt != transcript.attempt:
            self._stop(worker, Disown(request, attempt))
        elif message.moves >= transcript.moves:
            transcript.moves = message.moves
            self._transcripts.place(transcript, worker, is_dispatched=False)

    def _attempt_returned(self, worker: WorkerRef, message: AttemptReturned) -> None:
        transcript = self._transcripts.get(message.request)
        if transcript is not None and transcript.is_run_by(worker, message.attempt):
            # The worker may have told this to the controller's earlier life only.
            self._return(transcript, is_told=not transcript.is_announced_again)

    def _return(self, transcript: Transcript, *, is_told: bool) -> None:
        """The request waits again, as one whose worker is lost. `is_told`: the controller hears of
        it from the worker."""
        self._transcripts.wait_again(transcript)
        if not is_told:
            request = transcript.asked.request
            ended = RequestEnded(request, transcript.attempt, Outcome.RETURNED)
            self._tell_controller(ended)
        self._announce(transcript)

    def _attempt_failed(self, worker: WorkerRef, message: AttemptFailed) -> None:
        transcript = self._transcripts.get(message.request)
        if transcript is not None and transcript.is_run_by(worker, message.attempt):
            self._finish(transcript, Outcome.FAILED, GenerationFailed(message.reason))

    def _worker_gone(self, worker: WorkerRef) -> None:
        """Requests of a lost worker wait again; the controller decides where they go on.

        It may have heard from the worker that a request is finished whose last tokens never came
        here, and have forgotten it. So the request is announced again; a controller that still
        knows it ignores that.
        """
        for transcript in self._transcripts:
            if transcript.worker == worker:
                self._transcripts.wait_again(transcript)
                request = transcript.asked.request
                ended = RequestEnded(request, transcript.attempt, Outcome.WORKER_LOST)
                self._tell_controller(ended)
                self._announce(transcript)

    # -- the end of a request -------------------------------------------------------------------

    def _finish(
        self, transcript: Transcript, outcome: Outcome, failure: GenerationFailed | None = None
    ) -> None:
        asked = transcript.asked
        self._transcripts.close(transcript)
        transcript.chunks.put_nowait(failure)
        if transcript.is_announced_again and transcript.worker is not None:
            # The worker may have told this to the controller's earlier life only.
            ended = RequestEnded(
                asked.request, transcript.attempt, outcome, len(transcript.generated)
            )
            self._tell_controller(ended)
        error = str(failure) if failure is not None else None
        self._tell_controller(RequestTimed(transcript.line(outcome, error, self.slo)))
