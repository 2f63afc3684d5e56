"""KV that batches taken over here lack: which instance has it, and when it is asked for.

Of a batch of a live pair it lies with the target that ran the first layers. Where requests decode
at another instance, the source does not fetch it: a request goes to its decode instance with the
names of those that have KV of it (`Handover.kv_at`), and that instance asks each of them. So KV of
every layer crosses one link, from where it was written to where it is read (`routes.kv_moves`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from livescale.batching.contract import live_messages as messages
from livescale.batching.contract.serving import KvCame
from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.live.live_batches import LiveBatches
from livescale.values.routes import kv_moves
from livescale.values.types import InstanceId, LayerSpan, WorkerRef


class KvComing:
    """KV for batches in `taken`. `decodes_elsewhere`: requests leave this instance with their
    first token."""

    def __init__(
        self, batches: LiveBatches, limits: LiveLimits, decodes_elsewhere: Callable[[], bool]
    ) -> None:
        self._batches = batches
        self._limits = limits
        self._decodes_elsewhere = decodes_elsewhere
        self._decoder_layers = batches.batcher.span.stop - 2
        #: whose KV is here now, and was not reported yet
        self._came: list[KvCame] = []
        #: what the KV of the last requests that were moved here took per token (0: none was)
        self.token_ps = 0

    @property
    def stays_away(self) -> bool:
        """KV of prompts that are taken over now is not fetched: they decode elsewhere."""
        return self._limits.kv_straight and self._decodes_elsewhere()

    def is_wanted(self, batch: LiveBatch) -> bool:
        """Some request of the batch decodes here."""
        return batch.decoding or batch.keeps_kv or not self.stays_away

    def layers_ahead(self, decoding: bool, tokens: Sequence[int]) -> int:
        """KV of so many layers of these requests may be on its way at once."""
        layers = self._decoder_layers
        ahead = self._limits.kv_layers_ahead
        if decoding:  # they pause meanwhile: as few rounds as memory allows
            ahead = max(ahead, self._limits.batch_tokens_max * layers // sum(tokens))
        return min(ahead, layers)

    def to_come(self, message: messages.Handover) -> dict[int, None]:
        """Layers whose KV was written elsewhere and decodes need here, where all requests of the
        batch go on."""
        if message.next_layer <= 1:
            return {}
        here = self._batches.instance
        done = [(message.batch.target, LayerSpan(1, message.next_layer))]
        moves = kv_moves(done, [(here, LayerSpan(1, self._decoder_layers + 1))])
        return {layer: None for m in moves for layer in range(m.span.start, m.span.stop)}

    def begin(self, batch: LiveBatch, missing: Sequence[int], asked: Sequence[int]) -> None:
        """The batch was taken over, without the KV of these layers. Some was asked for with the
        pull: from the instance that gave the batch."""
        batch.kv_missing = dict.fromkeys(missing)
        ways = [layer for layer in asked if batch.holder_of(layer) is None]
        batch.kv_asked = {layer: None for layer in ways if layer in batch.kv_missing}

    def ask(self, now_ns: int) -> None:
        """Ask for what is missing, of few layers at a time."""
        for batch in self._batches.taken.values():
            if self.is_wanted(batch):
                self._ask(batch, now_ns)

    def is_missing(self, peer: WorkerRef, message: messages.KvLayer) -> bool:
        """This layer's KV is missing here, and comes from that worker."""
        batch = self._batches.taken.get(message.batch)
        if batch is None or message.layer not in batch.kv_missing:
            return False
        return batch.worker_of(message.layer) == peer

    def came(self, batch: LiveBatch, layer: int, now_ns: int) -> None:
        """This layer's KV was written."""
        del batch.kv_missing[layer]
        batch.kv_asked.pop(layer, None)
        batch.kv_since_ns = now_ns
        if not batch.kv_missing:
            self.complete(batch)
            if batch.decoding and batch.given_ns:
                tokens = sum(tokens for _, tokens in batch.handed)
                self.token_ps = max(1, (now_ns - batch.given_ns) * 1000 // tokens)
        self._batches.join_if_complete(batch)

    def complete(self, batch: LiveBatch) -> None:
        """All of the batch that was to come is here."""
        self._batches.settle(batch)
        if batch.kv_came:
            came = KvCame(
                requests=tuple((s.spec.request, s.spec.attempt) for s, _ in batch.handed),
                layers=len(batch.kv_came),
                tokens=sum(tokens for _, tokens in batch.handed),
                asked_ns=batch.asked_ns,
                first_ns=min(batch.kv_came.values()),
                last_ns=max(batch.kv_came.values()),
            )
            self._came.append(came)

    def take_came(self) -> list[KvCame]:
        """Whose KV has come since the last call."""
        came, self._came = self._came, []
        return came

    def lacking(self, peer: WorkerRef) -> list[LiveBatch]:
        """Batches that need something that only this worker has."""
        taken = self._batches.taken.values()
        return [b for b in taken if b.peer == peer or peer in map(b.worker_of, b.kv_missing)]

    def awaited(self) -> list[tuple[WorkerRef | None, InstanceId, int]]:
        """Whose KV is waited for, of batches of which instance, and since when."""
        waits: dict[tuple[WorkerRef | None, InstanceId, int], None] = {}
        for batch in self._batches.taken.values():
            for layer in batch.kv_asked:
                holder = batch.holder_of(layer)
                target = holder.part.batch.target if holder is not None else batch.key.target
                waits[batch.worker_of(layer), target, batch.kv_since_ns] = None
        return list(waits)

    # -- helpers --------------------------------------------------------------------------------

    def _ask(self, batch: LiveBatch, now_ns: int) -> None:
        batch.asked_ns = batch.asked_ns or now_ns
        if not batch.kv_asked:
            batch.kv_since_ns = now_ns
        ahead = self.layers_ahead(batch.decoding, [tokens for _, tokens in batch.handed])
        for layer in batch.kv_missing:
            if len(batch.kv_asked) >= ahead:
                return
            if layer in batch.kv_asked:
                continue
            holder, worker = batch.holder_of(layer), batch.worker_of(layer)
            if worker is None:
                continue
            batch.kv_asked[layer] = None
            part = holder.part if holder is not None else None
            self._batches.tell(worker, messages.KvWanted(batch.key, layer, part))
