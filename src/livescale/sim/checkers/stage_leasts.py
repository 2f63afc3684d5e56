"""A stage keeps its least number of replicas (QUART's r_min) whenever one of them drains."""

from __future__ import annotations

from livescale.messages.commands import AnyCommand, Drain
from livescale.sim.checkers.departures import DepartureChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge


class StageLeastChecker:
    """Of one life of a controller, whose wall clock is at `wall_ns` at time 0.

    Replicas that load count as those that serve do. Those of a model that is withdrawn go, and
    those on hosts that leave.
    """

    def __init__(self, knowledge: Knowledge, departures: DepartureChecker, wall_ns: int) -> None:
        self._knowledge = knowledge
        self._departures = departures
        self._wall_ns = wall_ns

    def check(self, now_ns: int, command: AnyCommand) -> None:
        """Before the knowledge has this command."""
        if not isinstance(command, Drain):
            return
        known, drained = self._knowledge, command.instance
        stage = known.model_of(drained)
        policy = known.policies.get(stage)
        if policy is None or policy.spec.stage is None or stage in known.withdrawn:
            return
        if self._departures.is_leaving(stage, drained):
            return
        placed = [i for i in known.instances(stage) if known.is_placed(stage, i)]
        staying = [i for i in placed if i not in known.draining and i != drained]
        least = policy.limits_at(self._wall_ns + now_ns)[0]
        require(len(staying) >= least, "stages keep their least number", command, staying, least)
