"""What an executor is, seen from an instance, and what comes of a Run. No torch is loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from livescale.batching.run import Run
from livescale.types import LayerSpan, Manifest, RequestId, TokenLogprobs

if TYPE_CHECKING:
    # Only the type of a field: an executor that computes nothing must not cost a second of imports.
    import torch


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a Run: hidden rows (token_count, hidden) of a span that ends inside the model,
    else one token per sampling segment, in segment order, and the logprobs of those requests that
    want them."""

    hidden: torch.Tensor | None
    token_ids: list[int]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)


class Executor(Protocol):
    """Second of an instance's three verbs."""

    def run(self, run: Run, hidden: torch.Tensor | None = None) -> RunResult:
        """Execute `run.span`. A span that starts inside the model takes `hidden` rows
        (token_count, hidden)."""
        ...


class InstanceExecutor(Executor, Protocol):
    """An executor that a worker can give models to, one after the other."""

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        """Take the model over: its layers exist, but none is materialized.

        Raises ModelError when the model cannot run here, or does not fit (with both sizes).
        """
        ...

    def materialize(self, layer: int) -> None:
        """The layer's bytes are complete in the arena and may be used."""
        ...

    def release(self) -> None:
        """Forget the model. The arena's bytes stay as they are."""
        ...

    @property
    def kv_blocks(self) -> int:
        """KV blocks that there are for the assigned model."""
        ...

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        """Rate of a prefill of `tokens` tokens. The instance must not serve yet."""
        ...
