"""Live scaling on one instance: its Batcher, its live batches, and what it tells its partner.

The same three verbs as a Batcher: `next_run()` -> `executor.run(run, rows)` -> `commit(run, ids)`.
While parameters arrive (`watermark` below all layers) the instance is a *target*: it forms batches
of waiting prompts and runs their layers in the live order. With all layers it serves as any other,
and takes batches over as a *source* (BlitzScale §5.2). Who takes what is agreed in messages
(`live_messages.py`, `live_giver.py`, `live_taker.py`); rows and KV lie with the executor, named by
the batch's key.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching import live_messages as messages
from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveBatch, LiveLimits
from livescale.batching.live_batches import LiveBatches
from livescale.batching.live_giver import LiveGiver
from livescale.batching.live_messages import BatchKey, LiveMessage
from livescale.batching.live_mover import LiveMover
from livescale.batching.live_order import LIVE_ORDERS, LiveOrder
from livescale.batching.live_pace import LivePace
from livescale.batching.live_taker import LiveTaker
from livescale.batching.live_turns import LiveTurns
from livescale.batching.run import Emission, EmittedTokens, Run, SequenceSpec
from livescale.plans import Pairing
from livescale.types import InstanceId, RequestId, WorkerRef

WHILE_RUNNING = messages.Offer | messages.Handover | messages.KvLayer
"""Messages that may come while a Run is in flight: nothing that runs is taken away by them."""


class LiveBatcher:
    """Decides the Runs of one instance of a model of `batcher.span.stop` layers.

    `pairing` None: the instance does nothing before everything is loaded. Else it is live from the
    start, for the pairing's source if there is one.
    """

    def __init__(
        self,
        batcher: Batcher,
        instance: InstanceId,
        limits: LiveLimits,
        pairing: Pairing | None = None,
    ) -> None:
        self.batcher = batcher
        self.instance = instance
        self.limits = limits
        #: layers 0…watermark-1 are here
        self.watermark = 0
        self._decoder_layers = batcher.span.stop - 2
        self.pace = LivePace(batcher, limits)
        self._order: LiveOrder | None = LIVE_ORDERS[pairing.order] if pairing is not None else None
        self.batches = LiveBatches(batcher, instance)
        self.giver = LiveGiver(batcher, self.batches, instance, self._order)
        self.taker = LiveTaker(batcher, self.batches, instance, limits, self.pace)
        self.mover = LiveMover(batcher, self.batches, instance, limits, self.giver, self.taker)
        if pairing is not None and pairing.source is not None:
            self.giver.pair(pairing.source, pairing.source_instance)
        self._turns = LiveTurns(
            batcher, limits, self.pace, self.batches, self.giver, self.taker, self._order
        )
        #: the last Run that was committed was one of a live batch
        self._was_live = False
        #: of a target with everything: requests up to this one came while it was live
        self._order_max: int | None = None

    # -- what comes in --------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self.watermark == self.batcher.span.stop

    @property
    def is_live(self) -> bool:
        """Requests may be sent here though layers are missing."""
        return self._order is not None and self._order.is_live

    def layers_arrived(self, watermark: int) -> None:
        """Layers 0…watermark-1 are complete and may be run."""
        assert self.watermark <= watermark <= self.batcher.span.stop
        self.watermark = watermark
        if self.is_full:
            self._order_max = self.batcher.lines.arrivals

    def add(self, spec: SequenceSpec) -> None:
        """Accept a request; ValueError when it can never run here. A newer attempt of a request
        takes the place of an older one."""
        self._cancel_older(spec)
        if max(self.batcher.attempts(spec.request), default=-1) >= spec.attempt:
            raise ValueError(f"request {spec.request} is on this instance in a later attempt")
        self.batcher.add(spec)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """Forget the request. False when it is not here, or another instance's by now.

        Its KV is freed at once, or when the Run in flight, or its live batch, is over.
        """
        if self.batcher.cancel(request, attempt):
            return True
        sequence = self.batcher.held.get(request, attempt)
        if sequence is None or sequence.is_elsewhere:
            return False
        batches = self.batches.everything()
        batch = next(batch for batch in batches if sequence in batch.sequences)
        if request in batch.cancelled:
            return False
        # All layers are done, and it waits for its KV only.
        if batch.next_layer == self.batcher.span.stop and batch.key in self.batches.taken:
            self.batcher.held.drop(sequence)
            batch.sequences.remove(sequence)
            self.batches.join_if_complete(batch)
        else:
            batch.cancelled[request] = None
            self._drop_if_over(batch)
        return True

    def give_back(self) -> list[tuple[RequestId, int]]:
        """Forget everything that is here: the load has failed, or the instance must go.

        Returns (request, attempt) of all that were its own: they must run elsewhere. News of
        batches that it has taken over (`taker.take_taken`) is to be told before.
        """
        assert not self._turns.in_flight, f"{self!r}: a Run is in flight"
        own = self.requests()
        for batch in self.batches.everything():
            self.batches.end(batch)
        self.taker.forget_all()
        self.mover.forget_all()
        self.giver.part()
        for request, attempt in own:
            self.batcher.cancel(request, attempt)
        return own

    # -- the three verbs ------------------------------------------------------------------------

    def next_run(self, steps_max: int = 1) -> Run | None:
        """The next Run, or None when there is nothing that could run now. While one is in flight:
        one that can be carried out behind it, whatever comes of that. They are committed in their
        order. See `Batcher.next_run` for `steps_max`."""
        if not self._turns.in_flight:
            self._form_batches()
        return self._turns.next_run(self.loaded, steps_max)

    def commit(self, run: Run, token_ids: list[int]) -> list[Emission]:
        """Take the Run's result: one token per sampling segment, in segment order."""
        emitted = self.commit_steps(run, [(token_id,) for token_id in token_ids])
        return [tokens.single for tokens in emitted]

    def commit_steps(self, run: Run, token_ids: Sequence[Sequence[int]]) -> list[EmittedTokens]:
        """As `commit`, for a Run of any number of steps."""
        chosen, batch = self._turns.in_flight.popleft()
        assert chosen.id == run.id, f"{self!r}: run {run.id} is not the first in flight"
        self._was_live = batch is not None
        if batch is None:
            return self.batcher.commit_steps(run, token_ids)
        return self._commit_live(batch, run, token_ids)

    def ran(self, run: Run, elapsed_ns: int) -> None:
        """How long a committed Run took, or the last one of its steps: what bounds live Runs, pulls
        and moves is reckoned from it."""
        self.pace.ran(run, elapsed_ns, was_live=self._was_live)
        if not self._was_live and not run.prefill_tokens:
            self.mover.step_ns = elapsed_ns

    # -- the partner ----------------------------------------------------------------------------

    def take_message(self, peer: WorkerRef, message: LiveMessage, now_ns: int) -> None:
        """A message of the other instance of a pair, between two Runs, or (WHILE_RUNNING) at any
        time. `Handover` and `KvLayer` come when their bytes are here."""
        may_come = not self._turns.in_flight or isinstance(message, WHILE_RUNNING)
        assert may_come, f"{self!r}: a Run is in flight"
        if isinstance(message, messages.Handover):
            for spec in message.requests:
                self._cancel_older(spec)
        if self.mover.take_message(peer, message, now_ns):
            return
        if not self.giver.take_message(peer, message, self.loaded, now_ns):
            self.taker.take_message(peer, message, now_ns, is_full=self.is_full)

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        """Nothing more comes from this worker or goes there. One that `is_reachable` is told what
        does not come. Between two Runs."""
        assert not self._turns.in_flight, f"{self!r}: a Run is in flight"
        self.mover.give_up(peer)
        self.giver.give_up(peer, is_lost=True)
        self.taker.give_up(peer)
        if is_reachable:
            # Its offers are forgotten here, and may not even have arrived.
            self.batches.tell(peer, messages.Parted(None))
        else:
            self.batches.untell(peer)

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        """What is to be told to whom, since the last call. To be called whenever something
        happened: after messages, after `commit`, and after `next_run`."""
        is_between_runs = not self._turns.in_flight
        deadline_ns = self.deadline_ns()
        self._turns.is_awaited = deadline_ns is not None and now_ns >= deadline_ns
        if is_between_runs:
            self._form_batches()
        if is_between_runs and self._turns.is_awaited:
            self._give_up_late(now_ns - self.limits.answer_ns)
        has_more = self._may_form() and self.batcher.lines.waits_since(self._order_max)
        partners = self.giver.offer(self.loaded, is_over=self.is_full and not has_more)
        for peer, instance in partners if self.limits.move_factor else ():
            self.mover.even(peer, instance)
        # A Run of several steps counts on the blocks that were free when it began.
        if self.is_full and all(run.steps == 1 for run, _ in self._turns.in_flight):
            self.taker.pull(now_ns)
        if is_between_runs and self.is_full:
            self.mover.talk()
        return self.batches.take_outbox()

    # -- what can be asked ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """`next_run` might have something now."""
        return self.batcher.has_work or bool(self.batches.line or self.batches.taken)

    @property
    def is_alone(self) -> bool:
        """There is nothing to tell another instance, and nothing that one should tell."""
        is_giving = not self.giver.is_parted or self.batches.given
        return not is_giving and self.taker.is_idle and self.mover.is_idle

    def deadline_ns(self) -> int | None:
        """When a partner's answer is late: then `take_outbox` is to be called."""
        since = [since_ns for *_, since_ns in self.giver.awaited() + self.taker.awaited()]
        return min(since) + self.limits.answer_ns + 1 if since else None

    def key_of(self, run: Run) -> BatchKey | None:
        """The live batch whose Run in flight this is: names its rows."""
        batches = (batch for chosen, batch in self._turns.in_flight if chosen.id == run.id)
        return next((batch.key for batch in batches if batch is not None), None)

    @property
    def is_running(self) -> bool:
        """A Run is in flight."""
        return bool(self._turns.in_flight)

    @property
    def loaded(self) -> int:
        """Decoder layers that can run: the last one runs with the head."""
        if self.is_full:
            return self._decoder_layers
        return min(max(self.watermark - 1, 0), self._decoder_layers - 1)

    def requests(self) -> list[tuple[RequestId, int]]:
        """(request, attempt) of everything that is this instance's, cancelled ones left out."""
        cancelled = {
            (sequence.spec.request, sequence.spec.attempt)
            for batch in self.batches.everything()
            if batch.cancelled
            for sequence in batch.sequences
            if sequence.spec.request in batch.cancelled
        }
        return [pair for pair in self.batcher.requests() if pair not in cancelled]

    def validate(self) -> None:
        """Check batches and Batcher against each other. Raises AssertionError."""
        self.batcher.validate()
        self.batches.validate()
        for batch in self.batches.line:
            assert batch.layers_done <= self.loaded, f"{batch.key} ran layers that are not here"

    def __repr__(self) -> str:
        return (
            f"<LiveBatcher {self.instance}, {self.watermark}/{self.batcher.span.stop} layers,"
            f" {len(self.batches.line)} batches in line, {len(self.batches.taken)} taken over,"
            f" {self.batcher!r}>"
        )

    # -- helpers, in the order used -------------------------------------------------------------

    def _cancel_older(self, spec: SequenceSpec) -> None:
        for attempt in self.batcher.attempts(spec.request):
            if attempt < spec.attempt:
                self.cancel(spec.request, attempt)

    def _may_form(self) -> bool:
        """Prompts that wait become live batches: while layers arrive, and for those that came
        meanwhile as long as there is somebody to share them with."""
        return self.is_live and (not self.is_full or not self.giver.is_parted)

    def _form_batches(self) -> None:
        while self._may_form() and len(self.batches.line) < self.limits.batches_max:
            sequences = self.batcher.hold_waiting(self.pace.batch_tokens_max(), self._order_max)
            if not sequences:
                return
            self.batches.append(sequences)

    def _give_up_late(self, late_ns: int) -> None:
        """Partners that have been asked before then, and have not answered, get and give nothing
        more."""
        for side in (self.giver, self.taker):
            waits = {peer: of for peer, of, since_ns in side.awaited() if since_ns < late_ns}
            for peer, instance in waits.items():
                assert peer is not None
                side.give_up(peer)
                self.batches.tell(peer, messages.Parted(instance))

    def _commit_live(
        self, batch: LiveBatch, run: Run, token_ids: Sequence[Sequence[int]]
    ) -> list[EmittedTokens]:
        assert run.steps == 1
        assert run.span.start == batch.next_layer, f"{run.span} of {batch.key}"
        batch.next_layer = run.span.stop
        batch.chosen_layers -= run.span.stop - run.span.start
        if run.span.stop < self.batcher.span.stop:
            assert not token_ids, f"{len(token_ids)} tokens without a head"
            self._drop_if_over(batch)
            return []
        emitted = []
        for sequence, tokens in zip([*batch.sequences], token_ids, strict=True):
            if sequence.spec.request in batch.cancelled:
                self.batcher.held.drop(sequence)
                batch.sequences.remove(sequence)
                continue
            emitted.append(self.batcher.emit_held(sequence, tokens))
            if emitted[-1].finish_reason is not None:
                batch.sequences.remove(sequence)
        batch.cancelled = {}
        self.batches.join_if_complete(batch)
        return emitted

    def _drop_if_over(self, batch: LiveBatch) -> None:
        if batch.is_over and not batch.chosen_layers:
            self.batches.end(batch)
