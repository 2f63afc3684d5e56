"""Where replicas of stages go, and the KL descent with its projection."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.stages.formulas.spreading import descend, kl_divergence, on_simplex
from livescale.control.stages.stage_placement import (
    StageHost,
    StageNeed,
    StagePlaced,
    is_contended,
    place,
    place_spread,
)

positives = st.floats(0.05, 1)


@st.composite
def clusters(draw: st.DrawFn) -> list[StageHost]:
    rooms = []
    for host in draw(st.sets(st.integers(0, 30), min_size=1, max_size=8)):
        devices = draw(st.integers(0, 8))
        free = draw(st.integers(0, devices))
        has: Counter[int] = Counter()
        for _ in range(devices - free):
            has[draw(st.integers(0, 4))] += 1
        rooms.append(StageHost(host, devices, free, dict(has)))
    return rooms


needs_of = st.lists(
    st.builds(StageNeed, st.integers(0, 4), st.integers(0, 8), st.booleans()),
    max_size=5,
    unique_by=lambda need: need.stage,
)


@given(hosts=clusters(), needs=needs_of, data=st.data())
def test_replicas_go_to_free_devices_and_none_is_left_out_without_need(
    hosts: list[StageHost], needs: list[StageNeed], data: st.DataObject
) -> None:
    for how in (place, place_spread):
        placed = how(hosts, needs)
        on_host = Counter(its.host for its in placed)
        assert all(on_host[room.host] <= room.free for room in hosts)
        of_stage = Counter(its.stage for its in placed)
        assert all(of_stage[need.stage] <= need.count for need in needs)
        free, wanted = sum(room.free for room in hosts), sum(need.count for need in needs)
        assert len(placed) == min(free, wanted)
        other_order = data.draw(st.permutations(hosts)), data.draw(st.permutations(needs))
        assert how(*other_order) == placed


@given(hosts=clusters(), needs=needs_of)
def test_key_stages_come_first(hosts: list[StageHost], needs: list[StageNeed]) -> None:
    placed = place(hosts, needs)
    of_stage = Counter(its.stage for its in placed)
    if any(of_stage[need.stage] < need.count for need in needs if need.is_key):
        keys = {need.stage for need in needs if need.is_key}
        assert {its.stage for its in placed} <= keys


@given(free=st.lists(st.integers(0, 8), min_size=1, max_size=8), count=st.integers(0, 30))
def test_under_contention_a_key_stage_is_spread_as_evenly_as_room_allows(
    free: list[int], count: int
) -> None:
    """Q is uniform: no host may have two more than another that still has room."""
    # One device of each host is taken, so that none is wholly free.
    hosts = [StageHost(i, its + 1, its) for i, its in enumerate(free)]
    needs = [StageNeed(0, count, is_key=True)]
    assert is_contended(hosts, needs) is (count > 0)
    got = Counter(its.host for its in place(hosts, needs))
    assert sum(got.values()) == min(count, sum(free))
    for one, other in itertools.product(hosts, repeat=2):
        if got[other.host] < other.free:
            assert got[one.host] <= got[other.host] + 1


@given(
    has=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    count=st.integers(1, 20),
)
def test_what_a_host_has_already_counts(has: list[int], count: int) -> None:
    hosts = [StageHost(i, its + 41, 40, {3: its}) for i, its in enumerate(has)]
    got = Counter(its.host for its in place(hosts, [StageNeed(3, count, is_key=True)]))
    level = [its + got[i] for i, its in enumerate(has)]
    for i, j in itertools.product(range(len(has)), repeat=2):
        assert level[i] <= level[j] + 1 or not got[i]


def test_key_stages_go_where_most_is_free_and_others_are_packed() -> None:
    hosts = [StageHost(0, 4, 1), StageHost(1, 4, 4), StageHost(2, 4, 2), StageHost(3, 4, 4)]
    needs = [StageNeed(0, 2), StageNeed(1, 2, is_key=True)]
    assert not is_contended(hosts, needs)
    assert place(hosts, needs) == [
        StagePlaced(1, 1, "key_most_free"),
        StagePlaced(1, 3, "key_most_free"),
        StagePlaced(0, 0, "dense"),
        StagePlaced(0, 2, "dense"),
    ]
    assert [its.host for its in place_spread(hosts, needs)] == [1, 3, 1, 3]


@given(hosts=clusters(), needs=needs_of)
def test_others_come_beside_key_stages_only_where_nothing_else_is_free(
    hosts: list[StageHost], needs: list[StageNeed]
) -> None:
    keys = {need.stage for need in needs if need.is_key}
    placed = place(hosts, needs)
    beside = {room.host for room in hosts if any(room.replicas.get(key) for key in keys)}
    beside |= {its.host for its in placed if its.stage in keys}
    dense = [its for its in placed if its.reason == "dense"]
    if any(its.host in beside for its in dense):
        got = Counter(its.host for its in placed)
        assert all(got[room.host] == room.free for room in hosts if room.host not in beside)


def test_packing_leaves_more_room_beside_key_stages_than_the_plain_spread() -> None:
    hosts = [StageHost(i, 4, 4) for i in range(4)]
    needs = [StageNeed(0, 1, is_key=True), StageNeed(1, 4), StageNeed(2, 3)]

    def free_beside_key(placed: list[StagePlaced]) -> int:
        (key,) = (its.host for its in placed if its.stage == 0)
        return 4 - sum(its.host == key for its in placed)

    assert free_beside_key(place_spread(hosts, needs)) == 2
    assert free_beside_key(place(hosts, needs)) == 3


@given(hosts=clusters(), count=st.integers(1, 12), data=st.data())
def test_a_key_stage_comes_to_hosts_with_a_copy_first(
    hosts: list[StageHost], count: int, data: st.DataObject
) -> None:
    """Contended or not: from there it loads from memory (QUART, Figure 5)."""
    has = data.draw(st.sets(st.sampled_from([room.host for room in hosts])))
    hosts = [replace(room, copies=(7,)) if room.host in has else room for room in hosts]
    got = Counter(its.host for its in place(hosts, [StageNeed(7, count, is_key=True)]))
    if any(got[room.host] for room in hosts if room.host not in has):
        assert all(got[room.host] == room.free for room in hosts if room.host in has)


@given(start=st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda p: sum(p) > 0.1))
def test_the_descent_ends_at_the_most_even_spread(start: list[float]) -> None:
    """With Q uniform, wherever it begins."""
    even = [1 / len(start)] * len(start)
    found = descend([its / sum(start) for its in start], even)
    assert found == pytest.approx(even, abs=1e-4)
    assert kl_divergence(found, even) < 1e-6


@given(weights=st.lists(st.tuples(positives, positives), min_size=1, max_size=8))
def test_the_descent_approaches_any_aim(weights: list[tuple[float, float]]) -> None:
    p, q = ([its / sum(column) for its in column] for column in zip(*weights, strict=True))
    found = descend(p, q)
    assert sum(found) == pytest.approx(1)
    assert kl_divergence(found, q) <= kl_divergence(p, q) + 1e-12
    assert found == pytest.approx(q, abs=1e-3)


@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=8), data=st.data())
def test_the_projection_is_the_nearest_point_of_the_simplex(
    values: list[float], data: st.DataObject
) -> None:
    found = on_simplex(values)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    other = data.draw(st.lists(positives, min_size=len(values), max_size=len(values)))
    other = [its / sum(other) for its in other]

    def distance(point: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(values, point, strict=True))

    assert distance(found) <= distance(other) + 1e-9
    for i in range(len(values)):
        assert distance(found) <= distance([float(i == j) for j in range(len(values))]) + 1e-9


def test_the_printed_descent_leaves_the_simplex() -> None:
    """Eq. 9's gradient is 1 where P is Q: one step of Eq. 10 takes the optimum off the simplex."""
    even, rate = [0.25] * 4, 0.1
    assert sum(its - rate * 1 for its in even) == pytest.approx(0.6)
    assert descend(even, even) == pytest.approx(even)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        descend([1.0], [0.0])
    with pytest.raises(ValueError, match="free"):
        StageHost(0, 4, 5)
