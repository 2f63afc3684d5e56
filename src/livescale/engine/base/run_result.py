"""What an executor is, seen from an instance, and what comes of a Run. No torch is loaded here.

What executors have in common stands here, too: what fits, and the Run by which one is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from livescale.batching.runs.engine_step import EngineStep
from livescale.batching.runs.run import Run, Segment
from livescale.engine.base.errors import ModelError
from livescale.values.types import (
    LayerSpan,
    Manifest,
    ModelSpec,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)

RowSum = np.ndarray[tuple[int], np.dtype[np.float32]]

if TYPE_CHECKING:
    # Only the type of a field: an executor that computes nothing must not cost a second of imports.
    import torch

    HiddenRows = torch.Tensor | bytearray


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a Run: hidden rows (token_count, hidden) of a span that ends inside the model,
    else one token per sampling segment, in segment order, and the logprobs of those requests that
    want them. An executor that computes nothing gives rows without values, of the same size.

    Of each request that wants an embedding `row_sums` has the sum of the rows behind the final norm
    over its segment's positions (hidden), fp32. Its token is 0.

    What came of a step of an engine that schedules by itself is its `step`; `token_ids` are empty.
    """

    hidden: torch.Tensor | bytearray | None
    token_ids: list[int]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    row_sums: Mapping[RequestId, RowSum] = field(default_factory=dict)
    step: EngineStep | None = None


class InstanceExecutor(Protocol):
    """What a worker can give models to, one after the other. One thread runs it.

    Rows and KV may be imported while another thread is in `run`, which has nothing to do with them.
    Those of an engine stay in it.
    """

    def prepare(self, manifest: Manifest) -> None:
        """The model may come: what takes long to make for it is made, if there is room besides what
        was made for others. A model that cannot run here is refused when it comes."""
        return

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        """Take the model over: its layers exist, but none is materialized.

        `arena` starts at the model's offset 0, is writable and outlives the assignment. Raises
        ModelError when the model cannot run here, or does not fit (with both sizes).
        """
        ...

    def run(
        self,
        run: Run,
        hidden: torch.Tensor | bytearray | None = None,
        layer_ran: Callable[[int], None] | None = None,
    ) -> RunResult:
        """Execute `run.span`: second of an instance's three verbs. A span that starts inside the
        model takes the `hidden` rows (token_count, hidden) of the Run that ended there. `layer_ran`
        is called with the number of each decoder layer when it is done: then its KV can be
        exported, and other KV imported."""
        ...

    def materialize(self, layer: int) -> None:
        """The layer's bytes are complete in the arena and may be used."""
        ...

    def when_missing(self, await_layer: Callable[[], bool]) -> None:
        """A Run that comes to a layer which is not materialized calls `await_layer` until it is:
        that lets others materialize on this thread. When it returns False the Run is given up. Runs
        of other executors than engines cover materialized layers only."""
        return

    def release(self) -> None:
        """Forget the model. The arena's bytes stay as they are."""
        ...

    @property
    def is_engine(self) -> bool:
        """It schedules by itself: a Run is one of its steps, and `run` gives what came of that."""
        return False

    @property
    def kv_blocks(self) -> int:
        """KV blocks that there are for the assigned model."""
        ...

    @property
    def cores(self) -> int:
        """Cores that the next Run is computed with."""
        return 1

    def use_cores(self, cores: int) -> int:
        """From the next Run on compute with so many cores. Returns how many that are: fewer where
        there are no more, and what there was where the device has no use for them."""
        return self.cores

    def export_rows(self, hidden: torch.Tensor | bytearray) -> memoryview:
        """The bytes of a Run's hidden rows, one row after the other, for another instance of the
        model. A copy."""
        raise AssertionError(_PASSES_NOTHING)

    def import_rows(self, content: memoryview, tokens: int) -> torch.Tensor | bytearray:
        """Hidden rows (tokens, hidden) from what `export_rows` gave. A copy.

        Raises ValueError when there are more or fewer bytes.
        """
        raise AssertionError(_PASSES_NOTHING)

    def join_rows(self, parts: Sequence[torch.Tensor | bytearray]) -> torch.Tensor | bytearray:
        """Hidden rows of several Runs that are carried out as one, one behind the other."""
        raise AssertionError(_PASSES_NOTHING)

    def split_rows(
        self, hidden: torch.Tensor | bytearray, counts: Sequence[int]
    ) -> Sequence[torch.Tensor | bytearray]:
        """Each of these Runs' own rows, of which there are so many."""
        raise AssertionError(_PASSES_NOTHING)

    def export_kv(self, decoder_layer: int, block_table: Sequence[int], tokens: int) -> memoryview:
        """The bytes of one layer's KV of a request's first `tokens` positions, in token order.

        It is a copy and holds no block ids; `decoder_layer` counts from 0.
        """
        raise AssertionError(_PASSES_NOTHING)

    def import_kv(
        self, decoder_layer: int, block_table: Sequence[int], tokens: int, content: memoryview
    ) -> None:
        """Write what `export_kv` gave for `tokens` positions; `content` is writable.

        Raises ValueError when there are more or fewer bytes, or the blocks cannot hold them.
        """
        raise AssertionError(_PASSES_NOTHING)

    def kv_layer_bytes(self, tokens: int) -> int:
        """Size of what `export_kv` gives for so many positions; 0 of an engine."""
        return 0

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        """Rate of a prefill of `tokens` tokens, or of as many as the KV pool holds. The instance
        must not serve yet."""
        ...


_PASSES_NOTHING = "rows and KV stay in the engine"


def with_blanks(run: Run, chosen: Sequence[int]) -> list[int]:
    """One token per sampling segment: the chosen ones in order, 0 where none is to be chosen."""
    rest = iter(chosen)
    return [next(rest) if segment.chooses else 0 for segment in run.segments if segment.samples]


def check_pool(kv_bytes: int, block_tokens: int) -> None:
    """Raises ValueError for a KV pool that holds nothing."""
    if kv_bytes < 1 or block_tokens < 1:
        raise ValueError(f"a KV pool of {kv_bytes} bytes, {block_tokens} tokens a block")


def fitting_blocks(spec: ModelSpec, arena: memoryview, kv_bytes: int, block_tokens: int) -> int:
    """KV blocks that a pool of `kv_bytes` has for the model. Raises ModelError with both sizes when
    the arena or the pool is too small."""
    if arena.nbytes < spec.size_bytes:
        raise ModelError(
            f"{spec.name} needs {spec.size_bytes} bytes of arena, there are {arena.nbytes}"
        )
    block_bytes = block_tokens * spec.kv_bytes_per_token
    if block_bytes > kv_bytes:
        raise ModelError(
            f"{spec.name} needs {block_bytes} bytes for one KV block of {block_tokens} tokens,"
            f" the pool has {kv_bytes}"
        )
    return kv_bytes // block_bytes


def prefill_run(span: LayerSpan, tokens: int, kv_blocks: int, block_tokens: int) -> Run:
    """A prefill of `tokens` tokens in the first KV blocks; fewer where the blocks hold fewer."""
    tokens = max(1, min(tokens, kv_blocks * block_tokens))
    segment = Segment(
        request="warm-up",
        attempt=0,
        first_position=0,
        token_ids=(0,) * tokens,
        block_table=tuple(range(-(-tokens // block_tokens))),
        samples=True,
        sampling=SamplingParams(output_tokens_max=1),
    )
    return Run(0, span, (segment,))


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
