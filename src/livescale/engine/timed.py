"""The timed executor: waits as long as a latency model says, and makes tokens up. No torch.

With it the real control plane, data plane and gateway run with dozens of instances on one machine.
Parameters move through arenas as ever, but nothing is computed with them. Hidden rows and KV that
go to other instances have their sizes, but no values.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from livescale.batching.run import Run, Segment
from livescale.engine.model_config import ModelShape, parse_config
from livescale.engine.model_files import model_spec
from livescale.engine.run_result import (
    InstanceExecutor,
    RunResult,
    check_places,
    check_pool,
    check_size,
    fitting_blocks,
    prefill_run,
)
from livescale.latency.work import LatencyModel, span_ns
from livescale.types import LayerSpan, Manifest, ModelSpec, TokenLogprobs

if TYPE_CHECKING:
    import torch

# A prompt's last ids and its length tell prompts apart well enough for made-up tokens.
_HASHED_TOKENS = 16
# Sleeps end late, by 0.1 ms and more. The next Run is shortened by it, so that rates come out
# right, but never by more than this: a machine that stood still is not caught up with.
_OVERSLEPT_NS_MAX = 2_000_000


@dataclass(slots=True)
class _Assigned:
    """The model that it pretends to run."""

    spec: ModelSpec
    shape: ModelShape
    kv_blocks: int
    materialized: set[int] = field(default_factory=set)


class TimedExecutor(InstanceExecutor):
    """Waits instead of computing. A token depends on the prompt and the position only, so that an
    attempt that starts anew elsewhere goes on as the last one would have; it is never a stop id."""

    def __init__(self, kv_bytes: int, block_tokens: int, latency: LatencyModel) -> None:
        check_pool(kv_bytes, block_tokens)
        self.kv_bytes = kv_bytes
        self.block_tokens = block_tokens
        self.latency = latency
        self._assigned: _Assigned | None = None
        self._overslept_ns = 0

    # -- a model comes and goes -------------------------------------------------------------

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        """Take the model over, with the KV blocks that a pool of `kv_bytes` would have for it."""
        self.release()
        spec = model_spec(manifest)
        blocks = fitting_blocks(spec, arena, self.kv_bytes, self.block_tokens)
        shape = parse_config(manifest.config_json, f"config of {manifest.model}")
        self._assigned = _Assigned(spec, shape, blocks)

    def materialize(self, layer: int) -> None:
        self._model.materialized.add(layer)

    def release(self) -> None:
        self._assigned = None

    # -- what can be asked ------------------------------------------------------------------

    @property
    def kv_blocks(self) -> int:
        return self._model.kv_blocks

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        """The latency model's word on a prefill; nothing is waited for."""
        run = prefill_run(span, tokens, self.kv_blocks, self.block_tokens)
        elapsed_ns = self.latency.run_ns(run.work)
        return max(1, run.token_count * 1_000_000_000 // max(elapsed_ns, 1))

    def __repr__(self) -> str:
        if self._assigned is None:
            return "<TimedExecutor, no model>"
        spec, materialized = self._assigned.spec, self._assigned.materialized
        return (
            f"<TimedExecutor {spec.name} {len(materialized)}/{spec.layers} layers,"
            f" {self._assigned.kv_blocks} KV blocks>"
        )

    # -- running ----------------------------------------------------------------------------

    def run(self, run: Run, hidden: torch.Tensor | bytearray | None = None) -> RunResult:
        """Wait as long as the span's decoder layers take; embedding and head ride along. Then give
        rows without values, or one token per sampling segment."""
        model, span = self._model, run.span
        assert span.stop <= model.spec.layers, f"span {span} of {model.spec.layers} layers"
        missing = model.shape.missing(range(span.start, span.stop), model.materialized)
        assert not missing, f"{self!r}: layer {missing[0]} is not materialized"
        size_bytes = run.token_count * model.spec.row_bytes_per_token
        if span.start == 0:
            assert hidden is None, "a span from layer 0 starts with token ids"
        else:
            assert isinstance(hidden, bytearray), f"span {span} needs hidden rows"
            assert len(hidden) == size_bytes, f"{len(hidden)} bytes of rows, not {size_bytes}"
        of_layers = model.shape.decoder_layers
        layers = span.decoder_layers(of_layers + 2)
        self._wait(span_ns(self.latency, run.work, layers, of_layers))
        if span.stop < model.spec.layers:
            return RunResult(bytearray(size_bytes), [])
        sampling = [segment for segment in run.segments if segment.samples]
        token_ids = [_token(segment, model.shape.vocab_size) for segment in sampling]
        logprobs = {
            # It is certain of what it made up.
            segment.request: TokenLogprobs(0.0, ((token_id, 0.0),))
            for segment, token_id in zip(sampling, token_ids, strict=True)
            if segment.sampling.logprobs is not None
        }
        return RunResult(None, token_ids, logprobs)

    # -- hidden rows and a request's KV leave and come ---------------------------------------

    def export_rows(self, hidden: torch.Tensor | bytearray) -> memoryview:
        """As many bytes as the rows have."""
        assert isinstance(hidden, bytearray)
        # Not a copy: no bytes are touched before they are sent.
        return memoryview(bytearray(len(hidden)))

    def import_rows(self, content: memoryview, tokens: int) -> bytearray:
        size_bytes = tokens * self._model.spec.row_bytes_per_token
        check_size(content, "rows", tokens, size_bytes)
        return bytearray(size_bytes)

    def kv_layer_bytes(self, tokens: int) -> int:
        model = self._model
        return tokens * (model.spec.kv_bytes_per_token // model.shape.decoder_layers)

    def export_kv(self, decoder_layer: int, block_table: Sequence[int], tokens: int) -> memoryview:
        assert 0 <= decoder_layer < self._model.shape.decoder_layers, f"layer {decoder_layer}"
        check_places(block_table, tokens, self.kv_blocks, self.block_tokens)
        return memoryview(bytearray(self.kv_layer_bytes(tokens)))

    def import_kv(
        self, decoder_layer: int, block_table: Sequence[int], tokens: int, content: memoryview
    ) -> None:
        assert 0 <= decoder_layer < self._model.shape.decoder_layers, f"layer {decoder_layer}"
        check_size(content, "KV", tokens, self.kv_layer_bytes(tokens))
        check_places(block_table, tokens, self.kv_blocks, self.block_tokens)

    # -- helpers, in the order used ---------------------------------------------------------

    @property
    def _model(self) -> _Assigned:
        assert self._assigned is not None, f"{self!r}"
        return self._assigned

    def _wait(self, run_ns: int) -> None:
        due_ns = time.monotonic_ns() + run_ns - self._overslept_ns
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        self._overslept_ns = min(time.monotonic_ns() - due_ns, _OVERSLEPT_NS_MAX)


def _token(segment: Segment, vocabulary: int) -> int:
    position = len(segment.prompt_ids) + len(segment.generated_ids)
    known = array("q", (*segment.prompt_ids[-_HASHED_TOKENS:], len(segment.prompt_ids), position))
    token_id = int(xxhash.xxh3_64_intdigest(known.tobytes())) % vocabulary
    stops = segment.sampling.stop_token_ids
    for _ in range(len(stops) + 1):
        if token_id not in stops:
            break
        token_id = (token_id + 1) % vocabulary
    return token_id
