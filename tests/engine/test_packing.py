"""Packed linears compute what plain ones compute, and leave the parameters where they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from livescale.engine.fused import fuse
from livescale.engine.packing import ROWS_STEP, can_pack, pack_linears

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, CPU)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(not DTYPES, reason="this torch has no packed products")


class Block(nn.Module):
    """The linears of a decoder layer: two groups, and two that stand alone."""

    def __init__(self, has_bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = {"q_proj": 48, "k_proj": 16, "v_proj": 16, "o_proj": 32}
        self.attention = nn.ModuleDict(
            {name: nn.Linear(32, out, bias=has_bias, dtype=dtype) for name, out in sizes.items()}
        )
        mlp = {"gate_proj": (32, 40), "up_proj": (32, 40), "down_proj": (40, 32)}
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(*size, bias=has_bias, dtype=dtype) for name, size in mlp.items()}
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        attention, mlp = self.attention, self.mlp
        heads = [attention[name](rows) for name in ("q_proj", "k_proj", "v_proj")]
        rows = attention["o_proj"](torch.cat(heads, dim=-1)[..., :32].contiguous())
        return mlp["down_proj"](torch.tanh(mlp["gate_proj"](rows)) * mlp["up_proj"](rows))


def block(has_bias: bool, dtype: torch.dtype) -> Block:
    torch.manual_seed(1)
    return Block(has_bias, dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@given(rows=st.integers(1, 3 * ROWS_STEP))
def test_packed_modules_compute_the_same(dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    plain, fast = block(has_bias, dtype), block(has_bias, dtype)
    pack_linears(fast)
    given_rows = torch.randn(1, rows, 32, dtype=dtype)
    expected, got = plain(given_rows), fast(given_rows)
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # Once more: a group keeps nothing of earlier rows.
    other = torch.randn(1, rows, 32, dtype=dtype)
    assert torch.allclose(fast(other), plain(other), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_members_of_a_group_may_be_called_alone_and_in_any_order() -> None:
    plain, fast = block(True, torch.float32), block(True, torch.float32)
    pack_linears(fast)
    rows, other = torch.randn(2, 5, 32).unbind()
    for name, given_rows in [("v_proj", rows), ("k_proj", other), ("q_proj", rows)]:
        expected = plain.attention[name](given_rows)
        assert torch.allclose(fast.attention[name](given_rows), expected, atol=1e-5)


def test_parameters_stay_where_they_are() -> None:
    module = block(False, torch.float32)
    before = {name: value.data_ptr() for name, value in module.named_parameters()}
    pack_linears(module)
    assert {name: value.data_ptr() for name, value in module.named_parameters()} == before


def test_neighbours_in_memory_are_packed_as_one() -> None:
    flat = torch.randn(80 * 32)
    weights = flat.view(80, 32).split([48, 16, 16])
    module = block(False, torch.float32)
    for name, weight in zip(("q_proj", "k_proj", "v_proj"), weights, strict=True):
        module.attention[name].weight = nn.Parameter(weight, requires_grad=False)
    expected = [module.attention[name](flat[:32]) for name in ("q_proj", "k_proj", "v_proj")]
    pack_linears(module)
    rows = flat[:32]
    for name, value in zip(("q_proj", "k_proj", "v_proj"), expected, strict=True):
        assert torch.allclose(module.attention[name](rows), value, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "linears"), [("llama", 7), ("mistral", 7), ("qwen2", 7), ("qwen3", 3), ("gemma2", 0)]
)
def test_layers_of_these_families_are_fused(family: str, linears: int) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    fields = {**sizes, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    config = CONFIG_MAPPING[family].from_dict({**fields, "pad_token_id": None})
    layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    assert len(fuse(layer)) == linears


def test_what_cannot_be_packed_is_said() -> None:
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))
