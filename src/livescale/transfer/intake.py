"""One feed on the receiving side: what is still to be asked of a holder, and what it owes.

State only, guarded by the reception's lock.
"""

import collections
import itertools
from collections.abc import Callable, Iterator

from livescale.chunks import CHUNK_RANGES_MAX, ChunkRange, ranges_of
from livescale.transfer.connection import Connection
from livescale.transfer.frames import Frame, FrameKind, WantedChunks, encode_ranges
from livescale.transfer.orders import ReceiveOrder
from livescale.transfer.outbox import Word
from livescale.types import Value, WorkerRef


class Arrival(Value, frozen=True):
    """A chunk that a feed is bringing, and where in the memory its bytes go."""

    intake: int
    chunk: int
    layer: int
    place_bytes: int
    size_bytes: int


class Intake:
    """The chunks that come from `upstream`, for one order."""

    def __init__(self, upstream: WorkerRef, now_ns: int) -> None:
        self.upstream = upstream
        self.window: int | None = None
        self.connection: Connection | None = None
        #: obsolete, or failed: nothing is asked for any more
        self.is_closed = False
        self.to_ask: collections.deque[int] = collections.deque()
        #: asked for and not in place
        self.asked: set[int] = set()
        self.arriving: int | None = None
        self.made_ns = now_ns
        self.is_stalled = False
        self._chunks = 0
        self._since_ns = now_ns
        self._seen: tuple[int, int] | None = None

    def next_to_ask(self) -> list[int]:
        """Chunks that may be asked for now; they count as asked. Small windows are refilled
        chunk by chunk, large ones by a quarter."""
        count = len(self.to_ask)
        if self.window is not None:
            room = self.window - len(self.asked)
            count = min(count, room) if room >= max(1, self.window // 4) else 0
        chunks = [self.to_ask.popleft() for _ in range(count)]
        self.asked.update(chunks)
        return chunks

    def took(self, chunk: int) -> None:
        """The chunk is in place, or was thrown away."""
        self._chunks += 1
        self.asked.discard(chunk)

    def has_just_stalled(self, now_ns: int, stall_ns: int) -> bool:
        """No byte came for `stall_ns` though something is owed; told once per stall."""
        taken = 0
        if self.arriving is not None and self.connection is not None:
            taken = self.connection.channel.taken_bytes
        seen = (self._chunks, taken)
        if seen != self._seen or not self.asked:
            self._seen, self._since_ns, self.is_stalled = seen, now_ns, False
        elif not self.is_stalled and now_ns - self._since_ns >= stall_ns:
            self.is_stalled = True
            return True
        return False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "stalled" if self.is_stalled else "open"
        return f"<Intake from {self.upstream} {state}, {len(self.asked)}+{len(self.to_ask)} chunks>"


def want_words(
    order: ReceiveOrder,
    worker: WorkerRef,
    copy: bytes,
    chunks: list[int],
    is_verified_only: Callable[[int], bool],
) -> list[Word]:
    """WANT frames for these chunks in this order."""
    words = []
    for is_only, run in itertools.groupby(chunks, is_verified_only):
        for ranges in _batches(ranges_of(run)):
            payload = WantedChunks(copy, order.chunk_bytes, ranges, is_only).encode()
            words.append(_word(FrameKind.WANT, order, worker, payload))
    return words


def stop_words(order: ReceiveOrder, worker: WorkerRef, chunks: list[int]) -> list[Word]:
    """STOP frames for these chunks."""
    return [
        _word(FrameKind.STOP, order, worker, encode_ranges(ranges))
        for ranges in _batches(ranges_of(chunks))
    ]


def stop_all_word(order: ReceiveOrder, worker: WorkerRef) -> Word:
    """A STOP frame for the whole plan."""
    return _word(FrameKind.STOP, order, worker, b"")


def _word(kind: FrameKind, order: ReceiveOrder, worker: WorkerRef, payload: bytes) -> Word:
    frame = Frame(kind, worker, order.plan, order.attempt, payload_bytes=len(payload))
    return Word(frame.encode() + payload)


def _batches(ranges: tuple[ChunkRange, ...]) -> Iterator[tuple[ChunkRange, ...]]:
    for start in range(0, len(ranges), CHUNK_RANGES_MAX):
        yield ranges[start : start + CHUNK_RANGES_MAX]
