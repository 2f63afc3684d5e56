"""`bench vllm` from the command line to its JSON, as small as it can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import REASON, vllm_python

from livescale.main import main

PYTHON = vllm_python()
pytestmark = [
    pytest.mark.usefixtures("machine"),
    # Three servers and an engine each import vLLM.
    pytest.mark.long,
    pytest.mark.skipif(PYTHON is None, reason=REASON),
    pytest.mark.timeout(1800),
]
TINY = ("--shape", "64x2", "--vocabulary", "1024", "--repetitions", "1", "--loads", "1")
SHORT = ("--streams", "2", "--prompt-tokens", "16", "--output-tokens", "8", "--no-defaults")


def test_all_parts_give_their_figures(tmp_path: Path) -> None:
    assert PYTHON is not None
    file = tmp_path / "figures.json"
    words = ("--vllm-python", PYTHON, "--parts", "serving,loads,link,binding", "--json", str(file))
    small = ("--link-size", "4MiB", "--link-gbit", "0.1")
    assert main(["bench", "vllm", *words, *TINY, *SHORT, *small]) == 0
    figures = json.loads(file.read_text())
    assert figures["lost"] == figures["token_mismatches"] == 0
    positive = (
        *("throughput_ratio_to_plain", "order_to_first_token_s", "bind_ms"),
        *("link_order_to_first_token_s", "link_beyond_link_s"),
    )
    assert all(figures[name] > 0 for name in positive)
    assert figures["vllm_version"]
    assert "added_ttft_ms" in figures
    assert "throughput_ratio_to_defaults" not in figures, "it was left out"
    assert all(model["copies_nothing"] for model in figures["binding"])
