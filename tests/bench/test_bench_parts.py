"""Parts of the benchmarks that must be right for any figure to mean something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from livescale.config.slo import percentile
from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.made_models import BenchShape, make_bench_model, parse_shape
from livescale.lab.bench.engines.engine_report import EngineReport, EngineRow, TokenCheck
from livescale.lab.bench.peers.engines import judge
from livescale.lab.bench.peers.line_server import closed_loop
from slowness import patient

SHAPE = BenchShape(64, 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    scratch = tmp_path_factory.mktemp("bench-models")
    for dtype in ("float32", "bfloat16"):
        make_bench_model(scratch / dtype, SHAPE, 1024, dtype)
    return {dtype: scratch / dtype for dtype in ("float32", "bfloat16")}


def test_bfloat16_models_are_the_float32_ones_rounded_as_torch_rounds(
    models: dict[str, Path],
) -> None:
    for file in sorted(models["float32"].glob("*.safetensors")):
        rounded = load_file(models["bfloat16"] / file.name)
        exact = load_file(file)
        assert rounded.keys() == exact.keys()
        for name, values in exact.items():
            assert rounded[name].dtype == torch.bfloat16
            assert torch.equal(rounded[name], values.to(torch.bfloat16)), name
    assert read_manifest(models["bfloat16"], "m").dtype == "BF16"


@given(hidden=st.integers(1, 16), layers=st.integers(1, 99))
def test_a_shape_is_what_it_says(hidden: int, layers: int) -> None:
    shape = parse_shape(f"{64 * hidden}x{layers}", None, None, None)
    assert str(shape) == f"{64 * hidden}x{layers}"
    preset = shape.preset(512)
    assert preset.decoder_layers == layers
    assert preset.heads % preset.kv_heads == 0
    assert preset.head_dim * preset.heads == preset.hidden_size == 64 * hidden


@pytest.mark.parametrize("text", ["512", "x8", "512x", "512x8x2", "-512x8", "axb"])
def test_a_shape_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(BenchError, match=text):
        parse_shape(text, None, None, None)


@pytest.mark.long
def test_the_judge_finds_wrong_tokens(models: dict[str, Path]) -> None:
    """Right tokens are those that it would choose itself; others are seen in both ways."""
    prompt = list(range(10, 30))
    job = {"threads": 1, "dtype": "float32", "directory": str(models["float32"])}
    _, exact = judge.load(job)
    right: list[int] = []
    for _ in range(4):
        token_id = next(
            candidate
            for candidate in range(1024)
            if exact({"prompts": [prompt], "token_ids": [[*right, candidate]]})["wrong"] == 0
        )
        right.append(token_id)
    wrong = [(token_id + 1) % 1024 for token_id in right]
    assert exact({"prompts": [prompt], "token_ids": [wrong]}) == {"tokens": 4, "wrong": 4}
    _, rounded = judge.load(job | {"dtype": "bfloat16"})  # the same weights, the other measure
    shortfall = rounded({"prompts": [prompt] * 2, "token_ids": [right, right]})
    assert shortfall["shortfall_p99_stds"] == pytest.approx(0, abs=1e-5)
    assert shortfall["tokens"] == 8
    assert rounded({"prompts": [prompt], "token_ids": [wrong]})["shortfall_p99_stds"] > 0.2


class _RoundRobin:
    """An engine that gives every running request one token per step."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.running: dict[int, int] = {}
        self.most = 0

    def start(self, index: int) -> None:
        self.running[index] = 0
        self.most = max(self.most, len(self.running))

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        for index in list(self.running):
            self.running[index] += 1
            is_ended = self.running[index] == self._lengths[index]
            yield index, [self.running[index]], is_ended
            if is_ended:
                del self.running[index]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), in_flight=st.integers(1, 8))
def test_a_closed_loop_keeps_so_many_running_and_finishes_all(
    lengths: list[int], in_flight: int
) -> None:
    engine = _RoundRobin(lengths)
    result = closed_loop(len(lengths), in_flight, engine.start, engine.step)
    assert result.token_ids == [list(range(1, length + 1)) for length in lengths]
    assert engine.most == min(in_flight, len(lengths))
    assert len(result.ttft_ns) == len(lengths)
    assert all(0 < ttft_ns <= result.elapsed_ns for ttft_ns in result.ttft_ns)


@given(values=st.lists(st.integers(-1000, 1000), min_size=1), percent=st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed(
    values: list[int], percent: int
) -> None:
    enough = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
    assert percentile(values, percent) == min(enough)


def row(engine: str, rates: tuple[float, ...], **other: object) -> EngineRow:
    fields: dict[str, object] = {
        "dtype": "bfloat16",
        "hidden": 512,
        "layers": 8,
        "in_flight": 8,
        "ttft_ns": [1_000_000],
        "settings": "",
        "token_check": TokenCheck(8, wrong=0),
        "cores_used": [1.0],
        "others_cpu": [0.0],
    }
    return EngineRow(engine=engine, tokens_per_s=list(rates), **{**fields, **other})


def test_the_headline_ratios_are_those_of_one_shape_and_absent_where_not_measured() -> None:
    rows = (
        row("livescale", (100.0, 300.0, 200.0)),
        row("transformers_cb", (100.0, 90.0, 400.0)),
        row("livescale", (50.0,), dtype="float32"),
        row("transformers_cb", (10.0,), dtype="float32"),
        row("vllm_cpu", (25.0,), dtype="float32"),
    )
    figures = EngineReport(rows, 64, 64, 2).as_json()
    assert figures["throughput_ratio_to_transformers_cb_at_8"] == 2.0
    assert "throughput_ratio_to_vllm_cpu_at_8" not in figures
    ratios = figures["ratios"]
    assert isinstance(ratios, list)
    assert [ratio["throughput_ratio"] for ratio in ratios] == [2.0, 5.0, 2.0]


ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"


@pytest.mark.usefixtures("machine")
def test_lines_go_out_and_come_back() -> None:
    with LineProcess("echo", [sys.executable, "-c", ECHO], {}) as process:
        for number in range(3):
            assert process.ask({"number": number}, patient(60)) == {"number": number}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('it broke')", ["ended early", "it broke"]),
        ("import time; time.sleep(600)", ["no answer within"]),
    ],
)
def test_a_process_that_fails_is_named_with_what_it_said(code: str, words: list[str]) -> None:
    with LineProcess("the peer", [sys.executable, "-c", code], {}) as process:
        with pytest.raises(BenchError) as caught:
            process.receive(patient(2))
        assert all(word in str(caught.value) for word in ["the peer", *words])


PARENT = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"pid": child.pid}), flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("machine")
def test_what_a_guarded_command_started_ends_with_it() -> None:
    words = (sys.executable, "-c", PARENT)
    with bench_process("the server", "peers.guarded", *words) as process:
        child = psutil.Process(process.receive(patient(60))["pid"])
        assert child.is_running()
    child.wait(patient(60))
