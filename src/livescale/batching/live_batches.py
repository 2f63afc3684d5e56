"""All live batches of one instance: its own, those that were given away, those taken over.

One table for both sides. Who has a batch on its way to whom is noted in the batch; what is to be
told of it to other instances piles up here, in order.
"""

from __future__ import annotations

from collections.abc import Callable

from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveBatch
from livescale.batching.live_messages import (
    Gone,
    Handover,
    KvLayer,
    LiveMessage,
    Offer,
    Settled,
)
from livescale.batching.run import BatchKey
from livescale.batching.sequence import SequenceState
from livescale.types import InstanceId, WorkerRef


class LiveBatches:
    """`line` are the instance's own, the earliest first; `given` were handed over and are not
    settled; `taken` were taken over and have not ended, in the order of their coming."""

    def __init__(self, batcher: Batcher, instance: InstanceId) -> None:
        self.batcher = batcher
        self.instance = instance
        self._held = batcher.held
        self._stop = batcher.span.stop
        self.line: list[LiveBatch] = []
        self.given: dict[BatchKey, LiveBatch] = {}
        self.taken: dict[BatchKey, LiveBatch] = {}
        self._batches = 0
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []

    def everything(self) -> list[LiveBatch]:
        """All batches of which something is here."""
        return [*self.line, *self.given.values(), *self.taken.values()]

    def next_key(self) -> BatchKey:
        """Names the next batch that leaves or may leave this instance."""
        self._batches += 1
        return BatchKey(self.instance, self._batches)

    def in_line(self, key: BatchKey) -> LiveBatch | None:
        return next((batch for batch in self.line if batch.key == key), None)

    # -- what becomes of them -------------------------------------------------------------------

    def append(self, sequences: list[SequenceState]) -> None:
        """Held requests are a batch from now on, the last of the line."""
        self.line.append(LiveBatch(self.next_key(), sequences))

    def end(self, batch: LiveBatch, keep: Callable[[SequenceState], None] | None = None) -> None:
        """The batch is no more: `keep` is done with its requests that are not cancelled (None: all
        are dropped). Where its KV came from it is settled."""
        drop = self._held.drop
        for sequence in batch.sequences:
            is_cancelled = sequence.spec.request in batch.cancelled
            (drop if keep is None or is_cancelled else keep)(sequence)
        batch.sequences = []
        if batch in self.line:
            self.line.remove(batch)
        self.given.pop(batch.key, None)
        if self.taken.pop(batch.key, None) is not None:
            self.settle(batch)

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
        """All of the batch that is wanted is here: where it was it may be forgotten."""
        if batch.peer is not None:
            self.tell(batch.peer, Settled(batch.key))
            batch.peer = None

    def join_if_complete(self, batch: LiveBatch) -> None:
        """If all layers are run and all KV is here, its requests run as others do."""
        is_computed = batch.next_layer == self._stop
        if is_computed and (not batch.kv_missing or not batch.sequences):
            self.end(batch, self._held.join)

    # -- what is to be told ---------------------------------------------------------------------

    def tell(self, peer: WorkerRef, message: LiveMessage) -> None:
        """To be sent behind what was told before."""
        self._outbox.append((peer, message))

    def untell(self, peer: WorkerRef) -> None:
        """Nothing reaches this worker any more."""
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]

    def take_outbox(self) -> list[tuple[WorkerRef, LiveMessage]]:
        """What was told since the last call. What is over since it was promised is Gone."""
        outbox, self._outbox = self._outbox, []
        return [(peer, self._if_given(message)) for peer, message in outbox]

    def _if_given(self, message: LiveMessage) -> LiveMessage:
        if isinstance(message, Handover | KvLayer) and message.batch not in self.given:
            return Gone(message.batch)
        return message

    def validate(self) -> None:
        """Every held request is in one batch. Raises AssertionError."""
        batched = [s for batch in self.everything() for s in batch.sequences]
        waiting = [s for s in self._held if not any(s is other for other in batched)]
        assert not waiting, f"{waiting} are held for no batch"
        assert len(batched) == len(self._held), "a request is in two batches"
        numbers = [batch.key.number for batch in self.line]
        assert numbers == sorted(set(numbers)), "the line is in order"


def offer_of(
    key: BatchKey, taker: InstanceId, sequences: list[SequenceState], ahead_tokens: int = 0
) -> Offer:
    """The requests as they are offered; each may generate `ahead_tokens` more meanwhile."""
    most = tuple(sequence.tokens_max for sequence in sequences)
    known = tuple(min(s.known_tokens + ahead_tokens, s.tokens_max) for s in sequences)
    return Offer(taker, key, known, most)
