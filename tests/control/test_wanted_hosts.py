"""Which hosts are wanted: properties of the rule, over any course of needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.cluster.wanted_hosts import (
    HostClaim,
    HostLimits,
    HostOrders,
    PoolNeed,
    WantedHosts,
)

SECOND = 1_000_000_000
needs = st.lists(
    st.tuples(st.integers(0, 20), st.sets(st.integers(0, 8)), st.integers(0, 3 * SECOND)),
    max_size=40,
)


@given(needs, st.integers(0, 3), st.integers(3, 6), st.integers(1, 3), st.booleans())
def test_never_more_than_the_most_nor_fewer_than_the_least(
    course: list[tuple[int, set[int], int]], least: int, most: int, size: int, comes: bool
) -> None:
    rule = WantedHosts(HostLimits(least, most, size, SECOND))
    claims: dict[int, HostClaim] = {}
    now_ns, count = 0, 0
    for lacking, busy, gap_ns in course:
        now_ns += gap_ns
        there = tuple(claim.host for claim in claims.values() if claim.host is not None)
        need = PoolNeed(lacking, tuple(f"host{n}" for n in sorted(busy)), there)
        orders = rule.step(now_ns, list(claims.values()), need, 0)
        for number in orders.give_back:
            claim = claims.pop(number)
            assert not lacking
            assert claim.host not in need.busy
        for _ in range(orders.ask):
            claims[count] = HostClaim(count, f"host{count}" if comes else None)
            count += 1
        assert least <= len(claims) <= most
        if lacking:
            assert len(claims) == most or comes or len(claims) * size >= lacking


def test_a_host_that_is_awaited_is_asked_for_once() -> None:
    rule = WantedHosts(HostLimits(0, 8, 2, SECOND))
    assert rule.step(0, [], PoolNeed(3), 0) == HostOrders(2, ())
    awaited = [HostClaim(0, None), HostClaim(1, None)]
    assert rule.step(1, awaited, PoolNeed(3), 0) == HostOrders(0, ())
    assert rule.step(2, awaited, PoolNeed(5), 0) == HostOrders(1, ())


def test_a_host_whose_workers_are_not_ready_is_awaited() -> None:
    rule = WantedHosts(HostLimits(1, 8, 1, SECOND))
    placed = [HostClaim(0, "a")]
    assert rule.step(0, placed, PoolNeed(1), 0) == HostOrders(0, ())
    assert rule.step(1, placed, PoolNeed(1, there=("a",)), 0) == HostOrders(1, ())


def test_what_nothing_needs_goes_after_its_time() -> None:
    rule = WantedHosts(HostLimits(1, 8, 1, SECOND))
    claims = [HostClaim(0, "a"), HostClaim(1, "b"), HostClaim(2, None)]
    assert rule.step(0, claims, PoolNeed(0, ("a",)), 0) == HostOrders(0, ())
    assert rule.step(SECOND - 1, claims, PoolNeed(0, ("a",)), 0) == HostOrders(0, ())
    assert rule.step(SECOND, claims, PoolNeed(0, ("a",)), 0) == HostOrders(0, (2, 1))
    # A need in between begins the time anew.
    rule.step(SECOND + 1, claims[:2], PoolNeed(1, ("a",)), 0)
    assert rule.step(2 * SECOND, claims[:2], PoolNeed(0, ("a",)), 0) == HostOrders(0, ())


def test_without_a_most_every_machine_is_one() -> None:
    rule = WantedHosts(HostLimits(1, None, 1, SECOND))
    assert rule.step(0, [], PoolNeed(), 3) == HostOrders(3, ())
    claims = [HostClaim(n, f"host{n}") for n in range(3)]
    assert rule.step(10 * SECOND, claims, PoolNeed(), 2) == HostOrders(0, ())
    assert rule.step(10 * SECOND, claims, PoolNeed(), 5) == HostOrders(2, ())
