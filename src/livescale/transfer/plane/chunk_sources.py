"""Which feed brings which chunk of an order, what is still to be asked of its holder and what that
owes, and which chunks are in place.

State only, guarded by the reception's lock; and the frames that ask for chunks.
"""

from __future__ import annotations

import array
import collections
import itertools
from collections.abc import Callable, Iterable, Iterator

from livescale.transfer.formats.frames import Frame, FrameKind, WantedChunks, encode_ranges
from livescale.transfer.formats.orders import ReceiveOrder, holder_of
from livescale.transfer.links.connection import Connection
from livescale.transfer.links.outbox import Word
from livescale.values.chunks import CHUNK_RANGES_MAX, ChunkRange, Feed, ranges_of
from livescale.values.types import Value, WorkerRef

_MISSING, _ARRIVING, _PRESENT = 0, 1, 2
_NO_INTAKE = -1
_CORRUPT_MAX = 2


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
        #: of these, those that have begun to come
        self.arriving: set[int] = set()
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
        if self.arriving and self.connection is not None:
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


class ChunkSources:
    """The chunks of one order and their intakes, by index."""

    def __init__(self, chunks: int) -> None:
        self.intakes: list[Intake] = []
        self._state = bytearray(chunks)
        # By chunk: the intake that is to bring it, and the one that brought it.
        self._owner = array.array("i", [_NO_INTAKE]) * chunks
        self._source = array.array("i", [_NO_INTAKE]) * chunks
        # Chunks whose connection has ended while something may still write them, and since when.
        self._left_behind: dict[int, int] = {}
        # By intake and layer: how often the layer was wrong.
        self._corrupt: dict[tuple[int, int], int] = {}

    def assign(self, feeds: tuple[Feed, ...], now_ns: int) -> list[tuple[Intake, list[int]]]:
        """These feeds, and no others, bring what is missing: every chunk comes from the first feed
        that lists it. Returns, by intake, chunks that were asked for and that others are to bring
        now."""
        self._owner = array.array("i", [_NO_INTAKE]) * len(self._owner)
        listed: dict[int, collections.deque[int]] = {}
        for feed in feeds:
            index = self._index_of_open(holder_of(feed), now_ns)
            intake = self.intakes[index]
            intake.window = feed.window
            to_ask = listed.setdefault(index, collections.deque())
            for chunk in (chunk for part in feed.chunks for chunk in part):
                if self._owner[chunk] == _NO_INTAKE:
                    self._owner[chunk] = index
                    if self._state[chunk] == _MISSING and chunk not in intake.asked:
                        to_ask.append(chunk)
        for index, intake in enumerate(self.intakes):
            intake.to_ask = listed.get(index, collections.deque())
            intake.is_closed = index not in listed
        return [(i, self._drop_unowned(index, i)) for index, i in enumerate(self.intakes)]

    def _index_of_open(self, upstream: WorkerRef, now_ns: int) -> int:
        """The intake that gets chunks from this holder; a holder that failed may try again."""
        for index, intake in enumerate(self.intakes):
            if intake.upstream == upstream and not intake.is_closed:
                return index
        self.intakes.append(Intake(upstream, now_ns))
        return len(self.intakes) - 1

    def _drop_unowned(self, index: int, intake: Intake) -> list[int]:
        dropped = [
            chunk
            for chunk in sorted(intake.asked)
            if self._owner[chunk] != index and chunk not in intake.arriving
        ]
        intake.asked.difference_update(dropped)
        return dropped

    # -- chunks -----------------------------------------------------------------------------------

    def index_asked(self, connection: Connection, chunk: int) -> int | None:
        """The intake that asked for the chunk on this connection."""
        for index, intake in enumerate(self.intakes):
            if intake.connection is connection and chunk in intake.asked:
                return index
        return None

    def begin(self, index: int, chunk: int) -> bool:
        """The chunk begins to arrive. False if it is not missing: it is thrown away."""
        if self._state[chunk] != _MISSING:
            self.intakes[index].took(chunk)
            return False
        self._state[chunk] = _ARRIVING
        self.intakes[index].arriving.add(chunk)
        return True

    def end(self, index: int, chunk: int) -> None:
        """The intake has brought the chunk."""
        self._state[chunk] = _PRESENT
        self._source[chunk] = index
        self.intakes[index].arriving.discard(chunk)
        self.intakes[index].took(chunk)

    def break_off(self, index: int, chunk: int) -> bool:
        """The chunk had begun and will not be whole. True if it may be asked for now; else it is
        given back with the rest of its feed, when the connection ends."""
        intake = self.intakes[index]
        self._state[chunk] = _MISSING
        intake.arriving.discard(chunk)
        if self._left_behind.pop(chunk, None) is None:
            return False
        intake.asked.discard(chunk)
        self._give_back((chunk,))
        return True

    def is_there(self, chunk: int) -> bool:
        """The chunk's bytes are in place. May be asked without the lock."""
        return self._state[chunk] == _PRESENT

    def set_there(self, chunk: int) -> None:
        """The chunk's bytes are in place without any feed."""
        self._state[chunk] = _PRESENT

    def blame(self, layer: int, chunks: Iterable[int]) -> list[Intake]:
        """The layer, of these chunks, was wrong. Returns the intakes that brought some of it and
        have brought it wrong before, in order."""
        found = []
        for index in sorted({self._source[chunk] for chunk in chunks}):
            self._corrupt[index, layer] = self._corrupt.get((index, layer), 0) + 1
            if self._corrupt[index, layer] >= _CORRUPT_MAX:
                found.append(self.intakes[index])
        return found

    def lose(self, chunks: Iterable[int]) -> None:
        """What was in place was wrong: it is asked for again."""
        for chunk in chunks:
            self._state[chunk] = _MISSING
        self._give_back(chunks)

    # -- intakes ----------------------------------------------------------------------------------

    def open_from(self, peer: WorkerRef) -> list[Intake]:
        return [i for i in self.intakes if i.upstream == peer and not i.is_closed]

    def asking(self) -> list[Intake]:
        """Intakes that have something to ask for."""
        return [i for i in self.intakes if i.to_ask and not i.is_closed]

    def unconnected(self, before_ns: int) -> list[WorkerRef]:
        """Holders that are waited for since before then, without a connection."""
        return [
            intake.upstream
            for intake in self.intakes
            if intake.connection is None and intake.to_ask and intake.made_ns < before_ns
        ]

    def hanging(self) -> list[Connection]:
        """On these a chunk has begun and does not go on that another feed is to bring: no holder
        can be asked for it before it is certain that the rest does not come."""
        return [
            intake.connection
            for index, intake in enumerate(self.intakes)
            if intake.connection is not None
            and intake.is_stalled
            and any(self._owner[chunk] != index for chunk in intake.arriving)
        ]

    def take_back(self, intake: Intake, now_ns: int) -> None:
        """Nothing that it was asked for comes; the feeds that are to bring the chunks ask. What it
        may still write is asked for when that has ended."""
        chunks = sorted(intake.asked - intake.arriving)
        self._left_behind.update(dict.fromkeys(intake.arriving, now_ns))
        intake.asked &= intake.arriving
        self._give_back(chunks)

    def left_behind(self, before_ns: int) -> list[int]:
        """Chunks that cannot be asked for since before then, because a read of them has not ended
        though its connection has."""
        return sorted(c for c, since_ns in self._left_behind.items() if since_ns < before_ns)

    def _give_back(self, chunks: Iterable[int]) -> None:
        """Missing chunks are asked for next: of their owner, else of the one that brought them,
        else of any that is open; if none is, they wait for new feeds."""
        opened = [index for index, intake in enumerate(self.intakes) if not intake.is_closed]
        again: dict[int, list[int]] = {}
        for chunk in chunks:
            for index in (self._owner[chunk], self._source[chunk], *opened):
                if index != _NO_INTAKE and not self.intakes[index].is_closed:
                    again.setdefault(index, []).append(chunk)
                    break
        for index, given in again.items():
            self.intakes[index].to_ask.extendleft(reversed(given))


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
    frame = Frame(kind, worker, order.plan, payload_bytes=len(payload))
    return Word(frame.encode() + payload)


def _batches(ranges: tuple[ChunkRange, ...]) -> Iterator[tuple[ChunkRange, ...]]:
    for start in range(0, len(ranges), CHUNK_RANGES_MAX):
        yield ranges[start : start + CHUNK_RANGES_MAX]
