"""When a process of a pool that ended is started again, and when the pool is given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.runtime.children.restarts import Restarts, give_up_reason

#: how lives ended: never ready, or so many seconds after that
LIVES = st.lists(st.none() | st.floats(0, 100), max_size=40)


@given(LIVES)
def test_pauses_grow_while_starts_fail_to_minutes_and_no_further(lives: list[float | None]) -> None:
    restarts, before_s = Restarts("worker 0"), 0.0
    for ready_s in lives:
        if ready_s is not None:
            restarts.ready()
            before_s = 0.0
        restarts.ended(1, ready_s)
        if ready_s is None:
            assert before_s <= restarts.pause_s <= 300
            before_s = restarts.pause_s
        else:
            assert restarts.pause_s <= 5
    for _ in range(20):
        restarts.ended(1, None)
    assert restarts.pause_s == 300


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.booleans())
def test_a_pool_that_was_ready_goes_on_while_one_of_the_kind_may_start(
    failed_starts: list[int], is_known: bool
) -> None:
    peers = [Restarts(f"worker {n}", failed_starts=count) for n, count in enumerate(failed_starts)]
    ended = max(peers, key=lambda peer: peer.failed_starts)
    ended.fatal = "no GPU" if is_known else None
    reason = give_up_reason(ended, peers, was_ready=True)
    assert (reason is None) == (min(failed_starts) < 8)
    if reason is not None and is_known:
        assert "no GPU" in reason


def test_before_the_pool_was_ready_a_known_reason_is_said_at_the_first_death() -> None:
    ended, other = Restarts("worker 0"), Restarts("worker 1")
    ended.ended(1, None)
    assert give_up_reason(ended, [ended, other], was_ready=False) is None
    ended.begins()
    ended.fatal = "no GPU"
    ended.ended(1, None)
    assert give_up_reason(ended, [ended, other], was_ready=False) == "worker 0 cannot start: no GPU"


def test_before_the_pool_was_ready_three_deaths_without_a_reason_end_it() -> None:
    ended, other = Restarts("worker 0"), Restarts("worker 1")
    for _ in range(2):
        ended.ended(-9, None)
        assert give_up_reason(ended, [ended, other], was_ready=False) is None
    ended.ended(-9, None)
    reason = give_up_reason(ended, [ended, other], was_ready=False)
    assert reason is not None
    assert "worker 0 failed 3 times" in reason
