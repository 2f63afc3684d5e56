"""A run whose model has stages, one of them slow, as text, figures and a page."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from reported_records import Row, S, played, reported

from livescale.latency.shapes import LLAMA_3_8B
from livescale.latency.work import LinearLatency
from livescale.messages.commands import ScaleDecided
from livescale.messages.events import InstanceReported, StageCounts
from livescale.report.html import html_report
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.stage_usage import STAGE_HEADER
from livescale.report.run_report import run_text
from livescale.sim.base.config import SimConfig
from livescale.telemetry.record.record import StepLine
from livescale.values.scaling_policies import ModelPolicy, StagesByQueue
from livescale.values.stages import even_stages, stage_specs
from livescale.values.types import InstanceId

MODEL = LLAMA_3_8B.name
SLOW = f"{MODEL}/1"
TOKEN_NS = 40_000
FROM_S, SECONDS, PER_S = 5, 20, 40


@pytest.fixture(scope="module")
def run() -> ReportedRun:
    """Three stages and Poisson arrivals; the one in the middle takes twice as long."""
    spec = replace(LLAMA_3_8B, is_tied=False)
    queue = StagesByQueue(slo_ns=200_000_000)
    stages = stage_specs(spec, even_stages(spec, 3))
    config = SimConfig.default(LLAMA_3_8B, workers=6)
    controller = replace(
        config.controller, models=tuple(ModelPolicy(s, 1, 4, scaling=queue) for s in stages)
    )
    latency = {"": LinearLatency(0, TOKEN_NS), SLOW: LinearLatency(0, 2 * TOKEN_NS)}
    # A Run is a request.
    config = replace(config, controller=controller, latency=latency, run_tokens_max=256)
    rng, at_ns, rows = random.Random(3), FROM_S * S, []
    while (at_ns := at_ns + int(rng.expovariate(PER_S / S))) < (FROM_S + SECONDS) * S:
        rows.append(Row(at_ns, 256, 1))
    return reported("stages", played({MODEL: rows}, config), started_ns=FROM_S * S)


def last_counts(run: ReportedRun) -> dict[str, list[StageCounts]]:
    """What each instance of a stage reported last, by stage."""
    last: dict[InstanceId, StageCounts] = {}
    for line in run.lines:
        for event in line.events if isinstance(line, StepLine) else ():
            if isinstance(event, InstanceReported) and event.stage is not None:
                last[event.instance] = event.stage
    models = {number: one.model for number, one in run.history.by_number.items()}
    found: dict[str, list[StageCounts]] = {}
    for number, counts in last.items():
        found.setdefault(models[number], []).append(counts)
    return found


def test_what_came_was_served_and_kept_devices_busy(run: ReportedRun) -> None:
    requests = len(run.history.requests)
    usage, last = run.by_stage, last_counts(run)
    assert list(usage) == [f"{MODEL}/{number}" for number in range(3)]
    for name, of in usage.items():
        load = of.load
        # What was reported when the last request had ended is behind the load.
        assert 0.9 * requests <= load.total("done") <= sum(one.done for one in last[name])
        assert load.total("done") == sum(one.total("done") for one in of.windows)
        assert load.service_s == pytest.approx((2 if name == SLOW else 1) * 256 * TOKEN_NS / 1e9)
        assert load.utilisation == pytest.approx(load.total("busy_ns") / load.served_ns)
        assert of.busiest is not None
        assert load.utilisation < of.busiest
    first = usage[f"{MODEL}/0"].load
    assert first.arrivals_per_s == pytest.approx(PER_S, rel=0.2)
    assert usage[SLOW].load.served_per_s == pytest.approx(1e9 / (2 * 256 * TOKEN_NS))


def test_poisson_arrivals_have_gaps_of_cv_one(run: ReportedRun) -> None:
    """At the first stage, which keeps up with them."""
    figures = run.by_stage[f"{MODEL}/0"].as_json()
    assert figures["gap_cv"] == pytest.approx(1, abs=0.35)


def test_the_last_decision_stands_with_its_reason(run: ReportedRun) -> None:
    decided = {
        word.model: word
        for line in run.lines
        if isinstance(line, StepLine)
        for word in line.commands
        if isinstance(word, ScaleDecided)
    }
    last = decided[SLOW]
    assert run.by_stage[SLOW].decision == (
        f"{last.from_instances} -> {last.to_instances}: {last.reason}"
    )
    assert run.by_stage[SLOW].as_json()["last_values"] == last.values
    assert max(count for _, count in run.by_stage[SLOW].instances) > 1


def test_the_report_has_a_row_for_each_stage(run: ReportedRun) -> None:
    text, page = run_text(run), html_report([run], "stages")
    for word in (*STAGE_HEADER, *run.by_stage, run.by_stage[SLOW].decision.split(": ")[1]):
        assert word in text
        assert word in page
    figures = run.as_json()["by_stage"]
    assert isinstance(figures, dict)
    assert figures.keys() == run.by_stage.keys()
    assert {"arrivals_per_s", "gap_cv", "served_per_s", "waiting", "utilisation"} <= {
        *figures[SLOW]
    }
