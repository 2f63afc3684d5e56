"""A whole run as text and figures: host copies, strategies, what was woken."""

from __future__ import annotations

import msgspec
import pytest
from reported_records import Row, S, played, reported

from livescale.clusters.topology import Host
from livescale.latency.shapes import LLAMA_3_8B
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run_report import run_text
from livescale.sim.base.config import SimConfig
from livescale.values.scaling_policies import ModelPolicy


@pytest.fixture(scope="module")
def report() -> ReportedRun:
    """A model that goes to zero between two bursts, with hosts that keep copies."""
    config = SimConfig.default(LLAMA_3_8B, workers=3)
    policy = ModelPolicy(LLAMA_3_8B, 0, 3, 15_000, 30_000, idle_ns=2 * S)
    hosts = tuple(Host(f"host-{n}", "leaf-0", 192 * 10**9) for n in range(2))
    controller = msgspec.structs.replace(
        config.controller, models=(policy,), agents_expected=len(hosts)
    )
    config = msgspec.structs.replace(config, controller=controller, hosts=hosts)
    rows = [Row(start * S + k * 10_000_000, 600, 5) for start in (20, 40) for k in range(60)]
    return reported("", played(rows, config))


def test_the_report_tells_of_host_copies_and_strategies(report: ReportedRun) -> None:
    (use,) = report.host_copies.values()
    assert (use.copies_max, use.bytes_max) == (1, LLAMA_3_8B.size_bytes)
    figures = report.as_json()
    assert figures["host_copies_per_model_max"] == 1
    assert figures["host_copies_per_model_mean"] == use.copies_mean
    assert figures["amendments"] == 0
    assert figures["strategies"] == report.strategies
    text = run_text(report)
    assert "host mem. llama-3-8b: " in text
    assert "at most 1; 16.06 GB on average" in text
    assert f"multicast {next(iter(report.strategies))} " in text


def test_waking_a_model_that_had_gone_is_a_scale_event(report: ReportedRun) -> None:
    woken = [event for event in report.scale_events if event.from_instances == 0]
    assert [event.woken_by for event in woken] == ["llama-3-8b-0", "llama-3-8b-60"]
    # The second time the device that was released last still has everything.
    assert [event.loads[0].upstream for event in woken] == ["h0.0", "spare"]
    assert report.starts[1] == sum(i.is_woken for i in report.history.instances) > 0
