"""Whether layers whose chunks come in any order, from several threads, are what they should be.

Hashing lives here; what follows from the verdict is decided in the reception. A layer is hashed
along its start as far as it is in place, so that little is left to do when its last chunk comes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Protocol

import xxhash

from livescale.transfer.formats.orders import ContentChecks, ReceiveOrder
from livescale.transfer.memory.arena import Arena
from livescale.transfer.memory.content_hashes import ContentHashes
from livescale.transfer.memory.model_bytes import ModelBytes


class Judged(Protocol):
    """What gets the verdicts; none is waited for when it `is_over`."""

    is_over: bool

    def layer_is_right(self, layer: int) -> None:
        """Its bytes are those of the manifest."""

    def layer_is_corrupt(self, layer: int, problem: str) -> None:
        """Its checksum is another one: an accident, its bytes may come again."""

    def fail(self, reason: str) -> None:
        """It cannot become right."""


class LayerChecks:
    """Checks the layers of one order, each by its checksum, and by its content hash where a
    checksum that agrees is not enough: an attacker may have made it agree."""

    def __init__(
        self,
        order: ReceiveOrder,
        arena: Arena,
        held: ModelBytes,
        contents: ContentHashes,
        is_in_place: Callable[[int], bool],
        judged: Judged,
    ) -> None:
        """`is_in_place` says of a chunk that its bytes lie in the memory."""
        self._order = order
        self._arena = arena
        self._holding = held
        self._contents = contents
        self._is_in_place = is_in_place
        self._judged = judged
        self._lock = threading.Lock()
        # Of layers that are partly hashed: how, and the first chunk that is not.
        self._hashers: dict[int, tuple[xxhash.xxh3_64, int]] = {}
        # Layers that a thread is hashing: it looks again when it is through.
        self._busy: set[int] = set()
        self._done: set[int] = set()

    def chunk_came(self, layer: int) -> None:
        """Give the verdict if the layer is whole: once, until `reset`."""
        checksum = self._checksum(layer)
        if checksum is not None:
            self._compare(layer, checksum)

    def is_empty(self, layer: int) -> None:
        """The layer needs no bytes: give the verdict."""
        self._compare(layer, xxhash.xxh3_64_hexdigest(b""))

    def reset(self, layer: int) -> None:
        """Other bytes will come: the layer is hashed from its start again."""
        with self._lock:
            self._done.discard(layer)

    def _checksum(self, layer: int) -> str | None:
        """The layer's checksum, if this call finds it whole. Only one call does."""
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

    def _hash(self, hasher: xxhash.xxh3_64, layer: int, start: int, stop: int) -> None:
        """These chunks are hashed where they lie, in host memory. Memory of a device would be
        hashed there: this is the seam for it, with `_compare` for content hashes."""
        grid = self._holding.grid
        first = (start - grid.first[layer]) * grid.chunk_bytes
        _, offset, size = grid.place(stop - 1)
        place = self._holding.place(layer, first)
        hasher.update(self._arena.view(place, offset + size - first))

    def _compare(self, layer: int, checksum: str) -> None:
        entry = self._order.manifest.layers[layer]
        if checksum == entry.checksum and self._needs_proof(layer):
            content = self._arena.view(self._holding.place(layer, 0), entry.size_bytes)
            then = functools.partial(self._content_is_known, layer)
            self._contents.start(content, lambda: not self._judged.is_over, then)
        elif checksum == entry.checksum:
            self._judged.layer_is_right(layer)
        elif not self._holding.grid.layer_bytes[layer]:
            self._judged.fail(
                f"plan {self._order.plan}: layer {layer} has no bytes but checksum {entry.checksum}"
            )
        else:
            problem = f"checksum of layer {layer} is {checksum}, not {entry.checksum}"
            self._judged.layer_is_corrupt(layer, problem)

    def _needs_proof(self, layer: int) -> bool:
        match self._order.content_checks:
            case ContentChecks.NONE:
                return False
            case ContentChecks.NETWORK:
                return self._holding.is_unproved(layer)
            case ContentChecks.ALL:
                return self._holding.grid.layer_bytes[layer] > 0

    def _content_is_known(self, layer: int, content_hash: str) -> None:
        manifest = self._order.manifest
        right = manifest.layers[layer].content_hash
        if content_hash == right:
            self._judged.layer_is_right(layer)
        else:
            # Not asked for again: an accident would have been found by the checksum.
            self._judged.fail(
                f"plan {self._order.plan}: layer {layer} of {manifest.model} has the SHA-256"
                f" {content_hash}, not {right}, though its checksum agrees: its bytes were changed"
            )
