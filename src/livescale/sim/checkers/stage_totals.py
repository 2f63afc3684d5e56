"""Stages of a model have no more replicas together than their policy allows (R_total)."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.messages.commands import AnyCommand, Resume, StartHolding
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.scaling_policies import LinePolicy, ScalingPolicy


class StageTotalChecker:
    """Of one life of a controller, whose models without a policy of their own scale by `scaling`.

    Looks where an instance begins or goes on, at instances that are no longer to end. What is there
    already when a total becomes smaller may stay until its requests are over.
    """

    def __init__(self, knowledge: Knowledge, scaling: ScalingPolicy) -> None:
        self._knowledge = knowledge
        self._scaling = scaling

    def check(self, ordered: Sequence[AnyCommand]) -> None:
        """After the knowledge has all commands of a step."""
        begun = [c.model for c in ordered if isinstance(c, StartHolding) and c.duty is not None]
        begun += [self._knowledge.model_of(c.instance) for c in ordered if isinstance(c, Resume)]
        policies = self._knowledge.policies
        stages = [policies[name].spec.stage for name in begun if name in policies]
        for model in dict.fromkeys(stage.model for stage in stages if stage is not None):
            self._check_line(model)

    def _check_line(self, model: str) -> None:
        line = [
            policy
            for policy in self._knowledge.policies.values()
            if policy.spec.stage is not None and policy.spec.stage.model == model
        ]
        totals = [
            scaling.replicas_total
            for scaling in (policy.scaling or self._scaling for policy in line)
            if isinstance(scaling, LinePolicy) and scaling.replicas_total is not None
        ]
        if not totals:
            return
        counts = {policy.spec.name: self._count(policy.spec.name) for policy in line}
        most = max(min(totals), sum(policy.instances_min for policy in line))
        rule = "stages have no more replicas together than they may have"
        require(sum(counts.values()) <= most, rule, counts, most)

    def _count(self, stage: str) -> int:
        known = self._knowledge
        placed = [i for i in known.instances(stage) if known.is_placed(stage, i)]
        return sum(instance not in known.draining for instance in placed)
