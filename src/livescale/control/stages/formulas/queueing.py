"""How long requests wait before c servers: M/M/c, and what variability makes of that.

QUART §5.1 prints a wait (Eq. 1) that lacks a^c / (c! (1 - rho)); Erlang's formula stands here.
Rates are per any one unit of time, results are in that unit. Where requests come as fast as they
are served, or faster, there is no steady state: the wait is `math.inf`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator


def erlang_c(offered: float, servers: int) -> float:
    """The part of the requests that wait in an M/M/c queue, with `offered` = lambda / mu.

    1 where there is no steady state. By recursion over Erlang's B, which neither overflows nor
    cancels: no power and no factorial of a large number.
    """
    if servers < 1:
        raise ValueError(f"servers must be at least 1, not {servers}")
    return next(itertools.islice(_parts_that_wait(offered), servers - 1, None))


def mmc_wait(arrival_rate: float, service_rate: float, servers: int) -> float:
    """Mean time in the queue: Erlang's C over c mu - lambda."""
    spare = servers * service_rate - arrival_rate
    if spare <= 0:
        return math.inf
    return erlang_c(arrival_rate / service_rate, servers) / spare


def mmc_sojourn(arrival_rate: float, service_rate: float, servers: int) -> float:
    """Mean time in queue and service: what QUART calls the queuing delay T_i."""
    return mmc_wait(arrival_rate, service_rate, servers) + 1 / service_rate


def variability(arrival_cv: float, service_cv: float) -> float:
    """(Ca² + Cs²) / 2: what Allen and Cunneen multiply the wait of M/M/c by."""
    return (arrival_cv**2 + service_cv**2) / 2


def least_stable(arrival_rate: float, service_rate: float) -> int:
    """The fewest servers, at least one, that are faster than the arrivals."""
    return math.floor(arrival_rate / service_rate) + 1


def servers_needed(
    arrival_rate: float, service_rate: float, wait_max: float, most: int, factor: float = 1.0
) -> int | None:
    """The fewest servers with a mean wait of at most `wait_max`; None: `most` do not suffice.

    `factor` multiplies the wait of M/M/c (`variability`).
    """
    by_count = itertools.islice(_parts_that_wait(arrival_rate / service_rate), max(most, 0))
    for count, waiting in enumerate(by_count, 1):
        spare = count * service_rate - arrival_rate
        if spare > 0 and factor * waiting / spare <= wait_max:
            return count
    return None


def _parts_that_wait(offered: float) -> Iterator[float]:
    """Erlang's C for 1, 2, 3, … servers, without end."""
    blocked = 1.0
    for servers in itertools.count(1):
        blocked = offered * blocked / (servers + offered * blocked)
        rho = offered / servers
        yield 1.0 if rho >= 1 else blocked / (1 - rho * (1 - blocked))
