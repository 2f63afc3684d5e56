"""All live batches of one instance: its own, those that were given away, those taken over.

One table for both sides. Who has a batch on its way to whom is noted in the batch; what is to be
told of it to other instances piles up here, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    KvAt,
    KvLayer,
    KvWanted,
    LiveMessage,
    Offer,
    PartOf,
    Pull,
    Settled,
    Taken,
)
from livescale.batching.contract.serving import KvPlaces
from livescale.batching.contract.visit_messages import Shared
from livescale.batching.live.live_batch import EarlyOffer, LiveBatch
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.held import Table
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import InstanceId, RequestId, WorkerRef

AHEAD_TOKENS = 32
"""Tokens that a request may generate between its offer and its handover."""


class LiveBatches:
    """`line` are the instance's own, the earliest first; `early` will be batches when the Run in
    flight ends; `ready` are computed here, and decode elsewhere; `given` were handed over and are
    not settled; `taken` were taken over and have not ended, in the order of their coming."""

    def __init__(self, batcher: Batcher, instance: InstanceId) -> None:
        self.batcher = batcher
        self.instance = instance
        self._held = batcher.held
        self._stop = batcher.span.stop
        self.line: list[LiveBatch] = []
        self.early: dict[BatchKey, EarlyOffer] = {}
        self.ready: dict[BatchKey, LiveBatch] = {}
        self.given: dict[BatchKey, LiveBatch] = {}
        self.taken: dict[BatchKey, LiveBatch] = {}
        self._batches = 0
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []

    def everything(self) -> list[LiveBatch]:
        """All batches of which something is here."""
        return [
            *self.line,
            *self.ready.values(),
            *self.given.values(),
            *self.taken.values(),
        ]

    def takes_nothing(self, message: LiveMessage) -> bool:
        """This message of a taker takes nothing away from a Run in flight: it is about a request
        that is offered early, or about one that was handed over when all layers were done."""
        if isinstance(message, Pull | Declined):
            return message.batch in self.early
        if isinstance(message, KvWanted) and message.part is not None:
            return True
        if not isinstance(message, KvWanted | Taken | Settled):
            return False
        given = self.given.get(message.batch)
        return message.batch in self.early or (given is not None and given.decoding)

    def next_key(self) -> BatchKey:
        """Names the next batch that leaves or may leave this instance."""
        self._batches += 1
        return BatchKey(self.instance, self._batches)

    def in_line(self, key: BatchKey) -> LiveBatch | None:
        return next((batch for batch in self.line if batch.key == key), None)

    def holds(self, key: BatchKey) -> bool:
        """Rows or KV of this batch may still be wanted here."""
        tables = (self.given, self.taken, self.ready)
        return any(key in table for table in tables) or self.in_line(key) is not None

    def cancelled(self) -> set[tuple[RequestId, int]]:
        """(request, attempt) of those that are computed along and not wanted any more."""
        return {
            (sequence.spec.request, sequence.spec.attempt)
            for batch in self.everything()
            if batch.cancelled
            for sequence in batch.sequences
            if sequence.spec.request in batch.cancelled
        }

    # -- what becomes of them -------------------------------------------------------------------

    def append(self, sequences: list[SequenceState]) -> None:
        """Held requests are a batch from now on, the last of the line."""
        self.line.append(LiveBatch(self.next_key(), sequences))

    def keep_ready(self, sequence: SequenceState, key: BatchKey | None = None) -> LiveBatch:
        """A held request is a batch from now on, whose layers are all done. With `key` it was
        offered before."""
        batch = LiveBatch(key or self.next_key(), [sequence], self._stop, decoding=True)
        self.ready[batch.key] = batch
        return batch

    def hold(
        self,
        key: BatchKey,
        spec: SequenceSpec,
        table: Table,
        kv_at: tuple[KvAt, ...],
        shared: Shared,
    ) -> LiveBatch:
        """A request of a team, to be given to another member of that: some of its KV is here."""
        sequence = self._held.arrive(spec, table)
        sequence.computed = sequence.prefill_tokens = sequence.known_tokens - 1
        sequence.is_started = True
        batch = self.keep_ready(sequence, key)
        batch.kv_at, batch.shared = kv_at, shared
        return batch

    def still_decoding(
        self, sequences: Sequence[SequenceState], offered: Sequence[int]
    ) -> list[SequenceState]:
        """Of requests that were offered those that still decode here, and have no more tokens than
        were offered of each."""
        decoding = [id(sequence) for sequence in self.batcher.lines.decoding()]
        known = zip(sequences, offered, strict=True)
        return [s for s, tokens in known if s.known_tokens <= tokens and id(s) in decoding]

    def take_decoding(self, key: BatchKey, sequences: list[SequenceState]) -> LiveBatch:
        """These requests, which decode here, are held from now on: they move as one batch."""
        for sequence in sequences:
            self._held.take_running(sequence)
        return LiveBatch(key, sequences, self._stop, decoding=True)

    def lend(self, batch: LiveBatch, sequence: SequenceState) -> LiveBatch:
        """A request of a batch that was taken over, whose layers are all run, may decode elsewhere:
        as a batch of its own. The KV that is missing here stays where the batch was."""
        batch.sequences.remove(sequence)
        lent = self.keep_ready(sequence)
        lent.lent_from = batch
        batch.lent[lent.key] = None
        return lent

    def resume(self, batch: LiveBatch) -> None:
        """A request that was to decode elsewhere decodes here."""
        source = batch.lent_from
        if source is None and batch.shared is None:
            self.end(batch, self._held.resume)
        elif source is not None and source.key in self.taken and not batch.cancelled:
            source.sequences += batch.sequences
            batch.sequences = []
            self.end(batch)
        else:  # some of its KV is gone
            self.end(batch, self._held.put_back)

    def end(self, batch: LiveBatch, keep: Callable[[SequenceState], None] | None = None) -> None:
        """The batch is no more: `keep` is done with its requests that are not cancelled (None: all
        are dropped). Where its KV came from it is settled."""
        self._leave(batch, keep)
        if batch in self.line:
            self.line.remove(batch)
        self.ready.pop(batch.key, None)
        self.given.pop(batch.key, None)
        if self.taken.pop(batch.key, None) is not None:
            for lent in [self.ready[key] for key in batch.lent if key in self.ready]:
                self.end(lent, keep)
            batch.lent = {}
            self.settle(batch)
        source, batch.lent_from = batch.lent_from, None
        if source is not None and source.lent.pop(batch.key, 0) is None:
            self.join_if_complete(source)

    def cancel(self, sequence: SequenceState) -> bool:
        """The request is not wanted any more. False if that was known."""
        batch = next(batch for batch in self.everything() if sequence in batch.sequences)
        if sequence.spec.request in batch.cancelled:
            return False
        # All layers are done, and it waits for its KV only.
        if batch.next_layer == self._stop and batch.key in self.taken:
            self._held.drop(sequence)
            batch.sequences.remove(sequence)
            self.join_if_complete(batch)
        else:
            batch.cancelled[sequence.spec.request] = None
            self.end_if_over(batch)
        return True

    def end_if_over(self, batch: LiveBatch) -> None:
        """No instance waits for any of it, and no Run in flight computes it."""
        if batch.is_over and not batch.chosen_layers:
            self.end(batch)

    def settle(self, batch: LiveBatch) -> None:
        """All of the batch that is wanted is here, and nothing of it is to be had elsewhere: where
        it was it may be forgotten."""
        if batch.peer is not None and not batch.lent:
            self.tell(batch.peer, Settled(batch.key))
            batch.peer = None

    def join_if_complete(self, batch: LiveBatch) -> None:
        """If all layers are run and all KV is here, its requests run as others do."""
        if batch.next_layer < self._stop or (batch.kv_missing and batch.sequences):
            return
        if batch.lent:
            self._leave(batch, self._held.join)
        else:
            self.end(batch, self._held.join)

    # -- KV for a third instance ----------------------------------------------------------------

    def send_part(self, peer: WorkerRef, wanted: KvWanted, part: PartOf) -> None:
        """The peer has a request of a batch that was handed to another instance, and wants this
        layer's KV. Gone, if that is not here (any more)."""
        batch = self.given.get(part.batch)
        is_run = batch is not None and 1 <= wanted.layer < min(batch.next_layer, self._stop - 1)
        if batch is None or not is_run or not batch.part_places(part.request):
            self.tell(peer, Gone(wanted.batch))
            return
        batch.parts[wanted.batch] = part.request
        self.tell(peer, KvLayer(wanted.batch, wanted.layer))

    def kv_places(self, key: BatchKey) -> KvPlaces | None:
        """Where the KV of a batch lies that is handed over, or comes. None: in no batch's
        blocks."""
        batch = self.given.get(key) or self.early.get(key) or self.taken.get(key)
        if batch is not None:
            return batch.kv_places()
        whole = self._batch_of_part(key)
        return whole.part_places(whole.parts[key]) if whole is not None else None

    # -- what is to be told ---------------------------------------------------------------------

    def tell(self, peer: WorkerRef, message: LiveMessage) -> None:
        """To be sent behind what was told before."""
        self._outbox.append((peer, message))

    def tell_gone(
        self,
        key: BatchKey,
        told: Iterable[WorkerRef],
        takers: Mapping[WorkerRef, InstanceId],
    ) -> None:
        """Those of the takers that were told of the batch learn that it is not to be had."""
        for worker in told:
            if worker in takers:
                self.tell(worker, Offer(takers[worker], key, (), ()))

    def untell(self, peer: WorkerRef) -> None:
        """Nothing reaches this worker any more."""
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]

    def take_outbox(self) -> list[tuple[WorkerRef, LiveMessage]]:
        """What was told since the last call. What is over since it was promised is Gone."""
        outbox, self._outbox = self._outbox, []
        return [(peer, self._if_given(message)) for peer, message in outbox]

    def _if_given(self, message: LiveMessage) -> LiveMessage:
        if not isinstance(message, Handover | KvLayer):
            return message
        key = message.batch
        is_kept = key in self.given or key in self.early or self._batch_of_part(key) is not None
        return message if is_kept else Gone(key)

    def _batch_of_part(self, key: BatchKey) -> LiveBatch | None:
        return next((batch for batch in self.given.values() if key in batch.parts), None)

    def _leave(self, batch: LiveBatch, keep: Callable[[SequenceState], None] | None) -> None:
        """Its requests are in it no longer."""
        drop = self._held.drop
        sequences, batch.sequences = batch.sequences, []
        for sequence in sequences:
            is_cancelled = sequence.spec.request in batch.cancelled
            (drop if keep is None or is_cancelled else keep)(sequence)

    def validate(self) -> None:
        """Every held request is in one batch. Raises AssertionError."""
        batched = [s for batch in self.everything() for s in batch.sequences]
        waiting = [s for s in self._held if not any(s is other for other in batched)]
        assert not waiting, f"{waiting} are held for no batch"
        assert len(batched) == len(self._held), "a request is in two batches"
        numbers = [batch.key.number for batch in self.line]
        assert numbers == sorted(set(numbers)), "the line is in order"


def offer_of(
    key: BatchKey,
    taker: InstanceId,
    sequences: list[SequenceState],
    ahead_tokens: int = 0,
    *,
    decoding: bool = False,
) -> Offer:
    """The requests as they are offered; each may generate `ahead_tokens` more meanwhile."""
    most = tuple(sequence.tokens_max for sequence in sequences)
    known = tuple(min(s.known_tokens + ahead_tokens, s.tokens_max) for s in sequences)
    return Offer(taker, key, known, most, decoding)


def moves_first(sequence: SequenceState) -> tuple[int, int]:
    """Orders requests that decode: those with much to generate and little KV before others."""
    return sequence.computed * 1_000_000 // sequence.outputs_left, sequence.order
