"""The arena: the one flat memory region in which a worker keeps parameters.

Memory and its bounds live here. What the bytes mean (tensors, models) and how they travel do not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref

import psutil

from livescale.values.types import Manifest

_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
_MADV_REMOVE = 9
# Memory that touching late leaves alone: a program that takes the last byte ends others.
_RESERVE_PERCENT = 5


class ArenaError(ValueError):
    """A range or a model does not fit the arena. The message gives both sizes."""


class Arena:
    """`size_bytes` of memory, allocated and touched once, at process start; or only the first
    `touched_bytes` of it, and the rest by `touch` as it is needed.

    It is a memfd, so that processes of the same host can read it where it lies (`fd`). Touching
    at construction keeps page faults (2-3 GB/s with small pages) out of transfers; memory that
    the machine does not have is refused here and not in mid-transfer.
    """

    def __init__(
        self, size_bytes: int, touched_bytes: int | None = None, memfd: int | None = None
    ) -> None:
        """With a `memfd`, which is the arena's to close from now on, its memory is that of another
        process' arena of this size."""
        if size_bytes < 1:
            raise ArenaError(f"an arena of {size_bytes} bytes is empty")
        self.size_bytes = size_bytes
        touched_bytes = size_bytes if touched_bytes is None else touched_bytes
        self._kept_bytes = min(_up_to_page(touched_bytes), size_bytes)
        self._fd = _new_memfd() if memfd is None else memfd
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            if memfd is None:
                os.ftruncate(self._fd, size_bytes)
                # Who maps it must not crash because it became smaller.
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = mmap.mmap(self._fd, size_bytes, flags=mmap.MAP_SHARED)
            # A kernel without huge pages for shared memory refuses; small pages are only slower.
            if size_bytes >= _HUGE_PAGE_BYTES:
                with contextlib.suppress(OSError):
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._touch(0, self._kept_bytes)
        except (OSError, ValueError) as error:
            self._close_fd()
            raise ArenaError(
                f"The allocation of an arena of {size_bytes} bytes failed: {error}. Lower "
                "arena_bytes"
            ) from error
        self._view = memoryview(self._memory)
        self._is_closed = False

    @property
    def fd(self) -> int:
        """The memfd, for the shared-memory carrier; it is the arena's to close."""
        return self._fd

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

    def touch(self, offset_bytes: int, size_bytes: int) -> None:
        """These bytes have memory from now on. Raises ArenaError if the machine has none left."""
        start = max(offset_bytes, self._kept_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        needed = offset_bytes + size_bytes - start
        if needed <= 0:
            return
        memory = psutil.virtual_memory()
        left = memory.available - memory.total * _RESERVE_PERCENT // 100
        if needed > left:
            raise ArenaError(
                f"The load needs {needed} more bytes, and the machine has {max(left, 0)} "
                "free. Lower arena_bytes"
            )
        try:
            self._touch(start, needed)
        except OSError as error:
            raise ArenaError(
                f"The allocation of {needed} more bytes failed: {error}. Lower arena_bytes"
            ) from error

    def give_back(self, offset_bytes: int, size_bytes: int) -> None:
        """These bytes are not needed any more: what was touched late goes back to the machine."""
        start = _up_to_page(max(offset_bytes, self._kept_bytes))
        stop = (offset_bytes + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            # A system that cannot punch holes keeps the memory for the next copy.
            with contextlib.suppress(OSError):
                self._memory.madvise(_MADV_REMOVE, start, stop - start)

    def check_fits(self, manifest: Manifest, offset_bytes: int = 0) -> None:
        """The manifest's layers, from `offset_bytes` on, lie in order, apart and inside.

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
        if offset_bytes < 0 or offset_bytes + end_bytes > self.size_bytes:
            at = f" at offset {offset_bytes}" if offset_bytes else ""
            raise ArenaError(
                f"model {manifest.model!r} needs {end_bytes} bytes of arena{at}, "
                f"the worker has {self.size_bytes}"
            )

    def close(self) -> None:
        """No view is given any more. The memory goes back with the last view that is left."""
        if self._is_closed:
            return
        self._is_closed = True
        self._close_fd()
        # Tensors may still look at the memory; then it is freed when they are.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def _touch(self, offset_bytes: int, size_bytes: int) -> None:
        if not size_bytes:
            return
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE, offset_bytes, size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel: page by page from here.
            part = memoryview(self._memory)[offset_bytes : offset_bytes + size_bytes]
            pages = part[:: mmap.PAGESIZE]
            pages[:] = bytes(len(pages))

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Arena {self.size_bytes} bytes{', closed' if self._is_closed else ''}>"


def _new_memfd() -> int:
    return os.memfd_create("livescale arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _up_to_page(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
