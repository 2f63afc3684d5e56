"""Lines of stages: in an even one, growing a stage moves the queue and shortens nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_lines import gamma_line, play_line

import effort
from livescale.control.stages.formulas.queueing import mmc_wait
from livescale.lab.reproduce.quart.quart import tandem_departures

STAGES, REPLICAS, LOAD = 8, 4, 0.9
arrivals_of = st.lists(st.floats(0, 20), min_size=1, max_size=80).map(
    lambda gaps: np.cumsum(np.array(gaps))
)
lines = st.lists(st.integers(1, 6), min_size=1, max_size=8)
seeds = st.integers(0, 1 << 32)


@given(arrivals=arrivals_of, replicas=lines, service=st.floats(0.1, 5))
def test_even_stages_wait_as_long_in_all_as_the_narrowest_alone(
    arrivals: np.ndarray, replicas: list[int], service: float
) -> None:
    """On any sample path: also each request leaves when it would have left the narrowest stage,
    plus the other services. So QUART has nothing to choose in such a line."""
    whole = play_line(arrivals, [service] * len(replicas), replicas)
    alone = play_line(arrivals, [service], [min(replicas)])
    assert whole.total_wait == pytest.approx(alone.total_wait, abs=1e-9)
    rest = service * (len(replicas) - 1)
    np.testing.assert_allclose(whole.leaves, alone.leaves + rest, rtol=1e-12, atol=1e-9)


@given(arrivals=arrivals_of, replicas=lines, grown=st.integers(0, 7), service=st.floats(0.1, 5))
def test_growing_one_of_even_stages_changes_no_total(
    arrivals: np.ndarray, replicas: list[int], grown: int, service: float
) -> None:
    """Unless this stage alone was the narrowest."""
    more = list(replicas)
    more[grown % len(more)] *= 2
    if min(more) == min(replicas):
        before, after = (
            play_line(arrivals, [service] * len(more), its) for its in (replicas, more)
        )
        assert after.total_wait == pytest.approx(before.total_wait, abs=1e-9)


@given(arrivals=arrivals_of, replicas=lines, seed=seeds)
def test_requests_are_played_as_a_table_of_servers_would(
    arrivals: np.ndarray, replicas: list[int], seed: int
) -> None:
    """Every stage by itself: the next request takes the server that has been free longest."""
    rng = np.random.default_rng(seed)
    services = [rng.exponential(1.0, len(arrivals)) for _ in replicas]
    at, waits = arrivals.tolist(), []
    for service, servers in zip(services, replicas, strict=True):
        free, begins = [0.0] * servers, []
        for arrival, its in zip(at, service.tolist(), strict=True):
            server = free.index(min(free))
            begins.append(max(arrival, free[server]))
            free[server] = begins[-1] + its
        waits.append(sum(begins) - sum(at))
        at = sorted(begin + its for begin, its in zip(begins, service.tolist(), strict=True))
    run = play_line(arrivals, services, replicas)
    assert run.leaves.tolist() == at
    assert [its * len(at) for its in run.waits] == pytest.approx(waits, abs=1e-7)


@given(arrivals=arrivals_of, replicas=lines, service=st.floats(0.1, 5))
def test_one_service_time_for_all_is_as_many_equal_ones(
    arrivals: np.ndarray, replicas: list[int], service: float
) -> None:
    one = play_line(arrivals, [service] * len(replicas), replicas)
    each = play_line(arrivals, [np.full(len(arrivals), service)] * len(replicas), replicas)
    assert one.waits == pytest.approx(each.waits, abs=1e-9)
    np.testing.assert_allclose(one.leaves, each.leaves, rtol=1e-12)


@given(seed=seeds, stages=st.integers(1, 4))
def test_with_one_replica_each_it_is_the_tandem_line(seed: int, stages: int) -> None:
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1.0, 50))
    leaves = tandem_departures(np.random.default_rng(seed), arrivals, stages, 0.8, 0.5)
    rng = np.random.default_rng(seed)
    services = [rng.gamma(4, 0.8 / 4, 50) for _ in range(stages)]
    run = play_line(arrivals, services, [1] * stages)
    np.testing.assert_allclose(run.leaves, leaves[-1])


def test_a_stage_of_exponential_services_waits_as_erlang_says() -> None:
    run = gamma_line(
        np.random.default_rng(2),
        [3],
        rate=0.7 * 3,
        arrival_cv=1,
        service_cv=1,
        count=200_000,
    )
    assert run.total_wait == pytest.approx(mmc_wait(2.1, 1.0, 3), rel=0.05)


@pytest.mark.parametrize(("arrival_cv", "printed"), [(1.0, 0.95), (4.0, 19.6)])
def test_eight_even_stages_at_ninety_percent(arrival_cv: float, printed: float) -> None:
    """QUART's setting: all waiting is before stage 1; with stage 1 doubled, before stage 2."""
    even, doubled = (
        gamma_line(
            np.random.default_rng(1),
            [first, *[REPLICAS] * (STAGES - 1)],
            rate=LOAD * REPLICAS,
            arrival_cv=arrival_cv,
            count=2_000_000,
        )
        for first in (REPLICAS, 2 * REPLICAS)
    )
    assert even.total_wait == pytest.approx(printed, rel=0.1)
    assert doubled.total_wait == pytest.approx(even.total_wait, rel=1e-6)
    assert even.waits[0] == pytest.approx(even.total_wait, rel=1e-6)
    assert doubled.waits[1] > 0.9 * even.total_wait
    assert max(doubled.waits[2:]) < 1e-6


@pytest.mark.parametrize("count", effort.mostly_long([200_000, 2_000_000], short=[200_000]))
def test_noisy_services_leave_little_to_gain_at_one_stage(count: int) -> None:
    """Service CV 0.3, arrivals CV 4: 27.7 services, 26.8 with stage 1 doubled, 6.2 with one replica
    more everywhere."""
    even, doubled, wider = (
        gamma_line(
            np.random.default_rng(4),
            [first, *[others] * (STAGES - 1)],
            rate=LOAD * REPLICAS,
            arrival_cv=4.0,
            service_cv=0.3,
            count=count,
        ).total_wait
        for first, others in ((4, 4), (8, 4), (5, 5))
    )
    near = 0.15 if count >= 1_000_000 else 0.4
    for found, printed in ((even, 27.7), (doubled, 26.8), (wider, 6.2)):
        assert found == pytest.approx(printed, rel=near)
    assert doubled / even == pytest.approx(26.8 / 27.7, abs=0.02)
    assert wider / even < 0.33


@given(arrivals=arrivals_of, replicas=lines)
def test_requests_leave_in_order_after_their_services(
    arrivals: np.ndarray, replicas: list[int]
) -> None:
    run = play_line(arrivals, [1.0] * len(replicas), replicas)
    assert all(a <= b for a, b in itertools.pairwise(run.leaves.tolist()))
    assert (run.leaves >= arrivals + len(replicas) * (1 - 1e-12)).all()
