"""Small queueing worlds whose exact behaviour is known: tandem queues, M/M/c, LRU memory.

They stand apart from the simulator: the claims they are for are about queues and caches in
general, not about a serving pool. All draws come from the generators that callers pass.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def gamma_gaps(rng: np.random.Generator, cv: float, mean: float, count: int) -> Times:
    """Gaps of that mean with a coefficient of variation of `cv`, gamma-distributed."""
    shape = 1 / cv**2
    return rng.gamma(shape, mean / shape, count)


def tandem_departures(
    rng: np.random.Generator, arrivals: Times, stages: int, service_mean: float, service_cv: float
) -> list[Times]:
    """When requests leave each stage of a line of single servers, first come first served.

    Lindley's recursion: a request leaves when it, and the one ahead of it, are through.
    """
    found = []
    for _ in range(stages):
        services = gamma_gaps(rng, service_cv, service_mean, len(arrivals))
        leaves = np.empty_like(arrivals)
        free = 0.0
        for i, (arrival, service) in enumerate(zip(arrivals, services, strict=True)):
            free = leaves[i] = max(arrival, free) + service
        found.append(leaves)
        arrivals = leaves
    return found


def cv_of_gaps(times: Times) -> float:
    """Coefficient of variation of the gaps between these times."""
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def erlang_wait(arrival_rate: float, service_rate: float, servers: int) -> float:
    """Mean wait in an M/M/c queue (Erlang's C formula): P0 a^c / (c! (1 - rho)) / (c mu - lambda)
    with a = lambda / mu."""
    offered = arrival_rate / service_rate
    rho = offered / servers
    last = offered**servers / math.factorial(servers) / (1 - rho)
    idle = 1 / (sum(offered**n / math.factorial(n) for n in range(servers)) + last)
    return idle * last / (servers * service_rate - arrival_rate)


def waits_in_mmc(
    rng: np.random.Generator,
    arrival_rate: float,
    service_rate: float,
    servers: int,
    count: int,
) -> float:
    """Mean wait of `count` simulated requests of an M/M/c queue that begins empty."""
    arrivals = np.cumsum(rng.exponential(1 / arrival_rate, count))
    services = rng.exponential(1 / service_rate, count)
    free = [0.0] * servers
    waited = 0.0
    for arrival, service in zip(arrivals.tolist(), services.tolist(), strict=True):
        begins = max(arrival, free[0])
        waited += begins - arrival
        heapq.heapreplace(free, begins + service)
    return waited / count


def lru_stays(
    rng: np.random.Generator, models: int, slots: int, rate_per_s: float, count: int
) -> Times:
    """How long models stay in a memory of `slots` from their load to their eviction (seconds).

    Requests for each model are Poisson with `rate_per_s`; the least recently used one goes.
    """
    at = np.cumsum(rng.exponential(1 / (models * rate_per_s), count)).tolist()
    wanted = rng.integers(models, size=count).tolist()
    loaded: OrderedDict[int, float] = OrderedDict()
    stays = []
    for time, model in zip(at, wanted, strict=True):
        if model in loaded:
            loaded.move_to_end(model)
            continue
        if len(loaded) == slots:
            _, since = loaded.popitem(last=False)
            stays.append(time - since)
        loaded[model] = time
    return np.array(stays)
