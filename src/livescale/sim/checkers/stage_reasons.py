"""Every stage that grows says why, with the numbers that led to it."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.messages.commands import AnyCommand, Resume, ScaleDecided, StartHolding
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge


def check_stage_reasons(knowledge: Knowledge, ordered: Sequence[AnyCommand]) -> None:
    """After the knowledge has all commands of a step: a stage of which an instance begins or goes
    on has a notice in the same step, with a reason and its numbers."""
    grown = [c.model for c in ordered if isinstance(c, StartHolding) and c.duty is not None]
    grown += [knowledge.model_of(c.instance) for c in ordered if isinstance(c, Resume)]
    for name in dict.fromkeys(grown):
        policy = knowledge.policies.get(name)
        if policy is not None and policy.spec.stage is not None:
            told = [c for c in ordered if isinstance(c, ScaleDecided) and _grows(c, name)]
            has_all = bool(told) and all(c.reason and c.values for c in told)
            require(has_all, "a stage that grows says why", name, told)


def _grows(command: ScaleDecided, name: str) -> bool:
    return command.model == name and command.to_instances > command.from_instances
