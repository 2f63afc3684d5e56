"""A model as stock `transformers` runs it, for the peers that are `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from livescale.lab.bench.peers.line_server import Job


def load_stock_model(job: Job) -> Any:
    """The job's model with SDPA attention, in the type of its files, on the job's threads."""
    torch.set_num_threads(job["threads"])
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(
        job["directory"], dtype="auto", attn_implementation="sdpa", local_files_only=True
    ).eval()
