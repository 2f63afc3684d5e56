"""The ways to other workers: messages of live pairs, with rows and KV, as data plane parcels.

Sending is done by a thread per peer, because opening a connection and waiting for room take time.
What goes wrong on the way to a peer ends the cooperation with that peer, and nothing else.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from livescale.runtime.member_process.live_parcels import Assembler, Letter, ParcelError, pack
from livescale.transfer.formats.orders import TransferError
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.types import WorkerRef

_log = logging.getLogger(__name__)
# What a source asks for at once is some layers' KV of one batch, which is far less.
_WAITING_BYTES_MAX = 1 << 30
_PARCEL_COST_BYTES = 1 << 10
"""What a parcel takes that waits, besides its bytes."""


@dataclass(frozen=True, slots=True)
class LineEvents:
    """What the owner of lines makes of them. `expected` says how many bytes come with a letter
    (None: they are not wanted) or raises ValueError; `came` is given letters that are complete, and
    when their last byte was here; `lost` peers that are lost, or (True) that sent what is no
    message. While a batch of a peer `is_taking` place, what is expected next of that peer is not
    known yet."""

    expected: Callable[[WorkerRef, Letter], int | None]
    came: Callable[[WorkerRef, Letter, bytearray, int], None]
    lost: Callable[[WorkerRef, bool], None]
    is_taking: Callable[[WorkerRef], bool]


class PeerLines:
    """All peers of one worker. Methods are called on the member's thread, which `post` lets do
    something between two Runs."""

    def __init__(
        self,
        data_plane: DataPlane,
        events: LineEvents,
        *,
        patience_s: float,
        post: Callable[[Callable[[], None]], None],
        waiting_bytes_max: int = _WAITING_BYTES_MAX,
    ) -> None:
        """`patience_s`: how long a peer may leave what it is sent unread. `waiting_bytes_max`: of
        all parcels that were not opened."""
        self._data_plane = data_plane
        self._events = events
        self._patience_s = patience_s
        self._post = post
        self._lines: dict[WorkerRef, _Line] = {}
        self._assemblers: dict[WorkerRef, Assembler] = {}
        #: parcels that were not opened, in order, and when each was here
        self._unopened: dict[WorkerRef, collections.deque[tuple[int, bytes]]] = {}
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting_bytes = 0
        #: a parcel of theirs found no room, which they have not been given up for yet
        self._crowded_out: set[WorkerRef] = set()
        self._waiting_lock = threading.Lock()
        data_plane.on_parcel = self._arrived
        data_plane.on_disconnected = lambda peer: post(partial(self.lose, peer))

    def close(self) -> None:
        """Nothing more is sent."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def lose(self, peer: WorkerRef) -> None:
        """What was sent to this worker, or came from it, may be lost, or it is gone."""
        self._forget(peer)
        line = self._lines.pop(peer, None)
        if line is not None:
            line.close()
        self._events.lost(peer, False)

    def refuse(self, peer: WorkerRef, reason: str) -> None:
        """What it sent is no message, is not to be believed or was lost: what follows of it is no
        message either. It is told so where it waits for an answer."""
        _log.warning("no more live work with %s: %s", peer, reason)
        self._forget(peer)
        self._events.lost(peer, True)

    def _forget(self, peer: WorkerRef) -> None:
        """What came of the peer and was not taken is no message any more."""
        self._assemblers.pop(peer, None)
        for _, parcel in self._unopened.pop(peer, ()):
            self._count_opened(parcel)

    # -- sending --------------------------------------------------------------------------------

    def send(self, peer: WorkerRef, letter: Letter, content: Sequence[memoryview]) -> None:
        """Queue the letter behind those that were sent before."""
        line = self._lines.get(peer)
        if line is None:
            line = _Line(peer, self._data_plane, self._patience_s, self._broken)
            self._lines[peer] = line
        try:
            line.put(pack(letter, content))
        except ParcelError as error:
            self._give_up(peer, str(error))

    def _broken(self, line: _Line, reason: str) -> None:
        """A line's thread gave up (called from there)."""
        self._post(partial(self._line_broken, line, reason))

    def _line_broken(self, line: _Line, reason: str) -> None:
        if self._lines.get(line.peer) is line:
            self._give_up(line.peer, reason)

    def _give_up(self, peer: WorkerRef, reason: str) -> None:
        _log.warning("no more live work with %s: %s", peer, reason)
        self.lose(peer)

    # -- receiving ------------------------------------------------------------------------------

    def _arrived(self, peer: WorkerRef, parcel: bytes) -> None:
        """On a thread of the data plane. A parcel that finds no room is lost."""
        size_bytes = len(parcel) + _PARCEL_COST_BYTES
        with self._waiting_lock:
            has_room = self._waiting_bytes + size_bytes <= self._waiting_bytes_max
            if has_room:
                self._waiting_bytes += size_bytes
            elif peer in self._crowded_out:
                return
            else:
                self._crowded_out.add(peer)
        if has_room:
            self._post(partial(self._received, peer, parcel, time.monotonic_ns()))
        else:
            self._post(partial(self._overflowed, peer))

    def _received(self, peer: WorkerRef, parcel: bytes, came_ns: int) -> None:
        self._unopened.setdefault(peer, collections.deque()).append((came_ns, parcel))
        self._open(peer)

    def open_waiting(self) -> None:
        """Open what can be opened now: the member has taken in what came before."""
        for peer in [*self._unopened]:
            self._open(peer)

    def _open(self, peer: WorkerRef) -> None:
        while (parcels := self._unopened.get(peer)) and not self._events.is_taking(peer):
            came_ns, parcel = parcels.popleft()
            self._count_opened(parcel)
            if peer not in self._assemblers:
                self._assemblers[peer] = Assembler(partial(self._events.expected, peer))
            try:
                complete = self._assemblers[peer].take(parcel)
            except ValueError as error:
                self.refuse(peer, str(error))
                return
            if complete is not None:
                self._events.came(peer, *complete, came_ns)
        if not parcels:
            self._unopened.pop(peer, None)

    def _count_opened(self, parcel: bytes) -> None:
        with self._waiting_lock:
            self._waiting_bytes -= len(parcel) + _PARCEL_COST_BYTES

    def _overflowed(self, peer: WorkerRef) -> None:
        with self._waiting_lock:
            self._crowded_out.remove(peer)
        self.refuse(peer, "its parcels found no room among those that wait")

    def __repr__(self) -> str:
        return f"<PeerLines {sorted(self._lines)}>"


class _Line:
    """What is sent to one peer, one message behind the other, by a thread of its own."""

    def __init__(
        self,
        peer: WorkerRef,
        data_plane: DataPlane,
        patience_s: float,
        broken: Callable[[_Line, str], None],
    ) -> None:
        self.peer = peer
        self._data_plane = data_plane
        self._patience_s = patience_s
        self._broken = broken
        self._parcels: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._run, name=f"live work with {peer}", daemon=True).start()

    def put(self, parcels: list[bytes]) -> None:
        for parcel in parcels:
            self._parcels.put(parcel)

    def close(self) -> None:
        """What was not sent is not sent."""
        self._is_closed = True
        self._parcels.put(None)

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None and not self._is_closed:
            try:
                self._data_plane.post(self.peer, parcel, self._patience_s)
            except TransferError as error:
                self._broken(self, str(error))
                return
