"""Lines of stages with several replicas each: who waits where (QUART §3, §4.1).

A queueing world apart from the simulator: one class of requests, first come first served at every
stage, no loads, no batches. In a line of even, deterministic stages all waiting together is what
it would be before the narrowest stage alone (Friedman 1965): growing another stage moves the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from livescale.lab.reproduce.quart.quart import gamma_gaps

Times = NDArray[np.float64]


@dataclass(frozen=True)
class LineRun:
    """What requests did in a line.

    `waits[i]` is the mean time before stage `i`; `leaves` are the times at which requests leave the
    last stage, in order. All in the unit of the arrivals.
    """

    waits: tuple[float, ...]
    leaves: Times

    @property
    def total_wait(self) -> float:
        """Mean time that a request waits at all stages together."""
        return sum(self.waits)


def play_line(
    arrivals: Times, services: Sequence[Times | float], replicas: Sequence[int]
) -> LineRun:
    """Plays requests that arrive at these times (in order) through the stages.

    `services[i]` are the service times at stage `i`, in the order in which requests begin there, or
    one number for all. `replicas[i]` serve there, each one request at a time.
    """
    waits = []
    for service, servers in zip(services, replicas, strict=True):
        if isinstance(service, np.ndarray):
            begins, leaves = _play_uneven(arrivals, service, servers)
        else:
            begins, leaves = _play_even(arrivals, service, servers)
        waits.append(float((begins - arrivals).mean()))
        arrivals = leaves
    return LineRun(tuple(waits), arrivals)


def gamma_line(
    rng: np.random.Generator,
    replicas: Sequence[int],
    *,
    rate: float,
    arrival_cv: float,
    service_cv: float = 0.0,
    count: int,
) -> LineRun:
    """A line of stages with unit services of that CV, and gamma arrivals, `rate` per service:
    arrivals are the same whichever stage grows (the same draws)."""
    arrivals = np.cumsum(gamma_gaps(rng, arrival_cv, 1 / rate, count))
    services = [gamma_gaps(rng, service_cv, 1.0, count) if service_cv else 1.0 for _ in replicas]
    return play_line(arrivals, services, replicas)


def _play_even(arrivals: Times, service: float, servers: int) -> tuple[Times, Times]:
    """Requests take turns at the servers: number n follows number n - servers. Of each server,
    leaves[k] - k · service is the largest of arrivals[j] - (j - 1) · service so far."""
    leaves = np.empty_like(arrivals)
    for first in range(min(servers, len(arrivals))):
        its = arrivals[first::servers]
        ahead = service * np.arange(len(its))
        leaves[first::servers] = np.maximum.accumulate(its - ahead) + ahead + service
    return leaves - service, leaves


def _play_uneven(arrivals: Times, services: Times, servers: int) -> tuple[Times, Times]:
    """The server that is free first takes the next request; those who overtake arrive first at
    the next stage."""
    free = [0.0] * servers
    begins = np.empty_like(arrivals)
    for i, (arrival, service) in enumerate(zip(arrivals.tolist(), services.tolist(), strict=True)):
        begins[i] = begin = max(arrival, free[0])
        heapq.heapreplace(free, begin + service)
    return begins, np.sort(begins + services)
