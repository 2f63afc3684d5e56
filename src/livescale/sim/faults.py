"""Faults as a plan: drawn from a seed before the run begins, so that a seed is a whole history."""

from __future__ import annotations

import random
from dataclasses import dataclass

from livescale.sim.config import FaultConfig
from livescale.types import RequestId


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """When what breaks. Times are virtual; losses name numbers of workers, or of agents.

    A broken feed is chosen by a number that is taken modulo the feeds of that moment.
    """

    worker_losses: tuple[tuple[int, int], ...]
    agent_losses: tuple[tuple[int, int], ...]
    feed_failures: tuple[tuple[int, int], ...]
    stalls: tuple[tuple[int, int], ...]
    controller_restarts: tuple[int, ...]
    cancellations: tuple[tuple[int, RequestId], ...]


def plan_faults(
    faults: FaultConfig,
    workers: int,
    agents: int,
    requests: list[tuple[int, RequestId]],
    seed: int,
) -> FaultPlan:
    """Draw the faults of a run. `requests` are (arrival time, id) pairs in order of arrival."""
    rng = random.Random(f"faults {seed}")

    def draw(count: int, choices: int) -> tuple[tuple[int, int], ...]:
        times = ((rng.randrange(faults.until_ns), rng.randrange(choices)) for _ in range(count))
        return tuple(sorted(times)) if choices else ()

    losses = draw(faults.worker_losses, workers)
    agent_losses = draw(faults.agent_losses if agents else 0, max(agents, 1))
    feed_failures = draw(faults.feed_failures, 1 << 16)
    stalls = draw(faults.stalls, workers)
    restarts = sorted(rng.randrange(faults.until_ns) for _ in range(faults.controller_restarts))
    cancellations = []
    for arrival_ns, request in requests:
        if rng.randrange(1000) < faults.cancelled_permille and arrival_ns < faults.until_ns:
            cancellations.append((rng.randrange(arrival_ns, faults.until_ns), request))
    return FaultPlan(
        losses, agent_losses, feed_failures, stalls, tuple(restarts), tuple(cancellations)
    )


class Delays:
    """Delays of messages: constant, and now and then late."""

    def __init__(self, faults: FaultConfig, message_delay_ns: int, seed: int) -> None:
        self._faults = faults
        self._message_delay_ns = message_delay_ns
        self._rng = random.Random(f"delays {seed}")

    def plain_ns(self) -> int:
        return self._message_delay_ns

    def of_worker_ns(self, now_ns: int) -> int:
        """The delay of a worker's message: late ones happen while faults do."""
        faults = self._faults
        if now_ns < faults.until_ns and self._rng.randrange(1000) < faults.late_permille:
            return self._message_delay_ns + self._rng.randrange(faults.late_ns_max + 1)
        return self._message_delay_ns

    def loss_window_ns(self) -> int:
        """How much of what a dying worker last sent is lost."""
        return self._rng.randrange(2 * self._message_delay_ns + 1)

    def reconnect_ns(self) -> int:
        """How long a peer takes to find a controller that has just begun."""
        return self._rng.randint(1, self._faults.reconnect_ns_max)
