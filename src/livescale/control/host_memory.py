"""What lies in hosts' memory: the copies that were ordered, rank by rank, and the room left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from livescale.control.fleet import Fleet
from livescale.control.placement import HostRoom
from livescale.messages.commands import AnyCommand, DropCopy
from livescale.types import PlanId, WorkerRef


@dataclass(slots=True)
class HostCopy:
    """What was ordered of one copy: the plan of each rank, until the agent has dropped it."""

    model: str
    agent: WorkerRef
    size_bytes: int
    plans: dict[int, PlanId]
    is_leaving: bool = False
    used_ns: int = 0
    #: ranks whose DropCopy is under way, and those that are not there any more
    dropping: dict[int, None] = field(default_factory=dict)
    gone: dict[int, None] = field(default_factory=dict)

    def drop(self, reason: str) -> list[AnyCommand]:
        """Orders for the ranks that are there and have not been ordered away."""
        commands: list[AnyCommand] = []
        for rank, plan in self.plans.items():
            if rank not in self.gone and rank not in self.dropping:
                self.dropping[rank] = None
                commands.append(DropCopy(self.model, self.agent, plan, reason, rank))
        return commands


class HostMemory:
    """The copies of all models on all hosts."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        #: by model and agent
        self._copies: dict[str, dict[WorkerRef, HostCopy]] = {}
        #: grows when a copy is added or gone
        self.changes = 0

    def add(self, copy: HostCopy) -> None:
        self.changes += 1
        self._copies.setdefault(copy.model, {})[copy.agent] = copy

    def remove(self, copy: HostCopy) -> None:
        self.changes += 1
        copies = self._copies[copy.model]
        del copies[copy.agent]
        if not copies:
            del self._copies[copy.model]

    def lose(self, agent: WorkerRef) -> None:
        """The agent is gone, and its host's copies with it."""
        self.changes += 1
        for copy in [copy for copy in self if copy.agent == agent]:
            self.remove(copy)

    def find(self, model: str, agent: WorkerRef) -> HostCopy | None:
        return self._copies.get(model, {}).get(agent)

    def of_model(self, model: str) -> list[HostCopy]:
        return list(self._copies.get(model, {}).values())

    def __iter__(self) -> Iterator[HostCopy]:
        return (copy for copies in self._copies.values() for copy in copies.values())

    def rooms(self) -> list[HostRoom]:
        """What is free on each host, in id order of the agents."""
        rooms = {
            record.ref: HostRoom(record.ref, record.host.memory_bytes)
            for record in self._fleet.living_agents()
        }
        for copy in self:
            rooms[copy.agent].free_bytes -= copy.size_bytes
            rooms[copy.agent].leaving_bytes += copy.size_bytes if copy.is_leaving else 0
        return list(rooms.values())
