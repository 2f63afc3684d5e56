"""The receptions under way on one member, by plan, and what all of them are told."""

from __future__ import annotations

import threading

from livescale.transfer.arena import ArenaError
from livescale.transfer.connection import Connection
from livescale.transfer.holdings import Holdings
from livescale.transfer.reception import Reception
from livescale.types import PlanId, WorkerRef


class Receptions:
    """Thread-safe."""

    def __init__(self, worker: WorkerRef, holdings: Holdings) -> None:
        self._worker = worker
        self._holdings = holdings
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
            self._holdings.add(reception.holding)
            self._receptions[reception.order.plan] = reception

    def remove(self, reception: Reception) -> None:
        """It is over."""
        with self._lock:
            if self._receptions.get(reception.order.plan) is reception:
                del self._receptions[reception.order.plan]

    def find(self, plan: PlanId) -> Reception | None:
        # One look-up, for every chunk: the interpreter's lock is enough.
        return self._receptions.get(plan)

    def all(self) -> list[Reception]:
        """In the order of their plans."""
        with self._lock:
            return [self._receptions[plan] for plan in sorted(self._receptions)]

    def introduced(self, peer: WorkerRef) -> None:
        for reception in self.all():
            reception.introduced(peer)

    def connected(self, connection: Connection) -> None:
        for reception in self.all():
            reception.connected(connection)

    def unreachable(self, peer: WorkerRef, reason: str) -> None:
        for reception in self.all():
            reception.unreachable(peer, reason)

    def connection_ended(self, connection: Connection, reason: str) -> None:
        for reception in self.all():
            reception.connection_ended(connection, reason)

    def close(self, reason: str) -> None:
        """All fail, and none begins any more."""
        with self._lock:
            self._is_closed = True
        for reception in self.all():
            reception.fail(reason)
