"""What an embedding is held against: the mean of transformers' last hidden states, in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import AutoModel

Name = TypeVar("Name")


def mean_rows(directory: Path, prompts: Iterable[Sequence[int]]) -> list[np.ndarray]:
    """Of each prompt (hidden), from a forward of its own."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = [model(torch.tensor([[*prompt]])).last_hidden_state[0] for prompt in prompts]
    return [of_prompt.mean(dim=0).numpy() for of_prompt in rows]


def assert_close(
    vectors: Mapping[Name, np.ndarray], expected: Mapping[Name, np.ndarray], tolerance: float = 1e-5
) -> None:
    """All are there, and no value is further away than this part of the largest one."""
    assert vectors.keys() == expected.keys()
    for name, vector in expected.items():
        scale = np.abs(vector).max()
        assert np.abs(vectors[name] - vector).max() <= tolerance * scale, name
