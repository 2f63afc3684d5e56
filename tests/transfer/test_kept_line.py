"""How long a downlink is kept for parcels: all that comes at its rate, and little for nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.transfer.carriers.token_bucket import NEXT_PARCEL_NS
from livescale.transfer.links.kept_line import KEPT_NS_MAX, WASTE_PARTS, WASTED_NS_MAX, KeptLine

RATE = 1_000_000_000
"""A byte takes a nanosecond."""
MS = 1_000_000
AHEAD_NS = KEPT_NS_MAX + NEXT_PARCEL_NS

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begins", "came", "ends"]),
        st.integers(1, 40 * MS),
        st.one_of(*(st.integers(0, most * MS) for most in (5, 30, 300))),
    ),
    max_size=60,
)


def end_of(line: KeptLine, parcel: int, steps: int, now_ns: int, slowness: int = 1) -> int:
    """A parcel of so many bytes comes piece by piece; the line must be kept before each of them,
    where it comes at the rate. Returns when it ended."""
    line.begins(parcel, now_ns)
    for _ in range(steps):
        assert slowness > 1 or line.until_ns > now_ns + parcel // steps
        now_ns += slowness * parcel // steps
        line.came(parcel // steps, now_ns)
    line.ends(0, now_ns)
    return now_ns


@settings(max_examples=examples(400))
@given(STEPS)
def test_whatever_comes_the_line_is_kept_for_a_moment_and_seldom_for_nothing(
    steps: list[tuple[str, int, int]],
) -> None:
    line = KeptLine(RATE)
    missing: list[int] = []
    now_ns = begin_ns = 10 * WASTED_NS_MAX
    wasted_ns = 0.0
    for kind, size, pause_ns in steps:
        if kind != "begins" and not missing:
            continue
        kept_ns = max(0, min(line.until_ns - now_ns, pause_ns))
        now_ns += pause_ns
        used = 0
        if kind == "begins":
            missing.append(size)
            line.begins(size, now_ns)
        elif kind == "came":
            # Not faster than the line is.
            used = min(size, missing[-1], pause_ns)
            missing[-1] -= used
            line.came(used, now_ns)
        else:
            line.ends(missing.pop(), now_ns)
            assert missing or line.until_ns <= now_ns + NEXT_PARCEL_NS
        if pause_ns:
            wasted_ns += kept_ns * (1 - used / pause_ns)
        assert line.until_ns <= now_ns + AHEAD_NS
        # What it had been kept for when patience ended was not taken back.
        most_ns = WASTED_NS_MAX + AHEAD_NS + (now_ns - begin_ns) / WASTE_PARTS
        assert wasted_ns <= most_ns + len(steps)


@given(st.integers(1, 40), st.integers(MS, 16 * MS), st.integers(0, NEXT_PARCEL_NS - 1))
def test_parcels_that_come_at_the_rate_have_the_line_all_the_time(
    count: int, parcel: int, gap_ns: int
) -> None:
    """Also between two that follow one another, as layers of KV do, if gaps are short for them."""
    line, now_ns = KeptLine(RATE), 1000 * MS
    for _ in range(count):
        now_ns = end_of(line, parcel // 4 * 4, 4, now_ns)
        assert line.until_ns >= now_ns + min(parcel // 4 * 4, NEXT_PARCEL_NS)
        now_ns += min(gap_ns, parcel // WASTE_PARTS)


@given(st.integers(2, 50), st.integers(1, 10), st.integers(1, 20))
def test_parcels_that_come_slowly_leave_the_line_to_others(
    slowness: int, piece_ms: int, pieces: int
) -> None:
    """For nearly as long as if it were not kept."""
    begin_ns = now_ns = 1000 * MS
    line = KeptLine(RATE)
    kept_ns = 0
    for _ in range(100):
        line.begins(pieces * piece_ms * MS, now_ns)
        for _ in range(pieces):
            kept_ns += min(piece_ms * slowness * MS, max(0, line.until_ns - now_ns))
            now_ns += piece_ms * slowness * MS
            line.came(piece_ms * MS, now_ns)
        line.ends(0, now_ns)
    came_ns = 100 * pieces * piece_ms * MS
    wasted_ns = (now_ns - begin_ns) / WASTE_PARTS + WASTED_NS_MAX + AHEAD_NS
    assert kept_ns <= came_ns + wasted_ns


def test_one_that_did_not_come_does_not_count_against_the_next_for_long() -> None:
    line = KeptLine(RATE)
    line.begins(100 * MS, 1000 * MS)
    line.came(MS, 1001 * MS)
    line.ends(99 * MS, 2000 * MS)
    end_of(line, 100 * MS, 20, 3000 * MS)


def test_only_runs_that_last_are_worth_a_word() -> None:
    line, now_ns = KeptLine(RATE), 1000 * MS
    now_ns = end_of(line, MS, 1, now_ns)
    assert not line.is_long
    for _ in range(2):
        now_ns = end_of(line, MS // 2, 1, now_ns)
    assert line.is_long
    end_of(line, MS, 1, now_ns + NEXT_PARCEL_NS + 1)
    assert not line.is_long
