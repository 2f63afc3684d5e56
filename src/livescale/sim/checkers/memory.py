"""What members are given fits into the memory they have: arenas, KV pools, hosts."""

from __future__ import annotations

from livescale.messages.commands import AnyCommand, StartHolding
from livescale.messages.events import AnyEvent, InstanceReported
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge


class MemoryChecker:
    """What is held of a model that is gone takes memory until it is dropped. A member carries out
    its orders one after the other: what it was told to drop makes room for what it is told to
    get."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    def absorb(self, event: AnyEvent) -> None:
        if isinstance(event, InstanceReported):
            is_within = 0 <= event.kv_blocks_used <= event.kv_blocks
            require(is_within, "KV blocks are not overdrawn", event)

    def check(self, command: AnyCommand) -> None:
        """After the knowledge has this command."""
        if isinstance(command, StartHolding):
            knowledge, member = self._knowledge, command.holding.member
            staying = [held.order.model for held in knowledge.on(member) if not held.is_leaving]
            # Of models that were gone before this life of the controller, nobody knows the size.
            held_bytes = sum(knowledge.sizes.get(model, 0) for model in staying)
            is_within = held_bytes <= knowledge.memory_bytes[member]
            require(is_within, "holdings fit their member's memory", command, held_bytes)
