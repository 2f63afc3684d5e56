"""Pieces of the compiled layers, each beside its plain definition."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compiled_span import load, segment

from effort import examples
from livescale.batching.runs.run import Run
from livescale.engine.files.make import Preset, make_model
from livescale.engine.kernels.compiled import as_bf16, compiled, exp, silu, vector
from livescale.engine.kernels.job import JOB, UNIT_FIELDS, WIDE_ITEMS, lanes_of
from livescale.engine.kernels.products import BF16, FP32, multiply
from livescale.engine.kernels.rows import arrange
from livescale.engine.kernels.tile_products import TileProducts, tile_products
from livescale.engine.spans.span_memory import SpanMemory
from livescale.engine.spans.span_rows import SpanRows, span_rows
from livescale.values.types import LayerSpan
from slowness import patient


@compiled()
def powers(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = exp(x[i])


@compiled()
def activations(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = silu(x[i])


@compiled()
def halves(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = as_bf16(x[i])


def test_powers_and_activations_are_exact_to_fp32() -> None:
    x = -np.linspace(0, 80, 100_001, dtype=np.float32)
    out = np.empty_like(x)
    powers(x, out)
    assert np.max(np.abs(out / np.exp(x.astype(np.float64)) - 1)) < 1e-5
    near = x > -10
    assert np.max(np.abs(out[near] / np.exp(x[near].astype(np.float64)) - 1)) < 1e-6
    both = np.concatenate([x, -x])
    out = np.empty_like(both)
    activations(both, out)
    wanted = both / (1 + np.exp(-both.astype(np.float64)))
    assert np.max(np.abs(out - wanted)) < 1e-5


def test_bf16_is_rounded_as_torch_rounds() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    x = np.concatenate([bits, ties]).view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) < 1e38)]
    out = np.empty(len(x), np.int16)
    halves(x, out)
    assert np.array_equal(out, torch.from_numpy(x).bfloat16().view(torch.int16).numpy())


@settings(max_examples=examples(40))
@given(
    rows=st.integers(1, 300),
    features=st.integers(1, 40).map(lambda n: 2 * n),
    out=st.integers(1, 90),
    kind=st.sampled_from(["fp32", "bf16 itself", "bf16 widened", "fp32 loops", "bf16 loops"]),
    is_added=st.booleans(),
    data=st.data(),
)
def test_products_are_those_of_matrices(
    rows: int, features: int, out: int, kind: str, is_added: bool, data: st.DataObject
) -> None:
    products = tile_products()
    if kind == "bf16 itself" and not products.bf16:
        kind = "bf16 widened"
    is_paired = kind == "bf16 itself"
    used = TileProducts() if "loops" in kind else products
    draw = np.random.default_rng(rows * 1000 + features)
    lanes = lanes_of(rows)
    weights = torch.from_numpy(draw.standard_normal((out, features)).astype(np.float32))
    rows_in = torch.from_numpy(draw.standard_normal((lanes, features)).astype(np.float32))
    if "bf16" in kind:
        weights = weights.bfloat16()
    if is_paired:
        rows_in = rows_in.bfloat16()
    first = data.draw(st.integers(0, out - 1))
    count = data.draw(st.integers(1, min(out - first, max(4, WIDE_ITEMS // features))))
    job = np.zeros(1, JOB)
    wide = np.empty(WIDE_ITEMS, np.float32)
    job["item_bytes"], job["operand_bytes"] = weights.element_size(), 2 if is_paired else 4
    job["is_paired"], job["wide"] = is_paired, wide.ctypes.data
    job["fp32_product"], job["bf16_product"] = used.fp32, used.bf16
    operand, into = operand_of(rows_in, is_paired), np.ones(out * lanes, np.float32)
    multiply(
        job,
        BF16 if "bf16" in kind else FP32,
        0,
        weights.data_ptr(),
        features,
        first,
        count,
        operand.data_ptr(),
        lanes,
        into.ctypes.data,
        out,
        first,
        int(is_added),
    )
    wanted = weights.double()[first : first + count] @ rows_in.double().T + is_added
    found = groups_of(into, out, lanes)[first : first + count]
    assert np.allclose(found, wanted.numpy(), atol=1e-3)
    rest = np.delete(groups_of(into, out, lanes), range(first, first + count), axis=0)
    assert (rest == 1).all()


def operand_of(rows: torch.Tensor, is_paired: bool) -> torch.Tensor:
    """(rows, features) as the kernels have it, one group of lanes behind the other."""
    parts = []
    for start in range(0, len(rows), 128):
        part = rows[start : start + 128]
        part = part.view(len(part), -1, 2).transpose(0, 1) if is_paired else part.T
        parts.append(part.contiguous().flatten())
    return torch.cat(parts)


def groups_of(memory: np.ndarray, features: int, lanes: int) -> np.ndarray:
    """(features, lanes) of memory in groups of lanes."""
    parts, start = [], 0
    for first in range(0, lanes, 128):
        width = min(128, lanes - first)
        parts.append(memory[start : start + features * width].reshape(features, width))
        start += features * width
    return np.concatenate(parts, axis=1)


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 200)), min_size=1, max_size=6),
    st.integers(1, 130),
)
def test_rows_lie_in_their_segments_and_units_cover_each_position_once(
    segments: list[tuple[int, int]], shared: int
) -> None:
    run = Run(1, LayerSpan(0, 2), tuple(segment(n, *pair) for n, pair in enumerate(segments)))
    job, memory, rows = arranged(run, shared)
    count, unit_count = int(job["rows"][0]), int(job["unit_count"][0])
    assert count == rows.rows == run.token_count
    assert unit_count <= rows.units
    owners = [n for n, (_, length) in enumerate(segments) for _ in range(length)]
    positions = [context + i for context, length in segments for i in range(length)]
    assert memory.integers("positions")[:count].tolist() == positions
    tables = [run.segments[owner].block_table for owner in owners]
    kept = [table[p // 4] * 4 + p % 4 for table, p in zip(tables, positions, strict=True)]
    assert memory.integers("kept")[:count].tolist() == kept
    ids = [i for each in run.segments for i in each.token_ids]
    assert memory.integers("token_ids")[:count].tolist() == ids
    last = [
        start + length - 1 for start, (_, length) in zip(starts(segments), segments, strict=True)
    ]
    wanted = [row for row, each in zip(last, run.segments, strict=True) if each.chooses]
    assert memory.integers("sample_rows")[: len(wanted)].tolist() == wanted
    assert job["samples"] == rows.samples == len(wanted)
    seen: dict[int, list[int]] = {}
    units = memory.integers("units").reshape(-1, UNIT_FIELDS)[:unit_count]
    for first, length, table, stretch, stretches in units.tolist():
        assert length == 1 or length * shared <= 128
        own = run.segments[owners[first]].block_table
        assert np.array(own).tolist() == list((ctypes.c_int64 * len(own)).from_address(table))
        for row in range(first, first + length):
            seen.setdefault(row, []).append(stretch)
            assert owners[row] == owners[first]
            if length == 1:
                assert stretches == -(-(positions[row] + 1) // 256)
    assert sorted(seen) == list(range(count))
    assert all(sorted(parts) == list(range(len(parts))) for parts in seen.values())


def arranged(run: Run, shared: int) -> tuple[np.ndarray, SpanMemory, SpanRows]:
    """The Run as the kernels have it, of a model whose KV head is shared by so many."""
    job = np.zeros(1, JOB)
    job["heads"], job["kv_heads"], job["head_dim"] = shared, 1, 8
    job["hidden"] = job["intermediate"] = 8
    job["block_tokens"], job["chooses"] = 4, 1
    memory, rows = SpanMemory(job, 1), span_rows(run, shared, 1 << 20)
    memory.fit(rows.rows, rows.units, 1)
    job["segments"], job["segment_count"] = rows.segments.buffer_info()[0], len(run.segments)
    arrange(job)
    return job, memory, rows


def starts(segments: list[tuple[int, int]]) -> list[int]:
    counts = [count for _, count in segments]
    return [sum(counts[:n]) for n in range(len(counts))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", Preset(1, 64, 96, 4, 2, 512), seed=3)
    return tmp_path / "model"


def test_threads_come_and_go_with_their_number_and_their_model(model: Path) -> None:
    before, own = set(threading.enumerate()), torch.get_num_threads()
    run = Run(1, LayerSpan(0, 3), (segment(0, 0, 40),))
    try:
        executor = load(model, "auto")
        tokens = []
        for count in (1, 3, 2, 1, 2):
            torch.set_num_threads(count)
            tokens.append(executor.run(run).token_ids)
            assert len(set(threading.enumerate()) - before) == count - 1
        assert all(token == tokens[0] for token in tokens)
        executor.release()
        assert not set(threading.enumerate()) - before
        dropped = load(model, "auto")
        dropped.run(run)
        threads = set(threading.enumerate()) - before
        assert len(threads) == 1
        del dropped
        gc.collect()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        torch.set_num_threads(own)


def test_a_vector_is_the_memory_itself() -> None:
    @compiled()
    def double(address: Any, length: Any) -> None:
        items = vector(address, FP32, length)
        for i in range(length):
            items[i] *= 2

    memory = np.arange(5, dtype=np.float32)
    double(memory.ctypes.data, 5)
    assert memory.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.long
@pytest.mark.parametrize("limit", ["SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16"])
@pytest.mark.usefixtures("machine")
def test_products_heed_what_onednn_may_use(limit: str) -> None:
    """Asked for more than that, oneDNN ends the process."""
    tests = str(Path(__file__).with_name("test_compiled_span.py"))
    words = ["-q", "--long", "-k", "rows_are and one and llama", tests]
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
