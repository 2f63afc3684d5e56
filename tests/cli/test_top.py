"""What `livescale top` makes of two looks at a pool."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from livescale.cli.top import Look, metric_sums, window_text
from livescale.gateway.contract.backend import ModelPhase, ModelStatus

STAGED = ModelStatus(
    "m",
    "/models/m",
    ModelPhase.SERVING,
    instances={"serving": 3},
    instances_by_stage=[{"serving": 1}, {"serving": 2, "draining": 0}],
    decisions_by_stage=["", "1 -> 2: overloaded"],
)
WHOLE = ModelStatus("other", "/models/other", ModelPhase.AT_ZERO)


def page(**families: float) -> str:
    """A page of metrics of the second stage, and of what is no stage's."""
    lines = [f'livescale_{name}{{model="m/1"}} {value}' for name, value in families.items()]
    more = ['livescale_instances{model="m/1",role="unified",state="serving"} 2.0']
    return "\n".join(["# HELP livescale_workers", "livescale_workers 4.0", *more, *lines])


def cells(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return line.split()


@given(st.lists(st.floats(0.001, 5), min_size=2, max_size=30), st.floats(0.5, 20))
def test_a_row_has_the_rates_of_the_window(gaps: list[float], took_s: float) -> None:
    before = {
        "stage_arrivals_total": 100,
        "stage_gap_seconds_total": 50,
        "stage_gap_seconds_squared_total": 40,
        "stage_runs_total": 99,
        "stage_busy_seconds_total": 7,
        "stage_wait_seconds_total": 3,
        "device_seconds_total": 60,
    }
    came, squared = len(gaps), sum(gap * gap for gap in gaps)
    rises = (came, sum(gaps), squared, came, took_s, took_s / 2, took_s * 2)
    after = {name: was + rise for (name, was), rise in zip(before.items(), rises, strict=True)}
    looks = [Look(0, metric_sums(page(**before)), (STAGED,))]
    looks.append(Look(took_s, metric_sums(page(**after)), (STAGED,)))
    row = cells(window_text(*looks), "m/1")
    assert row[1:3] == ["2", "serving"]
    mean = sum(gaps) / len(gaps)
    cv = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) / mean
    right_ones = came / took_s, cv, came / took_s, 0.5
    for cell, right in zip(row[3:7], right_ones, strict=True):
        assert math.isclose(float(cell), right, rel_tol=0.01, abs_tol=0.002)
    assert row[7:9] == ["50", "%"]
    assert " ".join(row[9:]) == "1 -> 2: overloaded"


def test_counters_that_began_anew_have_risen_from_zero_and_what_is_not_known_is_absent() -> None:
    before = Look(0, metric_sums(page(stage_arrivals_total=1000)), (STAGED,))
    after = Look(2, metric_sums(page(stage_arrivals_total=8)), (STAGED,))
    row = cells(window_text(before, after), "m/1")
    assert row[3:5] == ["4.00", "-"]
    assert "-" in row[7:9]


def test_models_without_stages_have_one_row() -> None:
    look = Look(0, {("num_requests_waiting", "other"): 3}, (WHOLE,))
    text = window_text(look, Look(1, look.sums, (WHOLE,)))
    assert cells(text, "other")[1:4] == ["none", "0", "3"]
    assert "stage" not in text
