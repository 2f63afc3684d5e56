"""Which open loads read from which members: a copy that is read from is not dropped."""

from __future__ import annotations

from livescale.control.state.holdings import Copy
from livescale.values.types import HoldingId, WorkerRef


class Reads:
    """Readers and the model that they get, by the worker or agent that sends."""

    def __init__(self) -> None:
        #: grows with every change
        self.version = 0
        self._reads: dict[WorkerRef, dict[tuple[HoldingId, str], None]] = {}

    def begin(self, reader: HoldingId, model: str, source: WorkerRef) -> None:
        """The load reads from there."""
        self.version += 1
        self._reads.setdefault(source, {})[reader, model] = None

    def end(self, reader: HoldingId, model: str, source: WorkerRef) -> None:
        """Nothing happens if the load does not read from there."""
        self.version += 1
        reads = self._reads.get(source, {})
        reads.pop((reader, model), None)
        if not reads:
            self._reads.pop(source, None)

    def count(self, source: WorkerRef) -> int:
        """Loads that read from the worker or agent now, whatever the model."""
        return len(self._reads.get(source, ()))

    def are_of(self, copy: Copy) -> bool:
        """Some load reads from the copy."""
        return any(
            model == copy.model
            for member in dict.fromkeys(copy.members)
            for _, model in self._reads.get(member, ())
        )

    def lose(self, source: WorkerRef) -> None:
        """The worker or agent is gone."""
        self.version += 1
        self._reads.pop(source, None)

    def __repr__(self) -> str:
        return f"{sum(map(len, self._reads.values()))} reads"
