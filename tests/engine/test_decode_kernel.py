"""The compiled kernel against the same attention written with torch, in fp64."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from livescale.engine.attention.decode_kernel import attend_rows
from livescale.engine.attention.kv_cache import as_array

BLOCKS = 24


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """`query` (heads, D) over the given places: (heads, D)."""
    shared = len(query) // len(keys)
    seen_keys = keys[:, places].double().repeat_interleave(shared, 0)
    seen_values = values[:, places].double().repeat_interleave(shared, 0)
    scores = torch.einsum("hd,hcd->hc", query.double(), seen_keys) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hc,hcd->hd", scores.softmax(-1), seen_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    shape=st.sampled_from([(1, 1, 8), (2, 3, 24), (4, 1, 64), (1, 5, 33)]),
    contexts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39)), min_size=1, max_size=5),
    block_tokens=st.sampled_from([1, 4, 16]),
    softcap=st.sampled_from([0.0, 1.5]),
    size=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_it_is_attention(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    contexts: list[tuple[int, int]],
    block_tokens: int,
    softcap: float,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kv_heads, shared, head_dim = shape
    places = BLOCKS * block_tokens
    stops = np.array([min(stop, places) for stop, _ in contexts])
    starts = np.array(
        [min(start, stop - 1) for (_, start), stop in zip(contexts, stops, strict=True)]
    )
    rows = np.array([2 * b + 1 for b in range(len(contexts))])
    queries = (torch.randn(2 * len(rows) + 1, kv_heads * shared, head_dim) * size).to(dtype)
    keys, values = torch.randn(2, kv_heads, places, head_dim).to(dtype)
    tables = np.stack([torch.randperm(BLOCKS).numpy() for _ in rows])
    seen = [
        [int(table[p // block_tokens]) * block_tokens + p % block_tokens for p in range(a, b)]
        for table, a, b in zip(tables, starts, stops, strict=True)
    ]
    # What no row may see is no number, as bytes of an earlier model may be.
    unseen = torch.ones(places, dtype=torch.bool)
    unseen[torch.tensor(sorted({place for one in seen for place in one}))] = False
    keys[:, unseen] = values[:, unseen] = float("nan")
    out = torch.full(queries.shape, 7.0)
    attend_rows(
        *(as_array(queries), as_array(keys), as_array(values), rows, tables, starts, stops),
        *(block_tokens, np.float32(0.2), np.float32(softcap), out.numpy()),
    )
    for row, its_places in zip(rows, seen, strict=True):
        wanted = reference(queries[row], keys, values, torch.tensor(its_places), 0.2, softcap)
        assert torch.allclose(out[row].double(), wanted, atol=2e-5), (row, its_places)
    others = [row for row in range(len(queries)) if row not in rows]
    assert (out[others] == 7.0).all()


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_it_runs_where_nothing_can_be_written() -> None:
    """As in a container with read-only files and no home: Numba finds no place for its cache."""
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from livescale.engine.warm_up import warm_up
warm_up()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
