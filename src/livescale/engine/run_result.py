"""What an executor is, seen from an instance, and what comes of a Run. No torch is loaded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from livescale.batching.run import Run
from livescale.types import LayerSpan, Manifest, RequestId, TokenLogprobs

if TYPE_CHECKING:
    # Only the type of a field: an executor that computes nothing must not cost a second of imports.
    import torch

    HiddenRows = torch.Tensor | bytearray


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a Run: hidden rows (token_count, hidden) of a span that ends inside the model,
    else one token per sampling segment, in segment order, and the logprobs of those requests that
    want them. An executor that computes nothing gives rows without values, of the same size."""

    hidden: torch.Tensor | bytearray | None
    token_ids: list[int]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)


class Executor(Protocol):
    """Second of an instance's three verbs."""

    def run(self, run: Run, hidden: torch.Tensor | bytearray | None = None) -> RunResult:
        """Execute `run.span`. A span that starts inside the model takes the `hidden` rows
        (token_count, hidden) of the Run that ended there."""
        ...


class InstanceExecutor(Executor, Protocol):
    """An executor that a worker can give models to, one after the other.

    Rows and KV may be imported while another thread is in `run`, which has nothing to do with them.
    """

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

    def export_rows(self, hidden: torch.Tensor | bytearray) -> memoryview:
        """The bytes of a Run's hidden rows, for another instance of the model. A copy."""
        ...

    def import_rows(self, content: memoryview, tokens: int) -> torch.Tensor | bytearray:
        """Hidden rows of `tokens` positions from what `export_rows` gave.

        Raises ValueError when there are more or fewer bytes.
        """
        ...

    def export_kv(self, decoder_layer: int, block_table: Sequence[int], tokens: int) -> memoryview:
        """The bytes of one layer's KV of a request's first `tokens` positions, in token order.

        It is a copy and holds no block ids; `decoder_layer` counts from 0.
        """
        ...

    def import_kv(
        self, decoder_layer: int, block_table: Sequence[int], tokens: int, content: memoryview
    ) -> None:
        """Write what `export_kv` gave for `tokens` positions; `content` is writable.

        Raises ValueError when there are more or fewer bytes, or the blocks cannot hold them.
        """
        ...

    def kv_layer_bytes(self, tokens: int) -> int:
        """Size of what `export_kv` gives for so many positions."""
        ...

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        """Rate of a prefill of `tokens` tokens. The instance must not serve yet."""
        ...


def check_places(block_table: Sequence[int], tokens: int, blocks: int, block_tokens: int) -> None:
    """Raises ValueError unless the first `tokens` positions of a request lie in these blocks, of a
    cache of `blocks` blocks of `block_tokens` positions."""
    held = len(block_table) * block_tokens
    if not 0 < tokens <= held:
        raise ValueError(f"KV of {tokens} tokens in blocks that hold {held}")
    if not all(0 <= block < blocks for block in block_table):
        raise ValueError(f"blocks {tuple(block_table)} of a cache of {blocks}")


def check_size(content: memoryview, kind: str, tokens: int, size_bytes: int) -> None:
    """Raises ValueError unless `content`, of this kind, has the size that `tokens` tokens have."""
    if tokens < 1 or content.nbytes != size_bytes:
        raise ValueError(f"{content.nbytes} bytes of {kind}, {tokens} tokens have {size_bytes}")
