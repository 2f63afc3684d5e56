"""The bytes of resident first layers: kept behind the assigned model, put back in its place.

What is kept is decided in `control/residency.py`. The worker's main thread calls it, while nobody
else reads or writes the memory.
"""

from __future__ import annotations

import xxhash

from livescale.control.residency import ResidentLayers
from livescale.transfer.arena import Arena
from livescale.types import Manifest


class ArenaResidents:
    """The last `budget_bytes` of an arena hold the first layers of models that lay at its start."""

    def __init__(self, arena: Arena, budget_bytes: int) -> None:
        self._arena = arena
        self._first_byte = max(arena.size_bytes - budget_bytes, 0)
        self._kept = ResidentLayers(self._first_byte, arena.size_bytes)

    def keep(self, manifest: Manifest) -> None:
        """The whole model lies at the start of the arena and is given up. One that reaches into
        the residents' memory keeps nothing."""
        if manifest.size_bytes > self._first_byte:
            return
        kept = self._kept.keep(_name(manifest), [e.size_bytes for e in manifest.layers])
        if kept is not None:
            place = self._arena.view(kept.offset_bytes, kept.size_bytes)
            place[:] = self._arena.view(0, kept.size_bytes)

    def restore(self, manifest: Manifest) -> tuple[int, ...]:
        """Put what is kept of the model back to the start of the arena, which it takes up from now
        on. Returns the layers that are there: those whose checksums agree."""
        kept = self._kept.find(_name(manifest))
        layers: tuple[int, ...] = ()
        if kept is not None:
            place = self._arena.view(0, kept.size_bytes)
            place[:] = self._arena.view(kept.offset_bytes, kept.size_bytes)
            layers = tuple(
                entry.layer
                for entry in manifest.layers[: kept.layers]
                if xxhash.xxh3_64_hexdigest(self._arena.view(entry.offset_bytes, entry.size_bytes))
                == entry.checksum
            )
        self._kept.make_way(manifest.size_bytes)
        return layers


def _name(manifest: Manifest) -> str:
    """Names the bytes: fine-tunes of one model share its manifest's id."""
    checksums = "".join(entry.checksum for entry in manifest.layers)
    return f"{manifest.id}-{xxhash.xxh3_64_hexdigest(checksums.encode())}"
