"""What members are given fits into the memory they have: arenas, KV pools, hosts."""

from __future__ import annotations

from livescale.messages.commands import AnyCommand, DropCopy, StartCopy, StartLoad
from livescale.messages.events import AnyEvent, InstanceReported
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.types import PlanId, WorkerRef


class MemoryChecker:
    """Copies of a model that is gone take memory until they are dropped. An agent carries out its
    orders one after the other: what it was told to drop makes room for what it is told to get."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._dropping: dict[PlanId, None] = {}

    def absorb(self, event: AnyEvent) -> None:
        if isinstance(event, InstanceReported):
            is_within = 0 <= event.kv_blocks_used <= event.kv_blocks
            require(is_within, "KV blocks are not overdrawn", event)

    def check(self, command: AnyCommand) -> None:
        """After the knowledge has this command."""
        if isinstance(command, StartLoad):
            size_bytes = self._knowledge.sizes[command.model]
            arena_bytes = self._knowledge.devices[command.worker].arena_bytes
            require(size_bytes <= arena_bytes, "a model fits the arena", command, size_bytes)
        elif isinstance(command, DropCopy):
            self._dropping[command.plan] = None
        elif isinstance(command, StartCopy):
            memory_bytes = self._knowledge.hosts[command.agent].memory_bytes
            held_bytes = self._held_bytes(command.agent)
            require(held_bytes <= memory_bytes, "copies fit the host", command, held_bytes)

    def _held_bytes(self, agent: WorkerRef) -> int:
        """All that the host was told to hold and not told to drop, as far as this life of the
        controller knows its size."""
        copies = self._knowledge.copies.items()
        held = [(key[0], plan) for key, plan in copies if key[1] == agent]
        there = [model for model, plan in held if plan not in self._dropping]
        return sum(self._knowledge.sizes.get(model, 0) for model in there)
