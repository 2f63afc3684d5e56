"""The policy that aims at a time to the first token: by property, and through the Controller."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.policy.autoscaler import SPREAD, Autoscaler
from livescale.control.policy.load_snapshot import LoadSnapshot, Suggestion
from livescale.control.policy.policy import SloPolicy
from livescale.control.policy.service_rate import ServiceRate
from livescale.values.scaling_policies import SloAim

MS = 1_000_000
S = 1_000 * MS
AIM = SloAim(ttft_ns=400 * MS, floor_decay_ns=10 * S, scale_down_timeout_ns=500 * MS)
WAIT_NS = AIM.ttft_ns // 2


@st.composite
def loads(draw: st.DrawFn) -> LoadSnapshot:
    """Queues, arrivals, instances and times of loads of all sizes; room is no matter."""
    serving = draw(st.integers(0, 8))
    return LoadSnapshot(
        instances=serving + draw(st.integers(0, 4)),
        window_tokens=draw(st.integers(0, 60_000)),
        window_ns=S,
        queued_prefill_tokens=draw(st.integers(0, 60_000)),
        kv_blocks_used=0,
        prefill_tokens_per_s=draw(st.sampled_from([None, 12_000])),
        kv_blocks=None,
        requests=draw(st.integers(1, 40) | st.just(5_000)),
        serving=serving,
        resumable=draw(st.integers(0, 3)),
        service_tokens_per_s=draw(st.integers(1_000, 20_000)),
        load_ns=draw(st.none() | st.integers(0, 5 * S)),
    )


def suggest(load: LoadSnapshot) -> Suggestion:
    return SloPolicy(AIM).suggest(load)


def needed_by_rate(load: LoadSnapshot) -> int:
    assert load.service_tokens_per_s
    return ceil(load.window_tokens * 1000 / (load.service_tokens_per_s * 900))


@given(loads())
def test_never_grows_for_a_queue_that_ends_before_a_load(load: LoadSnapshot) -> None:
    """With what arrives meanwhile. Instances that drain come back without a load."""
    assert load.service_tokens_per_s
    ready = load.serving + load.resumable
    load_s = (load.load_ns or 0) / S
    until_then = load.queued_prefill_tokens + load.window_tokens * load_s
    if until_then < ready * load.service_tokens_per_s * load_s:
        found = suggest(load)
        allowed = max(load.instances + load.resumable, needed_by_rate(load), 1)
        assert found.at_least <= allowed


@given(loads(), st.integers(0, 60_000))
def test_what_arrives_adds_no_instance_where_the_queue_keeps_the_aim(
    load: LoadSnapshot, more: int
) -> None:
    """One long prompt within a window says little. Without an aim arrivals count."""
    load = replace(load, queued_prefill_tokens=0, load_ns=None, window_tokens=more)
    assert suggest(load).at_least <= 1
    unaimed = SloPolicy(SloAim()).suggest(load)
    assert needed_by_rate(load) <= max(unaimed.at_least, 1)
    # What serves goes on serving while so much arrives.
    assert suggest(load).at_most == unaimed.at_most


@given(loads())
@example(
    # 20,000 tokens are queued, and by the end of the load it will be 35,000.
    LoadSnapshot(
        *(1, 25_000, S, 20_000, 0, None, None, 5_000),
        serving=1,
        service_tokens_per_s=10_000,
        load_ns=S,
    )
)
def test_what_is_asked_for_suffices(load: LoadSnapshot) -> None:
    """A queue that is grown for is computed within the wait that the aim allows, as it stands and
    as it will stand after the load; or every request has its instance."""
    assert load.service_tokens_per_s
    found, rate = suggest(load), load.service_tokens_per_s
    ready = load.instances + load.resumable
    assert found.grow_to == found.at_least
    if found.at_least > max(ready, needed_by_rate(load)) and found.at_least < load.requests:
        load_s = (load.load_ns or 0) / S
        arriving = load.window_tokens * load_s
        computed = (load.serving + load.resumable) * rate * load_s
        left = max(load.queued_prefill_tokens, load.queued_prefill_tokens + arriving - computed)
        assert left <= found.at_least * rate * WAIT_NS / S * (1 + 1e-9)


@given(loads(), st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 100))
def test_more_load_never_asks_for_less(
    load: LoadSnapshot, queued: int, arrived: int, requests: int
) -> None:
    more = replace(
        load,
        queued_prefill_tokens=load.queued_prefill_tokens + queued,
        window_tokens=load.window_tokens + arrived,
        requests=load.requests + requests,
    )
    low, high = suggest(load), suggest(more)
    assert low.at_least <= high.at_least
    assert low.at_most <= high.at_most
    assert low.at_least <= low.at_most


def test_a_load_that_takes_no_time_is_asked_for_where_a_slow_one_is_not() -> None:
    """9,000 tokens at 10,000 a second: 0.9 s on one instance, 0.2 s on five."""
    load = LoadSnapshot(1, 0, S, 9_000, 0, 15_000, None, requests=30, serving=1)
    measured = replace(load, service_tokens_per_s=10_000)
    assert suggest(replace(measured, load_ns=0)).at_least == 5
    assert suggest(replace(measured, load_ns=800 * MS)).at_least == 5
    slow = suggest(replace(measured, load_ns=S))
    assert slow.at_least == 1
    # What drains is there at once, and further ones come as late as before.
    assert suggest(replace(measured, load_ns=S, resumable=2)).at_least == 3
    values = slow.explain()
    assert {
        "ttft_aim_ms": 400,
        "service_tokens_per_s": 10_000,
        "load_ms": 1000,
        "left_after_load": -1000,
        "floor": 1,
    }.items() <= values.items()


def test_what_is_measured_counts_before_what_is_configured() -> None:
    load = LoadSnapshot(1, 0, S, 12_000, 0, 12_000, None, requests=30, serving=1, load_ns=0)
    assert suggest(load).at_least == 5
    assert suggest(replace(load, service_tokens_per_s=8_000)).at_least == 8
    # Nothing is known of the model yet: one instance.
    assert suggest(replace(load, prefill_tokens_per_s=None)).at_least == 1


@given(queued=st.integers(0, 10**6), rate=st.integers(1_000, 50_000), run=st.integers(128, 8192))
def test_without_an_aim_a_queue_takes_two_thirds_of_a_run(queued: int, rate: int, run: int) -> None:
    """Whatever the rate, as long as that is no shorter than an answer to it takes."""
    policy = SloPolicy(SloAim(run_tokens_max=run))
    load = LoadSnapshot(1, 0, S, queued, 0, rate, None, requests=10**7, serving=1, load_ns=0)
    load = replace(load, resumable=10**7)
    within = max(2 * run / 3, rate * 0.02)
    needed = policy.suggest(load).at_least
    assert needed == pytest.approx(max(ceil(queued / within), 1), rel=0.01, abs=1)


@given(queued=st.integers(0, 10**6), there=st.integers(1, 40), load_ms=st.integers(200, 5000))
def test_without_an_aim_loads_are_for_queues_above_the_bound(
    queued: int, there: int, load_ms: int
) -> None:
    """Spares wake for two thirds of a Run; a load is ordered for as many instances as leave no
    queue above the bound, and never where the queue ends before."""
    aim = SloAim(run_tokens_max=2048)
    load = LoadSnapshot(
        1,
        0,
        S,
        queued,
        0,
        10_000,
        None,
        10**7,
        serving=1,
        resumable=there - 1,
        load_ns=load_ms * MS,
    )
    at_once = min(ceil(queued / (2 * 2048 / 3)), there)
    loaded = ceil(queued / (10 * aim.room.backlog_upper_ns / MS))
    ends_before = queued <= there * 10 * load_ms
    expected = max(at_once, 0 if ends_before else loaded, 1)
    assert SloPolicy(aim).suggest(load).at_least == pytest.approx(expected, abs=1)


@given(loads())
def test_what_needs_no_load_shortens_the_queue(load: LoadSnapshot) -> None:
    """Up to what is there at once, and never more than there are requests; what is worth a load
    stays what it is, and without an aim nothing is promised."""
    found, plain = suggest(load), SloPolicy(SloAim()).suggest(load)
    assert plain.spread == 0
    assert 0 <= found.spread <= min(load.requests, load.instances + load.resumable)
    assert load.service_tokens_per_s
    if found.spread < min(load.requests, load.instances + load.resumable):
        queued_ns = load.queued_prefill_tokens * S / load.service_tokens_per_s
        assert queued_ns <= found.spread * AIM.ttft_ns / 8 * 1.001
    now = load.instances, (1, 1_000), None
    wanted, reason = Autoscaler(S, S).wanted(0, now[0], found, *now[1:])
    if found.at_least <= load.instances < found.spread and load.instances:
        assert (wanted, reason) == (found.spread, SPREAD)
    if found.at_least > load.instances:
        assert reason != SPREAD


def test_a_prompt_is_not_divided() -> None:
    load = LoadSnapshot(1, 0, S, 90_000, 0, 10_000, None, requests=2, serving=1, load_ns=0)
    assert suggest(load).at_least == 2


@given(
    peak=st.integers(1, 60),
    most=st.integers(1, 40),
    decay_ns=st.sampled_from([0, 50 * MS, 10 * S]),
    steps=st.lists(st.integers(1, 3 * S), max_size=20),
)
def test_the_floor_falls_from_the_last_peak_to_nothing(
    peak: int, most: int, decay_ns: int, steps: list[int]
) -> None:
    """Never above the peak or the most that is allowed, never up without need, and gone after the
    decay; it falls exactly when it says."""
    policy = SloPolicy(SloAim(ttft_ns=400 * MS, floor_decay_ns=decay_ns))
    busy = LoadSnapshot(
        1, 0, S, 2_000 * peak, 0, 10_000, None, peak, serving=1, load_ns=0, instances_max=most
    )
    floor = policy.suggest(busy).floor
    assert floor == (min(peak, most) if decay_ns else 0)
    now_ns = 0
    for step_ns in steps:
        now_ns += step_ns
        idle = LoadSnapshot(1, 0, S, 0, 0, 10_000, None, now_ns=now_ns, instances_max=most)
        found = policy.suggest(idle)
        assert found.floor <= floor
        assert found.at_most == 0
        floor = found.floor
        assert (floor == 0) or now_ns < decay_ns
        for falls_ns in policy.deadlines_ns(now_ns):
            assert falls_ns > now_ns
            before = policy.suggest(replace(idle, now_ns=falls_ns - 1)).floor
            now_ns, floor = falls_ns, policy.suggest(replace(idle, now_ns=falls_ns)).floor
            assert before > floor


@given(st.integers(0, 50_000))
def test_the_queue_that_asks_for_one_is_longer_than_the_one_that_gives_one_up(queued: int) -> None:
    """By half, so that nothing swings between the two."""
    load = LoadSnapshot(1, 0, S, queued, 0, 10_000, None, 100, serving=1, load_ns=0)
    kept = max(suggest(load).at_most, 1)
    fuller = replace(load, queued_prefill_tokens=queued * 3 // 2, instances=kept, serving=kept)
    assert suggest(fuller).at_least <= kept


def test_a_lower_need_leaves_the_floor_where_it_was() -> None:
    policy = SloPolicy(AIM)
    busy = LoadSnapshot(1, 0, S, 20_000, 0, 10_000, None, 100, serving=1, load_ns=0)
    assert policy.suggest(busy).floor == 10
    low = replace(busy, queued_prefill_tokens=4_000, now_ns=5 * S, instances=10, serving=10)
    found = policy.suggest(low)
    assert (found.at_least, found.floor) == (2, 5)
    assert policy.suggest(replace(low, now_ns=8 * S)).floor == 2
    # A need that reaches the floor is a new peak.
    assert policy.suggest(replace(low, now_ns=13 * S)).floor == 2


@given(loads(), st.integers(1, 12), st.integers(0, 3))
def test_a_constant_load_makes_nothing_swing(load: LoadSnapshot, most: int, loading: int) -> None:
    """Instances that are asked for come a few steps later. Once the number fell it never rises, and
    it is never above the most that is allowed."""
    policy, scaler = SloPolicy(AIM), Autoscaler(AIM.scale_down_timeout_ns, 60 * S)
    serving = min(load.serving, most)
    coming: list[int] = []
    numbers = []
    for now_ns in range(0, 30 * S, 250 * MS):
        serving += coming.count(now_ns)
        coming = [at_ns for at_ns in coming if at_ns > now_ns]
        count = serving + len(coming)
        seen = replace(
            load,
            instances=count,
            serving=serving,
            resumable=0,
            now_ns=now_ns,
            instances_max=most,
        )
        wanted, _ = scaler.wanted(now_ns, count, policy.suggest(seen), (1, most), None)
        assert wanted <= max(most, count)
        if wanted < count and serving:
            serving -= 1
        coming += [now_ns + (1 + loading) * 250 * MS] * max(wanted - count, 0)
        numbers.append(serving + len(coming))
    assert max(numbers) <= most
    falls = [i for i, (a, b) in enumerate(pairwise(numbers)) if b < a]
    if falls:
        rest = numbers[falls[0] :]
        assert rest == sorted(rest, reverse=True)


@given(
    runs=st.lists(st.tuples(st.integers(1, 4_000), st.integers(1, 500 * MS)), min_size=1),
)
def test_a_service_rate_lies_between_its_runs(runs: list[tuple[int, int]]) -> None:
    service = ServiceRate()
    for tokens, run_ns in runs:
        service.add(tokens, run_ns)
    rates = [tokens * S / run_ns for tokens, run_ns in runs]
    found = service.tokens_per_s
    if sum(run_ns for _, run_ns in runs) < 200 * MS:
        assert found is None
    else:
        assert found is not None
        assert min(rates) * 0.99 - 1 <= found <= max(rates) * 1.01 + 1


def test_a_service_rate_follows_what_changes() -> None:
    service = ServiceRate()
    for tokens in [1_000] * 300 + [500] * 600:
        service.add(tokens, 100 * MS)
    assert service.tokens_per_s == pytest.approx(5_000, rel=0.1)
    service.add(-1, 100 * MS)
    service.add(10**9, 0)
    assert service.tokens_per_s == pytest.approx(5_000, rel=0.1)


@pytest.mark.parametrize(("ttft_ns", "decay_ns"), [(0, 1), (-1, 1), (1, -1)])
def test_an_aim_must_make_sense(ttft_ns: int, decay_ns: int) -> None:
    with pytest.raises(ValueError, match="an aim of"):
        SloAim(ttft_ns, decay_ns)
