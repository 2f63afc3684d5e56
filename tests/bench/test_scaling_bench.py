"""`bench scaling`: rows of tiny loads; what they mean, not how large they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from livescale.load.traces import TraceRow
from livescale.main import main
from trace_files import write_trace

S = 1_000_000_000
SYSTEMS = {"fixed-full", "fixed-auto", "stop", "overlap", "zigzag", "livescale", "ideal"}
FIELDS = {
    *("trace", "model", "cluster", "part", "system", "requests", "failed"),
    *("ttft_mean_s", "ttft_p99_s", "tbt_p99_s", "device_s", "serving_s", "spare_s"),
}
CLUSTER = """
hosts:
  - name: "host{n}"
    count: 2
    memory: 200GB
    nic: 100Gbit
    device_link: 128Gbit
    storage: 40Gbit
    devices:
      - {count: 2, kind: a100, memory: 80GB, nic: 100Gbit}
"""
Bench = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIVESCALE_DATA", raising=False)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(CLUSTER)
    return tmp_path / "small.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A calm second, two with 24 requests each, three calm ones."""
    rows = [TraceRow(n * S // 2, 1_500, 6) for n in range(2)]
    rows += [TraceRow(S + n * S // 24, 2_000, 6) for n in range(48)]
    rows += [TraceRow(3 * S + n * S // 2, 1_500, 6) for n in range(6)]
    write_trace(tmp_path / "burst.csv.gz", rows)
    return tmp_path / "burst.csv.gz"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    def ran(*words: object) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        assert main(["bench", "scaling", *map(str, words), "--json", str(file)]) == 0
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return ran


@pytest.mark.long
def test_every_system_has_a_row_for_every_load(
    bench: Bench, cluster: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same trace plain and compressed is the same load; a seed makes the same rows."""
    plain = tmp_path / "plain.csv"
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    words = ("--trace", trace, plain, "--cluster", cluster, "--part", "0.5,1", "--capacity", "9.6")
    rows = bench(*words)["rows"]
    assert "slowest 5 %" in capsys.readouterr().out
    assert len(rows) == 2 * 2 * len(SYSTEMS)
    by_key = {(row["trace"], row["part"], row["system"]): row for row in rows}
    assert {key[2] for key in by_key} == SYSTEMS
    for row in rows:
        assert row.keys() >= FIELDS
        assert (row["model"], row["cluster"]) == ("llama-3-8b", str(cluster))
        assert row["failed"] == 0
        assert row["spare_s"] == row["device_spare_s"]
        assert row["system"] in ("livescale", "ideal") or not row["spare_s"]
        assert 0 < row["serving_s"] <= row["device_s"]
        assert 0 < row["ttft_mean_s"] <= row["ttft_p99_s"]
        uses = ("load", "serve", "drain", "spare", "idle")
        span_s = sum(row[f"device_{use}_s"] for use in uses) / 4
        assert row["device_s"] <= 4 * span_s
        parts = ("loading", "full", "held_back", "compute")
        assert sum(row[f"slow_{part}_s"] for part in parts) == pytest.approx(row["slow_ttft_s"])
    for name in (str(trace), str(plain)):
        for part in (0.5, 1):
            at = {system: by_key[name, part, system] for system in SYSTEMS}
            assert len({row["requests"] for row in at.values()}) == 1
            auto, ours = at["fixed-auto"], at["livescale"]
            assert auto["device_s"] >= ours["device_s"] or auto["devices"] == 4
            assert auto["devices"] <= at["fixed-full"]["devices"] == 4
            assert at["fixed-full"]["ttft_mean_s"] < at["ideal"]["ttft_mean_s"]
            assert at["ideal"]["ttft_mean_s"] < at["stop"]["ttft_mean_s"]
    halves = [by_key[name, 0.5, "stop"] for name in (str(trace), str(plain))]
    assert {**halves[0], "trace": ""} == {**halves[1], "trace": ""}
    same = ("--trace", plain, "--cluster", cluster, "--part", "1", "--capacity", "9.6")
    assert bench(*same)["rows"] == [r for r in rows if (r["trace"], r["part"]) == (str(plain), 1)]


def test_a_part_is_one_of_what_the_whole_pool_serves(
    bench: Bench, cluster: Path, tmp_path: Path
) -> None:
    write_trace(tmp_path / "even.csv", [TraceRow(n * S // 8, 1_000, 1) for n in range(48)])
    words = ("--trace", tmp_path / "even.csv", "--cluster", cluster)
    rows = bench(*words, "--part", "0.1", "--part", "0.2")["rows"]
    requests = [next(r["requests"] for r in rows if r["part"] == part) for part in (0.1, 0.2)]
    capacity = rows[0]["capacity_requests_per_s"]
    for part, found in zip((0.1, 0.2), requests, strict=True):
        # TraceUpscaler draws whether an arrival is emitted once more.
        assert found == pytest.approx(part * capacity * 47 / 8, rel=0.35)
    assert requests[0] < requests[1]


def test_a_model_gets_the_fewest_ranks_that_fit(bench: Bench, tmp_path: Path) -> None:
    """72B on devices of 80 GB: four of them are an instance, and a fixed pool has whole ones."""
    cluster = tmp_path / "four.yaml"
    cluster.write_text(CLUSTER.replace("{count: 2, kind", "{count: 4, kind"))
    write_trace(tmp_path / "few.csv", [TraceRow(n * S, 500, 2) for n in range(4)])
    words = ("--trace", tmp_path / "few.csv", "--cluster", cluster, "--part", "1")
    rows = bench(*words, "--model", "qwen2.5-72b", "--capacity", "1.33")["rows"]
    assert {row["model"] for row in rows} == {"qwen2.5-72b"}
    assert {row["system"]: row["devices"] for row in rows}["fixed-auto"] in (4, 8)
    assert all(row["failed"] == 0 for row in rows)


@pytest.mark.long
def test_requests_that_fail_are_counted_and_told(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More at once than a gateway lets wait: they are refused, and no latency is theirs."""
    rows = [TraceRow(0, 100, 1)] * 12_000 + [TraceRow(S, 100, 1)]
    write_trace(tmp_path / "flood.csv", rows)
    (tmp_path / "one.yaml").write_text(CLUSTER.replace("count: 2", "count: 1"))
    words = ("--trace", tmp_path / "flood.csv", "--cluster", tmp_path / "one.yaml")
    found = bench(*words, "--part", "1", "--capacity", "12001")["rows"]
    assert all(row["failed"] > 0 for row in found)
    assert "requests failed, and are not in the latencies: fixed-full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--part", "0"), "part 0: a part of what the pool can serve is in (0, 1]"),
        (("--part", "1.5"), "is in (0, 1]"),
        (("--part", "nan"), "is in (0, 1]"),
        (("--part", "much"), "write numbers such as 0.08,0.25"),
        (("--model", "llama-9"), "there is no model 'llama-9'"),
        (("--model", "qwen2.5-72b"), "does not fit: a rank has 145.4 GB"),
        (("--cluster", "blitzscale-z"), "blitzscale-b"),
        (("--trace", "nowhere.csv"), "nowhere.csv"),
        (("--seconds", "0"), "--seconds must be at least 1"),
        (("--capacity", "-3"), "--capacity must be positive"),
        (("--part", "0.0001"), "no request is left at part 0.0001"),
    ],
)
def test_wrong_input_is_one_clear_line(
    cluster: Path,
    trace: Path,
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("--trace", str(trace), "--cluster", str(cluster), "--capacity", "9.6")
    # What is given twice is a list: the wrong one is a further one.
    assert main(["bench", "scaling", *given, *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_trace_without_requests_or_without_time_is_refused(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "empty.csv", [])
    write_trace(tmp_path / "moment.csv", [TraceRow(0, 100, 1)] * 3)
    for name, said in (("empty.csv", "has no request"), ("moment.csv", "a load of one moment")):
        words = ("--trace", str(tmp_path / name), "--cluster", str(cluster))
        assert main(["bench", "scaling", *words]) == 1
        assert said in capsys.readouterr().err
