"""QUART's claims about queues, and λScale's about short stays in memory.

First small queueing worlds whose exact behaviour is known: tandem queues, M/M/c, LRU memory. They
stand apart from the simulator: the claims are about queues and caches in general, not about a
serving pool. All draws come from the generators that callers pass.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from livescale.reproduce.claim import Conditions, Curve, Measured, Picture

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


_STAGES = 5
_SERVICE_CV = 0.3
_UTILIZATION = 0.9


def cv_along_a_pipeline(conditions: Conditions) -> Measured:
    """QUART §3.1, §5.1, Figure 2 (a): burstiness changes along five stages; it rises from 0.03 to
    0.25 for requests with a CV of 0.1, and rises for a CV of 1, too.

    Gamma arrivals into five single servers in a line, 90 % utilized, service times with a CV of
    0.3; the CV of the gaps between requests that enter each stage.
    """
    cvs = (0.1, 1.0, 4.0)
    entering = {cv: _entering(conditions.seed, cv) for cv in cvs}
    figures = {
        "first_at_0.1": entering[0.1][0],
        "last_at_0.1": entering[0.1][-1],
        "is_rising": float(entering[0.1] == sorted(entering[0.1])),
        "first_at_1": entering[1.0][0],
        "last_at_1": entering[1.0][-1],
        "ratio_max": max(max(its) / min(its) for its in entering.values()),
    }
    curves = tuple(Curve(f"CV {cv:g}", tuple(enumerate(entering[cv], 1))) for cv in cvs)
    picture = Picture("Burstiness along a pipeline", "stage", "CV of arrivals", curves)
    return Measured({k.replace(".", "_"): v for k, v in figures.items()}, (picture,))


def wait_of_mmc(conditions: Conditions) -> Measured:
    """QUART §5.1, Eq. 1: the mean delay of an M/M/c stage. With one server, utilized to 95 %, unit
    service: the printed formula, Erlang's formula, and a simulation of two million requests."""
    rng = np.random.default_rng(conditions.seed)
    arrival, service = 0.95, 1.0
    printed = (1 - arrival / service) * arrival / (service * (service - arrival)) + 1 / service
    erlang = erlang_wait(arrival, service, 1) + 1 / service
    simulated = waits_in_mmc(rng, arrival, service, 1, 2_000_000) + 1 / service
    two = erlang_wait(1.9, service, 2)
    simulated_two = waits_in_mmc(rng, 1.9, service, 2, 1_000_000)
    return Measured(
        {
            "printed": printed,
            "erlang": erlang,
            "simulated": simulated,
            "erlang_wait_of_two": two,
            "simulated_wait_of_two": simulated_two,
        }
    )


def stays_in_memory(conditions: Conditions) -> Measured:
    """λScale §2.3, Figure 2: twelve models, three slots, LRU, a request per model and minute: over
    95 % stay less than 15 s.

    As stated, and at four requests per model and minute (four GPUs per node that each get one).
    """
    rng = np.random.default_rng(conditions.seed)
    limit_s = 15
    stays = {per_minute: lru_stays(rng, 12, 3, per_minute / 60, 200_000) for per_minute in (1, 4)}
    fifteen = lru_stays(rng, 15, 3, 1 / 60, 200_000)
    figures = {
        f"percent_at_{per_minute}": 100 * float((its < limit_s).mean())
        for per_minute, its in stays.items()
    }
    figures["percent_of_15_models"] = 100 * float((fifteen < limit_s).mean())
    curves = tuple(
        Curve(f"{per_minute} per minute", tuple(_shares(its)), True)
        for per_minute, its in stays.items()
    )
    picture = Picture("Stay in memory: 12 models, 3 slots", "seconds", "part below", curves)
    return Measured(figures, (picture,))


# -- helpers --------------------------------------------------------------------------------------


def _entering(seed: int, cv: float) -> list[float]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(gamma_gaps(rng, cv, 1.0, 200_000))
    leaving = tandem_departures(rng, arrivals, _STAGES - 1, _UTILIZATION, _SERVICE_CV)
    return [cv_of_gaps(times) for times in (arrivals, *leaving)]


def _shares(stays: np.ndarray) -> list[tuple[float, float]]:
    """The part of the stays below each whole second up to a minute."""
    return [(float(s), float((stays < s).mean())) for s in range(61)]
