"""The executor of a worker whose engine is vLLM: skeletons, and the one that has a model now."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

import torch

from livescale.batching.runs.run import Run
from livescale.engine.base.errors import ModelError
from livescale.engine.base.run_result import InstanceExecutor, RunResult
from livescale.values.types import LayerSpan, Manifest
from livescale.vllm_engine.skeleton import EngineTerms, Skeleton, copied_bytes

_log = logging.getLogger(__name__)


class VllmExecutor(InstanceExecutor):
    """Runs one assigned model. Engines are kept by the shape of their models (config.json, and how
    their bytes lie): those that were used last, `skeletons_max` of them. Together they have no
    more than `bytes_max` (None: no limit), unless it is one."""

    def __init__(
        self, terms: EngineTerms, skeletons_max: int, bytes_max: int | None = None
    ) -> None:
        assert skeletons_max > 0, "a model needs an engine"
        self._terms = terms
        self._skeletons_max = skeletons_max
        self._bytes_max = bytes_max
        #: the one that was used last comes last
        self._skeletons: dict[tuple[object, ...], Skeleton] = {}
        self._assigned: Skeleton | None = None
        self._await_layer: Callable[[], bool] = _nothing_comes

    def prepare(self, manifest: Manifest) -> None:
        if _shape_of(manifest) in self._skeletons or not self._has_room(manifest):
            return
        try:
            self._skeleton(manifest)
        except ModelError as error:
            _log.warning("no engine is built ahead: %s", error)

    # -- a model comes and goes -----------------------------------------------------------------

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        self.release()
        if manifest.tp_size > 1:
            raise ModelError(
                f"{manifest.model}: tensor parallelism (tp_size {manifest.tp_size}) is not"
                " supported by VllmExecutor"
            )
        if manifest.stage is not None:
            raise ModelError(f"{manifest.model}: vLLM runs whole models, and this is a stage")
        if arena.nbytes < manifest.size_bytes:
            raise ModelError(
                f"{manifest.model} needs {manifest.size_bytes} bytes of arena, there are"
                f" {arena.nbytes}"
            )
        skeleton = self._skeleton(manifest)
        skeleton.attach(manifest, arena[: manifest.size_bytes], self._await_layer)
        self._assigned = skeleton

    def materialize(self, layer: int) -> None:
        self._model.load(layer)

    def when_missing(self, await_layer: Callable[[], bool]) -> None:
        self._await_layer = await_layer

    def release(self) -> None:
        if self._assigned is not None:
            self._assigned.detach()
            self._assigned = None

    # -- what can be asked ----------------------------------------------------------------------

    @property
    def is_engine(self) -> bool:
        return True

    @property
    def kv_blocks(self) -> int:
        return self._model.kv_blocks

    @property
    def copies_nothing(self) -> bool:
        """All parameters of the assigned model are views of the arena."""
        return self._model.copies_nothing

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        return self._model.prefill_tokens_per_s(tokens)

    def __repr__(self) -> str:
        has = "a" if self._assigned is not None else "no"
        return f"<VllmExecutor, {len(self._skeletons)} engines, {has} model>"

    # -- running --------------------------------------------------------------------------------

    def run(
        self,
        run: Run,
        hidden: torch.Tensor | bytearray | None = None,
        layer_ran: Callable[[int], None] | None = None,
    ) -> RunResult:
        """One step of the engine."""
        assert run.asks is not None, f"{self!r} schedules by itself"
        step, logprobs = self._model.step(run.asks)
        return RunResult(None, [], logprobs, step=step)

    # -- helpers, in the order used -------------------------------------------------------------

    def _skeleton(self, manifest: Manifest) -> Skeleton:
        """The engine for the model's shape, made now if there is none."""
        key = _shape_of(manifest)
        skeleton = self._skeletons.pop(key, None)
        if skeleton is None:
            while self._skeletons and not self._has_room(manifest):
                self._skeletons.pop(next(iter(self._skeletons))).close()
                gc.collect()
            began_s = time.monotonic()
            skeleton = self._made(manifest)
            how = "views of the arena" if skeleton.copies_nothing else "copies"
            took_s = time.monotonic() - began_s
            _log.info("engine for %s in %.1f s: parameters are %s", manifest.model, took_s, how)
        self._skeletons[key] = skeleton
        return skeleton

    def _has_room(self, manifest: Manifest) -> bool:
        """For an engine besides those that there are."""
        if len(self._skeletons) >= self._skeletons_max:
            return False
        taken = sum(skeleton.size_bytes for skeleton in self._skeletons.values())
        needed = taken + self._terms.kv_bytes + copied_bytes(manifest, self._terms)
        return self._bytes_max is None or needed <= self._bytes_max

    def _made(self, manifest: Manifest) -> Skeleton:
        """Raises ModelError."""
        try:
            return Skeleton(manifest, self._terms)
        except ModelError:
            raise
        except Exception as error:  # vLLM refuses by many, assertions among them
            _log.debug("vLLM makes no engine", exc_info=error)
            raise ModelError(f"{manifest.model}: vLLM refuses it: {error}") from error

    @property
    def _model(self) -> Skeleton:
        assert self._assigned is not None, f"{self!r}"
        return self._assigned


def _shape_of(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.config_json, *((its.size_bytes, its.tensors) for its in manifest.layers))


def _nothing_comes() -> bool:
    return False
