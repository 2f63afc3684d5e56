"""The ParameterPool: which layers of which model lie where in the cluster's memory.

Only the pool drops a copy, and it refuses the last one (BlitzScale §5.3: at least one copy of
every model stays in device or host memory). Losing a worker is not dropping: that happens to us.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.types import WorkerRef


class LastCopyError(Exception):
    """The copy is the model's last in the cluster's memory, or bytes are still read from it."""


@dataclass(slots=True)
class Copy:
    """One copy of a model: on devices, one worker per rank, or in the memory of an agent's host
    (then every rank is the agent's). A rank is complete when its load has reported so."""

    model: str
    workers: tuple[WorkerRef, ...]
    size_bytes: int
    complete_ranks: dict[int, None] = field(default_factory=dict)

    @property
    def holder(self) -> WorkerRef:
        """What the copy is called by: the worker of rank 0, or the agent."""
        return self.workers[0]

    @property
    def is_on_host(self) -> bool:
        return self.holder.is_agent

    @property
    def is_complete(self) -> bool:
        return len(self.complete_ranks) == len(self.workers)

    def __repr__(self) -> str:
        there = f"{len(self.complete_ranks)}/{len(self.workers)}"
        return f"<Copy of {self.model} on {self.holder}, {there} ranks>"


class ParameterPool:
    """All copies, complete or arriving, and the loads that read from them.

    `keeps_last` False is for baselines that rely on storage alone.
    """

    def __init__(self, keeps_last: bool = True) -> None:
        self._keeps_last = keeps_last
        #: grows with every change of copies, or of who reads from them
        self.version = 0
        self._copies: dict[str, dict[WorkerRef, Copy]] = {}
        #: (reader, model) per source: a copy that somebody reads from is not dropped
        self._reads: dict[WorkerRef, dict[tuple[str, str], None]] = {}
        #: models that leave the pool: their last copies may go
        self._retired: dict[str, None] = {}

    # -- what is there ------------------------------------------------------------------------

    def begin(self, model: str, workers: tuple[WorkerRef, ...], size: int) -> None:
        """A copy is arriving; `size` bytes of memory are its own from now on."""
        self.version += 1
        copies = self._copies.setdefault(model, {})
        assert workers[0] not in copies, f"{copies[workers[0]]!r} is there already"
        copies[workers[0]] = Copy(model, workers, size)

    def complete(self, model: str, holder: WorkerRef, rank: int) -> None:
        """All layers of a rank are there. Late news of a copy that is gone is ignored."""
        self.version += 1
        copy = self.find(model, holder)
        if copy is not None:
            copy.complete_ranks[rank] = None

    def find(self, model: str, holder: WorkerRef) -> Copy | None:
        return self._copies.get(model, {}).get(holder)

    def copies(self, model: str) -> list[Copy]:
        """Every copy of the model, arriving ones included, in the order of their holders."""
        return [copy for _, copy in sorted(self._copies.get(model, {}).items())]

    def holders(self, model: str) -> list[WorkerRef]:
        """Complete copies on devices, each named by the worker of its rank 0, in worker order."""
        return [c.holder for c in self.copies(model) if c.is_complete and not c.is_on_host]

    def host_copies(self, model: str) -> list[Copy]:
        """Copies in host memory, complete or arriving."""
        return [copy for copy in self.copies(model) if copy.is_on_host]

    # -- who reads ----------------------------------------------------------------------------

    def begin_read(self, reader: str, model: str, source: WorkerRef) -> None:
        self.version += 1
        self._reads.setdefault(source, {})[reader, model] = None

    def end_read(self, reader: str, model: str, source: WorkerRef) -> None:
        self.version += 1
        reads = self._reads.get(source, {})
        reads.pop((reader, model), None)
        if not reads:
            self._reads.pop(source, None)

    def readers(self, source: WorkerRef) -> int:
        """Loads that read from the worker or agent now, whatever the model."""
        return len(self._reads.get(source, ()))

    def _is_read(self, copy: Copy) -> bool:
        return any(
            model == copy.model
            for worker in dict.fromkeys(copy.workers)
            for _, model in self._reads.get(worker, ())
        )

    # -- what goes ----------------------------------------------------------------------------

    def can_drop(self, model: str, holder: WorkerRef) -> bool:
        """Nobody reads it, and another complete copy stays (or none is needed)."""
        copy = self.find(model, holder)
        if copy is None or self._is_read(copy):
            return False
        return not copy.is_complete or not self.is_last(model, holder)

    def is_last(self, model: str, holder: WorkerRef) -> bool:
        """No complete copy but this one is in the cluster's memory, and one must be."""
        if not self._keeps_last or model in self._retired:
            return False
        return not any(c.is_complete and c.holder != holder for c in self.copies(model))

    def drop(self, model: str, holder: WorkerRef) -> None:
        """Forget a copy on purpose. Raises LastCopyError when `can_drop` is False."""
        if not self.can_drop(model, holder):
            raise LastCopyError(f"{holder} keeps {model}: {self.copies(model)}, {self._reads}")
        self.version += 1
        del self._copies[model][holder]

    def forget(self, model: str, holder: WorkerRef) -> None:
        """A copy that was arriving did not come about. A complete one can only be dropped."""
        copy = self.find(model, holder)
        if copy is not None:
            assert not copy.is_complete, f"{copy!r} is forgotten"
            self.version += 1
            del self._copies[model][holder]

    def lose(self, worker: WorkerRef) -> None:
        """The worker or agent is gone with everything it held and sent."""
        self.version += 1
        for copies in self._copies.values():
            for holder in [h for h, copy in copies.items() if worker in copy.workers]:
                del copies[holder]
        self._reads.pop(worker, None)

    def retire(self, model: str) -> None:
        """The model leaves the pool: none of its copies has to stay."""
        self.version += 1
        self._retired[model] = None

    def forget_model(self, model: str) -> None:
        """The retired model has no copy left."""
        self.version += 1
        assert not self._copies.get(model), f"{self.copies(model)} are left"
        self._copies.pop(model, None)
        self._retired.pop(model, None)

    def __repr__(self) -> str:
        reads = sum(map(len, self._reads.values()))
        copies = ", ".join(f"{model}: {len(h)}" for model, h in self._copies.items())
        return f"<ParameterPool {copies or 'empty'}, {reads} reads>"
