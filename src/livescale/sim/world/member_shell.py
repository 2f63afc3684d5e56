"""A member of the simulated world: the production Member, and a shell that lives in virtual time.

Effects are carried out over the clock, links and latency models; nothing is decided here. As on a
real member's thread, inputs wait while a Run is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from livescale.batching.lines.stage_batcher import StageBatcher
from livescale.batching.lines.team_batcher import TeamBatcher
from livescale.batching.runs.run import Run
from livescale.clusters.topology import Device, Host
from livescale.member import effects, inputs
from livescale.member.fence import Fence
from livescale.member.instance import HostedInstance, ServingLimits
from livescale.member.member import ADDRESS_SPACES, Member
from livescale.messages.attempts import AttemptTaken
from livescale.messages.commands import DropHolding, ReleaseHolding, StartHolding
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import AnyEvent, RequestEnded
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SimConfig
from livescale.sim.base.poison import Poison
from livescale.sim.checkers.fencing import FenceChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.live import LiveChecker, LiveEffect
from livescale.sim.checkers.members import MemberChecker
from livescale.sim.links.transfers import Transfers
from livescale.sim.world.executor import SimExecutor
from livescale.sim.world.gateway import FromWorkerMessage, SimTokens
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import (
    AGENT_NUMBERS_FROM,
    FromWorker,
    ModelSpec,
    PlanId,
    RequestId,
    WorkerRef,
)

_STEPS_MAX = 1 << 20
_PROGRESS = inputs.RunEnded | inputs.LayersRan
_OF_BYTES = (effects.Release, effects.Reach, effects.KeepLayers, effects.ForgetRows)
"""Effects that mean nothing where bytes have no values."""


@dataclass(slots=True)
class _Arrival:
    """A holding as the simulated transfers know it."""

    order: StartHolding
    spec: ModelSpec
    feeds: tuple[Feed, ...]
    is_asked_for: bool = False

    @property
    def key(self) -> tuple[WorkerRef, str, int]:
        return self.order.holding.member, self.order.model, self.order.rank


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all members of a world share. `report` sends a member's events to the controller, `emit`
    its answers to the gateway of a name, `tell` its messages to other workers; it is `killed` by a
    request of the `poison`."""

    config: SimConfig
    clock: Clock
    transfers: Transfers
    checker: MemberChecker
    fences: FenceChecker
    live_checker: LiveChecker
    report: Callable[[WorkerRef, AnyEvent], None]
    emit: Callable[[WorkerRef, str, FromWorkerMessage], None]
    poison: Poison
    killed: Callable[[WorkerRef], None]
    tell: Callable[[WorkerRef, effects.TellPeer], None]


class SimMember:
    """One life of a worker, which has a device, or of an agent, which has a host."""

    def __init__(self, ref: WorkerRef, around: Surroundings) -> None:
        self.ref = ref
        self._around = around
        self._config = config = around.config
        self._clock = around.clock
        self.device: Device | None = None
        self.host: Host | None = None
        self._executor: SimExecutor | None = None
        if ref.is_agent:
            self.host = config.hosts[ref.worker - AGENT_NUMBERS_FROM]
            size_bytes = self.host.memory_bytes
            self.member = Member(ref, size_bytes, address_bytes=ADDRESS_SPACES * size_bytes)
        else:
            self.device = config.device(ref.worker)
            limits = ServingLimits(
                kind=self.device.kind,
                live=config.live,
                resident_bytes=config.resident_bytes,
                report_gap_ns=config.report_gap_ns,
            )
            self.member = Member(ref, self.device.arena_bytes, limits)
            self._executor = SimExecutor(config, self.device, around.clock, around.poison, self)
        #: which controllers may be met
        self.fence = Fence()
        #: until then there is no memory, or the executor fails
        self.refuses_until_ns = 0
        self._inbox: list[inputs.MemberInput] = []
        #: how far the member's clock is ahead of the world's
        self._ahead_ns = 0
        self._is_stepping = self._is_dead = False
        self._arrivals: dict[PlanId, _Arrival] = {}
        #: the order of the instance that the checkers were shown last
        self._duty: StartHolding | None = None
        self._alarm: tuple[int, int] | None = None
        #: the instance that the checkers know
        self._shown: HostedInstance | None = None
        #: attempts that came from other instances
        self._taken: dict[tuple[RequestId, int], None] = {}
        self._carry: dict[type, Callable[[Any], None]] = {
            effects.Report: self._report,
            effects.Answer: self._answer,
            effects.Emit: self._emit,
            effects.TellPeer: self._tell,
            effects.Refuse: self._refuse,
            effects.RefuseOrder: lambda effect: around.fences.refused(ref, effect.command),
            effects.Fetch: self._fetch,
            effects.TakeUp: self._take_up,
            effects.AmendFetch: self._amend,
            effects.DropFetch: self._drop,
            effects.Assign: self._assign,
            effects.Materialize: self._show,
            effects.Measure: self._measure,
            effects.UseCores: lambda its: self._inbox.insert(0, self.executor.use_cores(its.cores)),
            effects.Execute: self._execute,
            effects.TakeOver: self._show,
            effects.WriteKv: self._show,
            **dict.fromkeys(_OF_BYTES, lambda _: None),
        }

    # -- life -----------------------------------------------------------------------------------

    def die(self) -> None:
        """Nothing of this incarnation happens any more."""
        self._is_dead = True
        self._inbox.clear()
        self._set_alarm()
        if self._executor is not None:
            self._executor.stop()
        self._around.live_checker.leaves(self.ref)
        self._around.transfers.node_gone(self.ref)
        self._arrivals.clear()

    def come_to_rest(self) -> None:
        """The world is over: nothing of its requests is left."""
        if self.member.instance is not None:
            serving = self.member.instance.serving
            assert isinstance(serving, TeamBatcher | StageBatcher), f"{serving!r}"
            serving.validate()
            self._around.checker.at_rest(self.ref, serving.kv_in_use)

    # -- what comes in --------------------------------------------------------------------------

    def take_order(self, order: inputs.MemberOrder, *, epoch: ControllerEpoch) -> None:
        """An order of a controller, in whichever life."""
        ordered = inputs.Ordered(order, epoch=epoch)
        if isinstance(order, StartHolding):
            layer_bytes = self._config.spec(order.model).layer_bytes
            ordered = inputs.Ordered(order, layer_bytes, order.model, epoch)
        elif isinstance(order, DropHolding | ReleaseHolding) and self.device is not None:
            holdings, instance = self.member.holdings, self.member.instance
            if self.fence.admits(epoch):
                self._around.checker.taken_back(order, holdings, instance, self._taken)
        self._around.fences.ordered(self.ref, order, epoch)
        self.put(ordered)

    def jump_ahead(self, jump_ns: int) -> None:
        """The member's clock jumps."""
        self._ahead_ns += jump_ns
        self._set_alarm()

    def put(self, news: inputs.MemberInput) -> None:
        """Now, or when the Run in flight is over."""
        if self._is_dead:
            return
        self._inbox.append(news)
        if not self.is_idle:
            self.executor.end_stretch()
        elif not self._is_stepping:
            self._step()

    @property
    def is_idle(self) -> bool:
        """No Run is in flight."""
        return self._executor is None or self._executor.is_idle

    def __repr__(self) -> str:
        return f"<SimMember {self.member!r}>"

    # -- the machine ----------------------------------------------------------------------------

    def _step(self) -> None:
        self._is_stepping = True
        while self._inbox and (self.is_idle or isinstance(self._inbox[0], _PROGRESS)):
            news, self._inbox = self._inbox, []
            self._take(news)
        self._is_stepping = False
        self._set_alarm()
        if self.device is not None:
            self._show_instance()

    def _show_instance(self) -> None:
        """The checker of live pairs looks at the instance."""
        instance, checker = self.member.instance, self._around.live_checker
        if instance is not self._shown:
            checker.leaves(self.ref)
            if instance is not None and instance.order.rank == 0:
                checker.joins(self.ref, instance, lambda: self.is_idle)
            self._shown = instance
        checker.looks(self.ref, self._clock.now_ns)

    def _take(self, news: Sequence[inputs.MemberInput]) -> None:
        now_ns = self._clock.now_ns + self._ahead_ns
        for effect in self.member.step(now_ns, news, self._steps_max()):
            self._carry[type(effect)](effect)
        self._around.fences.stepped(self.ref, self.member.waiting, self._inbox)

    def _steps_max(self) -> int:
        # Faults may come at any time, and what a worker sent last decides what they destroy.
        is_quiet = self._clock.now_ns >= self._config.faults.until_ns
        return _STEPS_MAX if self._config.coalesces and is_quiet else 1

    def _set_alarm(self) -> None:
        """Wake the member when that is due, by the world's clock."""
        wake_ns = None if self._is_dead else self.member.wake_ns()
        at_ns = None if wake_ns is None else wake_ns - self._ahead_ns
        if self._alarm is not None:
            if self._alarm[0] == at_ns:
                return
            self._clock.cancel(self._alarm[1])
        self._alarm = None
        if at_ns is not None:
            self._alarm = at_ns, self._clock.at(max(at_ns, self._clock.now_ns), self._wake)

    def _wake(self) -> None:
        self._alarm = None
        if self.is_idle:
            self._take(())
            self._step()

    # -- effects: messages ----------------------------------------------------------------------

    def _report(self, effect: effects.Report) -> None:
        event = effect.event
        if isinstance(event, RequestEnded):
            self._taken.pop((event.request, event.attempt), None)
        self._around.report(self.ref, event)

    def _answer(self, effect: effects.Answer) -> None:
        answer = effect.answer
        if isinstance(answer, AttemptTaken):
            self._taken[answer.request, answer.attempt] = None
        self._around.emit(self.ref, effect.gateway, answer)

    def _emit(self, effect: effects.Emit) -> None:
        step_ns = self.executor.step_ns
        if effect.is_repeated:
            step_ns = [self._clock.now_ns] * max(len(e.token_ids) for e in effect.emitted)
        tokens = SimTokens(step_ns, list(effect.emitted))
        self._around.emit(self.ref, effect.gateway, tokens)

    def _tell(self, effect: effects.TellPeer) -> None:
        self._around.live_checker.sends(effect.message)
        self._around.tell(self.ref, effect)

    def _refuse(self, effect: effects.Refuse) -> None:
        require(False, "members send what they agreed on", self.ref, effect)

    # -- effects: holdings ----------------------------------------------------------------------

    def _fetch(self, effect: effects.Fetch) -> None:
        order, spec = effect.order, self._config.spec(effect.order.model)
        self._check_assignment(order)
        arrival = self._arrivals[effect.plan] = _Arrival(order, spec, order.feeds)
        if self.host is not None:
            held = [arrival.key[1:] for arrival in self._arrivals.values()]
            size = sum(arrival.spec.size_bytes for arrival in self._arrivals.values())
            self._around.checker.holds(self.ref, self.host.memory_bytes, size, held)
            if self._refuses(order.model):
                self._inbox.insert(0, inputs.FetchFailed(effect.plan, "there is no memory"))
                return
        resident = effect.resident
        present = range(resident.layers if resident is not None else 0)
        receive = partial(self._receive, arrival, present)
        has_senders = any(isinstance(feed.upstream, FromWorker) for feed in order.feeds)
        if self.device is not None and has_senders and self._config.group_setup_ns:
            self._clock.after(self._config.group_setup_ns, receive)
        else:
            receive()

    def _take_up(self, effect: effects.TakeUp) -> None:
        arrival = self._arrivals.pop(effect.spare)
        self._check_assignment(effect.order)
        arrival.order = effect.order
        self._arrivals[effect.plan] = arrival

    def _check_assignment(self, order: StartHolding) -> None:
        """Before the member has anything of the order."""
        if order.duty is not None:
            others = [h for h in self.member.holdings if h.id != order.holding and not h.is_spare]
            self._around.checker.assigned(self.ref, bool(others), order)
            self._duty = order

    def _refuses(self, model: str) -> bool:
        """Whether the member refuses the model now; if so, the checkers know."""
        is_refused = self._clock.now_ns < self.refuses_until_ns
        if is_refused:
            self._around.checker.refused(model, self._clock.now_ns)
        return is_refused

    def _receive(self, arrival: _Arrival, present: range) -> None:
        """Ask for the parameters, unless the order was taken back meanwhile."""
        plan = arrival.order.holding.plan
        if self._arrivals.get(plan) is arrival:
            arrival.is_asked_for = True
            grid = ChunkGrid(arrival.spec.layer_bytes, arrival.order.chunk_bytes)
            self._around.transfers.receive(
                plan, arrival.key, grid, arrival.feeds, self.put, present
            )

    def _amend(self, effect: effects.AmendFetch) -> None:
        arrival = self._arrivals[effect.plan]
        arrival.feeds = effect.feeds
        if arrival.is_asked_for:
            self._around.transfers.amend(arrival.key, effect.feeds)

    def _drop(self, effect: effects.DropFetch) -> None:
        arrival = self._arrivals.pop(effect.plan)
        self._around.transfers.drop(arrival.key)

    # -- effects: the executor ------------------------------------------------------------------

    @property
    def executor(self) -> SimExecutor:
        assert self._executor is not None, f"{self!r} has no device"
        return self._executor

    def _assign(self, effect: effects.Assign) -> None:
        spec = self._arrivals[effect.plan].spec
        if self._refuses(spec.name):
            self._inbox.insert(0, inputs.FetchFailed(effect.plan, "the executor refuses"))
        else:
            self._inbox.insert(0, self.executor.assign(effect.plan, spec))

    def _show(self, effect: LiveEffect) -> None:
        """The checker of live pairs looks at what a worker does, which has one duty at a time."""
        assert self._duty is not None, f"{self!r} does {effect} for no instance"
        self._around.live_checker.sees(self._duty, effect)

    def _measure(self, effect: effects.Measure) -> None:
        rate = self.executor.prefill_tokens_per_s(effect.tokens)
        self._inbox.insert(0, inputs.RateMeasured(effect.plan, rate))

    def _execute(self, effect: effects.Execute) -> None:
        self._show(effect)
        self.executor.start(effect, effect.report_due_ns - self._ahead_ns)

    # -- what its executor asks for and tells ---------------------------------------------------

    def shorten(self, steps: int) -> Run:
        return self.member.shorten(steps)

    def killed(self) -> None:
        self._around.killed(self.ref)

    def progressed(self, news: inputs.RunEnded | inputs.LayersRan) -> None:
        self._around.live_checker.ran(self._duty, news)
        self._inbox.insert(0, news)
        self._step()
