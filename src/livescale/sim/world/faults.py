"""Faults as a plan: drawn from a seed before the run begins, so that a seed is a whole history."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from livescale.sim.base.clock import Clock
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.world.all_gateways import Gateways
from livescale.sim.world.all_members import Members
from livescale.sim.world.member_shell import SimMember
from livescale.values.types import RequestId, agent_ref

FaultPlan = dict[str, list[tuple[Any, ...]]]
"""When what breaks, by the name that it has in a FaultConfig: the virtual time of each fault, and
what was drawn for that one. Losses and stalls name numbers of workers or agents; feeds, members,
hosts, models and gateways are chosen by a number that is taken modulo those of that moment."""

_MANY = 1 << 16


def plan_faults(
    faults: FaultConfig,
    workers: int,
    agents: int,
    requests: list[tuple[int, RequestId]],
    seed: int,
) -> FaultPlan:
    """Draw the faults of a run. `requests` are (arrival time, id) pairs in order of arrival."""
    plan: FaultPlan = {}

    def draw(
        kind: str, rng: random.Random, choices: int = _MANY, *more: Callable[[], object]
    ) -> None:
        """One choice for each fault of the kind, and `more`."""
        plan[kind] = sorted(
            (rng.randrange(faults.until_ns), rng.randrange(choices), *(each() for each in more))
            for _ in range(getattr(faults, kind) if choices else 0)
        )

    rng = random.Random(f"faults {seed}")
    draw("worker_losses", rng, workers)
    draw("agent_losses", rng, agents)
    draw("feed_failures", rng)
    draw("stalls", rng, workers)
    restarts = range(faults.controller_restarts)
    plan["controller_restarts"] = sorted((rng.randrange(faults.until_ns),) for _ in restarts)
    plan["cancelled_permille"] = [
        (rng.randrange(arrival_ns, faults.until_ns), request)
        for arrival_ns, request in requests
        if rng.randrange(1000) < faults.cancelled_permille and arrival_ns < faults.until_ns
    ]
    # Drawn apart, so that a seed means what it meant before there were such faults.
    apart = random.Random(f"hosts and links {seed}")
    for kind in ("host_losses", "slow_links", "cut_links", "corruptions", "bad_files"):
        draw(kind, apart)
    quiet = random.Random(f"silences {seed}")
    silent = (lambda: quiet.randint(1, faults.silence_ns_max), lambda: quiet.random() < 0.5)
    draw("silences", quiet, _MANY, *silent)
    later = random.Random(f"refusals and clocks {seed}")
    draw("refusals", later)
    draw("clock_jumps", later, _MANY, lambda: later.randint(1, faults.clock_jump_ns_max))
    draw("takeovers", random.Random(f"takeovers {seed}"))
    draw("gateway_losses", random.Random(f"lost gateways {seed}"))
    return plan


@dataclass(frozen=True, slots=True)
class FaultSite:
    """What faults are done to: members as they come and go, the controller's life, and requests."""

    config: SimConfig
    clock: Clock
    members: Members
    end_life: Callable[[], None]
    take_over: Callable[[int], None]
    gateways: Gateways

    def schedule(self, plan: FaultPlan) -> None:
        """Let every fault come at its time."""
        members, transfers = self.members, self.members.transfers
        slow_permille = self.config.faults.slow_permille
        kinds: dict[str, Callable[..., None]] = {
            "worker_losses": members.lose,
            "agent_losses": lambda number: members.lose(agent_ref(number).worker),
            "host_losses": self._lose_host,
            "feed_failures": transfers.break_feed,
            "corruptions": transfers.corrupt,
            "stalls": self._stall,
            "bad_files": self._spoil,
            "refusals": partial(self._to_some, self._refuse),
            "slow_links": lambda choice: self._to_some(self._slow, choice, slow_permille),
            "cut_links": lambda choice: self._to_some(self._slow, choice, 0),
            "clock_jumps": partial(self._to_some, SimMember.jump_ahead),
            "silences": partial(self._to_some, self._silence),
            "controller_restarts": self.end_life,
            "takeovers": self.take_over,
            "cancelled_permille": self.gateways.cancel,
            "gateway_losses": self.gateways.lose,
        }
        for kind, happens in kinds.items():
            for time_ns, *drawn in plan[kind]:
                self.clock.at(time_ns, partial(happens, *drawn))
        if plan["silences"]:
            members.watch()

    # -- helpers --------------------------------------------------------------------------------

    def _lose_host(self, choice: int) -> None:
        """A whole machine goes: its agent and every worker on it, at once."""
        config = self.config
        of_workers = [config.device(number).host for number in range(config.workers)]
        names = sorted(dict.fromkeys([*of_workers, *(host.name for host in config.hosts)]))
        name = names[choice % len(names)]
        for ref in config.on_host(name):
            self.members.lose(ref.worker)

    def _stall(self, number: int) -> None:
        worker = self.members.by_number.get(number)
        if worker is not None:
            until_ns = self.clock.now_ns + self.config.faults.stall_ns
            self.members.transfers.slowdowns.freeze(worker.ref, until_ns)

    def _spoil(self, choice: int) -> None:
        """The files of some model are wrong, until faults are over at the latest."""
        names = [policy.spec.name for policy in self.config.policies]
        until_ns = self._until(self.config.faults.bad_files_ns)
        self.members.transfers.spoil(names[choice % len(names)], until_ns)

    def _until(self, length_ns: int) -> int:
        """The end of what begins now and takes so long, if faults are not over before."""
        return min(self.clock.now_ns + length_ns, self.config.faults.until_ns)

    def _to_some(self, happens: Callable[..., None], choice: int, *drawn: object) -> None:
        """It happens to one of the living members, counted round and round, if there is one."""
        members = self.members.living()
        if members:
            happens(members[choice % len(members)], *drawn)

    def _refuse(self, member: SimMember) -> None:
        """The member refuses all loads, until faults are over at the latest."""
        member.refuses_until_ns = self._until(self.config.faults.refusal_ns)

    def _silence(self, member: SimMember, silent_ns: int, is_stopped: bool) -> None:
        self.members.transfers.slowdowns.freeze(member.ref, self.clock.now_ns + silent_ns)
        self.members.silence(member.ref, silent_ns, is_stopped)

    def _slow(self, member: SimMember, permille: int) -> None:
        """The member's NIC carries so much of its rate, until faults are over at the latest."""
        until_ns = self._until(self.config.faults.link_ns)
        self.members.transfers.slowdowns.slow_nic(member.ref, permille, until_ns)
