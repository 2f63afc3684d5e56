"""Plain text: alignment, widths, and charts that lose no peak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.report.run.terminal import seconds, step_chart, table

S = 1_000_000_000


def test_table_aligns_names_left_and_numbers_right() -> None:
    rows = [("chain", 12, 0.12345), ("unicast from host", 7, None)]
    assert table(("strategy", "runs", "ratio"), rows) == (
        "strategy           runs  ratio\n"
        "-----------------  ----  -----\n"
        "chain                12  0.123\n"
        "unicast from host     7      -"
    )


def test_table_without_rows_is_its_header() -> None:
    assert table(("a", "bc"), []) == "a  bc\n-  --"


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (123.4, "123 s"),
        (12.34, "12.3 s"),
        (1.234, "1.23 s"),
        (0.0123, "12.3 ms"),
        (0.000123, "123 us"),
        (0.0000005, "0.500 us"),
    ],
)
def test_seconds_have_a_fitting_unit(value_s: float | None, text: str) -> None:
    assert seconds(value_s) == text


def test_step_chart_shows_each_level() -> None:
    chart = step_chart("instances", [(0, 1), (4 * S, 3), (8 * S, 2)], 10 * S, width_chars=19)
    assert chart.splitlines() == [
        "instances",
        "     3 |     ####",
        "     2 |     ######",
        "     1 | ##########",
        "       +-----------",
        "         0 s 10.0 s",
    ]


def test_step_chart_keeps_a_short_peak() -> None:
    chart = step_chart("instances", [(0, 1), (50 * S, 4), (50 * S + 1, 1)], 100 * S)
    assert "\n     4 | " in chart
    assert chart.splitlines()[1].count("#") == 1


@pytest.mark.parametrize("steps", [[], [(0, 0)], [(5, 0), (20, 3)]])
def test_step_chart_of_nothing_has_an_axis(steps: list[tuple[int, int]]) -> None:
    assert len(step_chart("instances", steps, 10).splitlines()) == 3
    assert step_chart("instances", [], 0)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 500)), max_size=30).map(sorted),
    st.integers(1, 100),
    st.integers(20, 100),
)
def test_step_chart_fits_and_agrees_with_the_counts(
    steps: list[tuple[int, int]], until_ns: int, width_chars: int
) -> None:
    lines = step_chart("instances", steps, until_ns, width_chars).splitlines()
    assert all(len(line) <= width_chars for line in lines)
    assert len(lines) <= 19
    highest = max((count for at_ns, count in steps if at_ns < until_ns), default=0)
    levels = [int(line.split("|")[0]) for line in lines[1:-2]]
    assert levels == sorted(levels, reverse=True)
    assert all(line.rstrip()[-1] == "#" for line in lines[1:-2])
    if highest:
        assert highest <= levels[0] < highest + levels[-1]
