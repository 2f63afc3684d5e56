"""What a process does once, before it is given a model: imports and first calls."""

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from livescale.engine.decode_kernel import attend_rows
from livescale.engine.families import FAMILIES
from livescale.engine.kv_cache import as_array


def import_modelling() -> None:
    """Import the modules of all families, each a hundredth of a second."""
    for architecture in FAMILIES:
        getattr(transformers, architecture)  # the package imports what is asked for


def warm_up() -> None:
    """Import the modelling code and touch the kernels that a first request would wait for.

    A library's first matrix product sets up its threads and workspaces.
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
    for dtype in (torch.float32, torch.bfloat16):
        _compile_attention(dtype)


def _compile_attention(dtype: torch.dtype) -> None:
    """The kernel is compiled on its first call with each type, or read from Numba's cache."""
    rows = as_array(torch.zeros(1, 1, 8, dtype=dtype))
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    limits = (1, np.float32(1.0), np.float32(0.0))
    out = np.zeros((1, 1, 8), np.float32)
    attend_rows(rows, rows, rows, none, none.reshape(1, 1), none, one, *limits, out)
