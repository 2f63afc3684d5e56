"""Copies of key stages leave some memory of their host free."""

from __future__ import annotations

from livescale.messages.commands import StartHolding
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.copy_strategies import KeyStageCopies, Placement


def check_key_copy(knowledge: Knowledge, placement: Placement, command: StartHolding) -> None:
    """After the knowledge has this command: a copy for a key stage, or of what an instance has and
    keeps, takes `memory_percent` of the host's memory at most, with all other copies there."""
    agent = command.holding.member
    if not isinstance(placement, KeyStageCopies) or not agent.is_agent:
        return
    require(bool(command.reason), "a copy has its reason", command)
    holders = knowledge.holders(command.model)
    is_last = all(instance in knowledge.draining for instance in holders)
    if is_last and not command.reason.startswith("key stage"):
        return
    used = sum(knowledge.sizes.get(held.order.model, 0) for held in knowledge.on(agent))
    most = knowledge.memory_bytes[agent] * placement.memory_percent // 100
    rule = "copies of key stages leave memory of their host free"
    require(used <= most, rule, command, used, most)
