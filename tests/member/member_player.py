"""A player of worlds of workers: a small controller and small gateways, driven by numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
from member_world import LAYER_BYTES, Shell, World, spec_of

from livescale.common.regions import ALIGNMENT_BYTES
from livescale.member.inputs import (
    ControllerMet,
    FeedEnded,
    FetchFailed,
    GatewayGone,
    MemberOrder,
    Ordered,
    Submitted,
)
from livescale.messages.attempts import Cancel, Disown
from livescale.messages.commands import (
    AmendHolding,
    ChangeDuty,
    DropHolding,
    ReleaseHolding,
    StartHolding,
)
from livescale.messages.events import HoldingFailed
from livescale.sim.checkers.live import live_batcher_of
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty, Partner, Taker
from livescale.values.types import (
    FromStorage,
    FromWorker,
    HoldingId,
    LayerSpan,
    PlanId,
    Role,
    WorkerRef,
)

ORDERS = ("zigzag", "zigzag", "best-effort", "overlap", "stop-the-world")
_FEEDS = (
    (Feed(FromStorage(), (ChunkRange(0, 9),)),),
    (Feed(FromWorker(WorkerRef(7)), (ChunkRange(0, 9),)),),
)
_ROUNDS_MAX = 3000

Move = tuple[str, int, int, bool]


@dataclass
class _Request:
    tokens: int
    outputs: int
    gateway: str
    attempt: int = 0


class Player:
    """Plays moves, then lets everything end."""

    def __init__(self, workers: int = 4) -> None:
        self.world = World(workers)
        self.instances: dict[int, tuple[WorkerRef, ...]] = {}
        #: the instance of every worker, as the controller knows
        self._assigned: dict[int, int] = {}
        #: the instances of which every worker keeps the bytes, and the orders for these
        self._spares: dict[int, list[int]] = {}
        self._orders: dict[PlanId, StartHolding] = {}
        #: warm spares that were used again
        self.woken = 0
        self._requests: list[_Request] = []
        #: the instance of every plan, which brings one rank of it
        self._plans: dict[PlanId, int] = {}

    def play(self, moves: list[Move]) -> Player:
        for what, first, second, is_stepped in moves:
            self.world.now_ns += 7
            getattr(self, f"_{what}")(first, second)
            if is_stepped:
                self._step_all()
        return self

    def end(self) -> Player:
        """Everything arrives and every request ends; then every model is taken away."""
        for number in range(len(self.world.shells)):
            # Those that it gave requests to may not have room for them, or be gone.
            self._role(number, 0)
        self._settle()
        for shell in self.world.shells:
            instance = shell.member.instance
            if instance is not None:
                live = live_batcher_of(instance)
                assert not shell.witness.stays, f"{shell.member} keeps {shell.witness.stays}"
                assert live.batcher.pool.used == 0
                assert instance.order.rank or live.is_full, "layers of a rank are unknown"
        for number in sorted(self._assigned):
            self._release(number, 0)
        for instance in self._kept():
            self._release_instance(instance)
        self._settle()
        for shell in self.world.shells:
            shell.check_rest()
        return self

    # -- moves ------------------------------------------------------------------------------------

    def _load(self, first: int, second: int) -> None:
        """A new instance, of one worker or of two."""
        free = [s for s in self.world.shells if s.ref.worker not in self._assigned]
        if not free:
            return
        first %= len(free)
        shells = [*free[first:], *free[:first]][: 2 if second % 5 == 4 else 1]
        instance = len(self.instances) + 1
        others = sorted(set(self._assigned.values()) | ({1} if instance > 1 else set()))
        live_order, gives_to = None, ()
        if second % 3 and others:
            other = others[second % len(others)]
            live_order = ORDERS[second % len(ORDERS)]
            gives_to = (Partner(other, self.instances[other][0]),)
        elif second % 4 == 3:
            live_order = "zigzag"
        workers = tuple(shell.ref for shell in shells)
        self.instances[instance] = workers
        offset_bytes = second // 3 % 2 * ALIGNMENT_BYTES
        for ref in workers:
            for spare in list(self._spares.get(ref.worker, ())):
                if self._offset_of(spare, ref) == offset_bytes:
                    self._release_instance(spare)
        for rank, shell in enumerate(shells):
            plan = len(self._plans) + 1
            self._plans[plan] = instance
            self._assigned[shell.ref.worker] = instance
            order = StartHolding(
                holding=HoldingId(plan, shell.ref),
                model=f"m{second % 2}",
                span=LayerSpan(0, len(LAYER_BYTES)),
                feeds=_FEEDS[second % 2],
                chunk_bytes=400,
                rank=rank,
                duty=Duty(instance, workers, live_order=live_order, gives_to=gives_to),
                measure_capacity=second % 2 == 0,
                offset_bytes=offset_bytes,
            )
            if second == 11:
                self.world.refused.add(plan)
            self._orders[plan] = order
            sizes = LAYER_BYTES if second != 10 else (9000,) * len(LAYER_BYTES)
            shell.inbox.append(Ordered(order, sizes, order.model))

    def _keep(self, first: int, second: int) -> None:
        """All ranks of an instance that is loaded become warm spares; sometimes they are so
        already."""
        known = sorted({*self._assigned.values(), *self._kept()})
        loaded = [number for number in known if self._is_loaded(number)]
        if not loaded:
            return
        instance = loaded[first % len(loaded)]
        for plan, ref in self._ranks(instance):
            shell = self.world.shell_of(ref)
            assert shell is not None
            self._order(shell, ReleaseHolding(HoldingId(plan, ref)))
            if instance not in self._spares.setdefault(ref.worker, []):
                del self._assigned[ref.worker]
                self._spares[ref.worker].append(instance)

    def _kept(self) -> list[int]:
        """The instances of which bytes are kept somewhere."""
        return sorted({instance for kept in self._spares.values() for instance in kept})

    def _offset_of(self, instance: int, ref: WorkerRef) -> int:
        plans = [plan for plan, member in self._ranks(instance) if member == ref]
        return self._orders[plans[0]].offset_bytes

    def _is_loaded(self, instance: int) -> bool:
        """Every rank is whole, as far as members have absorbed what they were told."""
        whole = {
            (shell.ref, holding.id.plan)
            for shell in self.world.shells
            for holding in shell.member.holdings
            if holding.is_whole
        }
        return all((ref, plan) in whole for plan, ref in self._ranks(instance))

    def _ranks(self, instance: int) -> list[tuple[PlanId, WorkerRef]]:
        plans = [plan for plan, brought in self._plans.items() if brought == instance]
        return list(zip(plans, self.instances[instance], strict=True))

    def _wake(self, first: int, second: int) -> None:
        """Warm spares become an instance; their executors may refuse the model."""
        kept = [
            number
            for number in self._kept()
            if not any(ref.worker in self._assigned for ref in self.instances[number])
        ]
        if not kept:
            return
        spare, instance = kept[first % len(kept)], len(self.instances) + 1
        self.woken += 1
        self.instances[instance] = workers = self.instances[spare]
        for rank, (before, ref) in enumerate(self._ranks(spare)):
            plan = len(self._plans) + 1
            self._plans[plan] = instance
            self._spares[ref.worker].remove(spare)
            self._assigned[ref.worker] = instance
            order = msgspec.structs.replace(
                self._orders[before],
                holding=HoldingId(plan, ref),
                feeds=(),
                rank=rank,
                duty=Duty(instance, workers),
                measure_capacity=second % 2 == 0,
                spare=before,
            )
            self._orders[plan] = order
            if second == 11:
                self.world.refused.add(plan)
            shell = self.world.shell_of(ref)
            assert shell is not None
            shell.inbox.append(Ordered(order, LAYER_BYTES, order.model))

    def _release(self, first: int, second: int) -> None:
        """One of the instances goes, all ranks of it; sometimes one that has gone already."""
        known = sorted(set(self._assigned.values())) or sorted(self.instances)
        if known:
            number = self._assigned.get(first, known[first % len(known)])
            self._release_instance(number)

    def _release_instance(self, instance: int) -> None:
        for plan, ref in self._ranks(instance):
            if instance in self._spares.get(ref.worker, ()):
                self._spares[ref.worker].remove(instance)
            shell = self.world.shell_of(ref)
            if shell is not None:
                shell.inbox.append(Ordered(DropHolding(HoldingId(plan, ref), "released")))
                if self._assigned.get(ref.worker) == instance:
                    del self._assigned[ref.worker]

    def _pair(self, first: int, second: int) -> None:
        """A target beside a whole instance, if there are workers for them, and requests for it."""
        known = len(self.instances)
        self._load(first, (0, 0, 6, 9)[second % 4])
        if len(self.instances) > known:
            shell = self.world.shell_of(self.instances[known + 1][0])
            assert shell is not None
            self._step_all()
            for _ in LAYER_BYTES:
                shell.bring_layer(0)
            self._step_all()
        self._load(first, (20, 1, 5, 7, 8)[second % 5])
        self._step_all()
        self._step_all()
        self._burst(first, second)

    def _apart(self, first: int, second: int) -> None:
        """An instance of two ranks, of which the second has everything before the first begins."""
        self._load(first, (4, 9, 14, 19)[second % 4])
        later = [shell for shell in self.world.shells if self._rank_of(shell) == 1]
        for _ in range(3):
            for shell in later:
                shell.step(len(shell.inbox))
                for _ in LAYER_BYTES:
                    shell.bring_layer(second)
            for way in self.world.open_ways():
                self.world.deliver(way)
        self._hear()

    def _burst(self, first: int, second: int) -> None:
        for place in range(2 + second % 3):
            self._submit(first, 2 * place + second % 2)

    def _amend(self, first: int, second: int) -> None:
        shell = self._shell(first)
        if shell.order is not None:
            self._order(shell, AmendHolding(shell.order.holding, _FEEDS[second % 2]))

    def _drain(self, first: int, second: int) -> None:
        """An instance is to become empty, or is wanted again."""
        order = self._shell(first).order
        if order is None or order.duty is None or len(order.duty.workers) > 1:
            return
        own = order.duty.instance
        others = sorted(set(self._assigned.values()) - {own})
        count = second % 4
        near = [Partner(other, self.instances[other][0]) for other in others][:count]
        takers = tuple(Taker(partner, (0, 1, 10**7)[second % 3]) for partner in near)
        duty = msgspec.structs.replace(order.duty, drains_to=takers)
        self._order(self._shell(first), ChangeDuty(order.holding, duty))

    def _split(self, first: int, second: int) -> None:
        """A prefill instance beside a decode instance, both whole, and requests for the first."""
        known = len(self.instances)
        self._load(first, 0)
        self._load(first, 0)
        new = [self.world.shell_of(refs[0]) for n, refs in self.instances.items() if n > known]
        if len(new) < 2:
            return
        self._step_all()
        for shell in new:
            assert shell is not None
            for _ in LAYER_BYTES:
                shell.bring_layer(0)
        for _ in range(3):
            self._step_all()
        giving = new[0]
        if giving is not None and giving.member.instance is not None:
            self._role(giving.ref.worker, 1)
            serving = [shell for shell in self.world.shells if shell.member.instance is not None]
            for place in range(2 + second % 3):
                self._submit(serving.index(giving), 3 + place)
            self._step_all()

    def _role(self, first: int, second: int) -> None:
        """An instance prefills for others, decodes, or does both."""
        order = self._shell(first).order
        if order is None or order.duty is None or len(order.duty.workers) > 1:
            return
        role = tuple(Role)[second % len(Role)]
        others = sorted(set(self._assigned.values()) - {order.duty.instance})
        near = tuple(Partner(other, self.instances[other][0]) for other in others)
        decodes_at = near[: 1 + second % 2] if role is Role.PREFILL else ()
        duty = msgspec.structs.replace(order.duty, role=role, decodes_at=decodes_at)
        self._order(self._shell(first), ChangeDuty(order.holding, duty))

    def _layer(self, first: int, second: int) -> None:
        self._shell(first).bring_layer(second)

    def _layers(self, first: int, second: int) -> None:
        for _ in LAYER_BYTES:
            self._shell(first).bring_layer(second)

    def _fail(self, first: int, second: int) -> None:
        shell = self._shell(first)
        for plan, transfer in shell.transfers.items():
            if transfer.missing:
                transfer.missing.clear()
                shell.inbox.append(FetchFailed(plan, "a checksum"))

    def _feed(self, first: int, second: int) -> None:
        shell = self._shell(first)
        for plan, transfer in shell.transfers.items():
            if transfer.missing:
                upstream = WorkerRef(second)
                shell.inbox.append(FeedEnded(plan, upstream, "gone", second % 2 == 0))

    def _meet(self, first: int, second: int) -> None:
        self._shell(first).inbox.append(ControllerMet())

    def _submit(self, first: int, second: int) -> None:
        """A new request, sometimes for an instance that is not there."""
        self._requests.append(_Request(1 + second % 6, 1 + first % 9, f"g{second % 2}"))
        self._attempt(len(self._requests) - 1, first, is_misled=second == 11)

    def _again(self, first: int, second: int) -> None:
        """A further attempt of a request, whatever became of the last one."""
        if self._requests:
            self._attempt(second % len(self._requests), first, is_misled=False)

    def _attempt(self, number: int, worker: int, *, is_misled: bool) -> None:
        serving = [s for s in self.world.shells if s.member.instance is not None]
        request = self._requests[number]
        shell = serving[worker % len(serving)] if serving and not is_misled else self._shell(worker)
        request.attempt += 1
        known = request.attempt % 3 if request.outputs > 2 else 0
        spec = spec_of(number + 1, request.attempt, request.tokens, request.outputs, known)
        instance = self._assigned.get(shell.ref.worker, 0) + is_misled
        shell.disconnected.discard(request.gateway)
        shell.inbox.append(Submitted(request.gateway, instance, spec))

    def _cancel(self, first: int, second: int) -> None:
        self._forget(Cancel, first, second)

    def _disown(self, first: int, second: int) -> None:
        self._forget(Disown, first, second)

    def _forget(self, message: type[Cancel | Disown], first: int, second: int) -> None:
        """Mostly to the one who has the attempt, and about the last one."""
        if self._requests:
            number = second % len(self._requests)
            shell = self._shell(first)
            attempt = self._requests[number].attempt
            owners = [
                s for s in self.world.shells if (f"r{number + 1}", attempt) in s.witness.stays
            ]
            shell = owners[0] if owners and first < 10 else shell
            shell.inbox.append(message(f"r{number + 1}", attempt))

    def _gone(self, first: int, second: int) -> None:
        shell = self._shell(first)
        shell.disconnected.add(f"g{second % 2}")
        shell.inbox.append(GatewayGone(f"g{second % 2}"))

    def _deliver(self, first: int, second: int) -> None:
        for _ in range(1 + second % 3):
            ways = self.world.open_ways()
            if ways:
                self.world.deliver(ways[first % len(ways)])

    def _refuse(self, first: int, second: int) -> None:
        ways = self.world.open_ways()
        if ways:
            self.world.deliver(ways[first % len(ways)], is_refused=True)

    def _cut(self, first: int, second: int) -> None:
        one, other = self._shell(first), self._shell(second)
        if one is not other:
            self.world.cut(one.ref, other.ref)

    def _die(self, first: int, second: int) -> None:
        shell = self._shell(first)
        lost = self._spares.pop(shell.ref.worker, [])
        instance = self._assigned.pop(shell.ref.worker, None)
        self.world.die(shell.ref.worker)
        for number in [*lost, *([instance] if instance is not None else [])]:
            self._release_instance(number)

    def _step(self, first: int, second: int) -> None:
        """One worker takes in a part of what waits."""
        self._shell(first).step(1 + second % 4, steps_max=1 + second % 3)
        self._hear()

    def _wait(self, first: int, second: int) -> None:
        self.world.now_ns += 100 * first

    def _run(self, first: int, second: int) -> None:
        """Messages come and Runs end for a while."""
        for _ in range(2 + second):
            for way in self.world.open_ways():
                self.world.deliver(way)
            self.world.now_ns += 20
            self._step_all()

    # -- helpers ----------------------------------------------------------------------------------

    def _shell(self, number: int) -> Shell:
        return self.world.shells[number % len(self.world.shells)]

    def _rank_of(self, shell: Shell) -> int:
        instance = self._assigned.get(shell.ref.worker)
        return self.instances[instance].index(shell.ref) if instance is not None else 0

    def _order(self, shell: Shell, order: MemberOrder) -> None:
        shell.inbox.append(Ordered(order))

    def _step_all(self) -> None:
        for shell in self.world.shells:
            wake_ns = shell.member.wake_ns()
            if shell.is_busy or (wake_ns is not None and wake_ns <= self.world.now_ns):
                shell.step(len(shell.inbox))
        self._hear()

    def _hear(self) -> None:
        """The controller releases what is left of an instance of which one rank has failed."""
        events, self.world.events = deque(self.world.events), []
        for ref, event in events:
            if not isinstance(event, HoldingFailed):
                continue
            instance = self._plans[event.holding.plan]
            if self._assigned.get(ref.worker) == instance:
                del self._assigned[ref.worker]
                self._release_instance(instance)

    def _settle(self) -> None:
        """Until nothing happens any more."""
        for _ in range(_ROUNDS_MAX):
            for way in self.world.open_ways():
                while self.world.ways[way]:
                    self.world.deliver(way)
            for shell in self.world.shells:
                shell.bring_layer(0)
            is_busy = any(shell.is_busy for shell in self.world.shells)
            wakes = [shell.member.wake_ns() for shell in self.world.shells]
            times = [at_ns for at_ns in wakes if at_ns is not None]
            if not is_busy and not self.world.open_ways():
                if not times:
                    return
                self.world.now_ns = max(self.world.now_ns, min(times))
            else:
                self.world.now_ns += 20
            self._step_all()
        raise AssertionError(f"no end: {[shell.member for shell in self.world.shells]}")
