"""`simulate` from the command line: strategies side by side, records, rates, sweeps, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from livescale.load.traces import TraceRow
from livescale.main import main
from livescale.telemetry.record.record import RequestLine, read_record
from livescale.telemetry.replay import replay
from trace_files import write_trace

S = 1_000_000_000
CLUSTER = """
hosts:
  - name: "host{n}"
    count: 2
    memory: 200GB
    nic: 100Gbit
    device_link: 128Gbit
    storage: 10Gbit
    price: 10.5
    devices:
      - {count: 2, kind: a100, memory: 80GB, nic: 100Gbit}
"""
WORKLOAD = """
seconds: 10
models:
  - {model: llama-2-7b, name: "chat-{n}", count: 3, gamma: {input: 300, output: 10}, rate: 1}
  - {model: llama-3-8b, gamma: {input: 300, output: 10}, rate: 1}
"""
Livescale = Callable[..., tuple[int, str, str]]


@pytest.fixture
def livescale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Livescale:
    monkeypatch.delenv("LIVESCALE_DATA", raising=False)

    def called(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return called


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(CLUSTER)
    return tmp_path / "small.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two calm seconds, two with 30 requests each, two calm ones."""
    rows = [TraceRow(n * S // 2, 1_500, 6) for n in range(4)]
    rows += [TraceRow(2 * S + n * S // 30, 2_000, 6) for n in range(60)]
    rows += [TraceRow(4 * S + n * S // 2, 1_500, 6) for n in range(4)]
    write_trace(tmp_path / "burst.csv", rows)
    return tmp_path / "burst.csv"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_strategies_are_compared_and_each_run_is_kept(
    livescale: Livescale, cluster: Path, trace: Path, tmp_path: Path
) -> None:
    figures, folder = tmp_path / "all.json", tmp_path / "report"
    names = ["livescale", "fixed-full", "fixed-delay:2s"]
    code, printed, _ = livescale(
        *("simulate", trace, "-c", cluster, "--strategy", ",".join(names)),
        *("--report", folder, "--json", figures),
    )
    assert code == 0
    assert "small: 4 devices (a100) on 2 hosts; llama-3-8b" in printed
    found = read(figures)
    assert [run["name"] for run in found["runs"]] == names
    assert all((run["requests"], run["failed"]) == (68, 0) for run in found["runs"])
    by_name = {run["name"]: run for run in found["runs"]}
    assert by_name["fixed-full"]["device_seconds"] > by_name["livescale"]["device_seconds"]
    assert by_name["fixed-full"]["ttft_mean_s"] < by_name["fixed-delay:2s"]["ttft_mean_s"]
    # Four devices of two hosts at $10.5: whoever holds them all the time pays for all.
    full = by_name["fixed-full"]
    assert full["dollars"] == pytest.approx(full["device_seconds"] / 3600 * 21 / 4)
    for name in ("livescale", "fixed-full", "fixed-delay-2s"):
        lines = list(read_record(folder / f"{name}.jsonl"))
        assert sum(isinstance(line, RequestLine) for line in lines) == 68
        assert replay(iter(lines)).steps > 0
    page = (folder / "report.html").read_text()
    assert all(name in page for name in names)


def test_nothing_is_written_that_nobody_asked_for(
    livescale: Livescale,
    cluster: Path,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    code, printed, _ = livescale("simulate", trace, "-c", cluster)
    assert code == 0
    assert "scaling   1 -> " in printed
    assert list(empty.iterdir()) == []


def test_the_same_seed_gives_the_same_records(
    livescale: Livescale, cluster: Path, trace: Path, tmp_path: Path
) -> None:
    records = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for record in records:
        livescale("simulate", trace, "-c", cluster, "--seed", 3, "--record", record)
    assert records[0].read_bytes() == records[1].read_bytes()


def test_a_mean_rate_is_that_of_the_load_that_is_played(
    livescale: Livescale, cluster: Path, trace: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "rate.json"
    livescale("simulate", trace, "-c", cluster, "--rate", "24/s", "--json", figures)
    # TraceUpscaler draws whether an arrival is emitted once more: 24 a second up to the last.
    assert read(figures)["requests"] == pytest.approx(24 * 5.5, rel=0.15)


def test_half_is_half_of_what_the_whole_pool_can_take(livescale: Livescale, tmp_path: Path) -> None:
    write_trace(tmp_path / "even.csv", [TraceRow(n * S // 4, 1_000, 1) for n in range(41)])
    requests = {}
    for rate in ("half", "1"):
        figures = tmp_path / f"{rate}.json"
        common = ("simulate", tmp_path / "even.csv", "--workers", 1, "--strategy", "fixed-full")
        code, printed, _ = livescale(*common, "--rate", rate, "--json", figures)
        assert code == 0
        assert "of the whole pool's capacity" in printed
        requests[rate] = read(figures)["requests"]
    assert requests["half"] == pytest.approx(requests["1"] / 2, rel=0.1)


@pytest.mark.long
def test_a_model_of_a_workload_has_roles_as_one_of_the_flag_has_them(
    livescale: Livescale, cluster: Path, trace: Path, tmp_path: Path
) -> None:
    """The same pool, said in two ways, does the same."""
    file = tmp_path / "w.yaml"
    roles = "roles: {prefill: {max_replicas: 2}, decode: {max_replicas: 3}}, split: [2, 1]"
    entry = f"{{model: llama-3-8b, trace: '{trace}', {roles}}}"
    file.write_text(f"seconds: 100\nmodels:\n  - {entry}\n")
    words = ("-c", cluster, "--strategy", "livescale,fixed:3", "--json")
    runs = []
    for name, load in (
        ("workload", ("--workload", file)),
        ("flag", (trace, "--model", "llama-3-8b,prefill=1-2,decode=1-3,split=2+1")),
    ):
        out = tmp_path / f"{name}.json"
        assert livescale("simulate", *load, *words, out)[0] == 0
        runs.append([{**run, "trace": ""} for run in read(out)["runs"]])
    assert runs[0] == runs[1]
    assert all(run["by_role"]["decode"]["requests_taken"] == run["requests"] for run in runs[0])
    fixed = runs[0][1]["by_role"]
    assert [fixed[role]["max_instances"] for role in ("prefill", "decode")] == [2, 1]


def test_a_workload_brings_its_models(livescale: Livescale, cluster: Path, tmp_path: Path) -> None:
    file, figures = tmp_path / "many.yaml", tmp_path / "many.json"
    file.write_text(WORKLOAD)
    code, printed, _ = livescale(
        *("simulate", "--workload", file, "-c", cluster, "--strategy", "livescale,fixed-full"),
        *("--json", figures),
    )
    assert code == 0
    assert "4 models" in printed
    assert "3 x llama-2-7b" in printed
    requests = [run["requests"] for run in read(figures)["runs"]]
    assert requests[0] == requests[1] > 20


@pytest.mark.parametrize("general", ["ttft=60s", "ttft=1us"])
@pytest.mark.parametrize("strategy", ["livescale", "livescale,fixed-full"])
def test_models_are_judged_by_the_slo_of_their_entry(
    livescale: Livescale, cluster: Path, tmp_path: Path, general: str, strategy: str
) -> None:
    """Whatever the command's own SLO says, which judges the models without one."""
    gamma = "gamma: {input: 300, output: 10}, rate: 1"
    entries = [
        f"{{model: llama-3-8b, name: strict, {gamma}, slo: ttft=1us}}",
        f"{{model: llama-3-8b, name: mild, {gamma}, slo: ttft=60s}}",
        f"{{model: llama-3-8b, name: plain, {gamma}}}",
    ]
    file, figures, record = (tmp_path / name for name in ("w.yaml", "w.json", "records"))
    file.write_text("seconds: 10\nmodels: [" + ", ".join(entries) + "]\n")
    words = ("simulate", "--workload", file, "-c", cluster, "--slo", general, "--report", record)
    code, printed, _ = livescale(*words, "--strategy", strategy, "--json", figures)
    assert code == 0
    found = read(figures)
    for run in found.get("runs", [found]):
        lines = read_record(record / f"{run['name']}.jsonl")
        asked = [line.model for line in lines if isinstance(line, RequestLine)]
        good = asked.count("mild") + (asked.count("plain") if general == "ttft=60s" else 0)
        assert run["slo_attainment"] == pytest.approx(good / len(asked))
        assert run["slo_of_models"] == {"strict": "ttft=0.001ms", "mild": "ttft=60000ms"}
    assert "2 models by bounds of their own" in (record / "report.html").read_text()
    assert ("2 models by bounds of their own" in printed) == ("," not in strategy)


def test_the_slo_of_an_entry_is_what_its_model_scales_to(
    livescale: Livescale, cluster: Path, tmp_path: Path
) -> None:
    """As a pool that knows it: with less time for the first token, more instances."""
    most = {}
    for slo in ("ttft=200ms", "ttft=60s"):
        file, figures = tmp_path / "w.yaml", tmp_path / "w.json"
        gamma = "gamma: {input: 3000, output: 10, cv: 4}, rate: 12"
        file.write_text(f"seconds: 20\nmodels: [{{model: llama-3-8b, {gamma}, slo: {slo}}}]\n")
        livescale("simulate", "--workload", file, "-c", cluster, "--json", figures)
        most[slo] = read(figures)["device_seconds"]
    assert most["ttft=200ms"] > most["ttft=60s"]


def test_too_long_requests_are_clipped_and_counted(
    livescale: Livescale, cluster: Path, tmp_path: Path
) -> None:
    write_trace(tmp_path / "long.csv", [TraceRow(n * S, 3_000 * (1 + n), 9) for n in range(4)])
    figures = tmp_path / "long.json"
    code, printed, _ = livescale(
        *("simulate", tmp_path / "long.csv", "-c", cluster, "--json", figures),
        *("--model", "llama-2-7b"),
    )
    assert code == 0
    assert "3 of 4 requests were too long for their model: clipped" in printed
    assert (read(figures)["clipped"], read(figures)["failed"]) == (3, 0)


def test_a_sweep_goes_from_loading_speed_to_violations(
    livescale: Livescale, cluster: Path, trace: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "sweep.json"
    code, printed, _ = livescale(
        *("simulate", trace, "-c", cluster, "--sweep", "bandwidth=400,10,100"),
        *("--slo", "ttft=450ms,tbt=150ms", "--json", figures),
    )
    assert code == 0
    rows = read(figures)["rows"]
    assert [row.get("gbit_per_s") for row in rows] == [None, 10, 100, 400]
    # 16.06 GB at 10 Gbit/s: 12.8 s, as the paper has it.
    assert rows[1]["load_s"] == pytest.approx(12.85, rel=0.01)
    violations = [row["violations"] for row in rows]
    assert violations[1] >= violations[2] >= violations[3] >= violations[0]
    for row in rows:
        assert row["stop_the_world_meets_slo"] == (row["violations"] <= 0.01)
        # Beside what instances held, never more than the pool has.
        assert 0 <= row["spare_seconds"] <= rows[0]["device_seconds"]
    assert printed.count("Gbit/s") >= 3
    assert re.search("GPU time +spare", printed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strategy", "livescale,serverles"), "did you mean 'serverlessllm'"),
        (("--model", "llama-3-9b"), "there is no model 'llama-3-9b'"),
        (("--model", "llama-3-8b,ranks=2"), "'ranks=2' is not one of tp=N, min=N, max=N"),
        (("--model", "qwen2.5-72b"), "qwen2.5-72b does not fit: a rank has 145.4 GB"),
        (("--model", "qwen2.5-72b,tp=4"), "of 4 ranks fits into no group or host"),
        (("--rate", "quick"), "write 'half', a part such as 0.8, or 6/s"),
        (("--sweep", "speed=3"), "write bandwidth=10,25,100"),
        (("--sweep", "bandwidth=0"), "write bandwidth=10,25,100"),
        (("--strategy", "livescale,tree", "--record", "a.jsonl"), "use --report DIR"),
        (("--report", "d", "--record", "a.jsonl"), "--report DIR holds the record, too"),
        (("--sweep", "bandwidth=10", "--report", "d"), "--sweep has runs of its own"),
        (("--sweep", "bandwidth=10,0.0000000001"), "--sweep: a bandwidth is 1e-10. Give a number"),
        (("--slo", "soon"), "'soon' is not a valid SLO"),
        (("--workload", "w.yaml"), "replaces a trace and --model"),
    ],
)
def test_wrong_input_is_one_clear_line(
    livescale: Livescale, cluster: Path, trace: Path, words: tuple[str, ...], said: str
) -> None:
    code, _, error = livescale("simulate", trace, "-c", cluster, *words)
    assert code == 1
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("amount", ["nan", "inf", "-inf", "0", "-1", "1e-12", "1e300"])
@pytest.mark.parametrize("flag", ["--link-gbit", "--storage-gbit", "--host-memory-gb"])
def test_amounts_that_no_pool_has_are_named(
    livescale: Livescale, trace: Path, flag: str, amount: str
) -> None:
    code, _, error = livescale("simulate", trace, "--workers", 2, f"{flag}={amount}")
    assert code == 1
    assert f"{flag} is {float(amount):g}. Give a number from 1e-06 to 1e+09" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("burst",), ("--model", "llama-3-8b"), ("--seconds", "5"), ("--seconds", "300")]
)
def test_a_workload_stands_alone(
    livescale: Livescale, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Also a flag that says the default would have no effect."""
    file = tmp_path / "w.yaml"
    file.write_text(WORKLOAD)
    code, _, error = livescale("simulate", "--workload", file, *words)
    assert code == 1
    assert "Remove the trace, --model and --seconds" in error


def test_a_cluster_that_is_not_there_and_one_without_known_accelerators(
    livescale: Livescale, trace: Path
) -> None:
    code, _, error = livescale("simulate", trace, "-c", "blitzscale-c")
    assert (code, "blitzscale-" in error) == (1, True)
    code, _, error = livescale("simulate", trace, "-c", "laptop")
    assert (code, "nothing is known of the accelerator 'cpu'" in error) == (1, True)


def test_a_fixed_pool_of_equal_device_time_stands_beside_what_it_is_like(
    livescale: Livescale, cluster: Path, trace: Path, tmp_path: Path
) -> None:
    """With its like in the comparison, or alone: the same pool."""
    both, alone = tmp_path / "both.json", tmp_path / "alone.json"
    asked = ("simulate", trace, "-c", cluster, "--strategy")
    code, printed, _ = livescale(*asked, "fixed:auto=stop,stop", "--json", both)
    assert code == 0
    assert "device time of stop: " in printed
    auto, stop = read(both)["runs"]
    assert (auto["name"], stop["name"]) == ("fixed:auto=stop", "stop")
    assert auto["device_seconds"] >= 0.99 * stop["device_seconds"]
    assert auto["scale_ups"] == 0
    record = tmp_path / "auto.jsonl"
    code, printed, _ = livescale(*asked, "fixed:auto=stop", "--json", alone, "--record", record)
    assert code == 0
    assert "slowest   5 %: " in printed
    assert "devices   serving " in printed
    assert read(alone)["ttft_p99_s"] == auto["ttft_p99_s"]
    assert sum(isinstance(line, RequestLine) for line in read_record(record)) == 68


def test_figures_per_time_count_from_the_start_of_the_load(
    livescale: Livescale, cluster: Path, tmp_path: Path
) -> None:
    """A pool that waits for a late first request holds its devices meanwhile."""
    write_trace(tmp_path / "late.csv", [TraceRow(n * S, 1_000, 2) for n in range(9, 12)])
    figures = tmp_path / "late.json"
    words = ("simulate", tmp_path / "late.csv", "-c", cluster, "--strategy", "fixed-full")
    livescale(*words, "--json", figures)
    found = read(figures)
    assert found["device_seconds"] > 4 * 11
    assert found["instances_mean"] == pytest.approx(4)
    uses = ("load", "serve", "drain", "spare", "idle")
    assert found["device_seconds"] == pytest.approx(sum(found[f"device_{u}_s"] for u in uses))
