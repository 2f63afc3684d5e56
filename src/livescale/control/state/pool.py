"""The ParameterPool: which layers of which model lie where in the cluster's memory.

Only the pool drops a copy, and it refuses the last one (BlitzScale §5.3: at least one copy of
every model stays in device or host memory). Losing a worker is not dropping: that happens to us.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from livescale.common.regions import lowest_gap
from livescale.control.state.copy_lists import CopyLists
from livescale.control.state.holdings import Copy, Holding, HoldingState
from livescale.control.state.members_in_use import MembersInUse
from livescale.control.state.reads import Reads
from livescale.control.state.spare_copies import SpareCopies, by_use
from livescale.control.state.stage_schedule import StageSchedule
from livescale.messages.commands import DropHolding, ReleaseHolding, StartHolding
from livescale.messages.events import WorkerLost
from livescale.values.types import HoldingId, InstanceId, PlanId, Value, WorkerRef


class LastCopyError(Exception):
    """The copy is the model's last in the cluster's memory, or bytes are still read from it."""


class ParameterPool:
    """All holdings, the copies that they make up, and the loads that read from them.

    `keeps_last` False is for baselines that rely on storage alone.
    """

    def __init__(self, keeps_last: bool = True) -> None:
        self._keeps_last = keeps_last
        self._of_member: dict[WorkerRef, dict[PlanId, Holding]] = {}
        self._lists = CopyLists()
        #: copies of which some ranks were not reported yet, those that are given up, and those in
        #: the memory of hosts, by what names them
        self._incomplete: dict[InstanceId, Copy] = {}
        self._given_up: dict[tuple[str, InstanceId | WorkerRef], Copy] = {}
        self._on_hosts: dict[tuple[str, WorkerRef], Copy] = {}
        self._spares = SpareCopies()
        #: members that hold more than warm spares
        self.in_use = MembersInUse()
        #: which stages are key, and which host was given which stage when
        self.schedule = StageSchedule()
        #: which loads read from whom, and the agents of hosts whose copies do not stay for others
        self.reads, self.guests = Reads(), self._lists.guests
        #: models that leave the pool: their last copies may go
        self.retired: dict[str, None] = {}

    # -- what is there ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change of copies, or of who reads from them."""
        return self._lists.version + self.reads.version

    def version_of(self, model: str) -> int:
        """Grows with every change of the model's copies."""
        return self._lists.version_of(model)

    def add(self, holding: Holding, ranks: int, size_bytes: int) -> Copy:
        """The holding was ordered, or a member reported it. Its copy has so many ranks and takes
        `size_bytes` of memory, all ranks together."""
        order, duty = holding.order, holding.order.duty
        copy = self._lists.find(order.model, holding.member if duty is None else duty.instance)
        if copy is None:
            members = (holding.member,) * ranks if duty is None else duty.workers
            instance = None if duty is None else duty.instance
            copy = Copy(order.model, members, size_bytes, instance)
            self._lists.add(copy)
            if duty is None:
                self._on_hosts[order.model, holding.member] = copy
        assert order.rank not in copy.ranks, f"{copy.ranks[order.rank]!r} is there already"
        copy.ranks[order.rank] = holding
        self._of_member.setdefault(holding.member, {})[order.holding.plan] = holding
        if duty is not None and copy.is_there:
            self._incomplete.pop(duty.instance, None)
        elif duty is not None and not copy.is_given_up:
            self._incomplete[duty.instance] = copy
        self._changed(copy)
        return copy

    def find(self, holding: HoldingId) -> Holding | None:
        """What the member has, or gets, by this plan."""
        return self._of_member.get(holding.member, {}).get(holding.plan)

    def on(self, member: WorkerRef) -> list[Holding]:
        """Everything that the member holds, or gets."""
        return list(self._of_member.get(member, {}).values())

    def has(self, member: WorkerRef, model: str) -> bool:
        """The member holds something of the model, or gets it."""
        return any(holding.order.model == model for holding in self.on(member))

    def holds_any(self, member: WorkerRef) -> bool:
        """The member holds something, or gets it."""
        return bool(self._of_member.get(member))

    def gap(
        self, member: WorkerRef, size_bytes: int, memory_bytes: int, without: Container[Copy] = ()
    ) -> int | None:
        """The lowest offset of a worker's memory from which so many bytes are free, or would be
        without these copies. What is ordered away takes none: it is gone when the next order is
        obeyed."""
        taken = []
        for holding in self.on(member):
            copy = self.copy_of(holding)
            if holding.state is not HoldingState.LEAVING and copy not in without:
                taken.append((holding.order.offset_bytes, copy.size_bytes // len(copy.members)))
        return lowest_gap(taken, size_bytes, memory_bytes)

    def copy_of(self, holding: Holding) -> Copy:
        """The copy that the holding is part of."""
        order = holding.order
        key = holding.member if order.duty is None else order.duty.instance
        copy = self._lists.find(order.model, key)
        assert copy is not None, f"{holding!r} is part of no copy"
        return copy

    def move(self, holding: Holding, cause: type[Value]) -> Copy:
        """News of the holding. Returns its copy; what is gone leaves the pool."""
        copy, before = self.copy_of(holding), holding.state
        holding.move(cause)
        if holding.state is HoldingState.GONE:
            del copy.ranks[holding.order.rank]
            del self._of_member[holding.member][holding.id.plan]
            self._look_at_use(holding.member)
            self.give_up(copy)
        elif holding.state is not before:
            # What depends on the pool need not look again at every layer.
            self._changed(copy)
        return copy

    def copies(self, model: str) -> list[Copy]:
        """Every copy of the model that may be read, arriving ones included, in the order of their
        holders."""
        return list(self._lists.of(model).there)

    def count_holders(self, model: str) -> int:
        """How many complete copies are on devices."""
        return len(self._lists.of(model).on_devices)

    def whole(self, model: str, rank: int) -> list[Holding]:
        """Whole holdings of a rank that may be read, in the order of their copies."""
        return [copy.ranks[rank] for copy in self.copies(model) if copy.ranks[rank].is_whole]

    def on_hosts(self) -> Iterable[Copy]:
        """All copies in the memory of hosts, those that go included."""
        return self._on_hosts.values()

    def on_host(self, model: str, agent: WorkerRef) -> Copy | None:
        """The copy in this host's memory; one that goes takes memory until it is gone."""
        return self._on_hosts.get((model, agent))

    def host_copies(self, model: str) -> list[Copy]:
        """Copies in the memory of the pool's hosts, complete or arriving, that stay."""
        return list(self._lists.of(model).on_hosts)

    def has_any(self, model: str) -> bool:
        """Some member holds something of the model, or gets it."""
        return self._lists.has_any(model)

    # -- warm spares --------------------------------------------------------------------------

    def release(self, copy: Copy, now_ns: int) -> list[ReleaseHolding]:
        """The copy's instance ends; its bytes stay as a warm spare until they are dropped."""
        assert copy.instance is not None, f"{copy!r} is no instance's"
        assert copy.is_there, f"{copy!r} lacks ranks"
        copy.used_ns = now_ns
        self._spares.add(copy, copy.instance)
        orders = copy.release()
        self._changed(copy)
        return orders

    def take_up(self, copy: Copy, orders: Sequence[StartHolding]) -> Copy:
        """A warm spare becomes an instance's copy, by one order for each rank."""
        assert copy.instance is not None, f"{copy!r} is no instance's"
        assert copy.instance in self._spares, f"{copy!r} is no spare"
        self._spares.remove(copy.instance)
        self._lists.remove(copy)
        for holding in copy.ranks.values():
            holding.move(StartHolding)
            del self._of_member[holding.member][holding.id.plan]
        for order in orders:
            holding = Holding(order, order.span.stop, HoldingState.WAKING)
            woken = self.add(holding, len(orders), copy.size_bytes)
        self._changed(copy)
        return woken

    def spares(self, model: str | None = None) -> list[Copy]:
        """The warm spares (of one model), least recently used first."""
        return self._spares.listed(model)

    def idle_spares(self, model: str) -> list[Copy]:
        """The model's warm spares whose workers are in no instance, least recently used first."""
        return sorted(self.iter_idle_spares(model), key=by_use)

    def iter_idle_spares(self, model: str) -> Iterator[Copy]:
        """The same in no order: a model may have very many, which are counted in every step."""
        return (c for c in self._spares.of(model) if not self.in_use.has_any_of(c.members))

    def take_changed_spares(self) -> dict[str, None]:
        """Models whose warm spares changed since the last call."""
        return self._spares.take_changed()

    def spares_to_drop(self) -> list[Copy]:
        """Warm spares that may all go together, least recently used first: nothing reads them,
        and every model keeps a complete copy that is needed."""
        found = [copy for copy in self.spares() if not self.reads.are_of(copy)]
        last: dict[str, Copy] = {copy.model: copy for copy in found}
        going = dict.fromkeys(found)
        kept = [
            copy
            for model, copy in last.items()
            if self._needs_copy(model)
            and not any(other not in going for other in self._lists.of(model).lasting)
        ]
        return [copy for copy in found if copy not in kept]

    # -- what goes ----------------------------------------------------------------------------

    def can_drop(self, copy: Copy) -> bool:
        """No member reads it, and another complete copy stays (or none is needed)."""
        if copy.is_given_up or self.reads.are_of(copy):
            return False
        return not copy.is_complete or not self.is_last(copy)

    def is_last(self, copy: Copy) -> bool:
        """Nothing but this copy keeps the model in the cluster's memory, as something must."""
        if not self._needs_copy(copy.model) or copy.holder in self.guests:
            return False
        return not any(other is not copy for other in self._lists.of(copy.model).lasting)

    def _needs_copy(self, model: str) -> bool:
        return self._keeps_last and model not in self.retired

    def drop(self, copy: Copy, reason: str) -> list[DropHolding]:
        """Give a copy up on purpose. Raises LastCopyError when `can_drop` is False."""
        if not self.can_drop(copy):
            raise LastCopyError(f"{copy!r} stays: {self.copies(copy.model)}, {self.reads}")
        orders = copy.drop(reason)
        self.give_up(copy)
        return orders

    def give_up(self, copy: Copy) -> None:
        """The copy can never be whole: what is left of it is dropped. Nothing happens to one that
        is given up already, but that it leaves the pool with its last rank."""
        copy.is_given_up = True
        name = (copy.model, copy.key)
        self._changed(copy)
        if copy.instance is not None:
            self._incomplete.pop(copy.instance, None)
            self._spares.remove(copy.instance)
        if copy.ranks:
            self._given_up[name] = copy
            return
        self._given_up.pop(name, None)
        self._lists.remove(copy)
        self._on_hosts.pop((copy.model, copy.holder), None)

    def is_incomplete(self, instance: InstanceId) -> bool:
        """Some ranks of the instance were reported, and others may be."""
        return instance in self._incomplete

    def incomplete(self) -> list[Copy]:
        """Copies on devices of which some ranks were reported, and others may be."""
        return list(self._incomplete.values())

    def drop_remainders(self) -> list[DropHolding]:
        """Orders for what is left of copies that are given up."""
        orders = []
        for copy in self._given_up.values():
            dropped = copy.drop("the copy can never be whole")
            if dropped:
                self._changed(copy)
            orders += dropped
        return orders

    def remainders(self) -> int:
        """Workers that hold something of copies that are given up, and else warm spares alone."""
        left = [h for c in self._given_up.values() if not c.is_on_host for h in c.ranks.values()]
        members = dict.fromkeys(holding.member for holding in left)
        return sum(
            all(h.state is HoldingState.SPARE or self.copy_of(h).is_given_up for h in self.on(m))
            for m in members
        )

    def lose(self, member: WorkerRef) -> None:
        """The worker or agent is gone with everything it held and sent."""
        for holding in self.on(member):
            self.move(holding, WorkerLost)
        self._of_member.pop(member, None)
        self.reads.lose(member)

    def retire(self, model: str) -> None:
        """The model leaves the pool: none of its copies has to stay."""
        self._lists.touch(model)
        self.retired[model] = None

    def forget_model(self, model: str) -> None:
        """The retired model has no copy left."""
        self._lists.touch(model)
        self._lists.forget_model(model)
        self.retired.pop(model, None)

    def _changed(self, copy: Copy) -> None:
        """What is read of the copies, and who is in use, may be another now."""
        self._lists.changed(copy)
        for member in copy.members:
            self._look_at_use(member)

    def _look_at_use(self, member: WorkerRef) -> None:
        self.in_use.look(member, self._of_member.get(member, {}).values())

    def __repr__(self) -> str:
        return f"<ParameterPool {self._lists!r}, {self.reads!r}>"
