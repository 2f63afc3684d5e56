"""Workload files: many models on one pool, every request drawn from the seed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.common.settings import ConfigError
from livescale.config.slo import SloAbsolute
from livescale.load.traces import TraceRow, burst_trace, read_trace
from livescale.load.workloads import Workload, WorkloadModel, read_workload
from trace_files import write_trace

S = 1_000_000_000
ROLE_MISTAKES = [
    (f"model: a, trace: burst, {text}", problem)
    for text, problem in (
        ("roles: {prefill: {}}", "roles: decode is missing"),
        ("roles: prefill", "roles must be a mapping"),
        ("roles: {prefill: {min: 1}, decode: {}}", "roles: prefill: unknown setting 'min'"),
        ("roles: {prefill: {min_replicas: -1}, decode: {}}", "min_replicas is -1, below"),
        (
            "roles: {prefill: {min_replicas: 3, max_replicas: 2}, decode: {}}",
            "roles: prefill: min_replicas is 3, above max_replicas 2",
        ),
        ("roles: {prefill: {min_replicas: 0}, decode: {}}", "Set both to 0, or neither"),
        (
            "max_replicas: 2, roles: {prefill: {}, decode: {}}",
            "max_replicas and roles are both set",
        ),
        ("split: [2, 1]", "split divides instances between roles, and there are none"),
        ("split: [2, 0], roles: {prefill: {}, decode: {}}", "Expected `int` >= 1"),
    )
]
EXAMPLES = Path(__file__).parent.parent / "examples" / "workloads"


def workload(tmp_path: Path, *entries: str, seconds: float = 100, seed: int = 0) -> Workload:
    file = tmp_path / "workload.yaml"
    lines = [f"seconds: {seconds}", "models:", *(f"  - {{{entry}}}" for entry in entries)]
    file.write_text("\n".join(lines) + "\n")
    return read_workload(file, None, seed)


def arrivals(model: WorkloadModel) -> list[int]:
    return [row.arrival_ns for row in model.rows]


def lengths(model: WorkloadModel) -> list[tuple[int, int]]:
    return [(row.input_tokens, row.output_tokens) for row in model.rows]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A request every second for 50 seconds, each of its own length."""
    path = tmp_path / "t.csv"
    write_trace(path, [TraceRow(n * S, n + 1, 2 * n + 1) for n in range(51)])
    return path


# -- what is asked of each model ------------------------------------------------------------------


def test_an_entry_is_so_many_models_with_names_and_limits(tmp_path: Path, trace: Path) -> None:
    made = workload(
        tmp_path,
        f"model: llama-3-8b, count: 3, name: 'm{{n}}', trace: '{trace}', tensor_parallel: 2,"
        " min_replicas: 0, max_replicas: 4, idle_s: 7.5, priority: 3, slo: 'ttft=450ms,tbt=150ms'",
        f"model: mistral-24b, trace: '{trace}'",
        f"model: llama-2-7b, count: 2, trace: '{trace}'",
    )
    assert made.duration_ns == 100 * S
    names = [model.name for model in made.models]
    assert names == ["m0", "m1", "m2", "mistral-24b", "llama-2-7b-0", "llama-2-7b-1"]
    first, plain = made.models[0], made.models[3]
    assert (first.preset, first.tp_size, first.priority) == ("llama-3-8b", 2, 3)
    assert (first.instances_min, first.instances_max, first.idle_ns) == (0, 4, 7_500_000_000)
    assert first.slo == SloAbsolute(450_000_000, 150_000_000)
    assert (plain.instances_min, plain.instances_max, plain.slo) == (1, None, None)
    assert all(list(model.rows) == read_trace(trace) for model in made.models)
    assert made.requests == 6 * 51


def test_a_trace_is_cut_to_the_workloads_time(tmp_path: Path, trace: Path) -> None:
    (model,) = workload(tmp_path, f"model: a, trace: '{trace}'", seconds=10).models
    assert arrivals(model) == [n * S for n in range(10)]


def test_limits_on_lengths_clip_and_count(tmp_path: Path, trace: Path) -> None:
    entry = f"model: a, trace: '{trace}', input_tokens_max: 10, output_tokens_max: 15"
    made = workload(tmp_path, entry)
    assert made.clipped_requests == made.models[0].clipped_requests == 51 - 8
    assert max(lengths(made.models[0])) == (10, 15)
    only_one = workload(tmp_path, f"model: a, trace: '{trace}', output_tokens_max: 15")
    assert max(lengths(only_one.models[0])) == (51, 15)


@given(shift=st.integers(0, 250), start=st.integers(0, 120), seconds=st.integers(1, 120))
def test_models_burst_one_after_the_other(
    shift: int, start: int, seconds: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shifts turn the trace within the workload's time, a start delays it: what then lies behind
    the end is not played."""
    folder = tmp_path_factory.mktemp("w")
    rows = [TraceRow(n * S, n + 1, 1) for n in range(51)]
    write_trace(folder / "t.csv", rows)
    entry = f"model: a, count: 4, trace: '{folder / 't.csv'}', shift_s: {shift}, start_s: {start}"
    for n, model in enumerate(workload(folder, entry, seconds=seconds).models):
        moved = [
            ((row.arrival_ns // S + n * shift) % seconds + start, row.input_tokens)
            for row in rows
            if row.arrival_ns < seconds * S
        ]
        expected = sorted((at, inputs) for at, inputs in moved if at < seconds)
        assert [
            (at // S, inputs)
            for at, (inputs, _) in zip(arrivals(model), lengths(model), strict=True)
        ] == expected


def test_a_rate_is_each_models_own_and_a_total_is_shared(tmp_path: Path, trace: Path) -> None:
    each = workload(tmp_path, f"model: a, count: 3, trace: '{trace}', rate: 40").models
    assert [len(model.rows) for model in each] == pytest.approx([2000] * 3, rel=0.05)
    factor = workload(tmp_path, f"model: a, trace: '{trace}', factor: 3").models[0]
    assert Counter(arrivals(factor)) == {n * S: 3 for n in range(51)}
    entry = "model: a, count: 4, gamma: {cv: 1}, total_rate: 100, share: "
    equal = workload(tmp_path, entry + "equal").models
    assert [len(model.rows) for model in equal] == pytest.approx([2500] * 4, rel=0.1)
    assert workload(tmp_path, entry.removesuffix(", share: ")).models == equal


@given(exponent=st.floats(0, 3).map(lambda s: round(s, 2)), seed=st.integers(0, 99))
def test_popularity_falls_as_a_power(
    exponent: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    entry = f"model: a, count: 5, gamma: {{cv: 0.1}}, total_rate: 10, share: zipf({exponent})"
    models = workload(tmp_path_factory.mktemp("w"), entry, seed=seed).models
    parts = [(n + 1) ** -exponent for n in range(5)]
    for model, part in zip(models, parts, strict=True):
        # A count varies by about cv √n, and by less than a request where n is small.
        expected = 1000 * part / sum(parts)
        assert len(model.rows) == pytest.approx(expected, abs=6 * 0.1 * math.sqrt(expected) + 1)


# -- the seed -------------------------------------------------------------------------------------


def test_a_models_draws_depend_on_its_name_and_the_seed_alone(tmp_path: Path) -> None:
    entry = "model: a, name: 'x{n}', count: 3, gamma: {input_sigma: 1}, rate: 2"
    alone = workload(tmp_path, entry).models
    among = workload(tmp_path, "model: b, trace: burst", entry).models
    assert among[1:] == alone
    assert alone[0].rows != alone[1].rows
    assert workload(tmp_path, entry, seed=1).models[0].rows != alone[0].rows
    bursts = workload(tmp_path, "model: b, count: 2, trace: burst").models
    assert bursts[0].rows != bursts[1].rows
    fixed = workload(tmp_path, "model: b, count: 2, trace: 'burst:seed=4'").models
    assert list(fixed[0].rows) == list(fixed[1].rows) == burst_trace(4)


@pytest.mark.usefixtures("machine")
def test_processes_with_other_hash_seeds_draw_the_same() -> None:
    code = (
        "import hashlib, msgspec, sys; from pathlib import Path;"
        "from livescale.load.workloads import read_workload;"
        "made = read_workload(Path(sys.argv[1]), None, 7);"
        "print(hashlib.sha256(msgspec.json.encode(made)).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(EXAMPLES / "hundred-models.yaml")],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_failed_requests_of_a_file_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n5,3,4\n6,0,0\n7,1,1\n")
    made = workload(tmp_path, f"model: a, count: 5, trace: '{path}'")
    assert made.requests == 10


# -- examples and mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "models"), [("twelve-models", 12), ("hundred-models", 100), ("thousand-models", 1000)]
)
def test_the_examples_need_no_data(name: str, models: int) -> None:
    made = read_workload(EXAMPLES / f"{name}.yaml", None, seed=0)
    assert len(made.models) == models
    assert len({model.name for model in made.models}) == models
    assert made.requests > 1000
    for model in made.models:
        assert arrivals(model) == sorted(arrivals(model))
        assert all(at < made.duration_ns for at in arrivals(model))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["missing required field `seconds`"]),
        ("second: 3", ["unknown key 'second'", "'seconds'"]),
        ("seconds: x\nmodels: []", ["Expected `float`, got `str`: `seconds`"]),
        ("seconds: 1.0e-10\nmodels: []", [">= 1e-09: `seconds`"]),
        ("seconds: .nan\nmodels: []", ["seconds"]),
        ("seconds: 3\nmodels: []", ["models must be a list of models, not an empty list"]),
        ("seconds: 3\nmodels: 4", ["models must be a list of models, not 4"]),
        ("seconds: 3\nmodels: [4]", ["models[0] must be a mapping", "4"]),
    ],
)
def test_what_is_no_workload_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_workload(file, None, 0)
    for word in [str(file), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("trace: burst", "missing required field `model`"),
        ("modell: a", "unknown key 'modell' (nearest known: 'model')"),
        ("model: a", "give trace or gamma"),
        ("model: a, trace: burst, gamma: {}", "give trace or gamma"),
        ("model: a, gamma: {}", "gamma needs a rate or a total_rate"),
        ("model: a, gamma: {}, factor: 2", "gamma needs a rate or a total_rate"),
        ("model: a, gamma: {cv: 99}, rate: 2", "cv 99 is not in 0.01 to 32: `gamma`"),
        ("model: a, gamma: {cvv: 9}, rate: 2", "unknown field `cvv`: `gamma`"),
        ("model: a, gamma: {rate: 9}, rate: 2", "unknown field `rate`: `gamma`"),
        ("model: a, gamma: {lengths: nowhere}, rate: 2", "trace 'nowhere' is not a file"),
        ("model: a, gamma: {}, rate: 1000000, count: 2", "more than 50000000 requests"),
        ("model: a, trace: burst, rate: -2", "Expected `float` > 0.0: `rate`"),
        ("model: a, trace: burst, rate: .nan", "Expected `float` > 0.0: `rate`"),
        ("model: a, trace: burst, rate: 2, factor: 2", "rate and factor contradict"),
        ("model: a, trace: burst, rate: 2, share: equal", "there is none"),
        ("model: a, trace: burst, total_rate: 2, share: zip", "share is 'zip': write equal or"),
        ("model: a, trace: burst, count: 3, name: b", "3 models need a {n} in it"),
        ("model: a, trace: burst, count: 0", "Expected `int` >= 1: `count`"),
        ("model: a, trace: burst, min_replicas: 3, max_replicas: 2", "is 3, above max_replicas 2"),
        *ROLE_MISTAKES,
        ("model: a, trace: nowhere", "a: trace 'nowhere' is not a file"),
        ("model: a, trace: 'gamma:rate=1,seconds=9,cv=4,input=0'", "lengths of 0 and 128 tokens"),
        ("model: a, trace: 'burst:seconds=0.001', rate: 2", "has no rate"),
        ("model: a, trace: burst, slo: fast", "slo: 'fast' is not a valid SLO"),
    ],
)
def test_mistakes_in_an_entry_name_the_place(tmp_path: Path, entry: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload(tmp_path, entry)
    assert str(caught.value).startswith(f"{tmp_path / 'workload.yaml'}: models[0]")
    assert problem in str(caught.value)


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\[1\]: there are two models called 'a'"):
        workload(tmp_path, "model: a, trace: burst", "model: a, trace: burst")
