"""The timed executor: waits as long as a latency model says, and makes tokens up. No torch.

With it the real control plane, data plane and gateway run with dozens of instances on one machine.
Parameters move through arenas as ever, but nothing is computed with them. Hidden rows and KV that
go to other instances have their sizes, but no values.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from livescale.batching.runs.run import Run, Segment
from livescale.engine.base.run_result import (
    InstanceExecutor,
    RowSum,
    RunResult,
    check_places,
    check_pool,
    check_size,
    fitting_blocks,
    prefill_run,
    with_blanks,
)
from livescale.engine.files.model_config import ModelShape, parse_config
from livescale.engine.files.model_files import model_spec
from livescale.latency.work import LatencyModel, span_ns, with_cores
from livescale.values.scaling_policies import CoresModel
from livescale.values.stages import gives_rows, takes_rows
from livescale.values.types import LayerSpan, Manifest, ModelSpec, TokenLogprobs

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

    @property
    def decoder_layers(self) -> int:
        """Here: a stage has some of the model's."""
        return self.spec.layers - 2


class TimedExecutor(InstanceExecutor):
    """Waits instead of computing. A token depends on the prompt and the position only, so that an
    attempt that starts anew elsewhere goes on as the last one would have; it is never a stop id."""

    def __init__(
        self,
        kv_bytes: int,
        block_tokens: int,
        latency: LatencyModel,
        cores_model: CoresModel | None = None,
    ) -> None:
        """`latency` is that of one core, and `cores_model` says what more do (None: nothing)."""
        check_pool(kv_bytes, block_tokens)
        self.kv_bytes = kv_bytes
        self.block_tokens = block_tokens
        self.latency = latency
        self._assigned: _Assigned | None = None
        self._overslept_ns = 0
        self._cores, self._cores_model = 1, cores_model

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

    @property
    def cores(self) -> int:
        return self._cores

    def use_cores(self, cores: int) -> int:
        if self._cores_model is not None:
            self._cores = max(cores, 1)
        return self._cores

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        """The latency model's word on a prefill; nothing is waited for."""
        run = prefill_run(span, tokens, self.kv_blocks, self.block_tokens)
        model = self._model
        whole = model.shape.decoder_layers
        elapsed_ns = self._with_cores(span_ns(self.latency, run.work, model.decoder_layers, whole))
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

    def run(
        self,
        run: Run,
        hidden: torch.Tensor | bytearray | None = None,
        layer_ran: Callable[[int], None] | None = None,
    ) -> RunResult:
        """Wait as long as the span's decoder layers take; embedding and head ride along. Then give
        rows without values, or one token per sampling segment."""
        model, span = self._model, run.span
        assert span.stop <= model.spec.layers, f"span {span} of {model.spec.layers} layers"
        missing = model.shape.missing(range(span.start, span.stop), model.materialized)
        assert not missing, f"{self!r}: layer {missing[0]} is not materialized"
        size_bytes = run.token_count * model.spec.row_bytes_per_token
        if not takes_rows(model.spec.stage, span):
            assert hidden is None, "a span from layer 0 starts with token ids"
        else:
            assert isinstance(hidden, bytearray), f"span {span} needs hidden rows"
            assert len(hidden) == size_bytes, f"{len(hidden)} bytes of rows, not {size_bytes}"
        of_layers = model.shape.decoder_layers
        layers = span.decoder_layers(model.spec.layers)
        run_ns = self._with_cores(span_ns(self.latency, run.work, layers, of_layers))
        self._wait(run_ns, span, layer_ran)
        if gives_rows(model.spec.stage, span, model.spec.layers):
            return RunResult(bytearray(size_bytes), [])
        choosing = [segment for segment in run.segments if segment.chooses]
        token_ids = [_token(segment, model.shape.vocab_size) for segment in choosing]
        logprobs = {
            # It is certain of what it made up.
            segment.request: TokenLogprobs(0.0, ((token_id, 0.0),))
            for segment, token_id in zip(choosing, token_ids, strict=True)
            if segment.sampling.logprobs is not None
        }
        sums = {
            segment.request: _row_sum(segment, model.shape.hidden_size)
            for segment in run.segments
            if segment.sampling.embeds
        }
        return RunResult(None, with_blanks(run, token_ids), logprobs, sums)

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

    def join_rows(self, parts: Sequence[torch.Tensor | bytearray]) -> bytearray:
        return bytearray(sum(map(len, parts)))

    def split_rows(
        self, hidden: torch.Tensor | bytearray, counts: Sequence[int]
    ) -> Sequence[bytearray]:
        row_bytes = self._model.spec.row_bytes_per_token
        assert len(hidden) == sum(counts) * row_bytes, f"{len(hidden)} bytes of rows"
        return [bytearray(count * row_bytes) for count in counts]

    def kv_layer_bytes(self, tokens: int) -> int:
        model = self._model
        return tokens * (model.spec.kv_bytes_per_token // model.decoder_layers)

    def export_kv(self, decoder_layer: int, block_table: Sequence[int], tokens: int) -> memoryview:
        assert 0 <= decoder_layer < self._model.decoder_layers, f"layer {decoder_layer}"
        check_places(block_table, tokens, self.kv_blocks, self.block_tokens)
        return memoryview(bytearray(self.kv_layer_bytes(tokens)))

    def import_kv(
        self, decoder_layer: int, block_table: Sequence[int], tokens: int, content: memoryview
    ) -> None:
        assert 0 <= decoder_layer < self._model.decoder_layers, f"layer {decoder_layer}"
        check_size(content, "KV", tokens, self.kv_layer_bytes(tokens))
        check_places(block_table, tokens, self.kv_blocks, self.block_tokens)

    # -- helpers, in the order used ---------------------------------------------------------

    @property
    def _model(self) -> _Assigned:
        assert self._assigned is not None, f"{self!r}"
        return self._assigned

    def _with_cores(self, run_ns: int) -> int:
        return with_cores(run_ns, self._cores_model, self._cores)

    def _wait(self, run_ns: int, span: LayerSpan, layer_ran: Callable[[int], None] | None) -> None:
        began_ns = time.monotonic_ns() - self._overslept_ns
        due_ns = began_ns + run_ns
        if layer_ran is not None:
            numbers = range(max(span.start, 1), min(span.stop, self._model.spec.layers - 1))
            for count, number in enumerate(numbers, 1):
                _sleep_until(began_ns + run_ns * count // len(numbers))
                layer_ran(number)
        _sleep_until(due_ns)
        self._overslept_ns = min(time.monotonic_ns() - due_ns, _OVERSLEPT_NS_MAX)


def _row_sum(segment: Segment, hidden_size: int) -> RowSum:
    """A token's row is 1 in one place, that of its id: sums are exact, however a prompt is cut."""
    places = np.asarray(segment.token_ids, dtype=np.int64) % hidden_size
    return np.bincount(places, minlength=hidden_size).astype(np.float32)


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)


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
