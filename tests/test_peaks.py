"""Peaks of traces that share a pool: turned in a circle, they meet or lie apart."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.load.peaks import STRETCH_PART, Peaks, peak_ns, turned
from livescale.load.traces import TraceRow

PERIOD = 2_000
STRETCH = PERIOD // STRETCH_PART
lengths = st.integers(1, 500)
rows = st.lists(
    st.builds(TraceRow, st.integers(0, PERIOD - 1), lengths, lengths), min_size=1, max_size=30
).map(lambda found: sorted(found, key=lambda row: row.arrival_ns))
several = st.lists(rows, min_size=1, max_size=5).map(
    lambda found: {f"m{n}": one for n, one in enumerate(found)}
)


def tokens_from(trace: list[TraceRow], start: int) -> int:
    """Of the stretch that begins then, around the end of the window."""
    return sum(
        row.input_tokens + row.output_tokens
        for row in trace
        if (row.arrival_ns - start) % PERIOD < STRETCH
    )


def gaps(trace: list[TraceRow]) -> Counter[tuple[int, int, int, int]]:
    """Distances between all arrivals, around the circle, with the lengths at both ends."""
    return Counter(
        (
            (b.arrival_ns - a.arrival_ns) % PERIOD,
            a.input_tokens,
            a.output_tokens,
            b.input_tokens,
        )
        for a in trace
        for b in trace
    )


@given(trace=rows)
def test_no_stretch_is_busier_than_the_peak(trace: list[TraceRow]) -> None:
    found = tokens_from(trace, peak_ns(trace, PERIOD))
    assert found == max(tokens_from(trace, row.arrival_ns) for row in trace)


@given(loads=several, peaks=st.sampled_from(Peaks))
def test_turned_traces_keep_their_rows_and_intervals(
    loads: dict[str, list[TraceRow]], peaks: Peaks
) -> None:
    for name, trace in turned(loads, peaks, PERIOD).items():
        assert gaps(trace) == gaps(loads[name])
        assert [row.arrival_ns for row in trace] == sorted(row.arrival_ns for row in trace)
        assert all(0 <= row.arrival_ns < PERIOD for row in trace)


@given(loads=several)
def test_peaks_meet_or_lie_apart(loads: dict[str, list[TraceRow]]) -> None:
    aligned, shifted = (turned(loads, p, PERIOD) for p in (Peaks.ALIGNED, Peaks.SHIFTED))
    for number, (name, trace) in enumerate(loads.items()):
        busiest = max(tokens_from(trace, row.arrival_ns) for row in trace)
        assert tokens_from(aligned[name], PERIOD // 2) == busiest
        begins = PERIOD * (2 * number + 1) // (2 * len(loads))
        assert tokens_from(shifted[name], begins) == busiest
    assert turned(loads, Peaks.AS_THEY_ARE, PERIOD) == loads


def test_a_trace_without_requests_has_no_peak() -> None:
    with pytest.raises(ValueError, match="no peak"):
        peak_ns([], PERIOD)
