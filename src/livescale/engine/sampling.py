"""From logits to tokens: a pure function of logits, parameters, history, seed and position.

No layers, no KV cache, no batching.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from livescale.batching.run import Segment
from livescale.types import RequestId, TokenLogprobs


def choose_tokens(
    logits: torch.Tensor, segments: Sequence[Segment]
) -> tuple[list[int], dict[RequestId, TokenLogprobs]]:
    """One token per sampling segment from its row of `logits` (segments, vocabulary).

    Greedy: the highest logit, of equal ones the lowest id.
    """
    # argmax gives the first of several maxima.
    return logits.argmax(dim=-1).tolist(), {}
