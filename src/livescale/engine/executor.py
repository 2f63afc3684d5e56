"""Executors run what a Batcher decided: a Run over a span of layers.

The layer loop and the KV pool's cut live here. What runs next, and when a layer
is complete, is decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from livescale.batching.runs.run import Run
from livescale.engine.attention.attention import page
from livescale.engine.attention.kv_cache import KVCache, KvSize
from livescale.engine.base.compute_cores import ComputeCores
from livescale.engine.base.errors import ModelError
from livescale.engine.base.run_result import (
    InstanceExecutor,
    RowSum,
    RunResult,
    check_pool,
    check_size,
    fitting_blocks,
    prefill_run,
    with_blanks,
)
from livescale.engine.files.model_files import model_spec
from livescale.engine.products.linear_choice import WeightsLayout
from livescale.engine.sampling.sampling import choose_tokens, is_plainly_greedy
from livescale.engine.spans.compiled_span import CompiledSpan
from livescale.engine.spans.layers import Layers, RunState
from livescale.values.stages import gives_rows, takes_rows
from livescale.values.types import LayerEntry, LayerSpan, Manifest, RequestId


@dataclass(frozen=True, slots=True)
class _Assigned:
    """The model under execution: its modules, their bytes and its cut of the KV pool."""

    manifest: Manifest
    layers: Layers
    cache: KVCache
    #: the same layers as one compiled call, if there is one
    compiled: CompiledSpan | None


class TorchExecutor(InstanceExecutor):
    """Runs one assigned model out of an arena, layer by layer, with a paged KV cache.

    The KV pool is allocated and touched once, here, and recut for each model.
    So are `parameter_bytes` of the device for its copy of the arena; a CPU can do without (0).
    """

    def __init__(
        self,
        kv_bytes: int,
        block_tokens: int,
        device: str = "cpu",
        weights_layout: WeightsLayout = "auto",
        parameter_bytes: int = 0,
        cores: ComputeCores | None = None,
    ) -> None:
        """`cores` are those of a CPU worker (None: what torch is set to, for good).

        Raises ValueError for a device that is not there.
        """
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"TorchExecutor runs on devices 'cpu' and 'cuda', not on {device!r}")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {device!r}: torch {torch.__version__} finds no CUDA device")
        check_pool(kv_bytes, block_tokens)
        self.kv_bytes = kv_bytes
        self.block_tokens = block_tokens
        self._device = torch.device(device)
        self._weights_layout: WeightsLayout = weights_layout
        self._cores = cores
        # Filled, not only zero-allocated: the first touch of a page is slow and is paid here.
        self._pool = torch.empty(kv_bytes, dtype=torch.uint8, device=self._device).fill_(0)
        self._parameters = ParameterMemory(self._device, parameter_bytes)
        self._assigned: _Assigned | None = None

    # -- a model comes and goes -------------------------------------------------------------

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        self.release()
        if manifest.tp_size > 1:
            raise ModelError(
                f"{manifest.model}: tensor parallelism (tp_size {manifest.tp_size}) is not"
                " supported by TorchExecutor"
            )
        blocks = fitting_blocks(model_spec(manifest), arena, self.kv_bytes, self.block_tokens)
        if not self._parameters.fits(manifest.size_bytes):
            raise ModelError(
                f"{manifest.model} needs {manifest.size_bytes} bytes on {self._device},"
                " there are fewer"
            )
        layers = Layers(manifest, self._device, self._weights_layout)
        config = layers.config
        size = KvSize(len(layers) - 2, blocks, self.block_tokens, config.kv_heads, config.head_dim)
        cache = KVCache(self._pool, layers.dtype, size)
        self._parameters.attach(arena[: manifest.size_bytes])
        self._assigned = _Assigned(manifest, layers, cache, layers.compile(cache))

    def materialize(self, layer: int) -> None:
        """Make the layer's parameters views of the arena's bytes, which are complete by now, or of
        their copy on the device.

        Raises ModelError naming layer and tensor when manifest and module disagree.
        """
        assigned = self._model
        entry = assigned.manifest.layers[layer]
        assigned.layers.bind(entry, self._parameters.place(entry))

    def release(self) -> None:
        if self._assigned is not None and self._assigned.compiled is not None:
            self._assigned.compiled.end()
        self._assigned = None
        self._parameters.detach()

    # -- what can be asked ------------------------------------------------------------------

    @property
    def kv_blocks(self) -> int:
        return self._model.cache.blocks

    @property
    def cores(self) -> int:
        return 1 if self._cores is None else self._cores.count

    def use_cores(self, cores: int) -> int:
        return self.cores if self._cores is None else self._cores.use(cores)

    @property
    def device(self) -> torch.device:
        """Where it computes: hidden rows come and go there."""
        return self._device

    @property
    def hidden_size(self) -> int:
        """Width of the assigned model's hidden rows."""
        return self._model.layers.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Type of the assigned model's parameters, hidden rows and KV."""
        return self._model.layers.dtype

    @property
    def compiled(self) -> CompiledSpan | None:
        """The assigned model's layers as one call; None where they are modules."""
        return self._model.compiled

    def parameters(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's parameters by the manifest's names (meta tensors until materialized)."""
        return self._model.layers.parameters(layer)

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        """Measured after two warm-ups, in the first KV blocks of the pool."""
        run = prefill_run(span, tokens, self.kv_blocks, self.block_tokens)
        hidden = None
        if takes_rows(self._model.manifest.stage, span):
            shape = (run.token_count, self.hidden_size)
            hidden = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for _ in range(2):
            self.run(run, hidden)
        started_ns = time.perf_counter_ns()
        self.run(run, hidden)
        elapsed_ns = time.perf_counter_ns() - started_ns
        return run.token_count * 1_000_000_000 // max(elapsed_ns, 1)

    def __repr__(self) -> str:
        if self._assigned is None:
            return f"<TorchExecutor {self._device}, no model>"
        layers = self._assigned.layers
        ready = len(layers) - len(layers.unbound(range(len(layers))))
        return (
            f"<TorchExecutor {self._device}, {self._assigned.manifest.model}"
            f" {ready}/{len(layers)} layers, {self._assigned.cache.blocks} KV blocks>"
        )

    # -- running ----------------------------------------------------------------------------

    @torch.inference_mode()
    def run(
        self,
        run: Run,
        hidden: torch.Tensor | bytearray | None = None,
        layer_ran: Callable[[int], None] | None = None,
    ) -> RunResult:
        if self._cores is not None:
            self._cores.apply()
        layers, span = self._model.layers, run.span
        assert span.stop <= len(layers), f"span {span} of {len(layers)} layers"
        missing = layers.unbound(range(span.start, span.stop))
        assert not missing, f"{self!r}: layer {missing[0]} is not materialized"
        gives = gives_rows(self._model.manifest.stage, span, len(layers))
        embeds = any(segment.sampling.embeds for segment in run.segments)
        compiled = self._model.compiled
        if compiled is not None and not gives and not embeds:
            wants_logits = not all(is_plainly_greedy(s) for s in run.segments if s.chooses)
            found = compiled.run(run, self._given(run, hidden), False, wants_logits, layer_ran)
            return _result(run, found.logits, found.chosen)
        rows = self._rows(run, hidden, layer_ran)
        return RunResult(rows[0], []) if gives else self._behind_head(run, rows)

    # -- hidden rows and a request's KV leave and come ---------------------------------------

    def export_rows(self, hidden: torch.Tensor | bytearray) -> memoryview:
        assert isinstance(hidden, torch.Tensor)
        rows = hidden.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return _bytes_of(rows)

    def import_rows(self, content: memoryview, tokens: int) -> torch.Tensor:
        size_bytes = tokens * self.hidden_size * self.dtype.itemsize
        check_size(content, "rows", tokens, size_bytes)
        rows = torch.empty(tokens, self.hidden_size, dtype=self.dtype)
        _bytes_of(rows)[:] = content.cast("B")
        return rows.to(self._device)

    def join_rows(self, parts: Sequence[torch.Tensor | bytearray]) -> torch.Tensor:
        rows = [part for part in parts if isinstance(part, torch.Tensor)]
        return rows[0] if len(parts) == 1 else torch.cat(rows)

    def split_rows(
        self, hidden: torch.Tensor | bytearray, counts: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        assert isinstance(hidden, torch.Tensor)
        return torch.split(hidden, list(counts))

    def kv_layer_bytes(self, tokens: int) -> int:
        cache = self._model.cache
        return 2 * tokens * cache.kv_heads * cache.head_dim * self.dtype.itemsize

    def export_kv(self, decoder_layer: int, block_table: Sequence[int], tokens: int) -> memoryview:
        rows = self._model.cache.export_layer(decoder_layer, block_table, tokens)
        return _bytes_of(rows.cpu())

    @torch.inference_mode()
    def import_kv(
        self, decoder_layer: int, block_table: Sequence[int], tokens: int, content: memoryview
    ) -> None:
        cache, size_bytes = self._model.cache, self.kv_layer_bytes(tokens)
        check_size(content, "KV", tokens, size_bytes)
        shape = (2, tokens, cache.kv_heads, cache.head_dim)
        rows = torch.frombuffer(content, dtype=self.dtype).view(shape)
        cache.import_layer(decoder_layer, block_table, rows)

    # -- helpers, in the order used ---------------------------------------------------------

    @property
    def _model(self) -> _Assigned:
        assert self._assigned is not None, f"{self!r}"
        return self._assigned

    def _rows(
        self,
        run: Run,
        hidden: torch.Tensor | bytearray | None,
        layer_ran: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """(1, rows, hidden) behind the last decoder layer of the Run's span."""
        model, span = self._model, run.span
        if model.compiled is not None:
            given = model.compiled.run(run, self._given(run, hidden), True, False, layer_ran).rows
            assert given is not None
            return given.unsqueeze(0)
        state, rows = self._state(run), self._input(run, hidden)
        head = len(model.layers) - 1
        for number, layer in enumerate(model.layers[span.start : min(span.stop, head)], span.start):
            rows = layer(rows, state)
            if layer_ran is not None and number > 0:
                layer_ran(number)
        return rows

    def _behind_head(self, run: Run, rows: torch.Tensor) -> RunResult:
        """Tokens, and the sums of those that want an embedding."""
        layers = self._model.layers
        [head] = layers[len(layers) - 1 :]
        sums = _row_sums(layers.final_norm, run, rows[0])
        return _result(run, head(rows, self._state(run)), None, sums)

    def _state(self, run: Run) -> RunState:
        batch = page(run, self._model.cache)
        sample_rows = []
        stop = 0
        for segment in run.segments:
            stop += segment.token_count
            if segment.chooses:
                sample_rows.append(stop - 1)
        return RunState(
            batch=batch,
            rope=self._model.layers.rope(batch.positions),
            sample_rows=torch.tensor(sample_rows, dtype=torch.long, device=self._device),
        )

    def _input(self, run: Run, hidden: torch.Tensor | bytearray | None) -> torch.Tensor:
        given = self._given(run, hidden)
        if given is not None:
            return given.unsqueeze(0)
        token_ids = [i for segment in run.segments for i in segment.token_ids]
        return torch.tensor([token_ids], device=self._device)

    def _given(self, run: Run, hidden: torch.Tensor | bytearray | None) -> torch.Tensor | None:
        """The hidden rows that the Run begins with; None where token ids are what it begins
        with."""
        if not takes_rows(self._model.manifest.stage, run.span):
            assert hidden is None, "a span from layer 0 starts with token ids"
            return None
        assert isinstance(hidden, torch.Tensor), f"span {run.span} needs hidden rows"
        assert hidden.shape == (run.token_count, self.hidden_size), f"{tuple(hidden.shape)}"
        return hidden


def _result(
    run: Run,
    logits: torch.Tensor | None,
    highest: Sequence[int] | None,
    sums: Mapping[RequestId, RowSum] | None = None,
) -> RunResult:
    """Tokens from `logits` (samples, vocabulary), or `highest` where these alone are wanted."""
    if logits is None:
        assert highest is not None
        return RunResult(None, with_blanks(run, highest))
    choosing = [segment for segment in run.segments if segment.chooses]
    chosen, logprobs = choose_tokens(logits, choosing)
    return RunResult(None, with_blanks(run, chosen), logprobs, sums or {})


def _row_sums(
    norm: Callable[[torch.Tensor], torch.Tensor], run: Run, rows: torch.Tensor
) -> dict[RequestId, RowSum]:
    """As told of a RunResult, from the rows (token_count, hidden) that the head takes."""
    sums, stop = {}, 0
    for segment in run.segments:
        start, stop = stop, stop + segment.token_count
        if segment.sampling.embeds:
            total = norm(rows[start:stop]).sum(dim=0, dtype=torch.float32)
            sums[segment.request] = total.cpu().numpy()
    return sums


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, flat."""
    content: memoryview = tensor.view(torch.uint8).flatten().numpy().data
    return content


class ParameterMemory:
    """A device's view of one arena at a time.

    `device_bytes` is allocated once, here; 0 means that the device computes from the arena itself.
    """

    def __init__(self, device: torch.device, device_bytes: int) -> None:
        assert device.type == "cpu" or device_bytes, f"{device} cannot read the arena"
        self._own = (
            torch.empty(device_bytes, dtype=torch.uint8, device=device) if device_bytes else None
        )
        self._arena = torch.empty(0, dtype=torch.uint8)

    def attach(self, arena: memoryview) -> None:
        """Take layers from this arena from now on. It is writable and fits (asked by `fits`)."""
        assert self.fits(arena.nbytes), f"{arena.nbytes} bytes of arena"
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)

    def fits(self, size_bytes: int) -> bool:
        """A model of this size can be placed."""
        return self._own is None or size_bytes <= len(self._own)

    def place(self, entry: LayerEntry) -> torch.Tensor:
        """Flat bytes (uint8) of the device, in which the complete layer lies at its offset."""
        if self._own is None:
            return self._arena
        layer = slice(entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
        # Blocks until the bytes are there: the next Run may use them on any stream.
        self._own[layer].copy_(self._arena[layer])
        return self._own

    def detach(self) -> None:
        """Hold the arena no longer."""
        self._arena = torch.empty(0, dtype=torch.uint8)
