"""The ParameterPool: which complete copies of which model lie in the cluster's memory.

Only the pool drops a copy, and it refuses the last one (BlitzScale §5.3: at least one copy of
every model stays in device or host memory). Losing a worker is not dropping: that happens to us.
"""

from __future__ import annotations

from livescale.types import WorkerRef


class LastCopyError(Exception):
    """The copy is the model's last in the cluster's memory, or bytes are still read from it."""


class ParameterPool:
    """Holders of complete copies, and the transfers that read from them."""

    def __init__(self) -> None:
        #: per model, the workers of each copy by its first one (one worker per rank)
        self._holders: dict[str, dict[WorkerRef, tuple[WorkerRef, ...]]] = {}
        #: (reader, source) pairs: a copy that somebody reads from is not dropped
        self._reads: dict[tuple[str, WorkerRef], None] = {}

    def add(self, model: str, *workers: WorkerRef) -> None:
        """`workers`, in the order of their ranks, have all layers of the model, verified."""
        self._holders.setdefault(model, {})[workers[0]] = workers

    def holders(self, model: str) -> list[WorkerRef]:
        """Complete copies, each named by the worker of its rank 0, in worker order."""
        return sorted(self._holders.get(model, {}))

    def begin_read(self, reader: str, source: WorkerRef) -> None:
        self._reads[reader, source] = None

    def end_read(self, reader: str, source: WorkerRef) -> None:
        self._reads.pop((reader, source), None)

    def readers(self, source: WorkerRef) -> int:
        """Transfers that read from the worker now."""
        return sum(1 for _, worker in self._reads if worker == source)

    def can_drop(self, model: str, holder: WorkerRef) -> bool:
        copies = self._holders.get(model, {})
        if holder not in copies or len(copies) < 2:
            return False
        return not any(self.readers(worker) for worker in copies[holder])

    def drop(self, model: str, holder: WorkerRef) -> None:
        """Forget a copy on purpose. Raises LastCopyError when `can_drop` is False."""
        if not self.can_drop(model, holder):
            raise LastCopyError(
                f"{holder} keeps {model}: {len(self._holders.get(model, {}))} copies,"
                f" {self.readers(holder)} readers"
            )
        del self._holders[model][holder]

    def lose(self, worker: WorkerRef) -> None:
        """The worker is gone with everything it held and sent."""
        for copies in self._holders.values():
            for holder in [h for h, workers in copies.items() if worker in workers]:
                del copies[holder]
        for key in [key for key in self._reads if key[1] == worker]:
            del self._reads[key]

    def __repr__(self) -> str:
        copies = ", ".join(f"{model}: {len(h)}" for model, h in self._holders.items())
        return f"<ParameterPool {copies or 'empty'}, {len(self._reads)} reads>"
