"""Members that can hold nothing new for a while: an agent without memory, a worker whose executor
refuses every model."""

from __future__ import annotations

from livescale.sim.clock import Clock
from livescale.types import WorkerRef


class Refusals:
    """Which members refuse until when, and which models they have refused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ns: dict[WorkerRef, int] = {}
        self._refused_ns: dict[str, int] = {}

    def begin(self, member: WorkerRef, until_ns: int) -> None:
        """The member refuses until then."""
        self._until_ns[member] = until_ns

    def refuses(self, member: WorkerRef, model: str) -> bool:
        """Whether the member refuses the model now; if so, this is remembered."""
        if self._clock.now_ns >= self._until_ns.get(member, 0):
            return False
        self._refused_ns[model] = self._clock.now_ns
        return True

    def were_there(self, model: str, since_ns: int) -> bool:
        """A member has refused the model at that time or later."""
        return self._refused_ns.get(model, -1) >= since_ns
