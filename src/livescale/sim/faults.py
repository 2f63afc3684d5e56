"""Faults as a plan: drawn from a seed before the run begins, so that a seed is a whole history."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from livescale.sim.clock import Clock
from livescale.sim.config import FaultConfig, SimConfig
from livescale.sim.links.transfers import Transfers
from livescale.sim.member import SimMember
from livescale.sim.refusals import Refusals
from livescale.types import RequestId, WorkerRef, agent_ref

#: a time, and a number that is taken modulo whatever there is to choose from at that time
Chosen = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """When what breaks. Times are virtual; losses name numbers of workers, agents or hosts.

    Feeds, the members whose links break and the models whose files go bad are chosen by a number
    that is taken modulo those of that moment.
    """

    worker_losses: tuple[Chosen, ...]
    agent_losses: tuple[Chosen, ...]
    feed_failures: tuple[Chosen, ...]
    stalls: tuple[Chosen, ...]
    controller_restarts: tuple[int, ...]
    cancellations: tuple[tuple[int, RequestId], ...]
    host_losses: tuple[Chosen, ...] = ()
    slow_links: tuple[Chosen, ...] = ()
    cut_links: tuple[Chosen, ...] = ()
    corruptions: tuple[Chosen, ...] = ()
    bad_files: tuple[Chosen, ...] = ()
    refusals: tuple[Chosen, ...] = ()
    #: when, which member, and by how much
    clock_jumps: tuple[tuple[int, int, int], ...] = ()
    #: when, which member, for how long, and whether it is stopped (else its link is cut)
    silences: tuple[tuple[int, int, int, bool], ...] = ()


def plan_faults(
    faults: FaultConfig,
    workers: int,
    agents: int,
    requests: list[tuple[int, RequestId]],
    seed: int,
) -> FaultPlan:
    """Draw the faults of a run. `requests` are (arrival time, id) pairs in order of arrival."""
    rng = random.Random(f"faults {seed}")

    def draw(rng: random.Random, count: int, choices: int) -> tuple[Chosen, ...]:
        times = ((rng.randrange(faults.until_ns), rng.randrange(choices)) for _ in range(count))
        return tuple(sorted(times)) if choices else ()

    losses = draw(rng, faults.worker_losses, workers)
    agent_losses = draw(rng, faults.agent_losses if agents else 0, max(agents, 1))
    feed_failures = draw(rng, faults.feed_failures, 1 << 16)
    stalls = draw(rng, faults.stalls, workers)
    restarts = sorted(rng.randrange(faults.until_ns) for _ in range(faults.controller_restarts))
    cancellations = []
    for arrival_ns, request in requests:
        if rng.randrange(1000) < faults.cancelled_permille and arrival_ns < faults.until_ns:
            cancellations.append((rng.randrange(arrival_ns, faults.until_ns), request))
    # Drawn apart, so that a seed means what it meant before there were such faults.
    apart = random.Random(f"hosts and links {seed}")
    quiet = random.Random(f"silences {seed}")
    silences = sorted(
        (
            quiet.randrange(faults.until_ns),
            quiet.randrange(1 << 16),
            quiet.randint(1, faults.silence_ns_max),
            quiet.random() < 0.5,
        )
        for _ in range(faults.silences)
    )
    later = random.Random(f"refusals and clocks {seed}")
    refusals = draw(later, faults.refusals, 1 << 16)
    jumps = sorted(
        (
            later.randrange(faults.until_ns),
            later.randrange(1 << 16),
            later.randint(1, faults.clock_jump_ns_max),
        )
        for _ in range(faults.clock_jumps)
    )
    return FaultPlan(
        losses,
        agent_losses,
        feed_failures,
        stalls,
        tuple(restarts),
        tuple(cancellations),
        host_losses=draw(apart, faults.host_losses, 1 << 16),
        slow_links=draw(apart, faults.slow_links, 1 << 16),
        cut_links=draw(apart, faults.cut_links, 1 << 16),
        corruptions=draw(apart, faults.corruptions, 1 << 16),
        bad_files=draw(apart, faults.bad_files, 1 << 16),
        silences=tuple(silences),
        refusals=refusals,
        clock_jumps=tuple(jumps),
    )


class Delays:
    """What happens to messages on their way: a constant delay, and now and then more."""

    def __init__(self, faults: FaultConfig, message_delay_ns: int, seed: int) -> None:
        self._faults = faults
        self._message_delay_ns = message_delay_ns
        self._rng = random.Random(f"delays {seed}")
        self._losses = random.Random(f"lost messages {seed}")
        self._pairs = random.Random(f"lost pairs {seed}")

    def plain_ns(self) -> int:
        return self._message_delay_ns

    def of_worker_ns(self, now_ns: int) -> int:
        """The delay of a worker's message: late ones happen while faults do."""
        faults = self._faults
        if now_ns < faults.until_ns and self._rng.randrange(1000) < faults.late_permille:
            return self._message_delay_ns + self._rng.randrange(faults.late_ns_max + 1)
        return self._message_delay_ns

    def loses(self, now_ns: int) -> bool:
        """A progress message of this time is lost."""
        faults = self._faults
        if now_ns >= faults.until_ns or not faults.lost_permille:
            return False
        return self._losses.randrange(1000) < faults.lost_permille

    def loss_window_ns(self) -> int:
        """How much of what a dying worker last sent is lost."""
        return self._rng.randrange(2 * self._message_delay_ns + 1)

    def pair_loss(self, now_ns: int) -> tuple[int, int] | None:
        """Whether a handover of this time loses one of its two workers: which, and how soon."""
        faults = self._faults
        if now_ns >= faults.until_ns or not faults.pair_loss_permille:
            return None
        if self._pairs.randrange(1000) >= faults.pair_loss_permille:
            return None
        soon_ns = 2 * self._message_delay_ns + self._pairs.choice([1, faults.late_ns_max + 1])
        return self._pairs.randrange(2), self._pairs.randrange(soon_ns)

    def reconnect_ns(self) -> int:
        """How long a peer takes to find a controller that has just begun."""
        return self._rng.randint(1, self._faults.reconnect_ns_max)


@dataclass(frozen=True, slots=True)
class FaultSite:
    """What faults are done to: the world's members as they come and go, and how they are lost."""

    config: SimConfig
    clock: Clock
    transfers: Transfers
    refusals: Refusals
    workers: Mapping[int, SimMember]
    agents: Mapping[int, SimMember]
    lose: Callable[[int], None]
    end_life: Callable[[], None]
    cancel: Callable[[RequestId], None]
    silence: Callable[[WorkerRef, int, bool], None]

    def schedule(self, plan: FaultPlan) -> None:
        """Let every fault come at its time."""
        chosen: list[tuple[tuple[Chosen, ...], Callable[[int], None]]] = [
            (plan.worker_losses, self.lose),
            (plan.agent_losses, lambda number: self.lose(agent_ref(number).worker)),
            (plan.host_losses, self._lose_host),
            (plan.feed_failures, self.transfers.break_feed),
            (plan.corruptions, self.transfers.corrupt),
            (plan.stalls, self._stall),
            (plan.bad_files, self._spoil),
            (plan.refusals, self._refuse),
            (plan.slow_links, partial(self._slow, self.config.faults.slow_permille)),
            (plan.cut_links, partial(self._slow, 0)),
        ]
        for times, happens in chosen:
            for time_ns, choice in times:
                self.clock.at(time_ns, partial(happens, choice))
        for time_ns, choice, jump_ns in plan.clock_jumps:
            self.clock.at(time_ns, partial(self._jump, choice, jump_ns))
        for time_ns, choice, silent_ns, is_stopped in plan.silences:
            self.clock.at(time_ns, partial(self._silence, choice, silent_ns, is_stopped))
        for time_ns in plan.controller_restarts:
            self.clock.at(time_ns, self.end_life)
        for time_ns, request in plan.cancellations:
            self.clock.at(time_ns, partial(self.cancel, request))

    # -- helpers --------------------------------------------------------------------------------

    def _lose_host(self, choice: int) -> None:
        """A whole machine goes: its agent and every worker on it, at once."""
        config = self.config
        of_workers = [config.device(number).host for number in range(config.workers)]
        names = sorted(dict.fromkeys([*of_workers, *(host.name for host in config.hosts)]))
        name = names[choice % len(names)]
        for number, host in enumerate(config.hosts):
            if host.name == name:
                self.lose(agent_ref(number).worker)
        for number, of_worker in enumerate(of_workers):
            if of_worker == name:
                self.lose(number)

    def _stall(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is not None:
            until_ns = self.clock.now_ns + self.config.faults.stall_ns
            self.transfers.slowdowns.freeze(worker.ref, until_ns)

    def _spoil(self, choice: int) -> None:
        """The files of some model are wrong, until faults are over at the latest."""
        faults = self.config.faults
        names = [policy.spec.name for policy in self.config.policies]
        until_ns = min(self.clock.now_ns + faults.bad_files_ns, faults.until_ns)
        self.transfers.spoil(names[choice % len(names)], until_ns)

    def _chosen(self, choice: int) -> SimMember | None:
        """One of the living members, counted round and round; None if there is none."""
        members = [*self.workers.values(), *self.agents.values()]
        return members[choice % len(members)] if members else None

    def _refuse(self, choice: int) -> None:
        """Some member refuses all loads, until faults are over at the latest."""
        member, faults = self._chosen(choice), self.config.faults
        if member is not None:
            until_ns = min(self.clock.now_ns + faults.refusal_ns, faults.until_ns)
            self.refusals.begin(member.ref, until_ns)

    def _jump(self, choice: int, jump_ns: int) -> None:
        member = self._chosen(choice)
        if member is not None:
            member.jump_ahead(jump_ns)

    def _silence(self, choice: int, silent_ns: int, is_stopped: bool) -> None:
        member = self._chosen(choice)
        if member is not None:
            self.transfers.slowdowns.freeze(member.ref, self.clock.now_ns + silent_ns)
            self.silence(member.ref, silent_ns, is_stopped)

    def _slow(self, permille: int, choice: int) -> None:
        """The NIC of some member carries so much of its rate, until faults are over at the
        latest."""
        member, faults = self._chosen(choice), self.config.faults
        if member is not None:
            until_ns = min(self.clock.now_ns + faults.link_ns, faults.until_ns)
            self.transfers.slowdowns.slow_nic(member.ref, permille, until_ns)
