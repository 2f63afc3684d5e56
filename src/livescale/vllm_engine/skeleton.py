"""An engine of vLLM for one shape of models, without parameters: they come from an arena.

Everything of vLLM that is not its public interface is called here and in `linears.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request

from livescale.batching.runs.engine_step import EngineLoad, EngineStep
from livescale.batching.runs.run import EngineAsk, SequenceSpec
from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.model_files import model_spec
from livescale.engine.files.modules import DTYPES
from livescale.values.types import Manifest, RequestId, SamplingParams, TokenLogprobs
from livescale.vllm_engine.gates import LayerGates, RunGivenUp, modules_by_layer
from livescale.vllm_engine.packing import forget_packed_experts, pack_tied_head, plain_linears
from livescale.vllm_engine.parameters import ArenaParameters, ParameterViews
from livescale.vllm_engine.requests import logprobs_of, params_of, prompt_of, tokens_of

_WARM_UP = SamplingParams(output_tokens_max=2, temperature=1.0, top_k=5, logprobs=1)
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """What engines of a worker are made with. With `binds_views` parameters are views of the arena
    where they can be; without, vLLM packs them for its kernels."""

    kv_bytes: int
    block_tokens: int
    run_tokens_max: int
    sequences_max: int
    binds_views: bool


@dataclass(slots=True)
class _Taken:
    """A request that the engine has, and its own record of it."""

    spec: SequenceSpec
    record: Request
    is_admitted: bool = False


@dataclass(slots=True)
class _Bound:
    """The model whose parameters the engine gets."""

    parameters: ArenaParameters
    missing: set[int]
    gates: LayerGates
    taken: dict[str, _Taken] = field(default_factory=dict)
    preemptions: int = 0


class Skeleton:
    """One engine. Models of its shape come and go: `attach`, `load` every layer, `step`,
    `detach`."""

    def __init__(self, manifest: Manifest, terms: EngineTerms) -> None:
        """Builds the engine, and does what vLLM does at its first requests. Raises ModelError when
        there is no room for KV, and whatever vLLM raises for a model that it cannot run."""
        self.shape = parse_config(manifest.config_json, f"config of {manifest.model}")
        #: its KV, and copies of parameters
        self.size_bytes = terms.kv_bytes + copied_bytes(manifest, terms)
        self._directory = tempfile.TemporaryDirectory(prefix="livescale-vllm-")
        (Path(self._directory.name) / "config.json").write_text(manifest.config_json)
        binds = not copied_bytes(manifest, terms)
        with plain_linears(is_on=binds):
            self._engine = _engine(self._directory.name, manifest, terms)
        self._core = self._engine.engine_core.engine_core
        worker = self._engine.model_executor.driver_worker.worker
        self._model: Any = worker.model_runner.model
        layers, is_tied = len(manifest.layers), self.shape.is_tied
        self._modules = modules_by_layer(self._model, layers, is_tied=is_tied)
        self._bound: _Bound | None = None
        self._warm_up()
        self._views: ParameterViews | None = None
        if binds:
            with set_current_vllm_config(self._engine.vllm_config):
                self._views = ParameterViews(self._model, manifest)
            self._views.detach()

    # -- a model comes and goes -----------------------------------------------------------------

    @property
    def kv_blocks(self) -> int:
        """Without the block that vLLM keeps for itself."""
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks) - 1

    @property
    def copies_nothing(self) -> bool:
        """All parameters are views of the arena."""
        return self._views is not None and self._views.are_all

    def attach(
        self, manifest: Manifest, arena: memoryview, await_layer: Callable[[], bool]
    ) -> None:
        """The parameters of this model are loaded next; `arena` begins with it. A step that needs
        one which is not loaded calls `await_layer` until it is, or until that returns False."""
        parameters, missing = ArenaParameters(manifest, arena), set(range(len(manifest.layers)))
        gates = LayerGates(self._modules, missing, await_layer)
        self._bound = _Bound(parameters, missing, gates)
        # What is kept there was computed with other parameters.
        self._engine.reset_prefix_cache()

    # A step may be under way, which waits for it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, layer: int) -> None:
        """The layer's bytes are in the arena, and verified."""
        bound = self._own
        assert layer in bound.missing, f"layer {layer} is there"
        with set_current_vllm_config(self._engine.vllm_config):
            if self._views is not None:
                self._views.bind(bound.parameters, layer)
            else:
                self._fill(bound.parameters, layer)
        bound.missing.remove(layer)
        if not bound.missing:
            bound.gates.remove()

    def detach(self) -> None:
        """Forget all requests, and the parameters."""
        if self._bound is None:
            return
        self._engine.abort_request(list(self._bound.taken))
        self._bound.gates.remove()
        self._bound = None
        if self._views is not None:
            self._views.detach()

    def close(self) -> None:
        """The engine goes, with its KV cache."""
        self.detach()
        self._engine.engine_core.shutdown()
        self._directory.cleanup()

    # -- running --------------------------------------------------------------------------------

    def step(self, ask: EngineAsk) -> tuple[EngineStep, dict[RequestId, TokenLogprobs]]:
        """Forget and take what is asked, and do one step if there is something to do."""
        bound = self._own
        for request, attempt in ask.forgotten:
            name = _name(request, attempt)
            if bound.taken.pop(name, None) is not None:
                self._engine.abort_request([name])
        refused = []
        for spec in ask.taken:
            try:
                self._take(spec)
            except ValueError as error:
                refused.append((spec.request, spec.attempt, f"vLLM: {error}"))
        if not bound.taken:
            return EngineStep(refused=tuple(refused), load=self._load()), {}
        before = [*bound.taken.values()]
        computed = _prompt_tokens_computed(before)
        preemptions = sum(taken.record.num_preemptions for taken in before)
        try:
            outputs = self._engine.step()
        except RunGivenUp:
            self._forget_all()
            return EngineStep(refused=tuple(refused), is_given_up=True), {}
        bound.preemptions += sum(taken.record.num_preemptions for taken in before) - preemptions
        admitted = tuple(_newly_admitted(before))
        tokens, logprobs, cached = [], {}, 0
        for output in outputs:
            taken = bound.taken.get(output.request_id)
            if taken is None:
                continue
            new, spec = tokens_of(taken.spec, output), taken.spec
            tokens.append(new)
            if taken.record.num_output_tokens == len(new.token_ids):
                cached += new.cached_tokens
            own = logprobs_of(spec, output)
            if own is not None:
                logprobs[spec.request] = own
            if output.finished:
                del bound.taken[output.request_id]
        prefill_tokens = max(_prompt_tokens_computed(before) - computed - cached, 0)
        step = EngineStep(tuple(tokens), admitted, tuple(refused), self._load(), prefill_tokens)
        return step, logprobs

    def prefill_tokens_per_s(self, tokens: int) -> int:
        """Of a prompt of so many tokens, or as many as the engine takes, after a warm-up."""
        most = self._engine.vllm_config.model_config.max_model_len - 1
        tokens = max(min(tokens, most), 1)
        elapsed_ns = 1
        for number in range(2):
            self._engine.reset_prefix_cache()
            began_ns = time.perf_counter_ns()
            self._generate(f"rate {number}", tokens, SamplingParams(output_tokens_max=1))
            elapsed_ns = time.perf_counter_ns() - began_ns
        self._engine.reset_prefix_cache()
        return max(tokens * 1_000_000_000 // max(elapsed_ns, 1), 1)

    # -- helpers, in the order used -------------------------------------------------------------

    def _warm_up(self) -> None:
        """vLLM compiles what chooses tokens and finds their logprobs when it is first asked for."""
        for number, sampling in enumerate((_WARM_UP, SamplingParams(output_tokens_max=2))):
            self._generate(f"warm-up {number}", _WARM_UP_TOKENS, sampling)

    def _generate(self, name: str, tokens: int, sampling: SamplingParams) -> None:
        ids = tuple(number % self.shape.vocab_size for number in range(tokens))
        spec = SequenceSpec(name, 0, ids, sampling)
        self._engine.add_request(name, prompt_of(spec), params_of(spec))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    @property
    def _own(self) -> _Bound:
        assert self._bound is not None, "the engine has no model"
        return self._bound

    def _fill(self, parameters: ArenaParameters, layer: int) -> None:
        """The loaders of vLLM put the layer's tensors into its own, which are complete then."""
        config = self._engine.vllm_config.model_config
        for module in self._modules[layer]:
            forget_packed_experts(module)
            initialize_layerwise_reload(module)
        self._model.load_weights(parameters.stored(layer))
        for module in self._modules[layer]:
            finalize_layerwise_reload(module, config)
        if layer == 0 and self.shape.is_tied:
            pack_tied_head(self._model)

    def _forget_all(self) -> None:
        """No request has got anything from the engine."""
        self._engine.abort_request(list(self._own.taken))
        self._own.taken.clear()
        # Their blocks count as computed from the moment in which they were scheduled.
        self._engine.reset_prefix_cache()

    def _take(self, spec: SequenceSpec) -> None:
        """Raises ValueError for what vLLM refuses."""
        name = _name(spec.request, spec.attempt)
        own = self._engine.add_request(name, prompt_of(spec), params_of(spec))
        self._own.taken[name] = _Taken(spec, self._core.scheduler.requests[own])

    def _load(self) -> EngineLoad:
        scheduler = self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        records = [taken.record for taken in self._own.taken.values()]
        computed = [min(r.num_computed_tokens, r.num_prompt_tokens) for r in records]
        left = sum(r.num_prompt_tokens for r in records) - sum(computed)
        begun = (own for own, r in zip(computed, records, strict=True) if not r.num_output_tokens)
        return EngineLoad(
            running=running,
            waiting=waiting,
            queued_prefill_tokens=left,
            begun_prompt_tokens=sum(begun),
            kv_blocks_used=round(scheduler.get_kv_cache_usage() * self.kv_blocks),
            preemptions=self._own.preemptions,
        )


def copied_bytes(manifest: Manifest, terms: EngineTerms) -> int:
    """Parameters that the engine of a model has besides those in the arena."""
    shape = parse_config(manifest.config_json, f"config of {manifest.model}")
    return 0 if terms.binds_views and not shape.experts else manifest.size_bytes


def _name(request: RequestId, attempt: int) -> str:
    return f"{request}/{attempt}"


def _prompt_tokens_computed(taken: list[_Taken]) -> int:
    records = [its.record for its in taken]
    return sum(min(r.num_computed_tokens, r.num_prompt_tokens) for r in records)


def _newly_admitted(taken: list[_Taken]) -> Iterator[tuple[RequestId, int]]:
    for its in taken:
        if not its.is_admitted and its.record.num_computed_tokens:
            its.is_admitted = True
            yield its.spec.request, its.spec.attempt


def _engine(directory: str, manifest: Manifest, terms: EngineTerms) -> LLMEngine:
    """Parameters are as vLLM makes them up. Raises ModelError."""
    shape = parse_config(manifest.config_json, f"config of {manifest.model}")
    block_bytes = terms.block_tokens * model_spec(manifest).kv_bytes_per_token
    # One block is vLLM's own, and a request needs another one.
    blocks = terms.kv_bytes // block_bytes
    if blocks < 2:
        raise ModelError(
            f"{manifest.model} needs {2 * block_bytes} bytes for two KV blocks of"
            f" {terms.block_tokens} tokens, the pool has {terms.kv_bytes}"
        )
    given: dict[str, Any] = {
        "model": directory,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": str(DTYPES[manifest.dtype]).removeprefix("torch."),
        "seed": 0,
        "enforce_eager": True,
        "block_size": terms.block_tokens,
        "kv_cache_memory_bytes": terms.kv_bytes,
        "max_model_len": min(shape.model_tokens_max, (blocks - 1) * terms.block_tokens),
        "max_num_seqs": terms.sequences_max,
        "max_num_batched_tokens": terms.run_tokens_max,
        "enable_prefix_caching": True,
        # One Run is one step: a step's tokens come from it, not from the one before.
        "async_scheduling": False,
        "max_logprobs": -1,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    return LLMEngine.from_engine_args(EngineArgs(**given))
