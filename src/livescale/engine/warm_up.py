"""What a process does once, before it is given a model: imports and first calls."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from livescale.engine.families import FAMILIES


def warm_up() -> None:
    """Import the modelling code and touch the kernels that a first request would wait for.

    Building a model imports its family's module (each a hundredth of a second), and a library's
    first matrix product sets up its threads and workspaces.
    """
    for architecture in FAMILIES:
        getattr(transformers, architecture)  # the package imports what is asked for
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
