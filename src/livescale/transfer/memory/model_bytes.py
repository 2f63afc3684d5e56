"""A copy of a model in this memory, whole or partial: which of its bytes are there.

State only: who wants the bytes and who writes them is not known here.
"""

from __future__ import annotations

import threading

from livescale.transfer.formats.frames import copy_id
from livescale.values.chunks import ChunkGrid
from livescale.values.types import Manifest


class ModelBytes:
    """Presence by chunk of its own grid, verification by layer. Guarded by the store's lock."""

    def __init__(self, manifest: Manifest, chunk_bytes: int, offset_bytes: int) -> None:
        self.manifest = manifest
        self.copy = copy_id(manifest)
        self.offset_bytes = offset_bytes
        self.grid = ChunkGrid([entry.size_bytes for entry in manifest.layers], chunk_bytes)
        self.is_complete = False
        self.is_withdrawn = False
        #: of every connection that is reading from it: what wakes its sending thread
        self.readers: list[threading.Condition] = []
        self._present = bytearray(self.grid.chunks)
        self._is_verified = bytearray(len(manifest.layers))
        self._unproved = bytearray(len(manifest.layers))

    @property
    def start_bytes(self) -> int:
        """Where its first layer begins in the memory."""
        return self.offset_bytes + self.manifest.layers[0].offset_bytes

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.manifest.size_bytes

    def place(self, layer: int, offset_bytes: int) -> int:
        """Where in the memory this byte of the layer lies."""
        return self.offset_bytes + self.manifest.layers[layer].offset_bytes + offset_bytes

    def has(self, layer: int, offset_bytes: int, size_bytes: int, is_verified_only: bool) -> bool:
        """These bytes of the layer are there."""
        if self.is_complete or self._is_verified[layer]:
            return True
        if is_verified_only:
            return False
        chunks = covering(self.grid, layer, offset_bytes, size_bytes)
        return all(self._present[chunk] for chunk in chunks)

    def has_chunk(self, chunk: int) -> bool:
        """This chunk of its own grid is there, verified or not."""
        return self.is_complete or bool(self._present[chunk])

    def is_unproved(self, layer: int) -> bool:
        """The layer's content hash has to be compared, and has not been."""
        return bool(self._unproved[layer])

    def doubt(self, layer: int) -> None:
        """Some of the layer came over a network: its content hash is to be compared."""
        self._unproved[layer] = 1

    def mark(self, chunk: int) -> None:
        self._present[chunk] = 1

    def verify(self, layer: int) -> None:
        """The layer is there, and right."""
        self._is_verified[layer] = 1
        self._unproved[layer] = 0
        for chunk in self.grid.of_layer(layer):
            self._present[chunk] = 1

    def reset(self, layer: int) -> None:
        """The layer's bytes are not there after all."""
        self._is_verified[layer] = 0
        for chunk in self.grid.of_layer(layer):
            self._present[chunk] = 0

    def __repr__(self) -> str:
        state = "withdrawn" if self.is_withdrawn else "whole" if self.is_complete else "partial"
        return f"<ModelBytes {self.manifest.model} {state}, {len(self.readers)} readers>"


def covering(grid: ChunkGrid, layer: int, offset_bytes: int, size_bytes: int) -> range:
    """The chunks of the grid that these bytes of a layer touch."""
    if size_bytes == 0:
        return range(0)
    first = grid.first[layer]
    last = first + (offset_bytes + size_bytes - 1) // grid.chunk_bytes
    return range(first + offset_bytes // grid.chunk_bytes, last + 1)
