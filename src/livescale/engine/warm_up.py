"""What a process does once, before it is given a model: imports and first calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from numba import typeof, types
from transformers import AutoModelForCausalLM, LlamaConfig

from livescale.engine.attention.decode_kernel import attend_rows
from livescale.engine.attention.kv_cache import as_array
from livescale.engine.files.families import FAMILIES
from livescale.engine.kernels.compiled import compiling_alone
from livescale.engine.kernels.job import JOB, LAYER
from livescale.engine.kernels.span import lead, serve
from livescale.engine.products.compiled_linear import linear_kernel
from livescale.engine.products.linear_timing import ensure_timings
from livescale.engine.products.row_norms import row_norms_kernel


def import_modelling() -> None:
    """Import the modules of all families, each a hundredth of a second."""
    for architecture in FAMILIES:
        getattr(transformers, architecture)  # the package imports what is asked for


def load_kernels() -> None:
    """Read the kernels from Numba's cache, or compile them: a minute on a machine's first start. No
    thread is started, so a process may do it that forks later."""
    with compiling_alone():
        for dtype in (torch.float32, torch.bfloat16):
            _compile_attention(dtype)
            _compile_span(dtype)
        linear_kernel()
        row_norms_kernel()


def warm_up(times_linears: bool = False) -> None:
    """Import the modelling code and touch the kernels that a first request would wait for.

    A library's first matrix product sets up its threads and workspaces. With `times_linears` the
    times of linear layers are known afterwards: the first process of a machine takes them.
    """
    import_modelling()
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    load_kernels()
    if times_linears:
        with compiling_alone():
            # Other processes that start now would disturb it.
            ensure_timings()


def _compile_attention(dtype: torch.dtype) -> None:
    """The kernel is compiled on its first call with each type, or read from Numba's cache."""
    rows = as_array(torch.zeros(1, 1, 8, dtype=dtype))
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    limits = (1, np.float32(1.0), np.float32(0.0))
    out = np.zeros((1, 1, 8), np.float32)
    attend_rows(rows, rows, rows, none, none.reshape(1, 1), none, one, *limits, out)


def _compile_span(dtype: torch.dtype) -> None:
    """As above. By their types alone: no model is needed."""
    like = types.int16 if dtype is torch.bfloat16 else types.float32
    records: Any = [typeof(np.zeros(1, kind)) for kind in (JOB, LAYER)]  # type: ignore[no-untyped-call]
    lead.compile((*records, like))
    serve.compile((*records, like, types.int64))


if __name__ == "__main__":
    warm_up()
