"""The model that a worker's executor has: taken over, bound, measured and run.

What the executor raises meanwhile is the end of the load, or of one request; the worker ends only
after errors by which its device, or the pool's own rules, cannot be trusted any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import Run
from livescale.engine.base.errors import ModelError, spoils_device
from livescale.engine.base.run_result import InstanceExecutor, RunResult
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.model_files import model_spec
from livescale.runtime.member_process.faulty_pieces import (
    nothing_of,
    run_or_pieces,
    why_broken,
    words_of,
)
from livescale.values.stages import gives_rows
from livescale.values.types import LayerSpan, Manifest, PlanId, StageOf

if TYPE_CHECKING:
    from livescale.engine.base.run_result import HiddenRows


class ModelFailed(Exception):
    """The model cannot be taken over, bound or measured here; the message says why."""


class AssignedModel:
    """Of one executor, one model after the other. `failed` is told of one that cannot compute when
    that is found out in a Run, on the thread of the Run."""

    def __init__(self, executor: InstanceExecutor, failed: Callable[[PlanId, str], None]) -> None:
        self._executor = executor
        self._failed = failed
        self.plan: PlanId | None = None
        self.stage: StageOf | None = None
        self.vocabulary = self.hidden_size = self.row_bytes = 0
        self._layers = 0
        #: why nothing is computed with it any more
        self._broken: str | None = None
        #: some Run of it came to a good end
        self._has_run = False

    def take(self, plan: PlanId, manifest: Manifest, memory: memoryview) -> None:
        """Raises ModelFailed."""
        self.plan, self._broken, self._has_run = plan, None, False
        try:
            self._executor.assign(manifest, memory)
        except Exception as error:
            self._broken = self._refusal(error)
            raise ModelFailed(self._broken) from error
        shape = parse_config(manifest.config_json, f"config of {manifest.model}")
        spec = model_spec(manifest)
        self.stage, self._layers = manifest.stage, spec.layers
        self.vocabulary, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.row_bytes = spec.row_bytes_per_token

    def release(self) -> None:
        self.plan = None
        self._executor.release()

    def materialize(self, layer: int) -> None:
        """Tells `failed` of a layer that its modules do not take: once."""
        if self._broken is not None:
            return
        try:
            self._executor.materialize(layer)
        except Exception as error:
            self._break(self._refusal(error))

    def prefill_tokens_per_s(self, tokens: int) -> int | None:
        """None, and `failed` is told, if it computes nothing."""
        if self._broken is not None:
            return None
        try:
            return self._executor.prefill_tokens_per_s(LayerSpan(0, self._layers), tokens)
        except Exception as error:
            self._break(self._refusal(error))
            return None

    def run(
        self, run: Run, rows: HiddenRows | None, layer_ran: Callable[[int], None] | None
    ) -> tuple[RunResult, tuple[FaultyRequest, ...]]:
        """What came of it, and of which requests nothing did. Where the first Run of a model fails,
        one token that no request brings tells whether that is the model's fault."""
        row_bytes = self.row_bytes if gives_rows(self.stage, run.span, self._layers) else 0
        if self._broken is None:
            result, faulty = run_or_pieces(self._executor, run, rows, layer_ran, row_bytes)
            if not faulty or self._has_run:
                self._has_run = True
                return result, faulty
            first, stop = max(run.span.start, 1), min(run.span.stop, self._layers - 1)
            # (Decoder layers are numbered without the embedding.)
            broken = why_broken(self._executor, run.span, range(first - 1, stop - 1))
            if broken is None:
                self._has_run = True
                return result, faulty
            self._break(broken)
        assert self._broken is not None
        return nothing_of(self._executor, run, row_bytes, self._broken)

    def _break(self, reason: str) -> None:
        assert self.plan is not None
        self._broken = reason
        self._failed(self.plan, reason)

    def _refusal(self, error: Exception) -> str:
        """In words. Raises what spoils the device: of an engine that is all but a refusal."""
        if isinstance(error, ModelError | ValueError):
            return str(error)
        if self._executor.is_engine or spoils_device(error):
            raise error
        return words_of(error)

    def __repr__(self) -> str:
        return f"<AssignedModel of plan {self.plan}, {self._broken or 'good'}>"
