"""Checksums of layers whose chunks come in any order, from several threads.

Hashing lives here; what follows from a checksum is decided in the reception. A layer is hashed
along its start as far as it is in place, so that little is left to do when its last chunk comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import xxhash

from livescale.transfer.arena import Arena
from livescale.transfer.holding import Holding


class LayerChecks:
    """`is_in_place` says of a chunk that its bytes lie in the memory."""

    def __init__(self, arena: Arena, holding: Holding, is_in_place: Callable[[int], bool]) -> None:
        self._arena = arena
        self._holding = holding
        self._is_in_place = is_in_place
        self._lock = threading.Lock()
        # Of layers that are partly hashed: how, and the first chunk that is not.
        self._hashers: dict[int, tuple[xxhash.xxh3_64, int]] = {}
        # Layers that a thread is hashing: it looks again when it is through.
        self._busy: set[int] = set()
        self._done: set[int] = set()

    def chunk_came(self, layer: int) -> str | None:
        """The layer's checksum, if this call finds it whole. Only one call does, until `reset`."""
        chunks = self._holding.grid.of_layer(layer)
        while True:
            with self._lock:
                if layer in self._busy or layer in self._done:
                    return None
                hasher, start = self._hashers.get(layer) or (xxhash.xxh3_64(), chunks.start)
                stop = start
                while stop < chunks.stop and self._is_in_place(stop):
                    stop += 1
                if start == stop:
                    return None
                self._busy.add(layer)
            self._hash(hasher, layer, start, stop)
            with self._lock:
                self._busy.discard(layer)
                self._hashers[layer] = (hasher, stop)
                if stop == chunks.stop:
                    del self._hashers[layer]
                    self._done.add(layer)
                    return hasher.hexdigest()

    def reset(self, layer: int) -> None:
        """Other bytes will come: the layer is hashed from its start again."""
        with self._lock:
            self._done.discard(layer)

    def _hash(self, hasher: xxhash.xxh3_64, layer: int, start: int, stop: int) -> None:
        grid = self._holding.grid
        first = (start - grid.first[layer]) * grid.chunk_bytes
        _, offset, size = grid.place(stop - 1)
        place = self._holding.place(layer, first)
        hasher.update(self._arena.view(place, offset + size - first))
