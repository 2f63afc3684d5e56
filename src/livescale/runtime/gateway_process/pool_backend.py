"""The gateway's Backend over a real pool: requests become dispatches, and tokens streams.

A transcript (`transcripts.py`) keeps prompt and generated tokens until the request is over, so that
another worker can go on where one died, and so that a restarted controller can be told what is
under way. A Ledger decides which worker owns which attempt and which tokens are accepted
(`member/ledger.py`); its effects are carried out here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from livescale.config.slo import SloAbsolute, parse_slo
from livescale.gateway.contract import backend
from livescale.member.ledger import Announce, Finish, Forget, Ledger, LedgerEffect, Moved, Send
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.runtime.gateway_process.catalog_intake import CatalogIntake
from livescale.runtime.gateway_process.open_questions import OpenQuestions, Question
from livescale.runtime.gateway_process.token_wires import TokenWires
from livescale.runtime.gateway_process.transcripts import Transcript, Transcripts
from livescale.runtime.wire import protocol
from livescale.runtime.wire.acting import ActingWire
from livescale.runtime.wire.boot import GatewayBoot
from livescale.runtime.wire.doors import CONTROLLER_DOOR, open_credentials
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.wire_channel import Wire, stay_connected
from livescale.values.types import Outcome, RequestId, WorkerRef

_log = logging.getLogger(__name__)


class _Stream:
    """TokenStream of one transcript."""

    def __init__(self, pool: PoolBackend, transcript: Transcript) -> None:
        self._pool = pool
        self._transcript = transcript

    @property
    def queued_s(self) -> float | None:
        transcript = self._transcript
        if transcript.first_dispatched_ns is None:
            return None
        return (transcript.first_dispatched_ns - transcript.queued_ns) / 1e9

    def pour(self, sink: backend.TokenSink) -> None:
        self._transcript.sink = sink

    def cancel(self) -> None:
        self._pool.cancel(self._transcript.asked.request, Outcome.CANCELLED)

    def stop(self) -> None:
        self._pool.cancel(self._transcript.asked.request, Outcome.FINISHED)


class PoolBackend:
    """Turns requests into dispatches and tokens. Lives on the gateway's event loop."""

    def __init__(
        self, boot: GatewayBoot, pass_on: Callable[[protocol.Catalog], None] = lambda _: None
    ) -> None:
        """`pass_on` is called with each catalog that a controller sends."""
        self._boot = boot
        self._pass_on = pass_on
        self._intake = CatalogIntake(boot.catalog, boot.files_directory, self._catalog_taken)
        self._shelf = self._intake.shelf
        self._watchers: list[Callable[[], None]] = []
        slo = parse_slo(boot.pool.slo)
        # A multiple of the mean is known only when the run is over.
        self.slo = slo if isinstance(slo, SloAbsolute) else None
        self._transcripts = Transcripts(
            boot.pool.queue_requests_max,
            boot.pool.queue_prompt_tokens_max,
            boot.pool.queue_timeout_s,
            self._waited_too_long,
        )
        self._transcripts.offer(card.name for card in self._shelf.cards)
        self._ledger = Ledger()
        self._acting: ActingWire[protocol.ToGateway] = ActingWire(self._ledger.fence)
        self._controllers_met = 0
        #: when the last controller sent something last (None: one is there and sends)
        self._away_since_ns: int | None = time.monotonic_ns()
        self._heartbeats = Heartbeats(boot.pool.lost_after_ms)
        self._tls = open_credentials(boot.pool.tls_dir)
        self._workers = TokenWires(
            secret=boot.secret,
            gateway=boot.gateway,
            heartbeats=self._heartbeats,
            received=self._worker_reported,
            gone=lambda worker: self._carry_out(self._ledger.worker_gone(worker)),
            tls=self._tls,
        )
        self._questions = OpenQuestions(boot.gateway)
        self.is_settled = asyncio.Event()
        #: the controller has said how the pool is
        self.is_known = asyncio.Event()

    # -- Backend --------------------------------------------------------------------------------

    def models(self) -> tuple[backend.ModelCard, ...]:
        return self._shelf.cards

    def watch_models(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def model_states(self) -> tuple[backend.ModelStatus, ...]:
        return self._shelf.states()

    async def add_model(self, model: backend.NewModel) -> str:
        answer = await self._ask(
            protocol.AddModel(
                self._questions.next_call(), model.directory, model.name, dict(model.settings)
            )
        )
        return answer.name

    async def change_model(self, name: str, settings: Mapping[str, backend.SettingValue]) -> None:
        await self._ask(protocol.ChangeModel(self._questions.next_call(), name, dict(settings)))

    async def remove_model(self, name: str) -> None:
        await self._ask(protocol.RemoveModel(self._questions.next_call(), name))

    def is_ready(self) -> bool:
        """Every model has what it should have at least, as far as the controller says; one that is
        just being replaced changes nothing."""
        away_ns = self._away_since_ns
        lost_after_ns = self._boot.pool.lost_after_ms * 1_000_000
        is_away = away_ns is not None and time.monotonic_ns() - away_ns >= lost_after_ns
        return self._shelf.is_ready and not is_away and self._intake.has_models

    @contextmanager
    def admit(
        self, model: str, requests: int, prompt_tokens: int, client: backend.Client
    ) -> Iterator[None]:
        self._check_started()
        with self._transcripts.holding(model, requests, prompt_tokens, client.name):
            yield

    def submit(self, requests: Sequence[backend.GenerateRequest]) -> list[_Stream]:
        self._check_started()
        opened = self._transcripts.open(requests)
        for request in requests:
            self._carry_out(self._ledger.open(request.request))
        return [_Stream(self, transcript) for transcript in opened]

    def readings(self) -> list[backend.Reading]:
        return [*self._transcripts.readings(), *self._shelf.readings()]

    def _check_started(self) -> None:
        if self._acting.wire is None and not self._controllers_met:
            raise backend.Unavailable("the pool is starting")

    def cancel(self, request: RequestId, outcome: Outcome) -> None:
        """No more tokens are wanted: free the request everywhere and record it as `outcome`."""
        self._carry_out(self._ledger.cancel(request, outcome))

    # -- the controller -------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay connected to the controller, whichever life it is in, and to the workers."""
        ways = (
            stay_connected(
                address,
                protocol.ToGateway,
                secret=self._boot.secret,
                door=CONTROLLER_DOOR,
                serve=self._listen,
                tls=self._tls,
            )
            for address in (self._boot.controller, *self._boot.other_controllers)
        )
        parts = [*ways, self._heartbeats.run()]
        if self._tls is not None:
            parts.append(self._tls.run())
        try:
            await asyncio.gather(*parts)
        finally:
            await self._workers.close()

    async def _listen(self, wire: Wire[protocol.ToGateway]) -> None:
        self._heartbeats.add(wire)
        epoch = await self._acting.meet(wire)
        if epoch is None:
            return
        wire.send(protocol.GatewayHello(self._boot.gateway))
        self._controllers_met += 1
        # A wire that this one replaced was not lost: its controller is not listened to any more.
        self._questions.leave_unanswered()
        self._carry_out(self._ledger.controller_joined(epoch))
        async for message in wire:
            if self._acting.wire is not wire:
                break
            self._away_since_ns = None
            if isinstance(message, Dispatch):
                is_reachable = self._workers.is_reachable(message.worker)
                effects = self._ledger.dispatched(message, epoch, is_reachable=is_reachable)
                self._carry_out(effects)
            elif isinstance(message, protocol.Peers):
                self._workers.meet(message)
            elif isinstance(message, protocol.PoolStatus):
                self._shelf.status = message
                self._look_if_known()
            elif isinstance(message, protocol.Catalog):
                self._intake.receive(message, wire.send)
                self._pass_on(message)
            elif isinstance(message, protocol.ModelFilePart):
                self._intake.answer(message)
            elif isinstance(message, protocol.ModelAnswer):
                self._questions.answer(message)
            elif isinstance(message, FailRequest):
                self._fail(message, epoch)
        if not self._acting.end(wire):
            return
        self._away_since_ns = wire.received_ns or self._away_since_ns
        self._questions.leave_unanswered()
        _log.info("The gateway lost the controller (%s); streams continue", wire.error)

    def _look_if_known(self) -> None:
        if self._shelf.status is None or not self._intake.has_models:
            return
        self.is_known.set()
        if self.is_ready():
            self.is_settled.set()

    def _catalog_taken(self) -> None:
        """Models came and went. Requests that were accepted go on, whatever comes of theirs: those
        of models that are gone are failed by the controller, which has every request announced."""
        self._transcripts.offer(card.name for card in self._shelf.cards)
        for changed in self._watchers:
            changed()
        self._look_if_known()

    async def _ask(self, question: Question) -> protocol.ModelAnswer:
        """Ask the controller. Raises ModelRefused or Unavailable."""
        self._check_started()
        if self._acting.wire is None:
            raise backend.Unavailable("the controller is restarting. Retry")
        return await self._questions.ask(question, self._acting.wire.send)

    def _tell_controller(
        self, event: RequestArrived | RequestCancelled | RequestEnded | protocol.RequestTimed
    ) -> None:
        # While no controller is there nothing is lost: the next one receives every transcript.
        if self._acting.wire is not None:
            self._acting.wire.send(event)

    def _fail(self, command: FailRequest, epoch: ControllerEpoch) -> None:
        request, failure = command.request, backend.GenerationFailed(command.reason)
        if command.retry_after_ns is not None and self._ledger.get(request) is not None:
            model = self._transcripts[request].asked.model
            why = f"the model '{model}' cannot be loaded: {command.reason}"
            failure = backend.NoInstance(why, command.retry_after_ns / 1e9, "load_failed")
        self._carry_out(self._ledger.failed(request, str(failure), epoch), failure)

    def _waited_too_long(self, transcript: Transcript) -> None:
        asked = transcript.asked
        waited = (
            f"no instance of '{asked.model}' was free within "
            f"{self._boot.pool.queue_timeout_s:g} s (queue_timeout_s)"
        )
        retry_after_s = self._transcripts.wait_s(asked.model, asked.client.name)
        failure = backend.NoInstance(waited, retry_after_s, "queue_timeout")
        self._carry_out(self._ledger.cancel(asked.request, Outcome.FAILED, waited), failure)

    # -- the workers ----------------------------------------------------------------------------

    def _worker_reported(self, worker: WorkerRef, message: protocol.FromTokenServer) -> None:
        if isinstance(message, protocol.Tokens):
            self._take(worker, message.tokens)
        else:
            self._carry_out(self._ledger.reported(worker, message))

    def _take(self, worker: WorkerRef, tokens: Sequence[protocol.Token]) -> None:
        """Pass the tokens that are accepted on to their streams; all of them have come now."""
        now_ns, came, transcripts = time.monotonic_ns(), self._ledger.came, self._transcripts
        for token in tokens:
            accepted, effects = came(
                worker,
                token.request,
                token.attempt,
                index=token.index,
                count=1,
                is_last=token.finish_reason is not None,
            )
            if accepted:
                transcripts.take(token, now_ns)
            if effects:
                self._carry_out(effects)

    # -- what follows ---------------------------------------------------------------------------

    def _carry_out(
        self, effects: Sequence[LedgerEffect], failure: backend.GenerationFailed | None = None
    ) -> None:
        """`failure`: what the stream of a request that fails raises (None: the reason alone)."""
        for effect in effects:
            if isinstance(effect, Send):
                order = effect.order
                submission = self._transcripts[order.request].submission(order)
                self._workers.send(order.worker, submission)
            elif isinstance(effect, Forget):
                self._workers.send(effect.worker, effect.message)
            elif isinstance(effect, Moved):
                self._transcripts.move(effect.request, effect.before, effect.after)
            elif isinstance(effect, Announce):
                self._tell_controller(self._transcripts[effect.request].arrival(effect))
            elif isinstance(effect, Finish):
                self._finish(effect, failure)
            else:
                self._tell_controller(effect)

    def _finish(self, end: Finish, failure: backend.GenerationFailed | None) -> None:
        transcript = self._transcripts.close(end.request, is_running=end.owner is not None)
        has_failed = end.outcome is Outcome.FAILED
        if has_failed and failure is None:
            failure = backend.GenerationFailed(end.reason)
        transcript.sink.end(failure if has_failed else None)
        # The sink has the stream, and the stream the transcript: without a circle they go at once.
        del transcript.sink
        self._tell_controller(protocol.RequestTimed(transcript.line(end, self.slo)))
