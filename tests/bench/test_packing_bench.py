"""`bench packing`: a short run of small blocks; what the figures are, not how large."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from interrupted import check_processes_end
from livescale.lab.bench.transfer.packing_wire import LAYERS
from livescale.latency.shapes import PRESETS
from livescale.main import main

SMALL = ("bench", "packing", "--model", "tiny", "--seconds", "0.2")
NAMES = ["none", "pre_alloc", "packing", "in_place"]


@pytest.mark.usefixtures("machine")
def test_every_step_has_figures_in_the_order_of_what_they_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert main([*SMALL, "--layers", "2", "--json", str(out)]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())
    shape = LAYERS["tiny"]
    assert figures["block_bytes"] == 2 * sum(shape.tensor_bytes())
    assert figures["tensors"] == 18
    assert figures["blocks"] >= 1
    steps = figures["steps"]
    assert [row["step"] for row in steps] == NAMES
    assert [row["messages"] for row in steps] == [18, 18, 1, 1]
    first = steps[0]["block_ms_p50"]
    for row in steps:
        assert 0 < row["block_ms_p50"] <= row["block_ms_max"]
        assert row["ratio_to_first"] == pytest.approx(row["block_ms_p50"] / first)
    medians = [row["block_ms_p50"] for row in steps]
    falls = all(after < before for before, after in pairwise(medians))
    assert figures["falls_with_each_step"] is falls
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert [word for word in printed if word in NAMES] == NAMES


def test_tensors_of_well_known_models_have_the_bytes_of_a_decoder_layer() -> None:
    """Llama and Mistral as the simulator has them; of Qwen3-30B-A3B 30.5 billion parameters are
    known in all, of which embedding and head are two matrices."""
    for name in LAYERS.keys() & PRESETS.keys():
        assert sum(LAYERS[name].tensor_bytes()) == PRESETS[name].spec().layer_bytes[1], name
    qwen = LAYERS["qwen3-30b-a3b"]
    outside = 2 * 151_936 * qwen.hidden + qwen.hidden
    parameters = qwen.decoder_layers * sum(qwen.tensor_bytes()) // 2 + outside
    assert parameters == pytest.approx(30.5e9, rel=0.005)


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_ctrl_c_leaves_nothing() -> None:
    check_processes_end((*SMALL[:-1], "60"), "blocks of")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt"], "unknown 'gpt', there are llama-2-7b"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--layers", "5"], "--layers must be at most 4"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--seconds", "nan"], "--seconds must be positive"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--model", "llama-2-70b", "--layers", "80"], "bytes of memory"),
    ],
)
def test_wrong_input_is_named_in_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
