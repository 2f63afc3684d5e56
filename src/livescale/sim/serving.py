"""Requests on one instance of the simulated world: what its rank 0 does with them, in virtual time.

The production LiveBatcher decides the Runs; they take what the latency model says. Like a real
worker's main thread it hears others between two Runs only, and a layer of a live batch is a Run.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from livescale.batching.batcher import Batcher
from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.live_messages import Handover, KvLayer, LiveMessage, Taken
from livescale.batching.live_taker import TakenBatch
from livescale.batching.reports import ReportPace, load_report
from livescale.batching.run import EmittedTokens, Run
from livescale.latency.work import span_ns
from livescale.messages.commands import StartLoad
from livescale.messages.events import BatchTaken, RequestEnded
from livescale.plans import Pairing
from livescale.sim.clock import COMMIT_PRIORITY, Action
from livescale.sim.surroundings import SimSurroundings
from livescale.sim.worker_messages import (
    SimAttemptFailed,
    SimAttemptTaken,
    SimCancel,
    SimSubmit,
    SimTokens,
    ToWorkerMessage,
)
from livescale.types import (
    FinishReason,
    InstanceId,
    LayerSpan,
    Outcome,
    RequestId,
    WorkerRef,
)

_GivenBack = Callable[[list[tuple[RequestId, int]]], None]
_STEPS_MAX = 1 << 20


class SimServing:
    """One instance as its rank 0 serves it. Other ranks have one, too, that gets no requests."""

    def __init__(self, around: SimSurroundings, order: StartLoad) -> None:
        config = around.config
        self._around = around
        self._order = order
        self._spec = config.spec(order.model)
        span = LayerSpan(0, self._spec.layers)
        batcher = Batcher(config.batcher(self._spec, around.device), span)
        self.live = LiveBatcher(batcher, order.instance, config.live, order.pairing)
        self._latency = config.latency_of(order.model)
        self._pace = ReportPace(config.report_gap_ns)
        #: the Run in flight, when it began, and when its steps end
        self._run: Run | None = None
        self._run_began_ns = 0
        self._step_ns: list[int] = []
        #: what is to be heard when the Run in flight is over
        self._inbox: list[Action] = []
        #: there may be something to tell another instance, or to wait for from it
        self._has_partner = order.pairing is not None
        self._alarm: int | None = None
        self._releasing: _GivenBack | None = None
        self._is_over = False
        if order.rank == 0:
            around.live_checker.joins(around.ref, self)
        #: requests that came from other instances
        self._taken: dict[tuple[RequestId, int], None] = {}
        self._handovers = self._handover_bytes = 0
        #: decoder layers of live batches that were run here
        self.live_layers = 0

    # -- what can be asked ----------------------------------------------------------------------

    @property
    def instance(self) -> InstanceId:
        return self._order.instance

    @property
    def pairing(self) -> Pairing | None:
        return self._order.pairing

    @property
    def is_idle(self) -> bool:
        """No Run is in flight. (None that could be started is left.)"""
        return self._run is None

    @property
    def waits_for_layer(self) -> tuple[tuple[int, int], ...]:
        """Requests of its first batch, if it can run no decoder layer yet and has a source that may
        pull: known tokens of each, and those that it can ever need KV for."""
        giver, pairing = self.live.giver, self._order.pairing
        if self.live.loaded or giver.is_parted or not giver.line or pairing is None:
            return ()
        if pairing.order == "overlap":
            return ()
        return tuple((s.known_tokens, s.tokens_max) for s in giver.line[0].sequences)

    def has_room(self, needs: Sequence[tuple[int, int]]) -> bool:
        """The instance is complete, and requests with such needs fit beside its own."""
        return self.live.is_full and self.live.batcher.has_room(needs)

    def has_taken(self, request: RequestId, attempt: int) -> bool:
        """The attempt came from another instance."""
        return (request, attempt) in self._taken

    # -- what comes in --------------------------------------------------------------------------

    def layers_there(self, watermark: int) -> None:
        """All ranks have layers 0…watermark-1."""
        if watermark > self.live.watermark:
            self.live.layers_arrived(watermark)
            self.go_on()

    def take_request(self, message: ToWorkerMessage) -> None:
        """News of the gateway about an attempt."""
        if self._run is not None and self.live.key_of(self._run) is not None:
            self._inbox.append(partial(self._request, message))
            return
        self._end_stretch()
        self._request(message)
        self.go_on()

    def hear(self, peer: WorkerRef, message: LiveMessage, size_bytes: int) -> None:
        """A message of another instance, with what came along."""
        self._later(partial(self._heard, peer, message, size_bytes))

    def peer_lost(self, peer: WorkerRef, then: Action) -> None:
        """Nothing more comes from this worker. Calls `then` when all that came before is heard."""
        self._later(partial(self._lost, peer, then))

    def release(self, then: _GivenBack) -> None:
        """Give everything back, and call `then` with what was run here and must run elsewhere.

        At once, unless others wait for what the Run in flight computes.
        """
        if self._has_partner or self._inbox or self._order.pairing is not None:
            self._releasing = then
            self._end_stretch()
            self.go_on()
        else:
            own = self.live.requests()
            self.leave()
            then(own)

    def leave(self) -> None:
        """Nothing happens here any more."""
        self._is_over = True
        self._inbox = []
        self._set_alarm(None)
        self._around.live_checker.leaves(self._around.ref)

    def forget_reports(self) -> None:
        """Whoever reads the reports may be new."""
        self._pace.forget()

    # -- serving --------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Hear and tell what there is, start the next Run unless one is in flight, and report what
        changed."""
        if self._run is not None or self._is_over:
            return
        while self._inbox:
            self._inbox.pop(0)()
        self._speak()
        if self._releasing is not None:
            self._give_back(self._releasing)
            return
        live = self.live
        if live.is_full or live.is_live:
            run = live.next_run(self._steps_max())
            self._speak()
            self.report_load()
            if run is not None:
                self._start(run)
        self._around.live_checker.looks(self._around.ref, self._around.clock.now_ns)

    def report_load(self) -> None:
        """Tell the controller of the instance's load, if that is worth a message."""
        report = load_report(
            self._order.instance,
            self._order.attempt,
            self.live.batcher,
            handovers=self._handovers,
            handover_bytes=self._handover_bytes,
        )
        if self._pace.is_due(self._around.clock.now_ns, report):
            self._around.say(report)

    def __repr__(self) -> str:
        return f"<SimServing {self._around.ref}, {self.live!r}>"

    # -- helpers: messages ----------------------------------------------------------------------

    def _later(self, action: Action) -> None:
        """Between two Runs: now, or when the one in flight is over."""
        self._inbox.append(action)
        self._end_stretch()
        self.go_on()

    def _request(self, message: ToWorkerMessage) -> None:
        ref, say = self._around.ref, self._around.say
        if isinstance(message, SimSubmit):
            spec = message.spec
            try:
                self.live.add(spec)
            except ValueError as error:
                self._around.emit(SimAttemptFailed(spec.request, spec.attempt, str(error)))
                say(RequestEnded(spec.request, spec.attempt, Outcome.FAILED, worker=ref))
            return
        is_here = self.live.cancel(message.request, message.attempt)
        if is_here and isinstance(message, SimCancel):
            say(RequestEnded(message.request, message.attempt, Outcome.CANCELLED, worker=ref))

    def _heard(self, peer: WorkerRef, message: LiveMessage, size_bytes: int) -> None:
        live, now_ns = self.live, self._around.clock.now_ns
        if isinstance(message, Taken) and message.batch in live.giver.given:
            self._note_given(peer, message)
        if isinstance(message, KvLayer) and message.batch in live.taker.batches:
            self._handover_bytes += size_bytes
            self._around.live_checker.kv_came(self.instance, message.batch, message.layer)
        self._has_partner = True
        live.take_message(peer, message, now_ns)
        for taken in live.taker.take_taken():
            assert isinstance(message, Handover)
            self._around.live_checker.handed(self.instance, message)
            self._took(taken, message.next_layer)
        self._speak()

    def _note_given(self, peer: WorkerRef, message: Taken) -> None:
        """The taker tells the gateway; should it die before that has come there, this one does."""
        now_ns = self._around.clock.now_ns
        given = self._around.given.setdefault(peer, {})
        for known in [known for known, since_ns in given.items() if self._is_old(since_ns)]:
            del given[known]
        for sequence in self.live.giver.given[message.batch].sequences:
            given[sequence.spec.request, sequence.spec.attempt] = now_ns

    def _is_old(self, since_ns: int) -> bool:
        return since_ns < self._around.clock.now_ns - self._around.config.live.answer_ns

    def _took(self, taken: TakenBatch, next_layer: int) -> None:
        """Gateway and controller hear who runs the batch before it goes on."""
        row_bytes = taken.rows * self._spec.row_bytes_per_token
        self._handovers += 1
        self._handover_bytes += row_bytes
        tokens = 0
        for spec in taken.requests:
            tokens += len(spec.prompt_ids) + len(spec.generated_ids)
            self._taken[spec.request, spec.attempt] = None
            for given in self._around.given.values():
                given.pop((spec.request, spec.attempt), None)  # it has come back
            self._around.emit(SimAttemptTaken(spec.request, spec.attempt, spec.moves))
            if taken.decoding:
                ids, now_ns = spec.generated_ids, self._around.clock.now_ns
                repeated = EmittedTokens(spec.request, spec.attempt, 0, ids, None)
                self._around.emit(SimTokens([now_ns] * len(ids), [repeated]))
        requests = tuple((spec.request, spec.attempt) for spec in taken.requests)
        self._around.say(
            BatchTaken(
                instance=self._order.instance,
                attempt=self._order.attempt,
                worker=self._around.ref,
                target=taken.key.target,
                requests=requests,
                next_layer=next_layer,
                tokens=tokens,
                row_bytes=row_bytes,
                pull_ns=taken.pull_ns,
                moves=tuple(spec.moves for spec in taken.requests),
            )
        )

    def _lost(self, peer: WorkerRef, then: Action) -> None:
        self._has_partner = True
        self.live.peer_lost(peer)
        self._speak()
        then()

    def _give_back(self, then: _GivenBack) -> None:
        self._has_partner = True
        own = self.live.give_back()
        self._speak()
        self.leave()
        then(own)

    def _speak(self) -> None:
        """Tell other instances what there is to tell; wait for what they owe."""
        if not self._has_partner:
            return
        live = self.live
        for peer, message in live.take_outbox(self._around.clock.now_ns):
            if isinstance(message, Handover):
                self._around.live_checker.hands(message)
            self._around.tell(peer, message, self._bytes_of(message))
        self._has_partner = not live.is_alone
        self._set_alarm(live.deadline_ns() if self._run is None else None)

    def _bytes_of(self, message: LiveMessage) -> int:
        """What goes along with the message."""
        if isinstance(message, Handover):
            return message.rows * self._spec.row_bytes_per_token
        if isinstance(message, KvLayer):
            tokens = sum(tokens for tokens, _ in self.live.kv_places(message.batch))
            return tokens * self._spec.kv_bytes_per_token // (self._spec.layers - 2)
        return 0

    def _set_alarm(self, at_ns: int | None) -> None:
        clock = self._around.clock
        if self._alarm is not None:
            clock.cancel(self._alarm)
        self._alarm = clock.at(max(at_ns, clock.now_ns), self._wake) if at_ns is not None else None

    def _wake(self) -> None:
        """A partner's answer is late."""
        self._alarm = None
        self._end_stretch()
        self.go_on()

    # -- helpers: Runs --------------------------------------------------------------------------

    def _steps_max(self) -> int:
        # Faults may come at any time, and what a worker said last decides what they destroy.
        config = self._around.config
        is_quiet = self._around.clock.now_ns >= config.faults.until_ns
        return _STEPS_MAX if config.coalesces and is_quiet else 1

    def _start(self, run: Run) -> None:
        """Let the Run take its time. A stretch ends where progress is worth a report."""
        live, now_ns = self.live, self._around.clock.now_ns
        is_live = live.key_of(run) is not None
        self._around.live_checker.runs(self.instance, self._spec.name, run, is_live=is_live)
        self._run_began_ns = now_ns
        work = run.work
        if is_live:
            layers = self._decoder_layers(run.span)
            self._step_ns = [now_ns + span_ns(self._latency, work, layers, self._spec.layers - 2)]
        elif run.steps == 1:
            self._step_ns = [now_ns + self._latency.run_ns(work)]
        else:
            first_ns = self._latency.run_ns(work)
            due_ns = self._pace.progress_due_ns
            steps = min(run.steps, max(due_ns - now_ns, 0) // max(first_ns, 1) + 2)
            times = self._latency.decode_ns(work.decodes, work.decode_context_tokens, steps)
            self._step_ns = list(itertools.accumulate(times, initial=now_ns))[1:]
            last = min(bisect.bisect_left(self._step_ns, due_ns) + 1, steps)
            del self._step_ns[last:]
            run = live.batcher.shorten(run, last)
        self._run = run
        self._commit_at_end(run)

    def _commit_at_end(self, run: Run) -> None:
        self._around.clock.at(self._step_ns[-1], partial(self._commit, run), COMMIT_PRIORITY)

    def _decoder_layers(self, span: LayerSpan) -> int:
        """How many of the span's layers are neither the embedding nor the head."""
        return min(span.stop, self._spec.layers - 1) - max(span.start, 1)

    def _end_stretch(self) -> None:
        """Something comes in: the Run in flight ends with the step that is under way."""
        if self._run is None or self._run.steps == 1:
            return
        over = bisect.bisect_right(self._step_ns, self._around.clock.now_ns)
        if over + 1 < self._run.steps:
            self._run = self.live.batcher.shorten(self._run, over + 1)
            del self._step_ns[over + 1 :]
            self._commit_at_end(self._run)

    def _commit(self, run: Run) -> None:
        if self._is_over or self._run is not run:
            return
        self._run = None
        if self.live.key_of(run) is not None:
            self.live_layers += self._decoder_layers(run.span)
        # The token at a position is the position: whoever computes it again gets the same.
        ends = [s.first_position + len(s.token_ids) for s in run.segments if s.samples]
        emitted = self.live.commit_steps(run, [range(end, end + run.steps) for end in ends])
        began_ns = self._step_ns[-2] if run.steps > 1 else self._run_began_ns
        self.live.ran(run, self._step_ns[-1] - began_ns)
        if emitted:
            self._around.emit(SimTokens(self._step_ns, emitted))
        for e in emitted:
            self._end_if_last(e)
        self.go_on()

    def _end_if_last(self, e: EmittedTokens) -> None:
        if e.finish_reason is FinishReason.LENGTH:
            tokens = e.index + len(e.token_ids)
            self._taken.pop((e.request, e.attempt), None)
            ended = RequestEnded(
                e.request, e.attempt, Outcome.FINISHED, tokens, worker=self._around.ref
            )
            self._around.say(ended)
