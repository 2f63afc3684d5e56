"""Orders that a data plane is carrying out, by plan, and the frames that concern one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from livescale.transfer.formats.frames import Frame
from livescale.transfer.links.connection import Connection
from livescale.transfer.memory.arena import ArenaError
from livescale.transfer.plane.chunk_sources import Arrival
from livescale.transfer.plane.reception import Reception
from livescale.transfer.plane.store import Store
from livescale.values.types import PlanId, WorkerRef


class Receptions:
    """Thread-safe."""

    def __init__(self, worker: WorkerRef, store: Store) -> None:
        self._worker = worker
        self._store = store
        self._lock = threading.Lock()
        self._receptions: dict[PlanId, Reception] = {}
        self._is_closed = False

    def add(self, reception: Reception) -> None:
        """Others may ask for what it gets. Raises ArenaError."""
        with self._lock:
            if self._is_closed:
                raise ArenaError(f"{self._worker} closed its data plane")
            if reception.order.plan in self._receptions:
                raise ArenaError("it is already being received")
            self._store.add(reception.held)
            self._receptions[reception.order.plan] = reception

    def remove(self, reception: Reception) -> None:
        """It is over."""
        with self._lock:
            if self._receptions.get(reception.order.plan) is reception:
                del self._receptions[reception.order.plan]

    def find(self, plan: PlanId) -> Reception | None:
        # One look-up, for every chunk: the interpreter's lock is enough.
        return self._receptions.get(plan)

    def refused(self, peer: WorkerRef, frame: Frame, reason: str) -> None:
        """The peer gives no more for what the frame is about."""
        reception = self.find(frame.plan)
        if reception is not None:
            reception.refused(peer, reason)

    def take(self, connection: Connection, frame: Frame) -> None:
        """A chunk: into its place, or thrown away if it is not waited for. Raises FrameError and
        OSError."""
        size_bytes = frame.payload_bytes
        channel = connection.channel
        reception = self.find(frame.plan)
        arrival = None if reception is None else reception.chunk_begins(connection, frame)
        if reception is None or arrival is None:
            channel.discard_range(size_bytes, lambda _: connection.count(size_bytes, size_bytes))
            return
        landed = partial(_landed, connection, reception, arrival)
        try:
            channel.receive_range(arrival.place_bytes, size_bytes, reception.permit, landed)
        except OSError:
            reception.chunk_ends(arrival, 0)
            raise

    def all(self) -> list[Reception]:
        """In the order of their plans."""
        with self._lock:
            return [self._receptions[plan] for plan in sorted(self._receptions)]

    def connected(self, connection: Connection) -> None:
        """There is a connection with its peer."""
        self.tell(Reception.connected, connection)

    def unreachable(self, peer: WorkerRef, reason: str) -> None:
        """It could not be called."""
        self.tell(Reception.unreachable, peer, reason)

    def tell(self, news: Callable[..., None], *about: object) -> None:
        """Let all of them take in what concerns connections: `news` is a method of Reception."""
        for reception in self.all():
            news(reception, *about)

    def close(self, reason: str) -> None:
        """All fail, and none begins any more."""
        with self._lock:
            self._is_closed = True
        self.tell(Reception.fail, reason)


def _landed(
    connection: Connection, reception: Reception, arrival: Arrival, written_bytes: int
) -> None:
    """No more is written for the chunk."""
    connection.count(arrival.size_bytes, arrival.size_bytes - written_bytes)
    reception.chunk_ends(arrival, written_bytes)
