"""What waits to be sent on one connection, and in which order it goes.

Queues only: the threads that send are in `connection.py`, and who fills the queues is elsewhere.
Words and parcels go before chunks; wants take turns, chunk by chunk. A peer to which others send
parcels may have chunks held back.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterable

from livescale.transfer.formats.frames import FrameError, WantedChunks
from livescale.transfer.memory.model_bytes import ModelBytes
from livescale.values.chunks import ChunkGrid, ChunkRange
from livescale.values.types import PlanId, Value, WorkerRef

_WORDS_MAX = 4096
_PARCEL_BYTES_MAX = 64 << 20
_PROBES_MAX = 4
_WANTED_CHUNKS_MAX = 1 << 21
_EARLY_FRAMES_MAX = 64
# A chunk goes at least this often, whatever the peer asks for: else its load would look stalled,
# and none could wait for another for ever.
_HELD_NS_MAX = 100_000_000


class OutboxFullError(ConnectionError):
    """More waits to be sent to this peer than there may be."""


class Word(Value, frozen=True):
    """A frame that goes before all chunks; `parcel` is its payload if it has an urgent one."""

    frame: bytes
    parcel: bytes | None = None


class ProbeBytes(Value, frozen=True):
    """The next bytes of a probe."""

    plan: PlanId
    size_bytes: int


class WantedChunk(Value, frozen=True):
    """The next chunk of a want and where its bytes lie in the memory."""

    plan: PlanId
    layer: int
    chunk: int
    offset_bytes: int
    size_bytes: int
    is_unproved: bool


class Settle(Value, frozen=True):
    """Nothing of the copy that was read last may be read any more before what comes next: it is
    withdrawn, or chunks of another copy come next."""


class Want:
    """Chunks of one copy that a peer wants for one of its plans. Guarded by the store's lock.

    Until the copy is known here, what the peer says is kept and not looked at.
    """

    def __init__(self, outbox: Outbox, plan: PlanId, first: WantedChunks, since_ns: int) -> None:
        self.outbox = outbox
        self.plan = plan
        self.copy = first.copy
        self.chunk_bytes = first.chunk_bytes
        self.since_ns = since_ns
        self.held: ModelBytes | None = None
        self.ready: collections.deque[int] = collections.deque()
        #: chunks that are not there yet, and whether they must be verified
        self.pending: dict[int, bool] = {}
        self.grid = ChunkGrid((), 1)
        self._early: list[WantedChunks | tuple[ChunkRange, ...]] = []

    def bind(self, held: ModelBytes) -> None:
        """The copy is here. Raises FrameError if what was wanted is not a part of it."""
        self.held = held
        self.grid = ChunkGrid(held.grid.layer_bytes, self.chunk_bytes)
        early, self._early = self._early, []
        for frame in early:
            if isinstance(frame, WantedChunks):
                self.add(frame)
            else:
                self.stop(frame)

    def add(self, wanted: WantedChunks) -> None:
        """More chunks are wanted. Raises FrameError."""
        if (wanted.copy, wanted.chunk_bytes) != (self.copy, self.chunk_bytes):
            raise FrameError(f"plan {self.plan} wants two copies or two sizes of chunks")
        if self.held is None:
            self._keep(wanted)
            return
        count = sum(map(len, wanted.ranges)) + len(self.pending) + len(self.ready)
        if count > _WANTED_CHUNKS_MAX:
            raise FrameError(f"plan {self.plan} wants {count} chunks, above {_WANTED_CHUNKS_MAX}")
        if max(part.stop for part in wanted.ranges) > self.grid.chunks:
            raise FrameError(f"plan {self.plan} wants chunks that the copy does not have")
        for part in wanted.ranges:
            if self.held.is_complete:
                self.ready.extend(part)
                continue
            for chunk in part:
                if self._is_there(chunk, wanted.is_verified_only):
                    self.ready.append(chunk)
                else:
                    self.pending[chunk] = wanted.is_verified_only
        self._take_turn()

    def stop(self, ranges: tuple[ChunkRange, ...]) -> None:
        """These chunks are not wanted any more. Raises FrameError."""
        if self.held is None:
            self._keep(ranges)
            return

        def is_wanted(chunk: int) -> bool:
            return not any(chunk in part for part in ranges)

        self.ready = collections.deque(filter(is_wanted, self.ready))
        self.pending = {c: flag for c, flag in self.pending.items() if is_wanted(c)}

    def bytes_came(self, chunks: Iterable[int]) -> None:
        """Chunks (of this want's grid) may be there now."""
        assert self.held is not None
        for chunk in chunks:
            flag = self.pending.get(chunk)
            if flag is not None and self._is_there(chunk, flag):
                del self.pending[chunk]
                self.ready.append(chunk)
        self._take_turn()

    def next_chunk(self) -> WantedChunk:
        assert self.held is not None
        chunk = self.ready.popleft()
        layer, offset, size = self.grid.place(chunk)
        place = self.held.place(layer, offset)
        is_unproved = self.held.is_unproved(layer)
        return WantedChunk(self.plan, layer, chunk, place, size, is_unproved)

    def _is_there(self, chunk: int, is_verified_only: bool) -> bool:
        assert self.held is not None
        if not is_verified_only and self.chunk_bytes == self.held.grid.chunk_bytes:
            return self.held.has_chunk(chunk)
        return self.held.has(*self.grid.place(chunk), is_verified_only)

    def _keep(self, frame: WantedChunks | tuple[ChunkRange, ...]) -> None:
        if len(self._early) >= _EARLY_FRAMES_MAX:
            raise FrameError(f"plan {self.plan} wants too much of a copy that is not here")
        self._early.append(frame)

    def _take_turn(self) -> None:
        if self.ready:
            self.outbox.take_turn(self)


class Outbox:
    """The queues of one connection. Guarded by the store's lock, like all wants in it."""

    def __init__(self, peer: WorkerRef, lock: threading.RLock) -> None:
        self.peer = peer
        self.changed = threading.Condition(lock)
        self.wants: dict[PlanId, Want] = {}
        #: the copy that the connection's sending thread reads from
        self.reading: ModelBytes | None = None
        self.is_closed = False
        self._words: collections.deque[Word] = collections.deque()
        self._parcel_bytes = 0
        self._probes: collections.deque[tuple[PlanId, int]] = collections.deque()
        self._turns: collections.deque[Want] = collections.deque()
        # Until when chunks are held back (0: they are not), and since when none went.
        self._held_until_ns = self._held_since_ns = 0

    def put(self, word: Word) -> None:
        """The frame goes next, behind other words. A parcel that finds no room raises
        OutboxFullError; a peer that lets words pile up loses its connection."""
        size = len(word.parcel or b"")
        with self.changed:
            if word.parcel is not None and self._parcel_bytes + size > _PARCEL_BYTES_MAX:
                raise OutboxFullError(f"too many parcels wait to be sent to {self.peer}")
            if len(self._words) >= _WORDS_MAX:
                self.close()
            if self.is_closed:
                return
            self._parcel_bytes += size
            self._words.append(word)
            self.changed.notify()

    def put_probe(self, plan: PlanId, size_bytes: int) -> None:
        """That many bytes are sent, in turn with the wants. Raises OutboxFullError."""
        with self.changed:
            if len(self._probes) >= _PROBES_MAX:
                raise OutboxFullError(f"{self.peer} probes too much")
            self._probes.append((plan, size_bytes))
            self.changed.notify()

    def hold(self, for_ns: int) -> None:
        """Chunks and probes are held back for so long from now on; the latest call counts."""
        with self.changed:
            now_ns = time.monotonic_ns()
            if now_ns >= self._held_until_ns:
                self._held_since_ns = now_ns
            self._held_until_ns = now_ns + for_ns
            self.changed.notify()

    def take_turn(self, want: Want) -> None:
        """The want has chunks to send."""
        if want not in self._turns:
            self._turns.append(want)
            self.changed.notify()

    def drop(self, want: Want) -> None:
        if self.wants.get(want.plan) is want:
            del self.wants[want.plan]
        want.ready.clear()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self._words.clear()
            self._turns.clear()
            self._probes.clear()
            self.changed.notify()

    def next(self, chunk_bytes: int) -> Word | WantedChunk | ProbeBytes | Settle | None:
        """What is to be sent now; waits for it. None when closed. Probes go by `chunk_bytes`."""
        with self.changed:
            while not self.is_closed:
                if self.reading is not None and self.reading.is_withdrawn:
                    return Settle()
                if self._words:
                    word = self._words.popleft()
                    self._parcel_bytes -= len(word.parcel or b"")
                    return word
                held_ns = self._held_ns()
                if not held_ns:
                    if (chunk := self._next_chunk()) is not None:
                        return chunk
                    if self._probes:
                        return self._next_probe(chunk_bytes)
                self.changed.wait(held_ns / 1e9 if held_ns else None)
            return None

    def settled(self) -> ModelBytes | None:
        """Nothing is read any more; returns what was."""
        with self.changed:
            was, self.reading = self.reading, None
            if was is not None:
                was.readers.remove(self.changed)
            return was

    def _held_ns(self) -> int:
        """For how long no chunk goes, if no word changes that."""
        if not self._held_until_ns:
            return 0
        now_ns = time.monotonic_ns()
        if now_ns >= self._held_until_ns:
            self._held_until_ns = 0
            return 0
        until_ns = min(self._held_until_ns, self._held_since_ns + _HELD_NS_MAX)
        if now_ns < until_ns:
            return until_ns - now_ns
        self._held_since_ns = now_ns
        return 0

    def _next_chunk(self) -> WantedChunk | Settle | None:
        while self._turns:
            want = self._turns[0]
            if not want.ready or want.held is None:
                self._turns.popleft()
                continue
            if self.reading is not want.held:
                if self.reading is not None:
                    return Settle()
                self.reading = want.held
                self.reading.readers.append(self.changed)
            chunk = want.next_chunk()
            self._turns.rotate(-1)
            return chunk
        return None

    def _next_probe(self, chunk_bytes: int) -> ProbeBytes:
        plan, size_bytes = self._probes.popleft()
        if size_bytes > chunk_bytes:
            self._probes.appendleft((plan, size_bytes - chunk_bytes))
        return ProbeBytes(plan, min(size_bytes, chunk_bytes))

    def __repr__(self) -> str:
        return f"<Outbox to {self.peer}, {len(self._words)} words, {len(self.wants)} wants>"
