"""Bounds, targets, schedules and hysteresis, by hand and by property."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.policy.autoscaler import Autoscaler, TokenWindow
from livescale.control.policy.load_snapshot import LoadSnapshot, Suggestion
from livescale.control.policy.policy import (
    BoundsPolicy,
    SloPolicy,
    TargetOngoingPolicy,
    make_policy,
)
from livescale.values.scaling_policies import (
    DAY_NS,
    Bounds,
    ModelPolicy,
    Period,
    SloAim,
    TargetOngoing,
)
from livescale.values.types import ModelSpec

MS = 1_000_000
HOUR_NS = DAY_NS // 24


def suggest(window: int = 0, queued: int = 0, kv: int = 0, rate: int | None = 15_000) -> Suggestion:
    load = LoadSnapshot(1, window, 1000 * MS, queued, kv, rate, 30_000)
    return BoundsPolicy(Bounds()).suggest(load)


@pytest.mark.parametrize(
    ("waiting", "n_min", "n_max"),
    [
        (0, 0, 0),
        (1, 1, 1),
        # 15,000 tokens per second: one instance is full at 10,500 tokens, busy from 7,500 on
        (7_500, 1, 1),
        (10_500, 1, 2),
        (10_501, 2, 2),
        (30_000, 3, 4),
        (100_000, 10, 14),
    ],
)
def test_backlog_follows_the_authors_formula(waiting: int, n_min: int, n_max: int) -> None:
    """n_min = ceil(waiting / 0.7 s / rate), n_max = ceil(waiting / 0.5 s / rate)."""
    suggestion = suggest(queued=waiting)
    assert (suggestion.at_least, suggestion.at_most) == (n_min, n_max)


@given(waiting=st.integers(0, 10**7), rate=st.integers(1, 10**5))
def test_backlog_is_exact(waiting: int, rate: int) -> None:
    suggestion = suggest(queued=waiting, rate=rate)
    assert suggestion.at_least == ceil(Fraction(waiting * 10, 7 * rate))
    assert suggestion.at_most == ceil(Fraction(waiting * 10, 5 * rate))


def test_the_load_that_asks_for_most_gives_the_reason() -> None:
    assert suggest(window=15_000).reason == "token_rate"
    assert suggest(queued=16_000, window=15_000).reason == "prefill_backlog"
    assert suggest(kv=30_000).reason == "kv_in_use"
    assert (suggest(kv=30_000).at_least, suggest(kv=30_000).at_most) == (2, 2)


def test_without_capacity_nothing_is_suggested_but_one_instance_for_requests() -> None:
    unknown = LoadSnapshot(1, 10**9, 1000 * MS, 10**9, 10**9, None, None)
    idle = BoundsPolicy(Bounds()).suggest(unknown)
    assert (idle.at_least, idle.at_most, idle.reason) == (0, 0, "idle")
    waiting = BoundsPolicy(Bounds()).suggest(replace(unknown, requests=3))
    assert (waiting.at_least, waiting.at_most, waiting.reason) == (1, 1, "requests")


def room(requests: int, instances: int = 1, **more: int) -> Suggestion:
    """Instances with 64 places and 100 blocks, of which they use what `more` says."""
    load = LoadSnapshot(instances, 0, 1000 * MS, 0, 0, 15_000, 100, requests, places=64)
    return BoundsPolicy(Bounds()).suggest(replace(load, **more))


@pytest.mark.parametrize(
    ("requests", "at_least", "at_most", "reason"),
    [
        (1, 1, 1, "requests"),
        # 85 % of 64 places are 55, 75 % are 48
        (48, 1, 1, "requests"),
        (49, 1, 2, "requests"),
        (56, 2, 2, "requests"),
        (64, 2, 2, "requests"),
        (65, 2, 2, "waiting_requests"),
        (800, 15, 17, "waiting_requests"),
    ],
)
def test_requests_take_places(requests: int, at_least: int, at_most: int, reason: str) -> None:
    found = room(requests)
    assert (found.at_least, found.at_most, found.reason) == (at_least, at_most, reason)
    assert found.explain()["waiting_requests"] == max(requests - 64, 0)


def test_an_instance_with_one_place_is_for_one_request() -> None:
    for requests in range(5):
        assert room(requests, places=1).at_least == requests


def test_what_full_instances_run_is_what_fits() -> None:
    """Two instances have KV for ten requests each, whatever places they have."""
    found = room(236, instances=2, left_waiting=216, full_instances=2, full_running=20)
    assert (found.at_least, found.reason) == (24, "waiting_requests")
    assert {"waiting_requests": 216, "full_instances": 2}.items() <= found.explain().items()
    # A third one is empty yet: it says nothing of how many fit.
    found = room(236, instances=3, left_waiting=200, full_instances=2, full_running=20)
    assert found.at_least == 24


@given(
    instances=st.integers(1, 20),
    full=st.integers(0, 20),
    running=st.integers(1, 64),
    waiting=st.integers(1, 1000),
    places=st.none() | st.integers(1, 64),
)
def test_those_that_wait_are_load(
    instances: int, full: int, running: int, waiting: int, places: int | None
) -> None:
    """Nothing goes while requests wait; more come than are full."""
    more = {"left_waiting": waiting, "full_instances": full, "full_running": full * running}
    found = room(full * running + waiting, instances, places=places, **more)
    assert found.at_most >= max(instances, found.at_least)
    assert found.at_least > full


def test_blocks_that_are_kept_hold_instances_but_ask_for_none() -> None:
    used = room(20, 3, kv_blocks_used=80)
    assert (used.at_least, used.at_most) == (1, 2)
    kept = room(20, 3, kv_blocks_used=80, kv_blocks_kept=100)
    assert (kept.at_least, kept.at_most) == (1, 3)


def test_bounds_of_zero_never_shrink() -> None:
    bounds = Bounds(token_rate_lower_permille=0, backlog_lower_ns=0, kv_lower_permille=0)
    load = LoadSnapshot(8, 1, 1000 * MS, 1, 1, 15_000, 30_000)
    assert BoundsPolicy(bounds).suggest(load).at_most > 8


@given(
    requests=st.integers(0, 10_000),
    target=st.integers(1, 20_000),
    lower=st.integers(1, 1000),
    instances=st.integers(0, 50),
)
def test_a_target_of_ongoing_requests_is_kept_per_instance(
    requests: int, target: int, lower: int, instances: int
) -> None:
    """Ray Serve's rule: requests / target instances; `at_most` at the lower edge of the band."""
    load = LoadSnapshot(instances, 0, 1, 0, 0, None, None, requests)
    found = TargetOngoingPolicy(TargetOngoing(target, lower)).suggest(load)
    assert found.at_least == ceil(Fraction(requests * 1000, target))
    assert found.at_most == ceil(Fraction(requests * 1000, target) * Fraction(1000, lower))
    assert found.at_most >= found.at_least
    assert (found.reason, found.explain()["requests"]) == ("ongoing_requests", requests)


def test_the_policy_of_a_value() -> None:
    assert isinstance(make_policy(Bounds()), BoundsPolicy)
    assert isinstance(make_policy(TargetOngoing()), TargetOngoingPolicy)
    assert isinstance(make_policy(SloAim()), SloPolicy)


def suggestion(at_least: int, at_most: int) -> Suggestion:
    return Suggestion(at_least, at_most, "load", dict)


IDLE_NS = 1000 * MS


class Scaler:
    """An autoscaler with fixed limits, of a model that has requests unless `idle_since_ns`."""

    def __init__(self, least: int = 1, most: int = 16) -> None:
        self.autoscaler = Autoscaler(333 * MS, IDLE_NS)
        self.limits = (least, most)
        self.idle_since_ns: int | None = None

    def wanted(self, now_ns: int, instances: int, needs: Suggestion) -> tuple[int, str]:
        return self.autoscaler.wanted(now_ns, instances, needs, self.limits, self.idle_since_ns)

    def deadlines_ns(self) -> list[int]:
        return self.autoscaler.deadlines_ns(self.idle_since_ns)


def make(instances_min: int = 1, instances_max: int = 16) -> Scaler:
    return Scaler(instances_min, instances_max)


@pytest.mark.parametrize(
    ("instances", "at_least", "at_most", "wanted"),
    [
        (1, 2, 2, 2),
        (1, 10, 14, 12),
        (1, 3, 4, 4),  # (3 + 4 + 1) / 2: the middle is rounded up
        (9, 10, 14, 12),
        (10, 10, 14, 10),  # n_min does not exceed n: nothing is added
        (1, 20, 30, 16),  # never above instances_max
        (16, 20, 30, 16),
    ],
)
def test_growing_is_immediate_and_to_the_middle(
    instances: int, at_least: int, at_most: int, wanted: int
) -> None:
    """Add (n_min + n_max + 1) / 2 - n where n_min > n; instances that load count."""
    assert make().wanted(0, instances, suggestion(at_least, at_most))[0] == wanted


def test_shrinking_waits_for_the_timeout_and_sheds_one_at_a_time() -> None:
    scaler, low = make(), suggestion(1, 1)
    assert scaler.wanted(0, 5, low) == (5, "below_lower_bound")
    assert scaler.deadlines_ns() == [333 * MS]
    assert scaler.wanted(332 * MS, 5, low) == (5, "below_lower_bound")
    assert scaler.wanted(333 * MS, 5, low) == (4, "idle")
    assert scaler.wanted(334 * MS, 4, low) == (4, "below_lower_bound")
    assert scaler.wanted(666 * MS, 4, low) == (3, "idle")


def test_load_within_the_bounds_starts_the_timeout_anew() -> None:
    scaler = make()
    scaler.wanted(0, 5, suggestion(1, 1))
    assert scaler.wanted(300 * MS, 5, suggestion(4, 5)) == (5, "within_bounds")
    assert scaler.deadlines_ns() == []
    assert scaler.wanted(340 * MS, 5, suggestion(1, 1)) == (5, "below_lower_bound")


def test_min_is_kept_and_reached_at_once() -> None:
    scaler = make(instances_min=2)
    assert scaler.wanted(0, 0, suggestion(0, 0)) == (2, "below_min")
    assert scaler.wanted(0, 2, suggestion(0, 0)) == (2, "within_bounds")
    assert scaler.wanted(10**12, 2, suggestion(0, 0)) == (2, "within_bounds")


def test_more_than_max_are_shed_at_once() -> None:
    """A restarted controller may adopt more than it would start: those that were draining."""
    scaler = make(instances_max=4)
    assert scaler.wanted(0, 6, suggestion(9, 9)) == (4, "above_max")
    assert scaler.wanted(0, 4, suggestion(9, 9)) == (4, "within_bounds")


@given(
    instances=st.integers(0, 20),
    at_least=st.integers(0, 40),
    spread=st.integers(0, 10),
    now_ns=st.integers(0, 1000 * MS),
)
def test_never_below_what_the_load_needs(
    instances: int, at_least: int, spread: int, now_ns: int
) -> None:
    scaler = make()
    scaler.autoscaler.below_since_ns = 0
    wanted, _ = scaler.wanted(now_ns, instances, suggestion(at_least, at_least + spread))
    assert wanted >= min(at_least, instances, 16)
    assert wanted >= min(instances - 1, 16)


def test_the_last_instance_goes_after_a_time_without_requests() -> None:
    scaler, none = make(instances_min=0), suggestion(0, 0)
    assert scaler.wanted(0, 1, none) == (1, "kept_warm")
    scaler.idle_since_ns = 100 * MS
    assert scaler.deadlines_ns() == [333 * MS, 1100 * MS]
    assert scaler.wanted(1099 * MS, 1, none) == (1, "kept_warm")
    assert scaler.wanted(1100 * MS, 1, none) == (0, "unused")
    assert scaler.wanted(1101 * MS, 0, none) == (0, "within_bounds")
    assert scaler.wanted(1102 * MS, 0, suggestion(1, 1)) == (1, "load")


def test_periods_of_the_day_replace_the_limits() -> None:
    day = Period(8 * HOUR_NS, 20 * HOUR_NS, 3, 9)
    night = Period(22 * HOUR_NS, 6 * HOUR_NS, 0, 1)
    policy = ModelPolicy(ModelSpec("m", (1,), 1, 1), 1, 4, schedule=(day, night))
    limits = [policy.limits_at(7 * DAY_NS + hour * HOUR_NS) for hour in range(24)]
    assert limits == [(0, 1)] * 6 + [(1, 4)] * 2 + [(3, 9)] * 12 + [(1, 4)] * 2 + [(0, 1)] * 2


@given(st.integers(0, DAY_NS - 1), st.integers(0, DAY_NS), st.integers(0, 10 * DAY_NS))
def test_a_period_holds_every_day_for_as_long_as_it_says(
    start_ns: int, stop_ns: int, wall_ns: int
) -> None:
    period = Period(start_ns, stop_ns, 0, 1)
    since_ns = (wall_ns - start_ns) % DAY_NS
    length_ns = stop_ns - start_ns if start_ns <= stop_ns else stop_ns - start_ns + DAY_NS
    assert period.holds_at(wall_ns) is (since_ns < length_ns)
    assert period.holds_at(wall_ns) is period.holds_at(wall_ns + DAY_NS)


def test_periods_must_make_sense() -> None:
    with pytest.raises(ValueError, match="is not in its day"):
        Period(5, 11, 0, 1, every_ns=10)
    with pytest.raises(ValueError, match="0 <= min 2 <= max 1 is broken"):
        Period(0, 1, 2, 1)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=30),
    window=st.integers(1, 60),
)
def test_a_window_holds_the_tokens_of_its_span(
    arrivals: list[tuple[int, int]], window: int
) -> None:
    tokens = TokenWindow(window)
    now_ns = 0
    seen: list[tuple[int, int]] = []
    for gap, count in arrivals:
        now_ns += gap
        tokens.add(now_ns, count)
        seen.append((now_ns, count))
        tokens.forget_old(now_ns)
        assert tokens.tokens == sum(c for at_ns, c in seen if at_ns > now_ns - window)


@pytest.mark.parametrize(("least", "most"), [(3, 2), (-1, 2), (0, 0)])
def test_limits_of_a_model_must_make_sense(least: int, most: int) -> None:
    spec = ModelSpec("m", (1,), 1, 1)
    with pytest.raises(ValueError, match=f"m: 0 <= min {least} <= max {most}"):
        ModelPolicy(spec, least, most)
