import threading
import time

import pytest
from transfer_world import WAIT_S

from livescale.transfer.token_bucket import BucketClosedError, TokenBucket

RATE = 40_000_000
# Large enough that a thread which the machine's other work delays does not lose rate.
BURST_BYTES = RATE // 20


def _elapsed_s(start_ns: int) -> float:
    return (time.monotonic_ns() - start_ns) / 1e9


@pytest.mark.parametrize("is_fresh_when_idle", [False, True])
def test_the_rate_is_met(is_fresh_when_idle: bool) -> None:
    bucket = TokenBucket(RATE, BURST_BYTES, is_fresh_when_idle=is_fresh_when_idle)
    bucket.take(BURST_BYTES)
    start_ns = time.monotonic_ns()
    for _ in range(160):
        bucket.take(RATE // 320)
    assert RATE / 2 / _elapsed_s(start_ns) / RATE == pytest.approx(1, abs=0.1)


def test_two_threads_share_the_rate_evenly() -> None:
    bucket = TokenBucket(RATE, BURST_BYTES)
    bucket.take(BURST_BYTES)
    taken = [0, 0]
    start_ns = time.monotonic_ns()

    def work(index: int) -> None:
        while time.monotonic_ns() < start_ns + 500_000_000:
            bucket.take(50_000)
            taken[index] += 50_000

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sum(taken) / _elapsed_s(start_ns) / RATE == pytest.approx(1, abs=0.1)
    assert max(taken) < 1.5 * min(taken)


def test_an_idle_line_collects_one_burst_and_no_more() -> None:
    bucket = TokenBucket(1_000_000, burst_bytes=50_000)
    start_ns = time.monotonic_ns()
    bucket.take(50_000)
    bucket.take(100_000)
    assert time.monotonic_ns() - start_ns >= 100_000_000


def test_a_line_that_is_fresh_when_idle_carries_nothing_at_once() -> None:
    """An uplink's first bytes after a rest take their time, as on a link. With credit a load's
    first layer was so early that the controller took loads for a quarter shorter than they were."""
    bucket = TokenBucket(1_000_000, burst_bytes=50_000, is_fresh_when_idle=True)
    start_ns = time.monotonic_ns()
    bucket.take(50_000)
    assert time.monotonic_ns() - start_ns >= 50_000_000


def test_closing_wakes_who_waits_and_refuses_who_comes() -> None:
    bucket = TokenBucket(1)
    refused = threading.Event()
    waiting = threading.Event()

    def work() -> None:
        waiting.set()
        try:
            bucket.take(1_000_000)
        except BucketClosedError:
            refused.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert waiting.wait(WAIT_S)
    bucket.close()
    thread.join(WAIT_S)
    assert refused.is_set()
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


def test_urgent_bytes_go_before_parameters_that_wait() -> None:
    bucket = TokenBucket(1_000_000, burst_bytes=0)
    order: list[str] = []

    def take_parameters() -> None:
        bucket.take(50_000)
        order.append("parameters")

    threads = [threading.Thread(target=take_parameters) for _ in range(4)]
    for thread in threads:
        thread.start()
    bucket.take(20_000, is_urgent=True)
    order.append("urgent")
    for thread in threads:
        thread.join(WAIT_S)
    # One slice of parameters may have been under way, or two if this thread was late.
    assert order.index("urgent") <= 2


def test_no_parameters_come_between_the_slices_of_what_is_urgent() -> None:
    """Each slice of a handover waited for one of parameters: it took twice its time."""
    bucket = TokenBucket(RATE, burst_bytes=0)
    size_bytes = RATE // 20
    taken: list[str] = []
    is_over = threading.Event()

    def take_parameters() -> None:
        while not is_over.is_set():
            bucket.take(bucket.slice_bytes(RATE))
            taken.append("parameters")

    thread = threading.Thread(target=take_parameters)
    thread.start()
    sizes = []
    for step in bucket.slices(size_bytes, is_urgent=True):
        sizes.append(step)
        taken.append("urgent")
    is_over.set()
    thread.join(WAIT_S)
    assert sum(sizes) == size_bytes
    assert len(sizes) > 5
    urgent = [place for place, what in enumerate(taken) if what == "urgent"]
    # A take that was booked before may return behind the first slice.
    between = taken[urgent[0] : urgent[-1]]
    assert between.count("parameters") <= 1


def beside_parcels(parcels: int) -> list[str]:
    """What took the line, in order, from the first of so many parcels of 10 ms to the last."""
    bucket = TokenBucket(RATE, burst_bytes=0)
    order: list[str] = []
    is_over = threading.Event()

    def take_parameters() -> None:
        while not is_over.is_set():
            bucket.take(bucket.slice_bytes(RATE))
            order.append("parameters")

    thread = threading.Thread(target=take_parameters)
    thread.start()
    for _ in range(parcels):
        for _ in bucket.slices(RATE // 100, is_urgent=True):
            pass
        order.append("parcel")
    is_over.set()
    thread.join(WAIT_S)
    first = order.index("parcel")
    return order[first : len(order) - order[::-1].index("parcel")]


def test_few_parameters_come_between_parcels_that_follow_one_another() -> None:
    """KV comes layer by layer: each layer waited for a chunk of parameters, a quarter of its time
    again. (Where the machine keeps a thread waiting for long, the line does not.)"""
    assert beside_parcels(32).count("parameters") <= 8


def test_parcels_without_an_end_leave_parameters_a_slice_every_100_ms() -> None:
    """Else a load beside them would look like one that has stalled."""
    assert beside_parcels(80).count("parameters") >= 4


def test_slices_are_all_of_it_and_end_when_the_bucket_is_closed() -> None:
    bucket = TokenBucket(None)
    assert list(bucket.slices(1 << 40, is_urgent=True)) == [1 << 40]
    limited = TokenBucket(RATE)
    for is_urgent in (False, True):
        assert sum(limited.slices(RATE // 8, is_urgent)) == RATE // 8
    slices = limited.slices(RATE, is_urgent=True)
    next(slices)
    limited.close()
    with pytest.raises(BucketClosedError):
        list(slices)


def test_parameters_get_their_share_and_leave_the_rest() -> None:
    bucket = TokenBucket(RATE, BURST_BYTES, parameter_share_percent=25)
    bucket.take(BURST_BYTES)
    bucket.take(1)  # when the burst is paid for
    start_ns = time.monotonic_ns()
    for _ in range(40):
        bucket.take(RATE // 320)
    assert RATE / 8 / _elapsed_s(start_ns) / RATE == pytest.approx(0.25, abs=0.03)


def test_both_classes_together_keep_to_the_rate() -> None:
    bucket = TokenBucket(RATE, BURST_BYTES)
    bucket.take(BURST_BYTES)
    start_ns = time.monotonic_ns()

    def take_urgent() -> None:
        for _ in range(40):
            bucket.take(RATE // 320, is_urgent=True)

    thread = threading.Thread(target=take_urgent)
    thread.start()
    for _ in range(40):
        bucket.take(RATE // 320)
    thread.join(WAIT_S)
    assert RATE / 4 / _elapsed_s(start_ns) / RATE == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("percent", [0, 101])
def test_a_share_that_is_none_is_refused(percent: int) -> None:
    with pytest.raises(ValueError, match="share of"):
        TokenBucket(1000, parameter_share_percent=percent)


def test_a_line_that_is_kept_takes_no_parameters_until_it_is_not() -> None:
    bucket = TokenBucket(RATE)
    ahead_ns = 3600 * 1_000_000_000
    bucket.keep_until(time.monotonic_ns() + ahead_ns)
    taken: list[str] = []
    thread = threading.Thread(target=lambda: (bucket.take(1000), taken.append("parameters")))
    thread.start()
    bucket.take(RATE // 20, is_urgent=True)
    taken.append("urgent")
    bucket.keep_until(0)
    thread.join(WAIT_S)
    assert taken == ["urgent", "parameters"]
    bucket.keep_until(time.monotonic_ns() + ahead_ns)
    bucket.close()
    with pytest.raises(BucketClosedError):
        bucket.take(1000)
