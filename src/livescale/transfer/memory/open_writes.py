"""Writes into the memory that something else carries out, a network card mostly, and that cannot be
called back: where each may still put bytes.

One rule lives here: no bytes are given to a copy, or to another write, before all writes into them
have ended. An aborted plan's bytes are so kept from others until its last read is over, and for
good if that never ends. What writes, and for whom, is not known here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from livescale.transfer.memory.arena import ArenaError


class OpenWrites:
    """Of one memory. Thread-safe; times are arguments."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        #: by number: first byte and end of a write that has not ended
        self._ranges: dict[int, tuple[int, int]] = {}
        #: bytes, and who is told when all writes into them have ended
        self._awaited: list[tuple[int, int, Callable[[], None]]] = []

    def begin(self, offset_bytes: int, size_bytes: int) -> int:
        """These bytes may be written until `end` of the number that is returned. Raises ArenaError
        if another write may still put bytes there."""
        with self._changed:
            self._check(offset_bytes, size_bytes)
            number = next(self._numbers)
            self._ranges[number] = (offset_bytes, offset_bytes + size_bytes)
            return number

    def end(self, number: int) -> None:
        """Nothing is written any more for this number."""
        with self._changed:
            del self._ranges[number]
            self._changed.notify_all()
            closed = [a for a in self._awaited if not self._touching(a[0], a[1])]
            self._awaited = [awaited for awaited in self._awaited if awaited not in closed]
        for _, _, tell in closed:
            tell()

    def check_closed(self, offset_bytes: int, size_bytes: int) -> None:
        """Raises ArenaError unless all writes into these bytes have ended."""
        with self._changed:
            self._check(offset_bytes, size_bytes)

    def wait_closed(self, offset_bytes: int, size_bytes: int, timeout_s: float) -> bool:
        """All writes into these bytes have ended; False if one has not after the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._touching(offset_bytes, size_bytes), timeout_s
            )

    def when_closed(self, offset_bytes: int, size_bytes: int, tell: Callable[[], None]) -> None:
        """`tell` is called once, when all writes into these bytes have ended: at once if they have,
        else by the thread that ends the last one."""
        with self._changed:
            is_open = bool(self._touching(offset_bytes, size_bytes))
            if is_open:
                self._awaited.append((offset_bytes, size_bytes, tell))
        if not is_open:
            tell()

    def ranges(self, offset_bytes: int, size_bytes: int) -> tuple[tuple[int, int], ...]:
        """(offset, size) of the writes into these bytes that have not ended, in order."""
        with self._changed:
            found = sorted(self._touching(offset_bytes, size_bytes))
        return tuple((start, stop - start) for start, stop in found)

    def _check(self, offset_bytes: int, size_bytes: int) -> None:
        touching = self._touching(offset_bytes, size_bytes)
        if touching:
            start, stop = min(touching)
            raise ArenaError(
                f"{stop - start} bytes at offset {start} may still be written by a read that has"
                f" not ended ({len(touching)} in {size_bytes} bytes at offset {offset_bytes})"
            )

    def _touching(self, offset_bytes: int, size_bytes: int) -> list[tuple[int, int]]:
        # Few: as many as chunks are under way on all channels.
        stop_bytes = offset_bytes + size_bytes
        return [
            (start, stop)
            for start, stop in self._ranges.values()
            if start < stop_bytes and offset_bytes < stop
        ]

    def __repr__(self) -> str:
        return f"<OpenWrites {len(self._ranges)}>"
