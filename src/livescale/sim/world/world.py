"""The simulated world: models, requests and the lives of the controller, in virtual time.

The world makes no decisions. Members (`members.py`) and the controller (`life.py`) carry out what
is ordered; the run record is of the same kind as a real pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import IO

import msgspec

from livescale.control.state.config import taking_over
from livescale.load.traces import TraceRow
from livescale.messages import commands, events
from livescale.messages.epochs import Fenced
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import ModelChange, SimConfig
from livescale.sim.base.poison import Poison
from livescale.sim.base.run_notes import RunNotes, SimResult
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.fencing import FenceChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.links.channel import Delays
from livescale.sim.world.all_gateways import Gateways
from livescale.sim.world.all_members import Members
from livescale.sim.world.claimed_hosts import ClaimedHosts
from livescale.sim.world.faults import FaultPlan, FaultSite
from livescale.sim.world.gateway import GatewayEvent, GatewayWorld, SimGateway
from livescale.sim.world.host_stays import HostStays
from livescale.sim.world.life import ControllerLife, LifeWorld
from livescale.sim.world.takeovers import Takeover
from livescale.values.types import RequestId

#: when parameters begin or end to move, what links have carried is noted
_BYTES_MOVE = frozenset((commands.StartHolding, events.HoldingCompleted, events.HoldingFailed))


class SimWorld:
    """One run. Schedule requests with `arrive_at`, then `run`."""

    def __init__(
        self, config: SimConfig, plan: FaultPlan, seed: int, record_file: IO[bytes] | None
    ) -> None:
        self.config = config
        self.clock = Clock()
        self._notes = RunNotes(record_file, {"sim": msgspec.to_builtins(config)})
        #: models that are served, withdrawn ones included until they are gone
        self._policies = {policy.spec.name: policy for policy in config.controller.models}
        self._leaving: dict[str, None] = {}
        self._delays = Delays(config, self.clock, seed)
        self._failures = FailureChecker(config.controller, self._may_loads_fail)
        fences = FenceChecker()
        #: the life that each gateway met last, which may be over
        self._met_by: dict[str, ControllerLife] = {}
        poison = Poison(config.faults, seed)
        self._gateway_world = GatewayWorld(
            config,
            self.clock,
            self._failures,
            poison,
            fences,
            serves=self._offers,
            say=self._gateway_says,
            write=self._notes.request,
        )
        self._gateways = Gateways(config, self.clock, self._delays, poison)
        self._members = Members(config, self.clock, self._delays, self._gateways, fences, poison)
        self._gateways.begin(self._gateway_begins, self._gateway_ended, self._members.is_silent)
        stays = HostStays(config, self.clock, self._delays, self._members)
        self._host_plans: list[HostStays | ClaimedHosts] = [stays]
        if config.demand is not None:
            claimed = ClaimedHosts(config, config.demand, self.clock, self._members, stays)
            self._host_plans.append(claimed)
        self._lives = 0
        self._life_world = LifeWorld(
            self.clock,
            self._delays,
            config.step_gap_ns,
            self._failures,
            self._stepped,
            self._decided,
            until_ns=lambda: self._limit_ns,
            gateway_of=self._gateways.name_of,
        )
        self._horizon_ns = max(
            config.faults.until_ns,
            *(change.at_ns for change in config.changes),
            *(stay.end_ns for stay in config.stays),
            0,
        )
        self._begin()
        self._members.begin()
        for change in config.changes:
            self.clock.at(change.at_ns, partial(self._change_models, change))
        site = FaultSite(
            config,
            self.clock,
            self._members,
            self._end_life,
            self._take_over,
            self._gateways,
        )
        site.schedule(plan)

    def arrive_at(self, request: RequestId, model: str, row: TraceRow) -> None:
        """Let the request come at its time."""
        self._horizon_ns = max(self._horizon_ns, row.arrival_ns)
        self.clock.at(row.arrival_ns, lambda: self._gateways.arrive(request, model, row))

    def run(self) -> SimResult:
        """Run until nothing is left to happen, then demand that everything ended well."""
        limit_ns = self._limit_ns
        while self.clock.now_ns <= limit_ns and self.clock.run_next():
            pass
        self._gateways.all_ended()
        assert not self._leaving, f"{list(self._leaving)} were withdrawn and are not gone"
        life, members = self._members.life, self._members.living()
        assert life is not None
        life.checker.all_answered()
        known = life.controller.router.requests
        require(not known, "the controller knows no request that is over", list(known))
        assert self.clock.now_ns <= limit_ns, f"{self!r} does not come to rest"
        life.controller.validate()
        life.checker.at_rest(
            self.clock.now_ns,
            {member.ref: member.member.reports for member in members},
            {m.ref: m.member.cores.now for m in members if m.device is not None},
        )
        self._members.transfers.moves.check_links()
        for member in members:
            member.come_to_rest()
        self._notes.end(life.controller)
        result = self._notes.result
        result.actions, result.end_ns = self.clock.actions_run, self.clock.now_ns
        return result

    @property
    def _limit_ns(self) -> int:
        """By then the world is at rest, or stuck."""
        return self._horizon_ns + self.config.grace_ns

    def __repr__(self) -> str:
        life = self._members.life
        controller = life.controller if life is not None else "no controller"
        return f"<SimWorld {self.clock!r}, {len(self._members.by_number)} members, {controller!r}>"

    # -- the controller's lives -----------------------------------------------------------------

    def _begin(self) -> None:
        """A controller begins, and all look for it."""
        life = self._begin_life()
        for gateway in self._gateways.by_name.values():
            self._find_each_other(life, gateway)
        self._members.meet(life)
        for hosts in self._host_plans:
            hosts.meet(life)

    def _take_over(self, choice: int) -> None:
        """A later controller begins, while the one that is there lives on."""
        older = self._members.life
        if older is not None:
            longest_ns = self.config.faults.takeover_ns_max
            takeover = Takeover(self.clock, older, longest_ns, choice)
            self._notes.end(older.controller)
            life = self._begin_life(is_takeover=True)
            for name, gateway in self._gateways.by_name.items():
                takeover.begin(name, partial(self._meet_gateway, life, gateway))
            self._members.take_over(life, takeover)
            for hosts in self._host_plans:
                hosts.meet(life)

    def _begin_life(self, *, is_takeover: bool = False) -> ControllerLife:
        models = tuple(self._policies.values())
        config = msgspec.structs.replace(self.config.controller, epoch=self._lives, models=models)
        config = taking_over(config, self._lives) if is_takeover else config
        self._lives += 1
        life = ControllerLife(config, self._life_world)
        self._notes.begin(config)
        for name in self._leaving:
            life.push(events.ModelRemoved(name))
        return life

    def _find_each_other(self, life: ControllerLife, gateway: SimGateway) -> None:
        meet = partial(self._meet_gateway, life, gateway)
        self.clock.after(self._delays.reconnect_ns(), meet)

    def _meet_gateway(self, life: ControllerLife, gateway: SimGateway) -> None:
        name = gateway.name
        if life.is_over or self._gateways.by_name.get(name) is not gateway:
            return
        later = gateway.later_than(life.epoch)
        if later is not None:
            life.push(Fenced(later))
            return
        before = self._met_by.get(name)
        self._met_by[name] = life
        if before is not None:
            before.report(name, Fenced(life.epoch))
        life.meet_gateway(gateway)

    def _end_life(self) -> None:
        life = self._members.life
        if life is not None:
            life.end(self.clock.now_ns - self._delays.loss_window_ns())
            self._members.life = None
            self._notes.end(life.controller)
            self.clock.after(self.config.faults.downtime_ns, self._begin)

    def _stepped(
        self,
        life: ControllerLife,
        received: Sequence[events.AnyEvent],
        ordered: Sequence[commands.AnyCommand],
    ) -> None:
        """Write down what a step received and ordered. Of an earlier life that lives on nothing is
        written: a record has one life after the other."""
        self._members.ordered(life, ordered)
        if life is not self._members.life:
            return
        now_ns = self.clock.now_ns
        self._notes.step(now_ns, received, ordered, life.controller)
        for command in ordered:
            if isinstance(command, commands.ModelGone):
                del self._policies[command.model], self._leaving[command.model]
        if not _BYTES_MOVE.isdisjoint(map(type, (*received, *ordered))):
            self._notes.traffic(now_ns, self._members.transfers.moves.carried_bytes())

    def _decided(self, life: ControllerLife) -> None:
        for hosts in self._host_plans:
            hosts.stepped(life)

    # -- gateways -------------------------------------------------------------------------------

    def _gateway_begins(self, name: str) -> SimGateway:
        gateway = SimGateway(name, self._gateway_world)
        self._members.watch_by(gateway)
        if self._members.life is not None:
            self._find_each_other(self._members.life, gateway)
        return gateway

    def _gateway_ended(self, gateway: SimGateway, lost_after_ns: int) -> None:
        self._met_by.pop(gateway.name, None)
        for life in self._members.lives:
            # Where nothing got through, the end comes with what was held up.
            life.go_on(gateway.name)
            life.lose(gateway.name, lost_after_ns)

    def _gateway_says(self, name: str, event: GatewayEvent) -> None:
        # Without a controller nothing is lost: the next one gets a report of every transcript.
        if name in self._met_by:
            self._met_by[name].report(name, event)

    # -- models ---------------------------------------------------------------------------------

    def _offers(self, model: str) -> bool:
        """Clients may ask for it."""
        specs = [policy.spec for policy in self._policies.values()]
        return any(s.offered_as == model and s.name not in self._leaving for s in specs)

    def _change_models(self, change: ModelChange) -> None:
        """Without a controller nothing is lost: the next one begins with what is served."""
        if change.added is not None:
            self._policies[change.added.spec.name] = change.added
            event: events.AnyEvent = events.ModelAdded(change.added)
        elif change.changed is not None:
            name = change.changed.spec.name
            if name not in self._policies or name in self._leaving:
                return
            self._policies[name] = change.changed
            event = events.ModelChanged(change.changed)
        else:
            self._leaving[change.removed] = None
            event = events.ModelRemoved(change.removed)
        # A gateway offers what its controller knows: whichever that is, it knows of the change.
        for life in self._members.lives:
            life.push(event)

    def _may_loads_fail(self, model: str, since_ns: int) -> bool:
        """Files of the model were wrong, or a member refused the model, since then."""
        were_wrong = self._members.transfers.were_files_wrong(model, since_ns)
        return were_wrong or self._members.checker.was_refused(model, since_ns)
