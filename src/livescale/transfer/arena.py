"""The arena: the one flat memory region in which a worker keeps parameters.

Memory and its bounds live here. What the bytes mean (tensors, models) and how they travel do not.
"""

from __future__ import annotations

import contextlib
import mmap

from livescale.types import Manifest

_HUGE_PAGE_BYTES = 2 << 20


class ArenaError(ValueError):
    """A range or a model does not fit the arena. The message gives both sizes."""


class Arena:
    """`size_bytes` of anonymous memory, allocated and touched once, at process start.

    Touching at construction keeps page faults (2-3 GB/s with small pages) out of transfers.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ArenaError(f"an arena of {size_bytes} bytes is empty")
        self.size_bytes = size_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE") and size_bytes >= _HUGE_PAGE_BYTES:
            # A kernel without transparent huge pages refuses; small pages are only slower.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        touched = -(-size_bytes // mmap.PAGESIZE)
        self._view[:: mmap.PAGESIZE] = bytes(touched)
        self._is_closed = False

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes `[offset_bytes, offset_bytes + size_bytes)`, writable and without a copy.

        Raises ArenaError if the range leaves the arena or the arena is closed.
        """
        if self._is_closed:
            raise ArenaError("the arena is closed")
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ArenaError(
                f"{size_bytes} bytes at offset {offset_bytes} leave the arena "
                f"of {self.size_bytes} bytes"
            )
        return self._view[offset_bytes : offset_bytes + size_bytes]

    def check_fits(self, manifest: Manifest) -> None:
        """The manifest's layers lie in order, apart from each other and inside the arena.

        Raises ArenaError otherwise.
        """
        if not manifest.layers:
            raise ArenaError(f"the manifest of {manifest.model!r} lists no layers")
        end_bytes = 0
        for index, entry in enumerate(manifest.layers):
            if entry.layer != index or entry.offset_bytes < end_bytes or entry.size_bytes < 0:
                raise ArenaError(
                    f"the manifest of {manifest.model!r} has layer {entry.layer} "
                    f"({entry.size_bytes} bytes at offset {entry.offset_bytes}) at place {index}, "
                    f"where layer {index} at offset {end_bytes} or more belongs"
                )
            end_bytes = entry.offset_bytes + entry.size_bytes
        if end_bytes > self.size_bytes:
            raise ArenaError(
                f"model {manifest.model!r} needs {end_bytes} bytes of arena, "
                f"the worker has {self.size_bytes}"
            )

    def close(self) -> None:
        """Nobody gets a view any more. The memory goes back with the last view that is left."""
        if self._is_closed:
            return
        self._is_closed = True
        # Tensors may still look at the memory; then it is freed when they are.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def __repr__(self) -> str:
        return f"<Arena {self.size_bytes} bytes{', closed' if self._is_closed else ''}>"
