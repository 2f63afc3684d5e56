"""The ParameterPool: which layers of which model lie where in the cluster's memory.

Only the pool drops a copy, and it refuses the last one (BlitzScale §5.3: at least one copy of
every model stays in device or host memory). Losing a worker is not dropping: that happens to us.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from livescale.common.regions import lowest_gap
from livescale.control.holdings import Copy, Holding, HoldingState
from livescale.messages.commands import DropHolding, ReleaseHolding, StartHolding
from livescale.messages.events import WorkerLost
from livescale.types import HoldingId, InstanceId, PlanId, Value, WorkerRef


class LastCopyError(Exception):
    """The copy is the model's last in the cluster's memory, or bytes are still read from it."""


class ParameterPool:
    """All holdings, the copies that they make up, and the loads that read from them.

    `keeps_last` False is for baselines that rely on storage alone.
    """

    def __init__(self, keeps_last: bool = True) -> None:
        self._keeps_last = keeps_last
        #: grows with every change of copies, or of who reads from them
        self.version = 0
        self._of_member: dict[WorkerRef, dict[PlanId, Holding]] = {}
        self._copies: dict[str, dict[InstanceId | WorkerRef, Copy]] = {}
        #: copies of which some ranks were not reported yet, those that are given up, and those in
        #: the memory of hosts, by what names them
        self._incomplete: dict[InstanceId, Copy] = {}
        self._given_up: dict[tuple[str, InstanceId | WorkerRef], Copy] = {}
        self._on_hosts: dict[tuple[str, WorkerRef], Copy] = {}
        #: warm spares: whole copies on devices that are no instance's
        self._spares: dict[InstanceId, Copy] = {}
        #: models whose warm spares changed since that was last asked
        self._spares_changed: dict[str, None] = {}
        #: (reader, model) per source: a copy that is read from is not dropped
        self._reads: dict[WorkerRef, dict[tuple[HoldingId, str], None]] = {}
        #: models that leave the pool: their last copies may go
        self._retired: dict[str, None] = {}

    # -- what is there ------------------------------------------------------------------------

    def add(self, holding: Holding, ranks: int, size_bytes: int) -> Copy:
        """The holding was ordered, or a member reported it. Its copy has so many ranks and takes
        `size_bytes` of memory, all ranks together."""
        self.version += 1
        order, duty = holding.order, holding.order.duty
        copies = self._copies.setdefault(order.model, {})
        copy = copies.get(holding.member if duty is None else duty.instance)
        if copy is None:
            members = (holding.member,) * ranks if duty is None else duty.workers
            instance = None if duty is None else duty.instance
            copy = Copy(order.model, members, size_bytes, instance)
            copies[copy.key] = copy
            if duty is None:
                self._on_hosts[order.model, holding.member] = copy
        assert order.rank not in copy.ranks, f"{copy.ranks[order.rank]!r} is there already"
        copy.ranks[order.rank] = holding
        self._of_member.setdefault(holding.member, {})[order.holding.plan] = holding
        if duty is not None and copy.is_there:
            self._incomplete.pop(duty.instance, None)
        elif duty is not None and not copy.is_given_up:
            self._incomplete[duty.instance] = copy
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

    def is_idle(self, member: WorkerRef) -> bool:
        """The member holds nothing but warm spares, and gets nothing."""
        held = self._of_member.get(member, {}).values()
        return all(holding.state is HoldingState.SPARE for holding in held)

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
        return self._copies[order.model][key]

    def move(self, holding: Holding, cause: type[Value]) -> Copy:
        """News of the holding. Returns its copy; what is gone leaves the pool."""
        copy, before = self.copy_of(holding), holding.state
        holding.move(cause)
        # What depends on the pool need not look again at every layer.
        self.version += holding.state is not before
        if holding.state is HoldingState.GONE:
            del copy.ranks[holding.order.rank]
            del self._of_member[holding.member][holding.id.plan]
            self.give_up(copy)
        return copy

    def copies(self, model: str) -> list[Copy]:
        """Every copy of the model that may be read, arriving ones included, in the order of their
        holders."""
        found = [copy for copy in self._copies.get(model, {}).values() if copy.is_there]
        return sorted(found, key=lambda copy: copy.holder)

    def holders(self, model: str) -> list[WorkerRef]:
        """Complete copies on devices, each named by the worker of its rank 0, in worker order."""
        return [c.holder for c in self.copies(model) if c.is_complete and not c.is_on_host]

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
        """Copies in host memory, complete or arriving, that stay."""
        return [copy for copy in self.copies(model) if copy.is_on_host]

    def has_any(self, model: str) -> bool:
        """Some member holds something of the model, or gets it."""
        return bool(self._copies.get(model))

    # -- warm spares --------------------------------------------------------------------------

    def release(self, copy: Copy, now_ns: int) -> list[ReleaseHolding]:
        """The copy's instance ends; its bytes stay as a warm spare until they are dropped."""
        assert copy.instance is not None, f"{copy!r} is no instance's"
        assert copy.is_there, f"{copy!r} lacks ranks"
        self.version += 1
        copy.used_ns = now_ns
        self._spares[copy.instance] = copy
        self._spares_changed[copy.model] = None
        return copy.release()

    def take_up(self, copy: Copy, orders: Sequence[StartHolding]) -> Copy:
        """A warm spare becomes an instance's copy, by one order for each rank."""
        assert copy.instance in self._spares, f"{copy!r} is no spare"
        self.version += 1
        del self._spares[copy.instance], self._copies[copy.model][copy.key]
        self._spares_changed[copy.model] = None
        for holding in copy.ranks.values():
            holding.move(StartHolding)
            del self._of_member[holding.member][holding.id.plan]
        for order in orders:
            holding = Holding(order, order.span.stop, HoldingState.WAKING)
            woken = self.add(holding, len(orders), copy.size_bytes)
        return woken

    def spares(self, model: str | None = None) -> list[Copy]:
        """The warm spares (of one model), least recently used first."""
        found = [copy for copy in self._spares.values() if model in (None, copy.model)]
        return sorted(found, key=lambda copy: (copy.used_ns, copy.holder))

    def idle_spares(self, model: str) -> list[Copy]:
        """The model's warm spares whose workers are in no instance, least recently used first."""
        own = self.spares(model)
        return [copy for copy in own if all(self.is_idle(member) for member in copy.members)]

    def take_changed_spares(self) -> dict[str, None]:
        """Models whose warm spares changed since the last call."""
        changed, self._spares_changed = self._spares_changed, {}
        return changed

    def spares_to_drop(self) -> list[Copy]:
        """Warm spares that may all go together, least recently used first: nothing reads them,
        and every model keeps a complete copy that is needed."""
        found = [copy for copy in self.spares() if not self._is_read(copy)]
        last: dict[str, Copy] = {copy.model: copy for copy in found}
        going = dict.fromkeys(found)
        kept = [
            copy
            for model, copy in last.items()
            if self._needs_copy(model)
            and not any(c.is_complete and c not in going for c in self.copies(model))
        ]
        return [copy for copy in found if copy not in kept]

    def is_retired(self, model: str) -> bool:
        """The model leaves the pool."""
        return model in self._retired

    # -- who reads ----------------------------------------------------------------------------

    def begin_read(self, reader: HoldingId, model: str, source: WorkerRef) -> None:
        self.version += 1
        self._reads.setdefault(source, {})[reader, model] = None

    def end_read(self, reader: HoldingId, model: str, source: WorkerRef) -> None:
        self.version += 1
        reads = self._reads.get(source, {})
        reads.pop((reader, model), None)
        if not reads:
            self._reads.pop(source, None)

    def readers(self, source: WorkerRef) -> int:
        """Loads that read from the worker or agent now, whatever the model."""
        return len(self._reads.get(source, ()))

    def _is_read(self, copy: Copy) -> bool:
        return any(
            model == copy.model
            for member in dict.fromkeys(copy.members)
            for _, model in self._reads.get(member, ())
        )

    # -- what goes ----------------------------------------------------------------------------

    def can_drop(self, copy: Copy) -> bool:
        """No member reads it, and another complete copy stays (or none is needed)."""
        if copy.is_given_up or self._is_read(copy):
            return False
        return not copy.is_complete or not self.is_last(copy)

    def is_last(self, copy: Copy) -> bool:
        """No complete copy but this one is in the cluster's memory, and one must be."""
        if not self._needs_copy(copy.model):
            return False
        return not any(c.is_complete and c is not copy for c in self.copies(copy.model))

    def _needs_copy(self, model: str) -> bool:
        return self._keeps_last and model not in self._retired

    def drop(self, copy: Copy, reason: str) -> list[DropHolding]:
        """Give a copy up on purpose. Raises LastCopyError when `can_drop` is False."""
        if not self.can_drop(copy):
            raise LastCopyError(f"{copy!r} stays: {self.copies(copy.model)}, {self._reads}")
        self.give_up(copy)
        return copy.drop(reason)

    def give_up(self, copy: Copy) -> None:
        """The copy can never be whole: what is left of it is dropped. Nothing happens to one that
        is given up already, but that it leaves the pool with its last rank."""
        self.version += 1
        copy.is_given_up = True
        name = (copy.model, copy.key)
        if copy.instance is not None:
            self._incomplete.pop(copy.instance, None)
            if self._spares.pop(copy.instance, None) is not None:
                self._spares_changed[copy.model] = None
        if copy.ranks:
            self._given_up[name] = copy
            return
        self._given_up.pop(name, None)
        self._copies[copy.model].pop(copy.key, None)
        self._on_hosts.pop((copy.model, copy.holder), None)

    def is_incomplete(self, instance: InstanceId) -> bool:
        """Some ranks of the instance were reported, and others may be."""
        return instance in self._incomplete

    def incomplete(self) -> list[Copy]:
        """Copies on devices of which some ranks were reported, and others may be."""
        return list(self._incomplete.values())

    def drop_remainders(self) -> list[DropHolding]:
        """Orders for what is left of copies that are given up."""
        left = self._given_up.values()
        return [order for copy in left for order in copy.drop("the copy can never be whole")]

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
        self.version += 1
        for holding in self.on(member):
            self.move(holding, WorkerLost)
        self._of_member.pop(member, None)
        self._reads.pop(member, None)

    def retire(self, model: str) -> None:
        """The model leaves the pool: none of its copies has to stay."""
        self.version += 1
        self._retired[model] = None

    def forget_model(self, model: str) -> None:
        """The retired model has no copy left."""
        self.version += 1
        assert not self._copies.get(model), f"{self._copies[model]} are left"
        self._copies.pop(model, None)
        self._retired.pop(model, None)

    def __repr__(self) -> str:
        reads = sum(map(len, self._reads.values()))
        copies = ", ".join(f"{model}: {len(h)}" for model, h in self._copies.items())
        return f"<ParameterPool {copies or 'empty'}, {reads} reads>"
