"""Parameters from an arena, layer by layer: vLLM computes what it does from its own load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from completions import prompt
from installed import REASON, greedy_tokens, vllm_python

from livescale.engine.files.make import make_model

pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(vllm_python() is None, reason=REASON),
    # vLLM alone takes half a minute to import, and much longer on busy cores.
    pytest.mark.timeout(1200),
]
#: whose made models have heads of a size that its kernels for CPUs know, and are not like Llama
FAMILIES = ("qwen2", "phi3", "mixtral")
#: vLLM lays experts out otherwise
COPIED = ("mixtral",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_model(root / family, "tiny", family=family)
    make_model(root / "tied", "tiny", tied=True)
    # vLLM has no windows in a part of the layers.
    config = root / "qwen2" / "config.json"
    fields = {**json.loads(config.read_text()), "use_sliding_window": False}
    del fields["layer_types"]
    config.write_text(json.dumps(fields))
    return sorted(root.iterdir())


def test_tokens_are_those_of_its_own_load(models: list[Path]) -> None:
    """As views of the arena, and packed for its kernels, in an engine that is kept: also after a
    load that was given up, while layers arrive, and after a step that waited for them in vain."""
    prompts = [prompt(number, 40 + number) for number in range(4)]
    found = greedy_tokens(models, prompts, 16, ("own", "views", "packed"))
    for path in models:
        (own, _), (views, copies_nothing), (packed, is_bound) = found[str(path)].values()
        assert views == own, path.name
        assert packed == own, path.name
        assert copies_nothing == (path.name not in COPIED), path.name
        assert not is_bound, path.name


def test_a_model_that_vllm_refuses_is_refused_with_its_words(tmp_path: Path) -> None:
    make_model(tmp_path / "windows", "tiny", family="qwen2")
    found = greedy_tokens([tmp_path / "windows"], [], 1, ["refused"])
    words, _ = found[str(tmp_path / "windows")]["refused"]
    assert words.startswith("m: vLLM refuses it: ")
    assert "max_window_layers" in words


def test_a_request_that_moves_ends_as_if_it_had_stayed(models: list[Path]) -> None:
    """Cut behind each of its tokens: its limits, the tokens that may end it and the repetition
    penalty count what was generated elsewhere."""
    (tied,) = (path for path in models if path.name == "tied")
    found = greedy_tokens([tied], [prompt(1, 40)], 12, ["moved"])
    ways, _ = found[str(tied)]["moved"]
    assert len(ways) == 3
    for whole, cut in ways:
        assert len(cut) == len(whole[0]) - 1
        assert all(one == whole for one in cut)
