"""`capacity` from the command line: the smallest pool, its price, and what is wrong with input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from livescale.load.traces import TraceRow
from livescale.main import main
from trace_files import write_trace

S = 1_000_000_000
CLUSTER = """
hosts:
  - name: "host{n}"
    count: 4
    memory: 200GB
    nic: 100Gbit
    device_link: 128Gbit
    storage: 40Gbit
    price: 8
    devices:
      - {count: 2, kind: a100, memory: 80GB, nic: 100Gbit}
"""


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIVESCALE_DATA", raising=False)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A trace that keeps more than two devices busy, and the cluster."""
    write_trace(tmp_path / "even.csv", [TraceRow(n * S // 16, 2_000, 4) for n in range(96)])
    (tmp_path / "four.yaml").write_text(CLUSTER)
    return tmp_path / "even.csv", tmp_path / "four.yaml"


def asked(files: tuple[Path, Path], figures: Path, *words: str) -> Any:
    trace, cluster = files
    code = main(
        ["capacity", "--trace", str(trace), "-c", str(cluster), "--json", str(figures), *words]
    )
    return {**json.loads(figures.read_text()), "code": code}


def test_hosts_without_memory_for_copies_are_counted_by_their_devices(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    figures = tmp_path / "c.json"
    words = ["--trace", str(files[0]), "--slo", "ttft_p90=60s", "--strategies", "fixed-full"]
    assert main(["capacity", *words, "--workers", "2", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert (found["unit"], found["strategies"][0]["smallest"]) == ("hosts", 1)


def test_the_smallest_pool_its_price_and_its_neighbours(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(
        *(files, tmp_path / "c.json", "--slo", "ttft_p90=1s,tbt_p50=200ms"),
        *("--strategies", "fixed-full,ideal"),
    )
    printed = capsys.readouterr().out
    assert found["code"] == 0
    assert "answer: " in printed
    for of_system in found["strategies"]:
        smallest = of_system["smallest"]
        assert 1 < smallest < 4, "one host is too few for 16 prompts of 0.14 s a second"
        assert of_system["devices"] == 2 * smallest
        assert of_system["dollars_per_hour"] == 8.0 * smallest
        tried = {row["size"]: row["within"] for row in of_system["tried"]}
        assert tried[smallest] is True
        assert tried[smallest - 1] is False
        assert tried[smallest + 1] is True
        for row in of_system["tried"]:
            uses = ("load", "serve", "drain")
            held_s = sum(row[f"device_{use}_s"] for use in uses)
            assert held_s == pytest.approx(row["device_seconds"], rel=0.05)
            assert row["slow_compute_s"] <= row["slow_ttft_s"]
            if row["within"]:
                assert row["ttft_p90_s"] <= 1
                assert row["tbt_p50_s"] <= 0.2
    by_name = {of["strategy"]: of for of in found["strategies"]}
    assert by_name["ideal"]["device_seconds"] <= by_name["fixed-full"]["device_seconds"]


def test_pools_can_grow_by_devices(files: tuple[Path, Path], tmp_path: Path) -> None:
    words = ("--strategy", "fixed-full", "--slo", "ttft_p90=1s", "--by", "devices")
    found = asked(files, tmp_path / "c.json", *words)
    by_hosts = asked(files, tmp_path / "h.json", *words[:-1], "hosts")
    (one,), (other,) = found["strategies"], by_hosts["strategies"]
    assert found["unit"] == "devices"
    assert 2 * (other["smallest"] - 1) < one["smallest"] <= 2 * other["smallest"]


def test_a_load_that_nothing_here_can_serve_has_no_answer(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(files, tmp_path / "c.json", "--slo", "ttft_p99=1ms", "--strategy", "fixed-full")
    assert found["code"] == 1
    assert "smallest" not in found["strategies"][0]
    assert "not even 4 hosts keep ttft_p99=1ms" in capsys.readouterr().out


def test_a_part_of_the_cluster_that_is_too_small_is_no_answer(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    found = asked(
        *(files, tmp_path / "c.json", "--slo", "ttft_p90=60s", "--strategy", "fixed-full"),
        *("--by", "devices", "--model", "mistral-24b,tp=2"),
    )
    tried = {row["size"]: row for row in found["strategies"][0]["tried"]}
    assert found["strategies"][0]["smallest"] >= 2
    if 1 in tried:
        assert "2 ranks" in tried[1]["refused"]


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("ttft=450ms", "--slo: 'ttft=450ms' is no bound"),
        ("ttft_p0=450ms", "a percentile is 1 to 100"),
        ("ttft_p99=1s,ttft_p99=2s", "ttft_p99 is bounded twice"),
        ("ttft_p99=1s,tbt_p99=1h", "'tbt_p99=1h' is no bound"),
        ("", "'' is no bound"),
    ],
)
def test_bounds_that_are_none_are_said(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], slo: str, said: str
) -> None:
    trace, cluster = files
    assert main(["capacity", "--trace", str(trace), "-c", str(cluster), "--slo", slo]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
