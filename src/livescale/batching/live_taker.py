"""The source's side of live pairs: what targets offer, what was pulled and is finished here.

A source pulls when it has no prompt of its own to compute and KV blocks for all layers of the batch
(they are reserved before it asks). Rows come first: the first token needs nothing else. KV follows
layer by layer, as asked for, while the remaining layers run; a request decodes when all of its KV
is here. No Runs are chosen here: that is the LiveBatcher's.
"""

from __future__ import annotations

from dataclasses import dataclass

from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveBatch, LiveLimits
from livescale.batching.live_messages import (
    BatchKey,
    Declined,
    Gone,
    Handover,
    KvLayer,
    KvWanted,
    LiveMessage,
    Offer,
    Parted,
    Pull,
    Settled,
    Taken,
)
from livescale.batching.run import SequenceSpec
from livescale.types import InstanceId, WorkerRef


@dataclass(frozen=True, slots=True)
class _Pulled:
    """A pull that was not answered yet, and the blocks that wait for the batch."""

    peer: WorkerRef
    offer: Offer
    reservation: int
    asked_ns: int


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """News: these requests are the source's from now on. `rows` came along with them."""

    key: BatchKey
    peer: WorkerRef
    requests: tuple[SequenceSpec, ...]
    rows: int
    pull_ns: int


class LiveTaker:
    """`batches` are those that were taken over and have not ended, in the order of their coming."""

    def __init__(self, batcher: Batcher, instance: InstanceId, limits: LiveLimits) -> None:
        self._batcher = batcher
        self._instance = instance
        self._limits = limits
        self.batches: dict[BatchKey, LiveBatch] = {}
        self._peer_of: dict[BatchKey, WorkerRef] = {}
        self._offers: dict[WorkerRef, Offer] = {}
        self._pulled: _Pulled | None = None
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []
        self._taken: list[TakenBatch] = []
        #: what one token takes in one layer here (0: not known)
        self.token_layer_ps = 0
        #: what the last pulls took until their rows were here
        self._pull_ns = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is offered, asked for or missing."""
        return not (self._offers or self._pulled or self.batches)

    def runnable(self) -> list[LiveBatch]:
        """Batches that have layers left, the first taken first."""
        stop = self._batcher.span.stop
        return [batch for batch in self.batches.values() if batch.next_layer < stop]

    # -- pulling --------------------------------------------------------------------------------

    def pull(self, now_ns: int) -> None:
        """Ask for the next batch, if this instance will have nothing else to prefill when it comes,
        and has room for it; ask for KV that is missing. What does not come in time is given up."""
        self._expire(now_ns)
        for batch in self.batches.values():
            self._ask_kv(batch, now_ns)
        if self._pulled is not None or self._ahead_ns() > self._pull_ns:
            return
        for peer in sorted(self._offers):
            offer = self._offers[peer]
            if offer.tokens and self._batcher.has_room(offer.tokens):
                del self._offers[peer]
                reservation = self._batcher.held.reserve(offer.tokens)
                self._pulled = _Pulled(peer, offer, reservation, now_ns)
                self._outbox.append((peer, Pull(offer.batch)))
                return

    def _ahead_ns(self) -> int:
        """Prefill work that is here. Of unknown length, if nothing was measured."""
        layers = self._batcher.span.stop - 2
        token_layers = self._batcher.queued_own_tokens * layers
        token_layers += sum(b.tokens * (layers - b.layers_done) for b in self.runnable())
        if token_layers and not self.token_layer_ps:
            return 1 << 62
        return token_layers * self.token_layer_ps // 1000

    # -- the targets' messages ------------------------------------------------------------------

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, *, is_full: bool
    ) -> None:
        """`is_full`: all layers are here, so that this instance can help."""
        if isinstance(message, Offer):
            if message.source == self._instance and is_full:
                self._offers[peer] = message
            else:
                self._outbox.append((peer, Parted(message.batch.target)))
        elif isinstance(message, Handover):
            self._handed(peer, message, now_ns)
        elif isinstance(message, Gone):
            self._gone(peer, message.batch)
        elif isinstance(message, KvLayer):
            batch = self.batches.get(message.batch)
            if batch is not None and batch.kv_missing.pop(message.layer, 0) is None:
                batch.kv_asked.pop(message.layer, None)
                batch.kv_since_ns = now_ns
                self._settle_if_complete(batch)
        elif isinstance(message, Parted):
            self._offers.pop(peer, None)

    def peer_lost(self, peer: WorkerRef) -> None:
        """What it did not send will not come: those requests are computed anew here."""
        self._offers.pop(peer, None)
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]
        if self._pulled is not None and self._pulled.peer == peer:
            self._batcher.held.cancel_reserved(self._pulled.reservation)
            self._outbox.append((peer, Declined(self._pulled.offer.batch)))
            self._pulled = None
        for key in [key for key, other in self._peer_of.items() if other == peer]:
            self._compute_anew(self.batches[key])

    def forget_all(self) -> None:
        """The instance goes: nobody waits for anything here."""
        if self._pulled is not None:
            self._batcher.held.cancel_reserved(self._pulled.reservation)
            self._outbox.append((self._pulled.peer, Declined(self._pulled.offer.batch)))
            self._pulled = None
        for peer in sorted(self._offers):
            self._outbox.append((peer, Parted(self._offers.pop(peer).batch.target)))

    # -- what becomes of batches ----------------------------------------------------------------

    def computed(self, batch: LiveBatch) -> None:
        """Its last layer was run here."""
        if batch.key in self.batches:
            self._settle_if_complete(batch)

    def forget(self, batch: LiveBatch) -> None:
        """Nothing is left of it."""
        if self.batches.pop(batch.key, None) is not None:
            self._outbox.append((self._peer_of.pop(batch.key), Settled(batch.key)))

    def take_outbox(self) -> list[tuple[WorkerRef, LiveMessage]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def take_taken(self) -> list[TakenBatch]:
        """Batches that were taken over since the last call."""
        taken, self._taken = self._taken, []
        return taken

    # -- helpers, in the order used -------------------------------------------------------------

    def _expire(self, now_ns: int) -> None:
        late_ns = now_ns - self._limits.answer_ns
        late = [
            self._peer_of[batch.key]
            for batch in self.batches.values()
            if batch.kv_asked and batch.kv_since_ns < late_ns
        ]
        if self._pulled is not None and self._pulled.asked_ns < late_ns:
            late.append(self._pulled.peer)
        for peer in dict.fromkeys(late):
            self.peer_lost(peer)

    def deadline_ns(self) -> int | None:
        """When something that was asked for is late."""
        since = [batch.kv_since_ns for batch in self.batches.values() if batch.kv_asked]
        if self._pulled is not None:
            since.append(self._pulled.asked_ns)
        return min(since) + self._limits.answer_ns + 1 if since else None

    def _ask_kv(self, batch: LiveBatch, now_ns: int) -> None:
        if not batch.kv_asked:
            batch.kv_since_ns = now_ns
        for layer in batch.kv_missing:
            if len(batch.kv_asked) >= self._limits.kv_layers_ahead:
                return
            if layer not in batch.kv_asked:
                batch.kv_asked[layer] = None
                self._outbox.append((self._peer_of[batch.key], KvWanted(batch.key, layer)))

    def _handed(self, peer: WorkerRef, message: Handover, now_ns: int) -> None:
        pulled = self._pulled
        if pulled is None or (pulled.peer, pulled.offer.batch) != (peer, message.batch):
            self._outbox.append((peer, Declined(message.batch)))
            return
        self._pulled = None
        tables = self._batcher.held.take_reserved(pulled.reservation)
        pull_ns = now_ns - pulled.asked_ns
        # A pull that comes late leaves this instance idle: the slow ones count more.
        self._pull_ns = max(pull_ns, (3 * self._pull_ns + pull_ns) // 4)
        self._outbox.append((peer, Taken(message.batch)))
        self._taken.append(TakenBatch(message.batch, peer, message.requests, message.rows, pull_ns))
        sequences = []
        free = list(tables)
        for spec in message.requests:
            count = self._batcher.pool.blocks_for(len(spec.prompt_ids) + len(spec.generated_ids))
            # Cancelled requests may have left the batch since it was offered: tables differ.
            table = next(table for table in free if len(table) == count)
            free.remove(table)
            sequences.append(self._batcher.hold(spec, table))
        for table in free:
            self._batcher.pool.release(table)
        if message.next_layer == 0:
            # Nothing was done of it: it is a prompt like any other, and may find its beginning.
            for sequence in sequences:
                self._batcher.put_back(sequence)
            self._outbox.append((peer, Settled(message.batch)))
            return
        batch = LiveBatch(message.batch, sequences, message.next_layer)
        if any(_decodes(sequence.spec) for sequence in sequences):
            batch.kv_missing = dict.fromkeys(range(1, message.next_layer))
        self.batches[batch.key] = batch
        self._peer_of[batch.key] = peer

    def _gone(self, peer: WorkerRef, key: BatchKey) -> None:
        pulled = self._pulled
        if pulled is not None and (pulled.peer, pulled.offer.batch) == (peer, key):
            self._batcher.held.cancel_reserved(pulled.reservation)
            self._pulled = None
        batch = self.batches.get(key)
        if batch is not None and batch.kv_missing and self._peer_of[key] == peer:
            self._compute_anew(batch)

    def _settle_if_complete(self, batch: LiveBatch) -> None:
        """All layers are run and all KV is here: its requests run as others do."""
        is_computed = batch.next_layer == self._batcher.span.stop
        if is_computed and (not batch.kv_missing or not batch.sequences):
            for sequence in batch.sequences:
                self._batcher.join(sequence)
            batch.sequences = []
            self.forget(batch)

    def _compute_anew(self, batch: LiveBatch) -> None:
        """KV that is missing will not come. Without any missing the batch goes on."""
        if not batch.kv_missing:
            return
        for sequence in batch.sequences:
            if sequence.spec.request in batch.cancelled:
                self._batcher.held.drop(sequence)
            else:
                self._batcher.put_back(sequence)
        batch.sequences = []
        self.forget(batch)


def _decodes(spec: SequenceSpec) -> bool:
    """It wants more than the token that its prefill gives."""
    return spec.sampling.output_tokens_max > len(spec.generated_ids) + 1
