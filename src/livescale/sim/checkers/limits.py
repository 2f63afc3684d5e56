"""A model's limits hold by themselves: nothing has to happen first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from livescale.control.state.config import ControllerConfig
from livescale.messages.events import AnyEvent, Tick
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.scaling_policies import RoleLimits
from livescale.values.types import InstanceId, Role

_PATIENCE_NS = 1_000_000_000


class LimitChecker:
    """Of one life of a controller, as long as nothing but the time is news to it.

    A second after the last event, and after the last change of limits by a schedule, no model has
    more instances than it may have, but for those that drain. While instances load, those that
    serve may have to stay.
    """

    def __init__(self, knowledge: Knowledge, config: ControllerConfig) -> None:
        self._knowledge = knowledge
        self._wall_ns = config.wall_ns
        self._patience_ns = _PATIENCE_NS + config.settle_ns
        #: since when there was no event
        self._quiet_since_ns: int | None = None

    def check(self, now_ns: int, received: Sequence[AnyEvent]) -> None:
        """Before the knowledge has these events."""
        since_ns = self._quiet_since_ns
        if since_ns is not None and now_ns >= since_ns + self._patience_ns:
            self._check_all(since_ns, now_ns)
        if since_ns is None or any(not isinstance(event, Tick) for event in received):
            self._quiet_since_ns = now_ns

    def at_rest(self, now_ns: int) -> None:
        """Nothing happens any more: least numbers hold, too."""
        self._check_all(now_ns, now_ns)
        for name in self._served():
            policy, holders = self._knowledge.policies[name], self._knowledge.holders(name)
            least = policy.limits_at(self._wall_ns + now_ns)[0]
            rule = "every model comes to its least number of instances"
            require(len(holders) >= least, rule, name, holders, least)

    # -- helpers, in the order used -------------------------------------------------------------

    def _check_all(self, since_ns: int, now_ns: int) -> None:
        """The limits that held all the time until now."""
        for name in self._served():
            if self._knowledge.loading(name):
                continue
            policy, counts = self._knowledge.policies[name], self._counts(name)
            for limits in policy.roles:
                self._check(name, limits.role, counts[limits.role], limits.instances_max)
            times_ns = (since_ns, now_ns - _PATIENCE_NS, now_ns)
            most = max(policy.limits_at(self._wall_ns + at_ns)[1] for at_ns in times_ns)
            self._check(name, None, counts.total(), most)

    def _served(self) -> list[str]:
        known = self._knowledge
        return [n for n in known.policies if n in known.specs and n not in known.withdrawn]

    def _counts(self, model: str) -> Counter[Role]:
        """Instances by role that do not drain. One of a role that the model does not have (any
        more) counts for the first one."""
        known, policy = self._knowledge, self._knowledge.policies[model]
        staying = [i for i in known.holders(model) if i not in known.draining]
        return Counter(_role(policy.roles, self._role(model, instance)) for instance in staying)

    def _role(self, model: str, instance: InstanceId) -> Role:
        duty = self._knowledge.ranks(model, instance)[0].order.duty
        return Role.UNIFIED if duty is None else duty.role

    def _check(self, model: str, role: Role | None, count: int, most: int) -> None:
        rule = "limits hold without anything else that happens"
        require(count <= most, rule, model, role, count, most)


def _role(roles: Sequence[RoleLimits], role: Role) -> Role:
    known = [limits.role for limits in roles]
    return role if role in known or not known else known[0]
