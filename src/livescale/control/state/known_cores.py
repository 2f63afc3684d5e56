"""Cores of workers: what each has told, and what it was asked for."""

from __future__ import annotations

from livescale.messages.commands import SetCores
from livescale.messages.events import CoresChanged
from livescale.values.types import WorkerRef


class KnownCores:
    """Of all living workers. Only what a worker has told is counted on; what it was asked for
    counts for its host from the order on."""

    def __init__(self) -> None:
        #: grows with every change
        self.version = 0
        self._now: dict[WorkerRef, int] = {}
        self._own: dict[WorkerRef, int] = {}
        #: orders that are not answered yet
        self._ordered: dict[WorkerRef, int] = {}
        #: of workers that had no more when they were asked for more
        self._most: dict[WorkerRef, int] = {}

    def joined(self, worker: WorkerRef, cores: int, own: int) -> None:
        """It has `cores`, and began with `own`."""
        self.version += 1
        self._now[worker], self._own[worker] = cores, own

    def left(self, worker: WorkerRef) -> None:
        """It is gone, with its cores and its answers."""
        self.version += 1
        for known in (self._now, self._own, self._ordered, self._most):
            known.pop(worker, None)

    def changed(self, event: CoresChanged) -> bool:
        """A worker has told. False of one that is gone."""
        worker = event.worker
        if worker not in self._now:
            return False
        self.version += 1
        self._now[worker] = event.cores
        # An order of an earlier life of the controller may be answered late.
        if event.asked and self._ordered.get(worker) == event.asked:
            del self._ordered[worker]
            if event.cores < event.asked:
                self._most[worker] = event.cores
        return True

    def order(self, worker: WorkerRef, cores: int) -> SetCores:
        """It is to have so many."""
        assert worker not in self._ordered, f"{worker} has not answered the order before"
        self.version += 1
        self._ordered[worker] = cores
        return SetCores(worker, cores)

    def now(self, worker: WorkerRef) -> int:
        """As it has told."""
        return self._now[worker]

    def own(self, worker: WorkerRef) -> int:
        """Those that it began with."""
        return self._own[worker]

    def held(self, worker: WorkerRef) -> int:
        """The most that it may have at the moment."""
        return max(self._now[worker], self._ordered.get(worker, 0))

    def most(self, worker: WorkerRef, cores_max: int) -> int:
        """It can have so many, of `cores_max`."""
        return min(self._most.get(worker, cores_max), cores_max)

    def is_waiting(self, worker: WorkerRef) -> bool:
        """It was asked, and has not answered."""
        return worker in self._ordered

    def raised(self) -> list[WorkerRef]:
        """Those with others than they began with, in id order."""
        return sorted(worker for worker, cores in self._now.items() if cores != self._own[worker])
