"""Presets: byte counts of published checkpoints, and what a rank of them holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.latency.shapes import EXECUTED, LLAMA_3_8B, PRESETS
from livescale.latency.work import RunWork

#: parameters as the checkpoints have them
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "mistral-24b": 23_572_403_200,
    "qwen2.5-72b": 72_706_203_648,
    "opt-66b": 65_719_701_504,
}
KV_BYTES_PER_TOKEN = {
    "llama-2-7b": 524_288,
    "llama-2-13b": 819_200,
    "llama-3-8b": 131_072,
    "mistral-24b": 163_840,
    "qwen2.5-72b": 327_680,
}


def test_every_preset_has_as_many_parameters_as_its_checkpoint() -> None:
    assert {name: shape.spec().size_bytes // 2 for name, shape in PRESETS.items()} == PARAMETERS
    for name, shape in PRESETS.items():
        spec = shape.spec()
        assert spec.size_bytes == 2 * PARAMETERS[name]
        assert spec.layers == shape.decoder_layers + 2
        assert (spec.name, spec.tp_size) == (name, 1)


def test_kv_of_a_token() -> None:
    for name, kv_bytes in KV_BYTES_PER_TOKEN.items():
        assert PRESETS[name].spec().kv_bytes_per_token == kv_bytes


def test_llama_3_8b_layer_by_layer() -> None:
    # Embedding, 32 decoder layers, final norm and head, as its safetensors have them.
    assert LLAMA_3_8B.layer_bytes[0] == 2 * 128_256 * 4096
    assert set(LLAMA_3_8B.layer_bytes[1:-1]) == {2 * 218_112_000}
    assert LLAMA_3_8B.layer_bytes[-1] == 2 * (128_256 * 4096 + 4096)


def test_a_tied_head_is_a_norm() -> None:
    assert PRESETS["opt-66b"].spec().layer_bytes[-1] == 2 * 2 * 9216


@given(name=st.sampled_from(sorted(PRESETS)), tp_size=st.sampled_from([1, 2, 4, 8]))
def test_ranks_hold_the_model_and_repeat_only_what_is_small(name: str, tp_size: int) -> None:
    shape = PRESETS[name]
    whole, rank = shape.spec(), shape.spec(tp_size)
    assert rank.layers == whole.layers
    for whole_bytes, rank_bytes in zip(whole.layer_bytes, rank.layer_bytes, strict=True):
        assert whole_bytes <= tp_size * rank_bytes
    # Norms, biases after sums and position rows are everywhere; vocabularies are rounded up.
    assert tp_size * rank.size_bytes < 1.003 * whole.size_bytes
    assert rank.kv_bytes_per_token * tp_size == whole.kv_bytes_per_token


def test_kv_heads_are_repeated_where_they_are_fewer_than_ranks() -> None:
    shape = PRESETS["qwen2.5-72b"]
    assert shape.spec(16).kv_bytes_per_token == shape.spec(8).kv_bytes_per_token
    assert 16 * shape.spec(16).layer_bytes[1] > 8 * shape.spec(8).layer_bytes[1]


@pytest.mark.parametrize("tp_size", [0, 3, 7, 5])
def test_ranks_that_cannot_share_are_refused(tp_size: int) -> None:
    with pytest.raises(ValueError, match=f"cut into {tp_size} ranks"):
        PRESETS["llama-3-8b"].spec(tp_size)


def test_models_known_by_size_and_time() -> None:
    assert {name: round(m.size_bytes / 1e9, 1) for name, m in EXECUTED.items()} == {
        "whisper-9b": 2.9,
        "bert-21b": 43,
        "llama-7b": 14,
        "opt-66b": 132,
        "wideresnet": 16,
    }
    for model in EXECUTED.values():
        spec = model.spec()
        assert spec.size_bytes == model.size_bytes
        assert spec.layers == 8
        assert max(spec.layer_bytes) - min(spec.layer_bytes) <= 1
        work = RunWork(((model.request_tokens, 0),), sampled=1)
        assert model.latency().run_ns(work) == model.executed_ns
    # The two that are also known as shapes come to about the same.
    for name in ("llama-7b", "opt-66b"):
        assert 0.95 < PRESETS[name].spec().size_bytes / EXECUTED[name].size_bytes < 1
