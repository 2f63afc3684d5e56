"""Linears compute the same in every way there is, and leave the parameters where they are."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.kernels import tile_products as tiles
from livescale.engine.products import compiled_linear
from livescale.engine.products.compiled_linear import CompiledLinear, can_compile_linear
from livescale.engine.products.experts import Experts
from livescale.engine.products.linear_choice import ChosenLinears, Kind
from livescale.engine.products.packing import ROWS_STEP, can_pack
from livescale.engine.products.row_norms import RowNorm
from livescale.engine.spans.fused import EXPERTS, NORMS, OFFSET_NORMS, fuse
from slowness import patient

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = get_args(Kind)
WAYS = [
    (kind, dtype)
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16))
    if kind != "packed" or can_pack(dtype, CPU)
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also for what is too small to be worth a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_linear, "ALONE_PRODUCTS", 0)
        yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """The linears of a decoder layer: two groups, and two that stand alone."""

    def __init__(self, has_bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = {"q_proj": 48, "k_proj": 16, "v_proj": 16, "o_proj": 32}
        self.attention = nn.ModuleDict(
            {name: nn.Linear(32, out, bias=has_bias, dtype=dtype) for name, out in sizes.items()}
        )
        mlp = {"gate_proj": (32, 48), "up_proj": (32, 48), "down_proj": (48, 32)}
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(*size, bias=has_bias, dtype=dtype) for name, size in mlp.items()}
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        attention, mlp = self.attention, self.mlp
        heads = [attention[name](rows) for name in ("q_proj", "k_proj", "v_proj")]
        rows = attention["o_proj"](torch.cat(heads, dim=-1)[..., :32].contiguous())
        return mlp["down_proj"](torch.tanh(mlp["gate_proj"](rows)) * mlp["up_proj"](rows))


class Fast:
    """What a block computes, with linears that are made so."""

    def __init__(self, block: Block, linears: ChosenLinears) -> None:
        attention: Any = block.attention
        mlp: Any = block.mlp
        self.qkv = linears([attention[name] for name in ("q_proj", "k_proj", "v_proj")])
        self.out = linears([attention["o_proj"]])
        self.gate_up = linears([mlp["gate_proj"], mlp["up_proj"]])
        self.down = linears([mlp["down_proj"]])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(self.out(self.qkv(rows)[..., :32].contiguous()))
        return self.down(torch.tanh(gate_up[..., :48]) * gate_up[..., 48:])


def block(has_bias: bool, dtype: torch.dtype) -> Block:
    torch.manual_seed(1)
    return Block(has_bias, dtype).requires_grad_(False)


@pytest.mark.parametrize(("kind", "dtype"), WAYS)
@pytest.mark.parametrize("has_bias", [False, True])
@given(rows=st.integers(1, 3 * ROWS_STEP))
def test_modules_compute_the_same(
    kind: Kind, dtype: torch.dtype, has_bias: bool, rows: int
) -> None:
    plain = block(has_bias, dtype)
    fast = Fast(plain, ChosenLinears(kind))
    given_rows = torch.randn(1, rows, 32, dtype=dtype)
    expected, got = plain(given_rows), fast(given_rows)
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # Once more: nothing is kept of earlier rows.
    other = torch.randn(1, rows, 32, dtype=dtype)
    assert torch.allclose(fast(other), plain(other), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("kind", "dtype"), WAYS)
@given(
    rows=st.integers(1, 300),
    width=st.integers(1, 200),
    sixteens=st.integers(1, 8),
    has_bias=st.booleans(),
    adds=st.booleans(),
)
def test_products_of_any_size(
    threads: None, kind: Kind, dtype: torch.dtype, rows: int, width: int, sixteens: int,
    has_bias: bool, adds: bool,
) -> None:  # fmt: skip
    torch.manual_seed(rows + width + sixteens)
    member = nn.Linear(16 * sixteens, width, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, 16 * sixteens).to(dtype)
    added = torch.randn(rows, width).to(dtype) if adds else None
    wanted = member.double()(x.double()) + (0 if added is None else added.double())
    got = ChosenLinears(kind)([member.to(dtype)])(x, added)
    assert got.dtype is dtype
    assert torch.allclose(got.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_compiled_linears_do_without_products_of_torch(threads: None, dtype: torch.dtype) -> None:
    """What a CPU computes for which torch has none, or has none in bf16."""
    own = tiles.tile_products()
    linear = CompiledLinear(torch.randn(130, 64).to(dtype))
    for rows in (1, 3, 40, 140):
        x = torch.randn(rows, 64).to(dtype)
        wanted = linear(x)
        for products in (tiles.TileProducts(fp32=own.fp32), tiles.TileProducts()):
            desk = compiled_linear.Desk(dtype, products)
            got = linear.on(desk, x)
            assert torch.allclose(got, wanted, atol=1e-4 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nothing_is_written_beside_the_memory_of_a_call(dtype: torch.dtype) -> None:
    """A single row that is widened once went 28 bytes too far."""
    own = tiles.tile_products()
    for products, rows in itertools.product(
        (own, tiles.TileProducts(fp32=own.fp32), tiles.TileProducts()), (1, 2, 8, 9, 16, 130)
    ):
        desk = compiled_linear.Desk(dtype, products)
        CompiledLinear(torch.randn(70, 16).to(dtype)).on(desk, torch.randn(rows, 16).to(dtype))
        for piece in desk.memory.values():
            whole = piece.base
            assert isinstance(whole, np.ndarray)
            stop = piece.ctypes.data - whole.ctypes.data + piece.nbytes
            assert not whole[stop:].any()


def test_calls_of_several_threads_do_not_meet(threads: None) -> None:
    linear = CompiledLinear(torch.randn(512, 256))
    inputs = [torch.randn(rows, 256) for rows in (1, 7, 64, 200)]
    wanted = [linear(x) for x in inputs]
    wrong = []

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        wrong.extend(n for n in range(50) if not torch.equal(linear(x), out))

    callers = [
        threading.Thread(target=call, args=pair) for pair in zip(inputs, wanted, strict=True)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_stay_where_they_are(kind: Kind) -> None:
    module = block(False, torch.float32)
    before = {name: value.data_ptr() for name, value in module.named_parameters()}
    Fast(module, ChosenLinears(kind))
    assert {name: value.data_ptr() for name, value in module.named_parameters()} == before


@pytest.mark.parametrize("kind", ["compiled", "plain"])
@pytest.mark.parametrize("is_joined", [False, True])
def test_no_copy_of_weights_is_made(kind: Kind, is_joined: bool) -> None:
    """Where they lie above each other, and where they do not."""
    module = block(False, torch.float32)
    if is_joined:
        above_each_other(module, torch.randn(80 * 32))
    fast = Fast(module, ChosenLinears(kind))
    for parameter in module.parameters():
        parameter.fill_(1.0)
    assert torch.equal(fast.qkv(torch.ones(1, 32)), torch.full((1, 80), 32.0))
    assert torch.equal(fast.down(torch.ones(1, 48)), torch.full((1, 32), 48.0))


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_in_memory_are_one_product(kind: Kind) -> None:
    flat = torch.randn(80 * 32)
    module = block(False, torch.float32)
    above_each_other(module, flat)
    rows = flat[:32]
    expected = [module.attention[name](rows) for name in ("q_proj", "k_proj", "v_proj")]
    got = Fast(module, ChosenLinears(kind)).qkv(rows)
    assert torch.allclose(got, torch.cat(expected), atol=1e-4)


def above_each_other(module: Block, flat: torch.Tensor) -> None:
    weights = flat.view(80, 32).split([48, 16, 16])
    for name, weight in zip(("q_proj", "k_proj", "v_proj"), weights, strict=True):
        module.attention[name].weight = nn.Parameter(weight, requires_grad=False)


# -- parts of layers -----------------------------------------------------------------------------


def layer_of(family: str, **more: object) -> Any:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    fields = {**sizes, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    config = CONFIG_MAPPING[family].from_dict({**fields, "pad_token_id": None, **more})
    return AutoModelForCausalLM.from_config(config).model.layers[0].requires_grad_(False)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_layers_of_every_family_are_fused(family: str) -> None:
    layer = layer_of(family)
    linears = {module for module in layer.modules() if type(module) is nn.Linear}
    fuse(layer, ChosenLinears("compiled"))
    assert not any("forward" in vars(linear) for linear in linears), "a linear is computed alone"
    norms = [module for module in layer.modules() if "Norm" in type(module).__name__]
    assert norms
    assert all(type(norm.forward) is RowNorm for norm in norms)
    assert "forward" in vars(layer)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    norm = layer_of(family).input_layernorm
    assert type(norm) in NORMS + OFFSET_NORMS
    torch.manual_seed(1)
    norm.weight.copy_(torch.randn(32))
    norm.to(dtype)
    inputs = [(torch.randn(1, 7, 32) * scale).to(dtype) for scale in (0.01, 1.0, 100.0)]
    # Heads of a projection lie apart from each other.
    inputs.append(torch.randn(5, 4, 32).to(dtype)[:, 1:3])
    wanted = [norm(x) for x in inputs]
    fuse(norm, ChosenLinears("plain"))
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for x, rows in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(norm(x), rows, atol=bound, rtol=bound)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    count = {"num_local_experts": 5, "num_experts": 5, "moe_intermediate_size": 32}
    [experts] = [m for m in layer_of(family, **count).modules() if type(m) in EXPERTS]
    torch.manual_seed(1)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    experts.to(dtype)
    ours = Experts.of(experts, ChosenLinears("compiled"))
    assert ours is not None
    assert Experts.of(experts, ChosenLinears("plain")) is None
    for rows in (1, 2, 3, 8, 40):
        x, weights = torch.randn(rows, 32).to(dtype), torch.rand(rows, 2)
        chosen = torch.stack([torch.randperm(5)[:2] for _ in range(rows)])
        torch.testing.assert_close(
            ours(x, chosen, weights),
            experts(x, chosen, weights),
            atol=10 * TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


def test_what_cannot_be_done_is_said() -> None:
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))
    assert not can_compile_linear(torch.zeros(4, 4, dtype=torch.float16))
    assert not can_compile_linear(torch.zeros(4, 24))
    assert not can_compile_linear(torch.zeros(16, 4).T)
    assert not can_compile_linear(torch.zeros(4, 4, device="meta"))


@pytest.mark.parametrize("layout", ["auto", "packed", "compiled", "plain"])
def test_fp16_stays_with_torch(layout: Any) -> None:
    member = nn.Linear(8, 6, dtype=torch.float16).requires_grad_(False)
    x = torch.randn(3, 8, dtype=torch.float16)
    assert torch.equal(ChosenLinears(layout)([member])(x), member(x))


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_a_cpu_without_products_in_bf16() -> None:
    """Libraries that are told so compute the same: loops of our own, and torch's in fp32."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    chosen = f"{__file__}::test_products_of_any_size"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", chosen],
        env=os.environ | limits,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(150),
    )
    assert done.returncode == 0, done.stdout[-2000:]
