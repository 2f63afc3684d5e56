"""What a Run makes an accelerator do, without the requests it is done for; what a latency model is,
and the plainest one: a fixed cost, a cost per token and a cost per token attended to.
"""

from __future__ import annotations

from typing import Protocol

from livescale.values.scaling_policies import CoresModel
from livescale.values.types import Value


class RunWork(Value, frozen=True):
    """One pass over all layers.

    `prefills` are (new tokens, tokens before them) of every chunk of a prompt; `decodes` counts
    sequences that compute one token, and `decode_context_tokens` sums the tokens that these attend
    to, their own included. `sampled` sequences go through the head.
    """

    prefills: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_context_tokens: int = 0
    sampled: int = 0

    @property
    def token_count(self) -> int:
        """New tokens of the pass."""
        return sum(new for new, _ in self.prefills) + self.decodes


class LatencyModel(Protocol):
    """How long one instance of one model takes for its Runs."""

    def run_ns(self, work: RunWork) -> int:
        """Time of one Run over all layers."""

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        """Times of `steps` Runs, one after the other, of the same `decodes` sequences: the
        context is `context_tokens` in the first and grows by `decodes` each time. Equal to
        `run_ns` of each."""


def span_ns(latency: LatencyModel, work: RunWork, layers: int, of_layers: int) -> int:
    """Time of a Run over `layers` of a model's `of_layers` decoder layers: their share of the
    whole. What an iteration costs besides its layers is shared out likewise."""
    whole_ns = latency.run_ns(work)
    return whole_ns if layers == of_layers else -(-whole_ns * layers // of_layers)


def with_cores(run_ns: int, model: CoresModel | None, cores: int) -> int:
    """What takes `run_ns` with one core, with so many (None: cores make no difference)."""
    return run_ns if model is None or cores == 1 else round(run_ns * model.times_of_one(cores))


class LinearLatency(Value, frozen=True, tag="linear"):
    """A fixed cost per Run, a cost per token computed, and a cost per token a decode attends to."""

    base_ns: int
    per_token_ns: int
    per_context_token_ns: int = 0

    def run_ns(self, work: RunWork) -> int:
        return (
            self.base_ns
            + self.per_token_ns * work.token_count
            + self.per_context_token_ns * work.decode_context_tokens
        )

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        first = self.base_ns + self.per_token_ns * decodes
        first += self.per_context_token_ns * context_tokens
        more = self.per_context_token_ns * decodes
        return [first + more * step for step in range(steps)]
