"""Warm spares: parameters that stay on released devices until another model needs the memory.

An instance that is released leaves its copy where it is. The next instance of the model on these
workers loads nothing (`take_up`), and meanwhile the copy is one more holder for multicasts. A
worker keeps as many models as its memory holds, also beside an instance; where there is no place
for another one, the spares that are least worth keeping go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from livescale.control.planning.copy_worth import CopyWorth
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.holdings import Copy
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState
from livescale.messages.commands import AnyCommand, DropHolding
from livescale.values.types import WorkerRef

NEEDED = "needed"
"""The spares that are worth most are kept (`copy_worth.py`)."""
# A link without a limit is the fastest.
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class _Room:
    """A place for a rank in a worker's memory: which spares go for it, and which stay beside it."""

    worker: WorkerRef
    offset_bytes: int
    going: tuple[Copy, ...]
    kept: tuple[Copy, ...]


class Spares(OfPool):
    """Which copies are kept, which are used again, and which give way. Orders only drops."""

    def __init__(self, known: PoolKnowledge, planning: Planning, worth: CopyWorth) -> None:
        super().__init__(known)
        self._keeping = known.config.warm_spares
        self._planning = planning
        self._worth_of = worth

    def keeps(self, instance: Instance) -> bool:
        """The instance's parameters stay when it is released."""
        is_wanted = self._keeping != "off" and instance.model not in self._pool.retired
        return is_wanted and instance.copy.is_complete

    def drop_unwanted(self) -> list[DropHolding]:
        """Orders for spares of models that leave the pool (for all, if none are to be kept)."""
        pool = self._pool
        if self._keeping != "off" and not pool.retired:
            return []
        unwanted = [
            copy for copy in pool.spares() if self._keeping == "off" or copy.model in pool.retired
        ]
        # One after the other: the last one that is needed stays.
        return [o for c in unwanted if pool.can_drop(c) for o in pool.drop(c, "not kept")]

    def to_wake(self, state: ModelState, count: int) -> list[Copy]:
        """At most so many spares that become instances of their model, of those whose workers are
        in no instance: those that others read last, because these will serve on busy links; then
        those that were used last."""
        own = self._usable(state)[::-1]
        own.sort(key=lambda copy: max(self._pool.reads.count(member) for member in copy.members))
        return own[:count]

    def roomy(self, state: ModelState) -> list[WorkerRef]:
        """Workers of no instance with room for the model beside what they hold, in id order."""
        return [room.worker for room in self._rooms(state, {}) if not room.going]

    def workers_for(self, state: ModelState) -> int:
        """How many workers the model can have at once: those with room, or with spares that may
        go, and those with spares of its own."""
        return len(self._workers(state, self._giving_way()))

    def workers_later(self, state: ModelState) -> int:
        """How many workers more the model can have when members that read spares have done so."""
        now, later = self._giving_way(), self._giving_way_later()
        if len(later) == len(now):
            return 0
        return len(self._workers(state, later)) - len(self._workers(state, now))

    def fitting(self, instances: Iterable[Instance], state: ModelState) -> list[Instance]:
        """Those of the instances on whose workers the model has a place when they are gone."""
        found = [
            instance
            for instance in instances
            if not (state.is_divided and any(map(self._fleet.is_engine, instance.workers)))
        ]
        can_load = self._planning.can_load(state)
        found = [instance for instance in found if all(map(can_load, instance.workers))]
        members = [worker for instance in found for worker in instance.workers]
        # There may be many instances and many spares: mostly there is nothing beside an instance.
        is_alone = all(len(self._pool.on(worker)) == 1 for worker in members)
        going = {} if is_alone else self._giving_way_later()
        return [i for i in found if all(self._fits_beside(w, i, state, going) for w in i.workers)]

    def targets_for(self, state: ModelState, workers: int) -> list[WorkerRef]:
        """Where ranks of new instances may go: to workers that hold nothing, and where these are
        too few, to those whose spares, driven out or locked up, are least worth keeping. So many
        workers, if there are, on the hosts whose memory has the model, too: loads that leave such a
        host share its NIC. Of all others half, so that the planner has a choice."""
        found = sorted(self._rooms(state, self._giving_way()), key=self._loss)
        empty = sum(not (room.going or room.kept) for room in found)
        count = empty if empty >= workers else max(workers, len(found) // 2)
        hosts = self._planning.hosts_with_copy(state.spec.name)
        near = [room for room in found if self._planning.topology.host_of(room.worker) in hosts]
        chosen = (*found[:count], *near[:workers])
        return sorted({room.worker for room in chosen})

    def rooms_for(self, state: ModelState) -> list[WorkerRef]:
        """All workers that ranks of new instances may go to, as `targets_for` ranks them."""
        found = sorted(self._rooms(state, self._giving_way()), key=self._loss)
        return [room.worker for room in found]

    def worth_of_rooms(self, state: ModelState) -> list[tuple[WorkerRef, int]]:
        """All workers that ranks of new instances may go to, and what is lost there at most (as
        `CopyWorth.of_spare`), the least first."""
        found = []
        for room in self._rooms(state, self._giving_way()):
            lost = map(self._worth_of.of_spare, (*room.going, *room.kept))
            found.append((max(lost, default=0), room.worker))
        return [(worker, lost) for lost, worker in sorted(found)]

    def give_way(
        self, targets: Sequence[Sequence[WorkerRef]], state: ModelState
    ) -> tuple[dict[WorkerRef, int], list[AnyCommand]]:
        """From where on the model's bytes will lie on the targets, and orders to drop the spares
        that lie there now."""
        offsets: dict[WorkerRef, int] = {}
        orders: list[AnyCommand] = []
        for worker in dict.fromkeys(worker for workers in targets for worker in workers):
            room = self._room(worker, state, self._giving_way())
            assert room is not None, f"{worker} has no room for {state!r}"
            for copy in room.going:
                orders += self._pool.drop(copy, f"makes room for {state.spec.name}")
            offsets[worker] = room.offset_bytes
        return offsets, orders

    def clear_for(self, spare: Copy) -> list[DropHolding]:
        """A spare is used again: orders for those that are of no use meanwhile."""
        reason = f"makes room for {spare.model}"
        return [o for copy in self._in_the_way(spare) for o in self._pool.drop(copy, reason)]

    # -- helpers ------------------------------------------------------------------------------

    def _workers(self, state: ModelState, giving_way: Mapping[Copy, None]) -> dict[WorkerRef, None]:
        """Those that the model can have if these spares go."""
        found = dict.fromkeys(room.worker for room in self._rooms(state, giving_way))
        return found | dict.fromkeys(w for c in self._usable(state) for w in c.members)

    def _usable(self, state: ModelState) -> list[Copy]:
        """The model's spares whose workers can be had, least recently used first."""
        idle, giving_way = self._pool.idle_spares(state.spec.name), self._giving_way()
        staying = [copy for copy in idle if not self._fleet.is_leaving(copy.members)]
        return [c for c in staying if all(other in giving_way for other in self._in_the_way(c))]

    def _in_the_way(self, spare: Copy) -> list[Copy]:
        """Other spares of several ranks on its workers: they would be of no use while one of these
        is in an instance."""
        pool = self._pool
        here = [pool.copy_of(holding) for member in spare.members for holding in pool.on(member)]
        others = dict.fromkeys(copy for copy in here if copy is not spare)
        return [copy for copy in others if len(copy.members) > 1 and not copy.is_given_up]

    def _rooms(self, state: ModelState, giving_way: Mapping[Copy, None]) -> list[_Room]:
        """Workers that can have a rank of a new instance if these spares go, in id order."""
        idle = self._fleet.idle(state.spec.size_bytes, engines=not state.is_divided)
        able = filter(self._planning.can_load(state), (record.ref for record in idle))
        rooms = [self._room(worker, state, giving_way) for worker in able]
        return [room for room in rooms if room is not None]

    def _room(
        self, worker: WorkerRef, state: ModelState, giving_way: Mapping[Copy, None]
    ) -> _Room | None:
        """The place of a new rank on the worker, for which as few and as worthless spares go as
        possible. A spare of several ranks always goes: it would be of no use for as long as the new
        instance has one of its workers."""
        pool, size_bytes = self._pool, state.spec.size_bytes
        memory_bytes = self._fleet.workers[worker.worker].device.arena_bytes
        if not pool.holds_any(worker):
            return _Room(worker, 0, (), ()) if size_bytes <= memory_bytes else None
        copies = [pool.copy_of(holding) for holding in pool.on(worker)]
        here = [copy for copy in copies if not copy.is_given_up]
        must_go = [copy for copy in here if copy.model == state.spec.name or len(copy.members) > 1]
        if any(copy not in giving_way for copy in must_go):
            return None
        going = list(must_go)
        others = [copy for copy in here if copy in giving_way and copy not in going]
        others.sort(key=self._worth)
        while pool.gap(worker, size_bytes, memory_bytes, going) is None:
            if not others:
                return None
            going.append(others.pop(0))
        # A gap between two that went last may do without what went before them.
        for copy in [copy for copy in going[-2::-1] if copy not in must_go]:
            fewer = [other for other in going if other is not copy]
            if pool.gap(worker, size_bytes, memory_bytes, fewer) is not None:
                going = fewer
        offset_bytes = pool.gap(worker, size_bytes, memory_bytes, going)
        assert offset_bytes is not None
        kept = [copy for copy in here if copy not in going]
        return _Room(worker, offset_bytes, tuple(going), tuple(kept))

    def _fits_beside(
        self, worker: WorkerRef, instance: Instance, state: ModelState, going: Mapping[Copy, None]
    ) -> bool:
        """The worker has room for the model beside what stays there when the instance is gone, or
        a spare of the model, which will be used again."""
        pool = self._pool
        copies = [pool.copy_of(holding) for holding in pool.on(worker)]
        staying = [c for c in copies if not (c in going or c is instance.copy or c.is_given_up)]
        if any(copy.model == state.spec.name for copy in staying):
            return True
        # As `_room`: these would be of no use.
        if any(len(copy.members) > 1 for copy in staying):
            return False
        gone = [copy for copy in copies if copy not in staying]
        memory_bytes = self._fleet.workers[worker.worker].device.arena_bytes
        return pool.gap(worker, state.spec.size_bytes, memory_bytes, gone) is not None

    def _giving_way(self) -> dict[Copy, None]:
        """Spares that may go together."""
        return dict.fromkeys(self._pool.spares_to_drop())

    def _giving_way_later(self) -> dict[Copy, None]:
        """These, and those that members read now and that no model needs as its last copy."""
        now = self._giving_way()
        read = [c for c in self._pool.spares() if self._pool.reads.are_of(c) and c not in now]
        return now | dict.fromkeys(copy for copy in read if not self._pool.is_last(copy))

    def _loss(self, room: _Room) -> tuple[tuple[int, ...], ...]:
        """How bad it is to take this room: the best of its spares counts, whether it goes or cannot
        be used meanwhile; then the best of those that go."""
        least = (-(_UNLIMITED + 1),)
        going = max(map(self._worth, room.going), default=least)
        kept = max(map(self._worth, room.kept), default=least)
        return max(going, kept), going, (room.worker.worker,)

    def _worth(self, copy: Copy) -> tuple[int, ...]:
        """Of two spares the one that is worth more: what is likely to be needed, or comes back
        slowly, if that is preferred, and what was used last."""
        if self._keeping == NEEDED:
            return self._worth_of.of_spare(copy), copy.used_ns, copy.holder.worker
        if self._keeping == "slow-links":
            return -self._rate(copy), copy.used_ns, copy.holder.worker
        return copy.used_ns, copy.holder.worker

    def _rate(self, copy: Copy) -> int:
        """How fast the model would come back to these devices (bytes per second)."""
        devices = self._planning.topology.devices
        rates = [devices[member].downlink_bytes_per_s for member in copy.members]
        return min(_UNLIMITED if rate is None else rate for rate in rates)
