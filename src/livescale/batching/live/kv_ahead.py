"""A decode instance: KV that comes before the request that it belongs to.

Blocks were reserved when the request was pulled. While its prompt is computed elsewhere it is
promised, and KV of the layers that are done is written into these blocks (`early_offers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from livescale.batching.contract import live_messages as messages
from livescale.batching.contract.serving import KvPlaces
from livescale.batching.live.live_batches import LiveBatches
from livescale.batching.live.live_pulls import PullUnderWay, PullWindow
from livescale.batching.runs.run import BatchKey
from livescale.values.types import WorkerRef


class KvAhead:
    """Of the pulls in the window those that are promised."""

    def __init__(
        self,
        batches: LiveBatches,
        window: PullWindow,
        layers_ahead: Callable[[Sequence[int]], int],
    ) -> None:
        """Of requests with so many tokens KV of `layers_ahead` layers may be on its way at once."""
        self._batches = batches
        self._window = window
        self._layers_ahead = layers_ahead
        self._layers = batches.batcher.span.stop - 2

    def promised(self, peer: WorkerRef, key: BatchKey) -> None:
        """The request will come, however long that takes."""
        pull = self._window.under_way.get(key)
        if pull is None or pull.peer != peer:
            self._batches.tell(peer, messages.Declined(key))
        else:
            pull.is_promised = True

    def pull_of(self, peer: WorkerRef, message: messages.KvLayer) -> PullUnderWay | None:
        """The pull whose request this KV belongs to, if it is missing. It may come with the
        promise."""
        pull = self._window.under_way.get(message.batch)
        if pull is None or pull.peer != peer or not pull.offer.decoding:
            return None
        is_wanted = 1 <= message.layer <= self._layers and message.layer not in pull.kv_came
        return pull if is_wanted else None

    def places(self, key: BatchKey) -> KvPlaces:
        """Where the KV goes."""
        pull = self._window.under_way[key]
        tables = self._batches.batcher.held.tables_of(pull.reservation)
        return tuple(zip(pull.kv_tokens, tables, strict=True))

    def ask(self) -> None:
        """Ask for the KV of further layers where some has come."""
        for pull in self._window.under_way.values():
            if not pull.is_promised:
                continue
            coming = sum(layer not in pull.kv_came for layer in pull.kv_asked)
            free = max(self._layers_ahead(pull.kv_tokens) - coming, 0)
            unasked = [n for n in range(1, 1 + self._layers) if n not in pull.kv_asked]
            for layer in unasked[:free]:
                pull.kv_asked[layer] = None
                self._batches.tell(pull.peer, messages.KvWanted(pull.offer.batch, layer))
