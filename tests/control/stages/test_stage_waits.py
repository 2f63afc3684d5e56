"""Waits in front of c servers: against exact fractions, known special cases, and simulations."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import effort
from livescale.control.stages.formulas.queueing import (
    erlang_c,
    least_stable,
    mmc_sojourn,
    mmc_wait,
    servers_needed,
    variability,
)
from livescale.lab.reproduce.quart.quart import printed_sojourn

SERVERS = (1, 2, 3, 4, 8, 16)
RHOS = (0.3, 0.5, 0.7, 0.9, 0.95)


@given(permille=st.integers(1, 999), servers=st.integers(1, 60))
def test_the_recursion_is_erlangs_formula(permille: int, servers: int) -> None:
    """In exact fractions, with powers and factorials as in the books."""
    offered = Fraction(permille, 1000) * servers
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    waiting = last / (sum(offered**n / math.factorial(n) for n in range(servers)) + last)
    assert erlang_c(float(offered), servers) == pytest.approx(float(waiting), rel=1e-9)


@given(rho=st.floats(0.01, 0.99), mu=st.floats(0.1, 50))
def test_with_one_server_erlangs_formula_is_that_of_mm1(rho: float, mu: float) -> None:
    assert mmc_wait(rho * mu, mu, 1) == pytest.approx(rho / (mu * (1 - rho)), rel=1e-9)
    assert mmc_sojourn(rho * mu, mu, 1) == pytest.approx(1 / (mu * (1 - rho)), rel=1e-9)


@given(rho=st.floats(0.05, 0.95), servers=st.integers(1, 20))
def test_one_fast_queue_waits_less_than_the_same_load_apart(rho: float, servers: int) -> None:
    """Pooling: c servers with one queue against c queues of their own."""
    pooled = mmc_wait(rho * servers, 1.0, servers)
    assert pooled <= mmc_wait(rho, 1.0, 1) * (1 + 1e-12)


@given(rho=st.floats(0.0, 2.0), servers=st.integers(1, 20_000))
def test_many_servers_neither_overflow_nor_leave_the_range(rho: float, servers: int) -> None:
    assert 0 <= erlang_c(rho * servers, servers) <= 1


@given(extra=st.floats(0.0, 10.0), servers=st.integers(1, 50))
def test_without_a_steady_state_the_wait_is_infinite(extra: float, servers: int) -> None:
    assert mmc_wait(servers + extra, 1.0, servers) == math.inf


@pytest.mark.parametrize("servers", [0, -1])
def test_no_servers_are_refused(servers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        erlang_c(0.5, servers)


@given(rho=st.floats(0.05, 0.95), cv=st.floats(0, 4))
def test_allen_and_cunneen_is_exact_for_one_server_with_poisson_arrivals(
    rho: float, cv: float
) -> None:
    """Pollaczek and Khinchine: rho (1 + Cs²) / (2 (1 - rho)) services."""
    exact = rho * (1 + cv**2) / (2 * (1 - rho))
    assert mmc_wait(rho, 1, 1) * variability(1, cv) == pytest.approx(exact, rel=1e-9)


@given(
    offered=st.floats(0, 40),
    wait_max=st.floats(1e-3, 10),
    most=st.integers(0, 60),
    cv=st.floats(0.1, 3),
)
def test_the_fewest_servers_are_those_of_a_search(
    offered: float, wait_max: float, most: int, cv: float
) -> None:
    factor = variability(cv, 1)
    will_do = [
        servers
        for servers in range(1, most + 1)
        if factor * mmc_wait(offered, 1, servers) <= wait_max
    ]
    found = servers_needed(offered, 1, wait_max, most, factor)
    assert found == min(will_do, default=None)
    assert found is None or found >= least_stable(offered, 1)


def test_the_printed_formula_is_wrong() -> None:
    """Eq. 1 of QUART: M/M/1 at 95 % takes 20 services, the printed one says 1.95."""
    assert printed_sojourn(0.95, 1, 1) == pytest.approx(1.95)
    assert mmc_sojourn(0.95, 1, 1) == pytest.approx(20)
    simulated = 1 + _mean_wait(np.random.default_rng(1), 0.95, 1, queues=1000, count=4000)
    assert mmc_sojourn(0.95, 1, 1) == pytest.approx(simulated, rel=0.1)
    assert printed_sojourn(0.95, 1, 1) < 0.15 * simulated


@pytest.mark.parametrize(
    ("servers", "rho"),
    effort.mostly_long(
        [(servers, rho) for servers in SERVERS for rho in RHOS],
        short=[(1, 0.5), (4, 0.7), (16, 0.5)],
    ),
)
def test_formula_and_simulated_requests_agree_within_two_percent(servers: int, rho: float) -> None:
    """Of the sojourn, and at high load of the wait itself."""
    count = {0.3: 600, 0.5: 600, 0.7: 3000, 0.9: 6000, 0.95: 12_000}[rho]
    rng = np.random.default_rng(servers)
    wait = _mean_wait(rng, rho, servers, queues=4000, count=count)
    formula = mmc_wait(rho * servers, 1, servers)
    assert wait + 1 == pytest.approx(formula + 1, rel=0.02)
    if rho >= 0.7:
        assert wait == pytest.approx(formula, rel=0.02)


# -- helpers --------------------------------------------------------------------------------------


def _mean_wait(
    rng: np.random.Generator, rho: float, servers: int, *, queues: int, count: int
) -> float:
    """Mean wait in M/M/c with unit services, over that many queues beside each other.

    Requests of each queue are played one by one, first come first served. The first half, while
    queues still grow from empty, does not count.
    """
    free = np.zeros((queues, servers))
    now = np.zeros(queues)
    row, total = np.arange(queues), 0.0
    for number in range(count):
        now += rng.exponential(1 / (rho * servers), queues)
        which = free.argmin(axis=1)
        begins = np.maximum(now, free[row, which])
        if number >= count // 2:
            total += float((begins - now).mean())
        free[row, which] = begins + rng.exponential(1.0, queues)
    return total / (count - count // 2)
