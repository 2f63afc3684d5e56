"""Silence and progress as rules: who is judged, when, and what a late watcher may not conclude."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.cluster.liveness import SilenceWatch, WorkProgress, look_gap_ns

LOST_AFTER = 1000
GAP = look_gap_ns(LOST_AFTER)
STUCK_AFTER = 60 * LOST_AFTER
gaps = st.integers(1, 3 * LOST_AFTER)


@given(
    looks=st.lists(gaps, min_size=1, max_size=60),
    words=st.lists(st.integers(0, 20 * LOST_AFTER), max_size=60),
)
def test_nobody_is_lost_who_was_not_silent_before_watching_eyes(
    looks: list[int], words: list[int]
) -> None:
    """Whatever the times: who is lost has sent nothing for `LOST_AFTER`, and in all that time no
    two looks were far apart."""
    watch: SilenceWatch[str] = SilenceWatch(LOST_AFTER)
    watch.add("peer", 0)
    words.sort()
    now, looked, lost = 0, [0], []
    watch.look(0)
    for gap in looks:
        now += gap
        for word in words:
            if now - gap < word <= now and not lost:
                watch.received("peer", word)
        looked.append(now)
        if watch.look(now):
            lost.append(now)
    assert len(lost) <= 1
    for at in lost:
        assert not [word for word in words if at - LOST_AFTER < word <= at]
        eyes = [look for look in looked if look <= at]
        apart = [b - a for a, b in pairwise(eyes) if b > at - LOST_AFTER]
        assert max(apart) <= LOST_AFTER // 2


@given(
    since=st.integers(0, 10 * LOST_AFTER),
    delays=st.lists(st.integers(0, GAP), min_size=40, max_size=40),
)
def test_silence_is_noticed_in_time_by_a_watcher_that_looks_in_time(
    since: int, delays: list[int]
) -> None:
    watch: SilenceWatch[str] = SilenceWatch(LOST_AFTER)
    watch.add("silent", 0)
    watch.add("other", 0)
    now, found = 0, None
    for delay in delays * 2:
        now += GAP + delay
        if now <= since:
            watch.received("silent", now)
        watch.received("other", now)
        lost = watch.look(now)
        assert "other" not in lost
        if "silent" in lost:
            found = now
            break
    assert found is not None
    assert found - since <= LOST_AFTER + 2 * GAP


def test_a_watcher_that_was_suspended_gives_everybody_a_fresh_period() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LOST_AFTER)
    watch.add("peer", 0)
    watch.look(0)
    back = 1_000_000 * LOST_AFTER
    assert watch.look(back) == ()
    for now in range(back, back + LOST_AFTER, GAP):
        assert watch.look(now) == ()
    assert watch.look(back + LOST_AFTER) == ("peer",)


def test_a_first_message_may_take_longer_and_only_that() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LOST_AFTER)
    watch.add("slow", 0, 3 * LOST_AFTER)
    watch.add("early", 0, 3 * LOST_AFTER)
    watch.received("early", GAP)
    lost = {now: watch.look(now) for now in range(0, 4 * LOST_AFTER, GAP)}
    found = {peer: now for now, peers in lost.items() for peer in peers}
    assert found == {"early": LOST_AFTER + GAP, "slow": 3 * LOST_AFTER}


def test_who_has_left_or_is_lost_is_not_judged_again() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LOST_AFTER)
    watch.add("left", 0)
    watch.add("lost", 0)
    watch.remove("left")
    watch.remove("left")
    assert [watch.look(now) for now in range(0, LOST_AFTER + 1, GAP)][-1] == ("lost",)
    watch.received("lost", LOST_AFTER)
    assert watch.peers == ()


@given(pieces=st.lists(st.tuples(st.integers(0, LOST_AFTER - 1), st.integers(0, STUCK_AFTER - 1))))
def test_a_thread_that_comes_round_is_alive_however_long_its_pieces_are(
    pieces: list[tuple[int, int]],
) -> None:
    """Asked at every moment that matters: at the ends of waits and of pieces, just before them."""
    progress = WorkProgress(LOST_AFTER, STUCK_AFTER)
    now = 0
    for wait, length in pieces:
        progress.ask(now)
        now += wait
        assert progress.is_alive(now)
        progress.begin(now)
        progress.ask(now)
        now += length
        assert progress.is_alive(now)
        progress.end(now)
        assert progress.is_alive(now)


def test_a_piece_that_is_stuck_and_an_inbox_that_is_not_emptied_are_silence() -> None:
    progress = WorkProgress(LOST_AFTER, STUCK_AFTER)
    progress.begin(0)
    assert progress.is_alive(STUCK_AFTER - 1)
    assert not progress.is_alive(STUCK_AFTER)
    progress.end(STUCK_AFTER)
    assert progress.is_alive(STUCK_AFTER)
    assert progress.ask(STUCK_AFTER)
    assert not progress.ask(STUCK_AFTER + 1), "one empty piece at a time"
    assert progress.is_alive(STUCK_AFTER + LOST_AFTER - 1)
    assert not progress.is_alive(STUCK_AFTER + LOST_AFTER)
    progress.begin(STUCK_AFTER + LOST_AFTER)
    assert progress.is_alive(STUCK_AFTER + LOST_AFTER)


def test_a_thread_that_has_nothing_to_do_and_was_not_asked_is_alive() -> None:
    assert WorkProgress(LOST_AFTER, STUCK_AFTER).is_alive(1_000_000 * STUCK_AFTER)
