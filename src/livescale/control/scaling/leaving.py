"""Members that leave the pool in order: nothing new comes to them, their instances are drained, and
they may go when nothing is lost with them.
"""

from __future__ import annotations

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.holdings import Copy
from livescale.control.together.pairing import Pairings
from livescale.messages.commands import Drain, ScaleDecided
from livescale.messages.events import MembersLeave
from livescale.values.types import WorkerRef


class Leaving(OfPool):
    """Who leaves stands in the fleet, so that nothing is placed there."""

    def __init__(self, known: PoolKnowledge, planning: Planning, pairings: Pairings) -> None:
        super().__init__(known)
        self._planning = planning
        self._pairings = pairings

    def members_leave(self, event: MembersLeave, _now_ns: int) -> bool:
        """False if none of them is there, or all are known to leave."""
        new = [ref for ref in event.members if self._fleet.is_alive(ref)]
        new = [ref for ref in new if ref not in self._fleet.leaving]
        self._fleet.begin_leaving(new)
        return bool(new)

    def decide(self) -> list[ScaleDecided | Drain]:
        """Instances of those who leave are drained as soon as they serve and are in no live pair;
        what a model lacks then is made elsewhere."""
        if not self._fleet.leaving:
            return []
        commands: list[ScaleDecided | Drain] = []
        for _, instance in sorted(self._fleet.instances.items()):
            if not self._fleet.is_leaving(instance.workers):
                continue
            part = instance.part
            if instance in self._pairings.unpaired(part):
                before = self._fleet.tally(part).capacity
                commands.append(
                    ScaleDecided(part.model, part.role, before, before - 1, "its host leaves", {})
                )
                self._fleet.move(instance, Drain)
                commands.append(Drain(instance.id))
        return commands

    def free(self) -> tuple[WorkerRef, ...]:
        """Those that may go: no instance is on them, nothing is read from them, and of what they
        hold there is a whole copy, or a way to one, elsewhere. Guests are no such place."""
        return tuple(ref for ref in sorted(self._fleet.leaving) if self._may_go(ref))

    # -- helpers --------------------------------------------------------------------------------

    def _may_go(self, ref: WorkerRef) -> bool:
        if self._fleet.instance_on(ref) is not None or self._pool.reads.count(ref):
            return False
        copies = [self._pool.copy_of(holding) for holding in self._pool.on(ref)]
        if self._router.on_worker(ref) or not all(copy.is_there for copy in copies):
            # Requests of an instance that has ended may be on their way back, and what an instance
            # lacks may still be reported.
            return False
        return all(self._is_elsewhere(copy) for copy in copies)

    def _is_elsewhere(self, copy: Copy) -> bool:
        state = self._states.get(copy.model)
        if not copy.is_complete or state is None or state.is_leaving:
            return True
        # One that wakes may fail, and then its bytes are gone.
        others = [
            c
            for c in self._pool.copies(copy.model)
            if c.is_complete and not c.is_waking and c is not copy
            if c.holder not in self._pool.guests
        ]
        if any(not self._fleet.is_leaving(other.members) for other in others):
            return True
        topology = self._planning.topology
        staying = [
            member
            for member in (*topology.devices, *topology.agents)
            if member not in self._fleet.leaving and member not in self._pool.guests
        ]
        return any(map(topology.reads_files, staying))

    def __repr__(self) -> str:
        return f"<Leaving {', '.join(map(str, self._fleet.leaving)) or 'none'}>"
