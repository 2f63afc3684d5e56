"""The pace of a line, in virtual time: what is claimed of it holds to the nanosecond, whichever
thread goes first."""

import contextlib
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.transfer.carriers.token_bucket import BucketClosedError, TokenBucket
from virtual_time import VirtualCondition, VirtualTime

RATE = 40_000_000
BYTE_NS = 1_000_000_000 // RATE
MS = 1_000_000
HOUR_NS = 3_600_000 * MS
BURST_BYTES = RATE // 20
RNGS = st.randoms(use_true_random=False)
SIZES = st.lists(st.integers(1, RATE // 100), min_size=1, max_size=20)


def bucket_in(time: VirtualTime, rate: int = RATE, *args: Any, **options: Any) -> TokenBucket:
    changed = VirtualCondition(time)
    return TokenBucket(rate, *args, now_ns=time.now_ns, changed=changed, **options)


@given(SIZES, st.booleans(), st.integers(0, BURST_BYTES), RNGS)
def test_the_rate_is_met(
    sizes: list[int], is_fresh: bool, late_bytes: int, rng: random.Random
) -> None:
    """Also where a thread wakes up late, by less than the burst."""
    late_ns = late_bytes * BYTE_NS
    time = VirtualTime(rng, late_ns)
    bucket = bucket_in(time, RATE, BURST_BYTES, is_fresh_when_idle=is_fresh)
    bucket.take(BURST_BYTES)
    begin_ns = time.now_ns()
    # What the first take was late by is credit.
    owed_ns = sum(sizes) * BYTE_NS
    for size in sizes:
        bucket.take(size)
    assert max(0, owed_ns - late_ns) <= time.now_ns() - begin_ns <= owed_ns + late_ns


@given(st.integers(2, 5), st.integers(1, RATE // 100), st.integers(1, 10), RNGS)
def test_threads_share_the_rate_evenly(
    threads: int, size: int, takes: int, rng: random.Random
) -> None:
    time = VirtualTime(rng)
    bucket = bucket_in(time, RATE, BURST_BYTES)
    bucket.take(BURST_BYTES)
    begin_ns = time.now_ns()
    taken = [0] * threads

    def work(index: int) -> None:
        for _ in range(takes):
            bucket.take(size)
            taken[index] += 1
            assert max(taken) - min(taken) <= 1

    time.run(*(lambda index=index: work(index) for index in range(threads)))
    assert time.now_ns() - begin_ns == threads * takes * size * BYTE_NS


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=4), RNGS)
def test_no_window_of_time_carries_more_than_the_rate_and_one_burst(
    works: list[tuple[list[int], bool]], rng: random.Random
) -> None:
    """Whoever takes, for whatever."""
    time = VirtualTime(rng)
    bucket = bucket_in(time, RATE, BURST_BYTES)
    came: list[tuple[int, int]] = []

    def work(sizes: list[int], is_urgent: bool) -> None:
        for size in sizes:
            bucket.take(size, is_urgent)
            came.append((time.now_ns(), size))

    time.run(*(lambda task=task: work(*task) for task in works))
    most = max(size for _, size in came)
    for first, last in itertools.combinations(range(len(came)), 2):
        window_ns = came[last][0] - came[first][0]
        carried = sum(size for _, size in came[first : last + 1])
        assert carried <= window_ns / BYTE_NS + BURST_BYTES + most


def test_an_idle_line_collects_one_burst_and_no_more() -> None:
    time = VirtualTime()
    bucket = bucket_in(time, RATE, BURST_BYTES)
    begin_ns = time.now_ns()
    bucket.take(BURST_BYTES)
    assert time.now_ns() == begin_ns
    bucket.take(2 * BURST_BYTES)
    assert time.now_ns() == begin_ns + 2 * BURST_BYTES * BYTE_NS


def test_a_line_that_is_fresh_when_idle_carries_nothing_at_once() -> None:
    """An uplink's first bytes after a rest take their time, as on a link. With credit a load's
    first layer was so early that the controller took loads for a quarter shorter than they were."""
    time = VirtualTime()
    bucket = bucket_in(time, RATE, BURST_BYTES, is_fresh_when_idle=True)
    begin_ns = time.now_ns()
    bucket.take(BURST_BYTES)
    assert time.now_ns() == begin_ns + BURST_BYTES * BYTE_NS


@given(st.lists(st.booleans(), max_size=4), RNGS)
def test_closing_wakes_who_waits_and_refuses_who_comes(
    are_urgent: list[bool], rng: random.Random
) -> None:
    time = VirtualTime(rng)
    bucket = bucket_in(time, 1)
    refused = []

    def work(is_urgent: bool) -> None:
        try:
            bucket.take(1_000_000, is_urgent)
        except BucketClosedError:
            refused.append(is_urgent)

    begin_ns = time.now_ns()
    time.run(
        bucket.close, *(lambda is_urgent=is_urgent: work(is_urgent) for is_urgent in are_urgent)
    )
    assert sorted(refused) == sorted(are_urgent)
    assert time.now_ns() == begin_ns
    with pytest.raises(BucketClosedError):
        bucket.take(1)


def test_no_limit_does_not_wait_but_closes() -> None:
    bucket = TokenBucket(None)
    bucket.take(1 << 60)
    bucket.close()
    with pytest.raises(BucketClosedError):
        bucket.take(1)


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_that_carries_nothing_is_refused(rate: int) -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        TokenBucket(rate)


@given(st.integers(1, 6), RNGS)
def test_urgent_bytes_go_before_parameters_that_wait(threads: int, rng: random.Random) -> None:
    time = VirtualTime(rng)
    bucket = bucket_in(time, burst_bytes=0)
    order: list[str] = []

    def take(what: str) -> None:
        bucket.take(50_000, is_urgent=what == "urgent")
        order.append(what)

    time.run(lambda: take("urgent"), *[lambda: take("parameters")] * threads)
    # One slice of parameters may have been under way.
    assert order.index("urgent") <= 1
    assert len(order) == threads + 1


@given(RNGS)
def test_no_parameters_come_between_the_slices_of_what_is_urgent(rng: random.Random) -> None:
    """Each slice of a handover waited for one of parameters: it took twice its time."""
    time = VirtualTime(rng)
    bucket = bucket_in(time, burst_bytes=0)
    sizes: list[int] = []
    taken: list[str] = []
    is_over = False

    def take_parameters() -> None:
        while not is_over:
            bucket.take(bucket.slice_bytes(RATE))
            taken.append("parameters")

    def take_urgent() -> None:
        nonlocal is_over
        for step in bucket.slices(RATE // 20, is_urgent=True):
            sizes.append(step)
            taken.append("urgent")
        is_over = True

    time.run(take_parameters, take_urgent)
    assert sum(sizes) == RATE // 20
    assert len(sizes) > 5
    urgent = [place for place, what in enumerate(taken) if what == "urgent"]
    assert taken[urgent[0] : urgent[-1]].count("parameters") == 0


def beside_parcels(parcels: int, rng: random.Random) -> Counter[str]:
    """What took the line from the first of so many parcels of 10 ms to the last."""
    time = VirtualTime(rng)
    bucket = bucket_in(time, burst_bytes=0)
    order: list[str] = []
    is_over = False

    def take_parameters() -> None:
        while not is_over:
            bucket.take(bucket.slice_bytes(RATE))
            order.append("parameters")

    def take_parcels() -> None:
        nonlocal is_over
        for _ in range(parcels):
            for _ in bucket.slices(RATE // 100, is_urgent=True):
                pass
            order.append("parcel")
        is_over = True

    time.run(take_parameters, take_parcels)
    first = order.index("parcel")
    return Counter(order[first : len(order) - order[::-1].index("parcel")])


@given(st.integers(2, 100), RNGS)
def test_parcels_that_follow_one_another_leave_parameters_a_slice_every_100_ms(
    parcels: int, rng: random.Random
) -> None:
    """KV comes layer by layer: each layer waited for a chunk of parameters, a quarter of its time
    again. Without any a load beside them would look like one that has stalled."""
    slices = beside_parcels(parcels, rng)["parameters"]
    assert (parcels - 1) // 11 - 1 <= slices <= parcels // 10 + 1


@given(st.integers(0, RATE // 4), st.booleans())
def test_slices_are_all_of_it(size_bytes: int, is_urgent: bool) -> None:
    bucket = bucket_in(VirtualTime())
    assert sum(bucket.slices(size_bytes, is_urgent)) == size_bytes


def test_slices_end_when_the_bucket_is_closed() -> None:
    assert list(TokenBucket(None).slices(1 << 40, is_urgent=True)) == [1 << 40]
    bucket = bucket_in(VirtualTime())
    slices = bucket.slices(RATE, is_urgent=True)
    next(slices)
    bucket.close()
    with pytest.raises(BucketClosedError):
        list(slices)


@given(st.sampled_from([1, 4, 10, 25, 50, 100]), st.integers(1, 40))
def test_parameters_get_their_share_and_leave_the_rest(percent: int, takes: int) -> None:
    time, size = VirtualTime(), RATE // 320
    bucket = bucket_in(time, burst_bytes=0, parameter_share_percent=percent)
    begin_ns = time.now_ns()
    for _ in range(takes):
        bucket.take(size)
    # The last one has the whole line for its own bytes.
    own_ns = size * BYTE_NS
    assert time.now_ns() - begin_ns == (takes - 1) * own_ns * 100 // percent + own_ns
    bucket.take(size, is_urgent=True)
    assert time.now_ns() - begin_ns == (takes - 1) * own_ns * 100 // percent + 2 * own_ns


@given(st.integers(1, 40), st.integers(1, 40), RNGS)
def test_both_classes_together_keep_to_the_rate(
    urgent: int, parameters: int, rng: random.Random
) -> None:
    time, size = VirtualTime(rng), RATE // 320
    bucket = bucket_in(time, RATE, BURST_BYTES)
    bucket.take(BURST_BYTES)
    begin_ns = time.now_ns()

    def take(times: int, is_urgent: bool) -> None:
        for _ in range(times):
            bucket.take(size, is_urgent)

    time.run(lambda: take(urgent, True), lambda: take(parameters, False))
    assert time.now_ns() - begin_ns == (urgent + parameters) * size * BYTE_NS


@pytest.mark.parametrize("percent", [0, 101])
def test_a_share_that_is_none_is_refused(percent: int) -> None:
    with pytest.raises(ValueError, match="share of"):
        TokenBucket(1000, parameter_share_percent=percent)


@given(RNGS)
def test_a_line_that_is_kept_takes_no_parameters_until_it_is_not(rng: random.Random) -> None:
    time = VirtualTime(rng)
    bucket = bucket_in(time)
    begin_ns = time.now_ns()
    bucket.keep_until(begin_ns + HOUR_NS)
    taken: list[str] = []

    def take_parameters() -> None:
        bucket.take(1000)
        taken.append("parameters")

    def take_urgent() -> None:
        bucket.take(RATE // 20, is_urgent=True)
        taken.append("urgent")
        bucket.keep_until(0)

    time.run(take_parameters, take_urgent)
    assert taken == ["urgent", "parameters"]
    assert time.now_ns() < begin_ns + HOUR_NS


def test_a_line_that_is_kept_takes_parameters_afterwards_or_closes() -> None:
    time = VirtualTime()
    bucket = bucket_in(time)
    kept_ns = time.now_ns() + HOUR_NS
    bucket.keep_until(kept_ns)
    bucket.take(1000)
    assert time.now_ns() == kept_ns
    bucket.keep_until(kept_ns + HOUR_NS)

    def take() -> None:
        with contextlib.suppress(BucketClosedError):
            bucket.take(1000)

    time.run(take, bucket.close)
    assert time.now_ns() == kept_ns
