"""A copy that somebody else writes into the memory, layer by layer, while others read from it."""

from __future__ import annotations

import threading

from livescale.transfer.holding import ModelBytes
from livescale.transfer.holdings import Holdings


class Filling:
    """Made by `DataPlane.fill`. Exactly what `layer_done` was called for is given to others."""

    def __init__(self, holding: ModelBytes, holdings: Holdings) -> None:
        self._holding = holding
        self._holdings = holdings
        self._lock = threading.Lock()
        sizes = holding.grid.layer_bytes
        self._missing = {layer for layer, size in enumerate(sizes) if size}
        if not self._missing:
            holdings.complete(holding)

    def layer_done(self, layer: int) -> None:
        """The layer's bytes are in place and right, as the caller vouches. The copy is offered
        when all layers are done."""
        self._holdings.verify(self._holding, layer)
        with self._lock:
            self._missing.discard(layer)
            is_whole = not self._missing
        if is_whole:
            self._holdings.complete(self._holding)

    def fail(self, reason: str) -> None:
        """The rest does not come: who wants parts of the copy is refused."""
        self._holdings.remove(self._holding, reason)

    def __repr__(self) -> str:
        return f"<Filling of {self._holding}, {len(self._missing)} layers missing>"
