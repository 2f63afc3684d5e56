"""Made models are complete, loadable by stock libraries and the same for the same seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from livescale.engine.base.errors import ModelError
from livescale.engine.files.make import END_ID, PRESETS, SPECIAL_TOKENS, make_model
from slowness import patient


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.usefixtures("machine")
def test_same_seed_same_bytes_even_in_another_process(tmp_path: Path) -> None:
    make_model(tmp_path / "a", "tiny", seed=3)
    program = (
        "import sys, pathlib; from livescale.engine.files.make import make_model;"
        "make_model(pathlib.Path(sys.argv[1]), 'tiny', seed=3)"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "b")], check=True, timeout=patient(60)
    )
    make_model(tmp_path / "c", "tiny", seed=4)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_families_are_made_alike_and_complete(tmp_path: Path, family: str) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_model(tmp_path / name, "tiny", seed=seed, family=family)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")
    names = set(contents(tmp_path / "a"))
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert len([name for name in names if name.endswith(".safetensors")]) >= 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.model_type == family
    assert model.generation_config.eos_token_id == END_ID
    assert model.config.num_hidden_layers == PRESETS["tiny"].decoder_layers


def test_stock_transformers_loads_it(models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models / "tiny")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[0, 5, 6]])).logits
    assert logits.shape == (1, 3, PRESETS["tiny"].vocab_size)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == END_ID
    # Neither flat nor saturated: greedy choices must be decided by the weights.
    assert 0.3 < float(logits.std()) < 3


def test_tied_head_is_not_in_the_files(models: Path) -> None:
    index = json.loads((models / "tied" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    model = AutoModelForCausalLM.from_pretrained(models / "tied")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_tokenizer_covers_the_vocabulary_and_round_trips(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny")
    plain = Tokenizer.from_file(str(models / "tiny" / "tokenizer.json"))
    vocabulary = PRESETS["tiny"].vocab_size
    assert len(tokenizer) == plain.get_vocab_size() == vocabulary
    assert all(plain.decode([i], skip_special_tokens=False) for i in range(vocabulary))
    for text in ("The blai  slirt, 42!", "déjà vu 東京 🚀\n\ttabs", ""):
        ids = tokenizer(text).input_ids
        assert ids == plain.encode(text).ids
        assert ids[0] == tokenizer.bos_token_id == 0
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny")
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|system|>Be.<|end|><|user|>Hi<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    special = [i for i in ids if i < len(SPECIAL_TOKENS)]
    assert special == [0, 2, 1, 3, 1, 4]


def test_shards_are_bounded(tmp_path: Path) -> None:
    make_model(tmp_path / "m", "tiny")
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) == 3
    limit = 3_428_352 // 2
    assert all(file.stat().st_size <= limit + 8192 for file in files)  # 8192 for the header


def test_sizes_of_the_presets() -> None:
    def megabytes(name: str) -> float:
        sizes = PRESETS[name]
        kv = sizes.kv_heads * sizes.head_dim
        layer = sizes.hidden_size * (
            2 * sizes.hidden_size + 2 * kv + 3 * sizes.intermediate_size + 2
        )
        ends = sizes.hidden_size * (2 * sizes.vocab_size + 1)
        return 4 * (sizes.decoder_layers * layer + ends) / 1e6

    assert megabytes("tiny") == pytest.approx(3, rel=0.2)
    assert megabytes("small") == pytest.approx(20, rel=0.1)
    assert megabytes("medium") == pytest.approx(100, rel=0.1)
    for sizes in PRESETS.values():
        assert sizes.kv_heads < sizes.heads
        assert sizes.model_tokens_max >= 4096


def test_refuses_to_overwrite_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    make_model(target, "tiny")  # an empty directory is no obstacle
    before = contents(target)
    with pytest.raises(ModelError, match=f"{target} exists already"):
        make_model(target, "tiny", seed=1)
    with pytest.raises(ModelError, match="unknown preset 'huge', there are tiny, small, medium"):
        make_model(tmp_path / "other", "huge")
    with pytest.raises(ModelError, match="unknown family 'mamba', there are llama, qwen2, qwen3,"):
        make_model(tmp_path / "other", "tiny", family="mamba")
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("machine")
def test_no_torch_is_imported_to_make_or_read_models() -> None:
    program = (
        "import sys, livescale.engine.files.make, livescale.engine.files.model_files;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patient(60))
