"""The members of a simulated world: their lives, their silences and their connections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from livescale.clusters.topology import Topology
from livescale.control.cluster.liveness import look_gap_ns
from livescale.member.inputs import ControllerMet
from livescale.messages import commands, events
from livescale.messages.epochs import Fenced
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SimConfig
from livescale.sim.base.poison import Poison
from livescale.sim.checkers.fencing import FenceChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.live import LiveChecker
from livescale.sim.checkers.members import MemberChecker
from livescale.sim.links.channel import Delays, SimChannel
from livescale.sim.links.live_link import LiveLink
from livescale.sim.links.transfers import Transfers, TransferTimes
from livescale.sim.world.all_gateways import Gateways
from livescale.sim.world.gateway import SimGateway
from livescale.sim.world.life import ControllerLife
from livescale.sim.world.member_shell import SimMember, Surroundings
from livescale.sim.world.silence import Silences, Watcher
from livescale.sim.world.takeovers import Takeover
from livescale.values.types import WorkerRef, agent_ref


class Members:
    """Living workers and agents. `life` is that of the controller, while there is one: the latest,
    where earlier ones live on."""

    def __init__(
        self,
        config: SimConfig,
        clock: Clock,
        delays: Delays,
        gateways: Gateways,
        fences: FenceChecker,
        poison: Poison,
    ) -> None:
        self.life: ControllerLife | None = None
        #: the life that each member met last, which may be over
        self._met: dict[WorkerRef, ControllerLife] = {}
        #: lives that were taken over from
        self._earlier: list[ControllerLife] = []
        self.by_number: dict[int, SimMember] = {}
        #: hosts that are not there, until then (None: until they come)
        self.away_until_ns: dict[str, int | None] = {}
        #: of each number: the incarnation that began last
        self._last_lives: dict[int, int] = {}
        #: of hosts that came: the first incarnation of their members in this start
        self._first_lives: dict[str, int] = {}
        self._config = config
        self._clock = clock
        self._delays = delays
        self._gateways = gateways
        self._topology = Topology(
            leaves={leaf.name: leaf for leaf in config.controller.leaves},
            group_bytes_per_s=config.controller.group_bytes_per_s,
            remote_storage_bytes_per_s=config.controller.remote_storage_bytes_per_s,
        )
        self.transfers = Transfers(
            clock,
            self._topology,
            TransferTimes(config.holder_wait_ns, config.stall_ns, config.load_ns),
            config.controller.parameter_share_percent,
            config.link_sharing,
        )
        self._live_link = LiveLink(clock, self.transfers.moves.serving, delays, self._hand_over)
        self.checker = MemberChecker(
            config.policies,
            self.transfers.missing_bytes,
            resident_bytes=config.resident_bytes,
            corruptible=config.faults.corruptions > 0,
        )
        self._around = Surroundings(
            config=config,
            clock=clock,
            transfers=self.transfers,
            checker=self.checker,
            fences=fences,
            live_checker=LiveChecker(config, self._live_link.free_ns),
            report=self._report,
            emit=gateways.answer,
            poison=poison,
            killed=self._lose_life,
            tell=self._live_link.send,
        )
        faults = config.faults
        self._silences = Silences(
            clock=clock,
            lost_after_ns=faults.lost_after_ns,
            until_ns=faults.until_ns + faults.silence_ns_max,
            goes_on=self._goes_on,
        )
        self._is_watching = False
        self._look_gap_ns = look_gap_ns(faults.lost_after_ns)

    @property
    def lives(self) -> list[ControllerLife]:
        """Of the controller, that are not over; the latest is the last."""
        latest = [] if self.life is None else [self.life]
        return [life for life in (*self._earlier, *latest) if not life.is_over]

    def living(self) -> list[SimMember]:
        """Workers first, in the order in which they began to live."""
        return sorted(self.by_number.values(), key=lambda member: member.ref.is_agent)

    def ordered(self, life: ControllerLife, ordered: Sequence[commands.AnyCommand]) -> None:
        """The controller orders this in one of its lives."""
        self.checker.ordered(ordered)
        self._silences.ordered(ordered, life.began_ns)

    # -- lives ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """All members come to life soon, but for those of hosts that come later."""
        refs = [WorkerRef(number) for number in range(self._config.workers)]
        refs += [agent_ref(number) for number in range(len(self._config.hosts))]
        for ref in refs:
            if self.away_until_ns.get(self._config.host_of(ref), 0) is None:
                continue
            self._clock.after(self._delays.reconnect_ns(), partial(self._start, ref))

    def is_away(self, host: str) -> bool:
        """The host has not come yet, or has left."""
        until_ns = self.away_until_ns.get(host, 0)
        return until_ns is None or self._clock.now_ns < until_ns

    def come(self, host: str, first_life: int) -> None:
        """The host's processes begin: incarnations count from there on."""
        del self.away_until_ns[host]
        self._first_lives[host] = first_life
        for ref in self._config.on_host(host):
            first = WorkerRef(ref.worker, first_life)
            self._clock.after(self._delays.reconnect_ns(), partial(self._start, first))

    def leave(self, host: str, until_ns: int | None, *, is_let_go: bool) -> None:
        """All processes of the host end, and begin again at that time (None: when it comes). Of
        those that are let go nothing is lost."""
        self.away_until_ns[host] = until_ns
        for ref in self._config.on_host(host):
            self.lose(ref.worker, is_let_go=is_let_go)

    def _start(self, ref: WorkerRef) -> None:
        host = self._config.host_of(ref)
        if self.is_away(host):
            until_ns = self.away_until_ns[host]
            if until_ns is not None:
                self._clock.at(until_ns, partial(self._start, ref))
            return
        if ref.incarnation < self._first_lives.get(host, 0):
            return  # of an earlier start of the host
        last = self._last_lives.get(ref.worker, -1)
        require(ref.incarnation > last, "incarnations grow", ref, last)
        self._last_lives[ref.worker] = ref.incarnation
        member = self.by_number[ref.worker] = SimMember(ref, self._around)
        if member.host is not None:
            self._topology.agents[ref] = member.host
        elif member.device is not None:
            self._topology.devices[ref] = member.device
            self._live_link.join(ref, member.put)
            self._gateways.join(ref, member.put)
        if self.life is not None:
            self._meet_controller(self.life, member)

    def lose(self, number: int, *, is_let_go: bool = False) -> None:
        """The member dies: the last of what it sent is lost, unless it is let go, then both sides
        see the end."""
        member = self.by_number.pop(number, None)
        if member is None:
            return
        ref = member.ref
        lost_after_ns = self._clock.now_ns
        if is_let_go:
            self.checker.is_let_go(ref, member.member.instance)
        else:
            lost_after_ns -= self._delays.loss_window_ns()
        member.die()
        self._silences.died(ref)
        self._live_link.died(ref)
        if ref.is_agent:
            del self._topology.agents[ref]
        else:
            del self._topology.devices[ref]
        if not ref.is_agent:
            self._gateways.leave(ref, lost_after_ns)
        for life in self.lives:
            # Where nothing got through, the end comes with what was held up.
            life.go_on(ref)
            life.lose(ref, lost_after_ns)
        successor = WorkerRef(number, ref.incarnation + 1)
        self._clock.after(self._config.faults.rejoin_ns, partial(self._start, successor))

    def _find(self, ref: WorkerRef) -> SimMember | None:
        """This life of a member, unless it is over."""
        member = self.by_number.get(ref.worker)
        return member if member is not None and member.ref == ref else None

    def _lose_life(self, ref: WorkerRef) -> None:
        """This incarnation ends, if it lives."""
        if self._find(ref) is not None:
            self.lose(ref.worker)

    def _hand_over(self, sender: WorkerRef, receiver: WorkerRef) -> None:
        """A live batch goes over; maybe one of both is lost meanwhile."""
        loss = self._delays.pair_loss()
        if loss is not None:
            which, after_ns = loss
            self._clock.after(after_ns, partial(self.lose, (sender, receiver)[which].worker))

    # -- connections ----------------------------------------------------------------------------

    def meet(self, life: ControllerLife) -> None:
        """A controller is there: all members look for it."""
        self.life = life
        for member in self.living():
            delay_ns = self._delays.reconnect_ns()
            self._clock.after(delay_ns, partial(self._meet_controller, life, member))

    def take_over(self, life: ControllerLife, takeover: Takeover) -> None:
        """A later controller is there, while the earlier one lives on."""
        self.life = life
        self._earlier = [earlier for earlier in self._earlier if not earlier.is_over]
        self._earlier.append(takeover.older)
        for member in self.living():
            takeover.begin(member.ref, partial(self._meet_controller, life, member))

    def _meet_controller(self, life: ControllerLife, member: SimMember) -> None:
        ref = member.ref
        if life.is_over or self._find(ref) is not member or self._silences.is_silent(ref):
            return
        later = member.fence.meet(life.epoch)
        if later is not None:
            life.push(Fenced(later))
            return
        if not life.incarnations.join(ref):
            if life.incarnations.is_lost(ref):
                self.lose(ref.worker)
            return
        before, self._met[ref] = self._met.get(ref), life
        if before is not None:
            before.report(ref, Fenced(life.epoch))
        self._around.fences.met(ref, life.epoch)
        life.meet(ref, member.take_order)
        reports, cores = member.member.reports, member.member.cores
        if member.host is not None:
            life.report(ref, events.AgentJoined(ref, member.host, reports))
        elif member.device is not None:
            self._live_link.join(ref, member.put)
            life.report(ref, events.WorkerJoined(ref, member.device, reports, cores.now, cores.own))
        member.put(ControllerMet(life.epoch))

    def _report(self, ref: WorkerRef, event: events.AnyEvent) -> None:
        self.checker.reports(ref, event)
        # The next controller learns from WorkerJoined what is left of it.
        if ref in self._met:
            self._met[ref].report(ref, event)

    # -- silence --------------------------------------------------------------------------------

    def is_silent(self, ref: WorkerRef) -> bool:
        """Nothing reaches the member."""
        return self._silences.is_silent(ref)

    def watch(self) -> None:
        """From now on the controller, the gateways and the supervisor look who is silent."""
        controller = Watcher("controller", self._met_by_controller, self._controller_gives_up)
        self._silences.watch(controller, self._look_gap_ns // 4)
        self._is_watching = True
        for gateway in self._gateways.by_name.values():
            self.watch_by(gateway)
        supervisor = Watcher("supervisor", self._refs, self._lose_life, is_local=True)
        self._silences.watch(supervisor, 3 * self._look_gap_ns // 4)

    def watch_by(self, gateway: SimGateway) -> None:
        """The gateway looks, too, if anybody does."""
        if self._is_watching:
            met = partial(self._met_by_gateway, gateway)
            give_up = partial(self._gateways.give_up, gateway)
            watcher = Watcher(f"gateway {gateway.name}", met, give_up)
            self._silences.watch(watcher, 2 * self._look_gap_ns // 4)

    def _refs(self) -> list[WorkerRef]:
        return [member.ref for member in self.living()]

    def _met_by_controller(self) -> list[WorkerRef]:
        life = self.life
        if life is None:
            return []
        return list(filter(life.incarnations.is_there, self._refs()))

    def _controller_gives_up(self, ref: WorkerRef) -> None:
        assert self.life is not None, f"no watcher gives {ref} up"
        self._live_link.leave(ref)
        self.life.give_up(ref)

    def _met_by_gateway(self, gateway: SimGateway) -> list[WorkerRef]:
        connected = self._gateways.connected(gateway)
        for worker in gateway.workers_with_requests():
            # Of one that is dead the end is on its way.
            if worker in connected:
                self._silences.require_noticed(worker, 0, "requests")
        return connected

    def _channels(self, ref: WorkerRef) -> list[SimChannel[Any]]:
        """The connections of a member."""
        of_life = self.life.channels(ref) if self.life is not None else []
        return [*self._gateways.channels(ref), *of_life]

    def silence(self, ref: WorkerRef, silent_ns: int, is_stopped: bool) -> None:
        """Nothing comes from the member and nothing reaches it for so long."""
        if not self._silences.is_silent(ref):
            self._silences.begin(ref, silent_ns, is_stopped=is_stopped)
            self._live_link.hold(ref)
            for channel in self._channels(ref):
                channel.hold()

    def _goes_on(self, ref: WorkerRef) -> None:
        """What was held up arrives. The member looks for those that gave it up meanwhile."""
        self._live_link.go_on(ref)
        for channel in self._channels(ref):
            channel.go_on()
        life, member = self.life, self._find(ref)
        delay_ns = self._delays.reconnect_ns()
        if member is None:
            return
        if not ref.is_agent and self._gateways.see_ends(ref):
            self._clock.after(delay_ns, partial(self._come_back_to_gateways, member))
        if life is not None:
            self._clock.after(delay_ns, partial(self._meet_controller, life, member))

    def _come_back_to_gateways(self, worker: SimMember) -> None:
        if self._find(worker.ref) is worker:
            self._gateways.join(worker.ref, worker.put)
            if self._silences.is_silent(worker.ref):
                for channel in self._channels(worker.ref):
                    channel.hold()
