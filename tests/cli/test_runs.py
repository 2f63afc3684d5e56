"""`demo` and `simulate` from the command line to the figures they write, on small loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import commands
import pytest

from effort import mostly_long
from livescale.load.traces import TraceRow
from livescale.telemetry.record.record import RequestLine, read_record
from livescale.telemetry.replay import replay
from slowness import patient, patient_ms
from trace_files import write_trace

KEYS = {
    *("trace", "requests", "failed", "max_instances", "final_instances", "scale_ups"),
    *("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s"),
}


def livescale(*words: object) -> str:
    """A pool, in a process of its own, as one that is started by hand."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "livescale.main", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_trace(path: Path, requests: int, tokens: int) -> Path:
    """A burst in the first second and one request after three."""
    rows = [TraceRow(n * 1_000_000_000 // requests, tokens, 6) for n in range(requests)]
    write_trace(path, [*rows, TraceRow(3_000_000_000, tokens, 6)])
    return path


def test_simulate_writes_figures_and_a_record_that_replays(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "burst.csv", 100, 2000)
    record, figures = tmp_path / "run.jsonl", tmp_path / "run.json"
    code, printed, error = commands.livescale(
        "simulate", trace, "--record", record, "--json", figures
    )
    assert code == 0, error
    found = json.loads(figures.read_text())
    assert found.keys() >= KEYS | {"bytes", "seconds", "receivers"}
    assert (found["requests"], found["failed"], found["final_instances"]) == (101, 0, 1)
    assert found["max_instances"] > 1
    assert "scaling   1 -> " in printed
    assert replay(read_record(record)).steps > 0


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("device", mostly_long(["cpu", "timed"], ["timed"]))
def test_the_demo_checks_every_token_and_joins_the_clients_times(
    tiny_model: Path, tmp_path: Path, device: str
) -> None:
    trace = make_trace(tmp_path / "burst.csv", 30, 40)
    record, figures = tmp_path / "run.jsonl", tmp_path / "run.json"
    livescale(
        *("demo", "--only", "scaling", "--folder", tmp_path / "seen", "--device", device),
        *("--model", tiny_model, "--trace", trace, "--divide-lengths", 1),
        *(
            "--seconds",
            4,
            "--record",
            record,
            "--json",
            figures,
            "--slo",
            f"ttft={patient_ms(60_000)}ms,tbt={patient_ms(60_000)}ms",
        ),
    )
    found = json.loads(figures.read_text())
    assert found.keys() >= KEYS | {"token_mismatches", "near_ties"}
    assert (found["requests"], found["failed"], found["token_mismatches"]) == (31, 0, 0)
    assert found["tokens"] == 31 * 6
    assert found["slo_attainment"] == 1
    requests = [line for line in read_record(record) if isinstance(line, RequestLine)]
    assert len(requests) == 31
    for line in requests:
        assert line.scheduled_ns is not None
        assert line.sent_ns is not None
        assert line.dispatched_ns is not None
        times = (line.scheduled_ns, line.sent_ns, line.queued_ns, line.dispatched_ns)
        assert list(times) == sorted(times)
        assert len(line.token_ns) == 6
        assert line.slo_met is True
    assert replay(read_record(record)).steps > 0


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_the_demo_plays_prefill_and_decode_on_their_own_instances(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder, figures = tmp_path / "seen", tmp_path / "run.json"
    printed = livescale(
        *("demo", "--disaggregated", "--folder", folder, "--device", "timed"),
        *("--model", tiny_model, "--seconds", 6, "--factor", 5, "--load-seconds", 0.2),
        *("--json", figures),
    )
    found = json.loads(figures.read_text())
    assert found.keys() >= KEYS | {"token_mismatches", "near_ties", "by_role"}
    assert (found["failed"], found["token_mismatches"], found["final_instances"]) == (0, 0, 2)
    prefill, decode = found["by_role"]["prefill"], found["by_role"]["decode"]
    assert [(role["final_instances"]) for role in (prefill, decode)] == [1, 1]
    assert prefill["max_instances"] > 1
    assert decode["max_instances"] > 1
    # Requests of one token have nothing to decode.
    assert found["requests"] // 2 < decode["requests_taken"] <= found["requests"]
    assert decode["kv_bytes"] > 0
    assert "decode instances that serve" in printed
    names = {path.name for path in folder.iterdir()}
    assert names == {"disaggregated.jsonl", "report.html"}
    assert replay(read_record(folder / "disaggregated.jsonl")).steps > 0


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_the_demo_shows_a_burst_with_and_without_live_scaling(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Which of the two is faster is for a quiet machine to say; everything else is checked."""
    folder, figures = tmp_path / "seen", tmp_path / "run.json"
    printed = livescale(
        *("demo", "--only", "live", "--model", tiny_model, "--live-load-seconds", 2),
        *("--folder", folder, "--json", figures),
    )
    found = json.loads(figures.read_text())["live"]
    assert found["token_mismatches"] == 0
    assert found["ttft_p99_ratio"] > 0
    stop, live = found["runs"]
    assert [stop["name"], live["name"]] == ["stop-the-world", "zigzag"]
    assert stop["requests"] == live["requests"] >= 8
    assert stop["failed"] == live["failed"] == 0
    assert found["tokens"] == 2 * 4 * stop["requests"]
    assert "live_loads" not in stop
    # On a busy machine the load may be over before the burst, or come too late to help.
    assert ("live_loads" in live) == ("layers run" in printed)
    assert live.get("first_help_s", 1) > 0
    names = {path.name for path in folder.iterdir()}
    assert names - {"live.svg"} == {"stop-the-world.jsonl", "zigzag.jsonl", "report.html"}
    assert "live.svg" in names or "no instance was loaded while requests came" in printed
    for record in folder.glob("*.jsonl"):
        assert replay(read_record(record)).steps > 0
