"""Live scaling on one instance: its Batcher, its live batches, and what it tells its partner.

Our `Serving`. The same three verbs as a Batcher: `next` -> `executor.run(run, rows)` -> `done`.
While parameters arrive (`watermark` below all layers) the instance is a *target*: it forms batches
of waiting prompts and runs their layers in the live order. With all layers it serves as any other,
and takes batches over as a *source* (BlitzScale §5.2). Who takes what is agreed in messages
(`live_messages.py`, `live_giver.py`, `live_taker.py`); rows and KV lie with the executor, named by
the batch's key.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.contract import live_messages as messages
from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.contract.live_order import LIVE_ORDERS, LiveOrder
from livescale.batching.contract.serving import Capabilities, KvCame, KvPlaces, Serving
from livescale.batching.live.decode_giver import DecodeGiver
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batches import LiveBatches
from livescale.batching.live.live_drainer import LiveDrainer
from livescale.batching.live.live_giver import LiveGiver
from livescale.batching.live.live_mover import LiveMover
from livescale.batching.live.live_pace import LivePace
from livescale.batching.live.live_taker import LiveTaker
from livescale.batching.live.live_turns import LiveTurns
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.messages.events import InstanceReported
from livescale.values.routes import Partner, Taker
from livescale.values.types import InstanceId, RequestId, WorkerRef

WHILE_RUNNING = messages.Offer | messages.Promised | messages.Handover | messages.KvLayer
"""Messages that may always come while a Run is in flight: they take nothing away that runs."""


class LiveBatcher(Serving):
    """Decides the Runs of one instance of a model of `batcher.span.stop` layers.

    Without a `live_order` the instance does nothing before everything is loaded. Else it is live
    from the start, and `gives_to` may pull what it has.
    """

    def __init__(
        self,
        batcher: Batcher,
        instance: InstanceId,
        limits: LiveLimits,
        live_order: str | None = None,
        gives_to: Sequence[Partner] = (),
    ) -> None:
        self.batcher = batcher
        self.instance = instance
        self.limits = limits
        #: layers 0…watermark-1 are here
        self.watermark = 0
        self._decoder_layers = batcher.span.stop - 2
        self.pace = LivePace(batcher, limits)
        self._order: LiveOrder | None = LIVE_ORDERS[live_order] if live_order is not None else None
        self.batches = LiveBatches(batcher, instance)
        self.decode_giver = DecodeGiver(self.batches, limits)
        self.taker = LiveTaker(self.batches, limits, self.pace, lambda: self.decode_giver.is_giving)
        self.mover = LiveMover(self.batches, limits, self.taker)
        self.drainer = LiveDrainer(self.batches, limits, self.pace)
        self.giver = LiveGiver(
            self.batches, self._order, self.mover, self.drainer, self.decode_giver
        )
        for partner in gives_to:
            self.giver.pair(partner)
        self._turns = LiveTurns(
            limits, self.pace, self.batches, self.giver, self.taker, self._order
        )
        #: what is to run elsewhere, and what can be computed nowhere
        self._returned: list[tuple[RequestId, int]] = []
        self._refused: list[tuple[RequestId, int, str]] = []
        #: of a target with everything: requests up to this one came while it was live
        self._order_max: int | None = None

    # -- what comes in --------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self.watermark == self.batcher.span.stop

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            whole_model_only=self._order is None or not self._order.is_live,
            kv_blocks=self.batcher.config.kv_blocks,
            prefill_tokens_per_s=self.pace.prefill_tokens_per_s(),
        )

    def layers_arrived(self, watermark: int) -> None:
        assert self.watermark <= watermark <= self.batcher.span.stop
        self.watermark = watermark
        if self.is_full:
            self._order_max = self.batcher.lines.arrivals

    def add(self, spec: SequenceSpec) -> None:
        self._cancel_older(spec)
        if max(self.batcher.attempts(spec.request), default=-1) >= spec.attempt:
            raise ValueError(f"request {spec.request} is on this instance in a later attempt")
        self.batcher.add(spec)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """As told of a Serving: KV is freed at once, or when the Run in flight, or the live batch,
        is over."""
        if self.batcher.cancel(request, attempt):
            return True
        sequence = self.batcher.held.get(request, attempt)
        if sequence is None or sequence.is_elsewhere:
            return False
        return self.batches.cancel(sequence)

    def give_back(self) -> list[tuple[RequestId, int]]:
        assert not self._turns.in_flight, f"{self!r}: a Run is in flight"
        own = self.requests()
        for batch in self.batches.everything():
            self.batches.end(batch)
        self.taker.forget_all()
        self.mover.forget_all()
        self.drainer.forget_all()
        self.decode_giver.forget_all()
        self.giver.part()
        for request, attempt in own:
            self.batcher.cancel(request, attempt)
        return own

    # -- Runs ------------------------------------------------------------------------

    def next(self, steps_max: int = 1) -> Run | None:
        if not self._turns.in_flight:
            self._form_batches()
        run = self._turns.next(self.loaded, steps_max)
        if run is not None and run.batch is None:
            self.decode_giver.announce(run)
        return run

    @property
    def tells_layers(self) -> bool:
        return not self.decode_giver.early.is_empty

    def layers_ran(self, stop: int) -> None:
        self.decode_giver.early.layers_ran(stop)

    def may_come(self, peer: WorkerRef, message: LiveMessage) -> bool:
        if isinstance(message, WHILE_RUNNING) or not self._turns.in_flight:
            return True
        return self.batches.takes_nothing(message)

    def shorten(self, run: Run, steps: int) -> Run:
        return self.batcher.shorten(run, steps)

    def fail(self, run: Run, faulty: Sequence[FaultyRequest]) -> None:
        for one in faulty:
            if self.cancel(one.request, one.attempt):
                one.tell(self._refused, self._returned)

    def take_refused(self) -> list[tuple[RequestId, int, str]]:
        refused, self._refused = self._refused, []
        return refused

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        """What bounds live Runs, pulls and moves is reckoned from `elapsed_ns`."""
        emitted = self._turns.done(run, token_ids)
        prefill_tokens = run.prefill_tokens
        self.pace.ran(run, elapsed_ns, prefill_tokens)
        self.drainer.ran(elapsed_ns)
        if run.batch is None and not prefill_tokens:
            self.mover.step_ns = self.drainer.step_ns = elapsed_ns
        return emitted

    # -- the partner ----------------------------------------------------------------------------

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        return self.taker.expected_tokens(peer, message)

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, came_ns: int | None = None
    ) -> int | None:
        """`Handover` and `KvLayer` come when their bytes are here."""
        assert self.may_come(peer, message), f"{self!r}: a Run is in flight"
        if isinstance(message, messages.Handover):
            for spec in message.requests:
                self._cancel_older(spec)
        if self.giver.take_message(peer, message, self.loaded, now_ns):
            return None
        return self.taker.take_message(
            peer,
            message,
            now_ns,
            came_ns=now_ns if came_ns is None else came_ns,
            is_full=self.is_full,
            takes_decodes=not self.decode_giver.is_giving,
        )

    def work_alone(self) -> None:
        if self.is_full:
            return  # what is in line is shared until it is done
        assert not self._turns.in_flight, f"{self!r}: a Run is in flight"
        self.giver.part()
        for batch in [*self.batches.line]:
            sequences = [s for s in batch.sequences if s.spec.request not in batch.cancelled]
            self._returned += [(s.spec.request, s.spec.attempt) for s in sequences]
            self.batches.end(batch)
        for sequence in [*self.batcher.lines.waiting.values()]:
            request, attempt = sequence.spec.request, sequence.spec.attempt
            self._returned.append((request, attempt))
            self.batcher.cancel(request, attempt)

    def drain_to(self, takers: Sequence[Taker]) -> None:
        """What other instances would move here is not taken meanwhile."""
        assert not self._turns.in_flight, f"{self!r}: a Run is in flight"
        self.drainer.drain_to(takers)
        self.taker.is_draining = bool(takers)

    def decode_at(self, partners: Sequence[Partner], *, keeps: bool = False) -> None:
        self.decode_giver.decode_at(partners, keeps=keeps)

    def take_returned(self) -> list[tuple[RequestId, int]]:
        returned, self._returned = self._returned, []
        return returned + self.drainer.take_returned()

    def take_kv_came(self) -> list[KvCame]:
        return self.taker.kv.take_came()

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        """Between two Runs."""
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
        is_between_runs = not self._turns.in_flight
        deadline_ns = self.deadline_ns()
        self._turns.is_awaited = deadline_ns is not None and now_ns >= deadline_ns
        if is_between_runs:
            self._form_batches()
        if is_between_runs and self._turns.is_awaited:
            late_ns = now_ns - self.limits.answer_ns
            _give_up_late(self.batches, (self.giver, self.taker), late_ns)
        has_more = self._may_form() and self.batcher.lines.waits_since(self._order_max)
        partners = self.giver.offer(self.loaded, is_over=self.is_full and not has_more)
        for peer, instance in partners if self.limits.move_factor else ():
            self.mover.even(peer, instance)
        # A Run of several steps counts on the blocks that were free when it began.
        if self.is_full and all(run.steps == 1 for run, _ in self._turns.in_flight):
            self.taker.pull(now_ns, self._turns.in_flight_ns())
        if is_between_runs and self.is_full:
            self.giver.keep_promises(self.loaded, now_ns)
            self.mover.talk()
            self.drainer.talk()
        return self.batches.take_outbox()

    # -- what can be asked ----------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        is_giving = not self.giver.is_parted or self.batches.given or self.decode_giver.is_giving
        is_moving = not (self.mover.is_idle and self.drainer.is_idle)
        return not is_giving and self.taker.is_idle and not is_moving

    def deadline_ns(self) -> int | None:
        since = [since_ns for *_, since_ns in self.giver.awaited() + self.taker.awaited()]
        return min(since) + self.limits.answer_ns + 1 if since else None

    @property
    def loaded(self) -> int:
        """Decoder layers that can run: the last one runs with the head."""
        if self.is_full:
            return self._decoder_layers
        return min(max(self.watermark - 1, 0), self._decoder_layers - 1)

    def holds(self, key: BatchKey) -> bool:
        return self.batches.holds(key)

    def kv_places(self, key: BatchKey) -> KvPlaces:
        places = self.batches.kv_places(key)
        return places if places is not None else self.taker.ahead.places(key)

    def report(self) -> InstanceReported:
        pace, handovers = self.pace, self.taker.handovers
        return self.batcher.report(self.instance, handovers, pace.prefill_tokens, pace.prefill_ns)

    def requests(self) -> list[tuple[RequestId, int]]:
        """Cancelled ones are left out."""
        cancelled = self.batches.cancelled()
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
        meanwhile as long as there is a partner to share them with."""
        is_live = self._order is not None and self._order.is_live
        return is_live and (not self.is_full or not self.giver.is_parted)

    def _form_batches(self) -> None:
        while self._may_form() and len(self.batches.line) < self.limits.batches_max:
            sequences = self.batcher.hold_waiting(self.pace.batch_tokens_max(), self._order_max)
            if not sequences:
                return
            self.batches.append(sequences)


def _give_up_late(
    batches: LiveBatches, sides: Sequence[LiveGiver | LiveTaker], late_ns: int
) -> None:
    """Partners that have been asked before then, and have not answered, get and give nothing
    more."""
    for side in sides:
        waits = {peer: of for peer, of, since_ns in side.awaited() if since_ns < late_ns}
        for peer, instance in waits.items():
            assert peer is not None
            side.give_up(peer)
            batches.tell(peer, messages.Parted(instance))
