"""Requests that a model's library cannot compute, or that it computes to no numbers.

They go to the model that also serves the streams of others. `make_poisoned_model` writes it: its
tokenizer knows a token more than its embedding, and one row of the embedding is NaN. All that is
beyond the embedding is refused before a worker sees it. So the row is what reaches a Run: its
hidden states, its KV and its logits are no numbers, in the same Runs and the same KV memory as the
streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from livescale.engine.files.make import PRESETS, make_model

PRESET = PRESETS["tiny"]
NAN_ID = 7
"""Its row of the embedding is NaN. The head's row is zero, so that no stream generates it."""
FOREIGN = "<|pad|>"
"""The tokenizer's id for it is the first one that the embedding has not."""
_VOCABULARY = PRESET.vocab_size
_LONG_TOKENS = 600
_OUTPUT_TOKENS = 8
_COMPLETIONS, _CHAT, _EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class PoisonPrompt:
    """One kind. `body` makes the request of a number, without the model's name; `statuses` are the
    answers that are right."""

    name: str
    path: str
    body: Callable[[int], dict[str, object]]
    statuses: tuple[int, ...]


def make_poisoned_model(directory: Path) -> None:
    """Write it. What has neither `FOREIGN` nor `NAN_ID` is served as by any other model."""
    make_model(directory, PRESET)
    for file in sorted(directory.glob("*.safetensors")):
        weights = load_file(file)
        for name, value in (("model.embed_tokens.weight", np.nan), ("lm_head.weight", 0)):
            if name in weights:
                weights[name][NAN_ID] = value
        save_file(weights, file, metadata={"format": "pt"})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(FOREIGN)])
    tokenizer.save(str(directory / "tokenizer.json"))


def _refused(name: str, path: str, **fields: object) -> PoisonPrompt:
    return PoisonPrompt(name, path, lambda _: fields, (400,))


def _computed(name: str, tokens: int = 3, **fields: object) -> PoisonPrompt:
    """A completion whose prompt ends in the row of NaN, each with another beginning: nothing of it
    is in a cache."""

    def body(number: int) -> dict[str, object]:
        start = [10 + number % (_VOCABULARY - 10)] * (tokens - 1)
        return {"prompt": [*start, NAN_ID], "max_tokens": _OUTPUT_TOKENS, **fields}

    return PoisonPrompt(name, _COMPLETIONS, body, (200, 500))


POISON_PROMPTS = (
    _refused("text with a token that the model has not", _COMPLETIONS, prompt=f"a {FOREIGN}"),
    _refused(
        "chat with such a token", _CHAT, messages=[{"role": "user", "content": f"a {FOREIGN}"}]
    ),
    _refused("embedding of such a token", _EMBEDDINGS, input=f"a {FOREIGN}"),
    _refused("the first id beyond the embedding", _COMPLETIONS, prompt=[5, _VOCABULARY]),
    _refused("an id of 2**62", _COMPLETIONS, prompt=[5, 2**62]),
    _refused("a negative id", _COMPLETIONS, prompt=[5, -1]),
    _refused(
        "a prompt of the model's whole length", _COMPLETIONS, prompt=[5] * PRESET.model_tokens_max
    ),
    _refused(
        "a bias for an id beyond the embedding",
        _COMPLETIONS,
        prompt=[5],
        logit_bias={str(_VOCABULARY): 1},
    ),
    _computed("a row of NaN"),
    _computed("a row of NaN behind a long prompt", _LONG_TOKENS),
    _computed("a row of NaN, tokens drawn", temperature=1.0, top_p=0.9, top_k=50, min_p=0.01),
    _computed("a row of NaN, with logprobs", logprobs=5),
    PoisonPrompt(
        "embedding of a row of NaN",
        _EMBEDDINGS,
        lambda number: {"input": [10 + number % (_VOCABULARY - 10), NAN_ID]},
        (500,),
    ),
)
"""Sent in turn."""
