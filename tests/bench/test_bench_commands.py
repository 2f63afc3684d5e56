"""Every benchmark from the command line to its JSON, as small as it can be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from livescale.main import main
from slowness import patient

ABOUT = {"machine", "versions", "command"}
TINY = ("--shape", "64x2", "--vocabulary", "1024", "--repetitions", "1", "--threads", "1")


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The figures of a run that went well."""
    file = tmp_path / "figures.json"
    assert main(["bench", *words, "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures.keys() >= ABOUT
    assert figures["machine"].keys() == {"cpu", "cores", "memory_bytes"}
    assert "torch" in figures["versions"]
    return figures


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said about a run that cannot be."""
    assert main(["bench", *words]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_engine_compares_ours_with_both_ways_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--prompt-tokens", "12", "--output-tokens", "6", "--concurrency", "1,3")
    figures = bench(tmp_path, "engine", *TINY, "--dtype", "float32", *lengths)
    engines = {"livescale", "transformers_generate", "transformers_cb"}
    assert {(row["engine"], row["concurrency"]) for row in figures["rows"]} == {
        (engine, in_flight) for engine in engines for in_flight in (1, 3)
    }
    for row in figures["rows"]:
        assert (row["dtype"], row["hidden"], row["layers"]) == ("float32", 64, 2)
        rate = row["tokens_per_s"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        assert row["token_check"]["wrong"] == 0
        assert row["token_check"]["tokens"] == min(8, 4 * row["concurrency"]) * 6
    assert len(figures["ratios"]) == 4
    assert all(ratio["throughput_ratio"] > 0 for ratio in figures["ratios"])
    assert all(ratio["cpu_time_ratio"] > 0 for ratio in figures["ratios"])
    # Another shape than the headline's: no headline.
    assert not any(key.startswith("throughput_ratio_to") for key in figures)
    printed = capsys.readouterr().out
    assert all(engine in printed for engine in engines)


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_engine_runs_bfloat16_and_may_leave_others_out(tmp_path: Path) -> None:
    lengths = ("--prompt-tokens", "12", "--output-tokens", "6", "--concurrency", "2")
    figures = bench(tmp_path, "engine", *TINY, *lengths, "--engines", "livescale")
    (row,) = figures["rows"]
    assert row["dtype"] == "bfloat16"
    assert 0 <= row["token_check"]["shortfall_p99_stds"] <= 0.2
    assert figures["ratios"] == []


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_gateway_holds_streams_beside_some_that_never_read(tmp_path: Path) -> None:
    figures = bench(
        *(tmp_path, "gateway", "--streams", "20", "--stalled", "3", "--workers", "2"),
        *(
            "--step-ms",
            "10",
            "--seconds",
            f"{patient(1):.1f}",
            "--ramp-seconds",
            "0.2",
            "--output-tokens",
            "16",
        ),
        *("--gateways", "2"),
    )
    assert figures["streams_held"] == 20
    assert sum(share["streams"] for share in figures["by_gateway"]) == 20
    assert [share["events"] > 0 for share in figures["by_gateway"]] == [True, True]
    for name in ("events_per_stream", "worst_gap_ms"):
        assert 0 < figures[name]["min"] <= figures[name]["p50"] <= figures[name]["max"]
    assert figures["errors"] == []
    for name in (
        *("requests_per_s", "tokens_per_s", "gateway_cpu_us_per_token", "load_cpu_share"),
        *("send_cpu_us", "gateway_cpu_in_sends"),
    ):
        assert figures[name] > 0, name
    assert figures["tokens_per_event"] >= 1
    for name in ("added_gap_ms", "added_mean_gap_ms", "added_ttft_ms"):
        assert figures[name]["p50"] <= figures[name]["p99"]
    assert figures["gateway_rss_after_bytes"] > 0


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_coldstart_tells_phases_and_ratios(tmp_path: Path) -> None:
    figures = bench(tmp_path, "coldstart", *TINY, "--prompt-tokens", "12")
    cold, warm = figures["cold_ms"], figures["warm_ms"]
    assert set(cold) == {
        *("process", "imports", "context", "kernels", "connections", "bytes", "first_token"),
        "total",
    }
    assert set(warm) == {"bytes", "first_token", "total"}
    for phases in (cold, warm):
        assert all(ms > 0 for ms in phases.values())
        parts = sum(ms for phase, ms in phases.items() if phase != "total")
        assert phases["total"] == pytest.approx(parts)
    assert figures["ratio_cold_to_warm"] == pytest.approx(cold["total"] / warm["total"])
    assert "vllm_ms" not in figures


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["engine", "--shape", "512"], "512"),
        (["engine", "--shape", "65x2", "--heads", "3"], "65x2"),
        (["engine", "--hidden", "64"], "--layers"),
        (["engine", "--concurrency", "0"], "--concurrency"),
        (["engine", "--engines", "livescale,other"], "other"),
        (["engine", "--engines", "vllm_cpu"], "--vllm-python"),
        (["engine", "--repetitions", "0"], "--repetitions"),
        (["gateway", "--streams", "0"], "--streams"),
        (["gateway", "--gateways", "0"], "--gateways"),
        (["gateway", "--seconds", "0"], "--seconds"),
        (["coldstart", "--shape", "x"], "x"),
    ],
)
def test_wrong_flags_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert named in refused(capsys, *words)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["engine", "--vllm-python", "/nowhere/python"], "/nowhere/python"),
        (["engine", "--vllm-python", sys.executable], "no vLLM"),
        (["coldstart", "--vllm-python", "/nowhere/python"], "/nowhere/python"),
    ],
)
def test_an_interpreter_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert named in refused(capsys, *words)
