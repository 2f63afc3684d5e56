"""What live work takes, as measured on one instance, and how much of it decodes wait for."""

from __future__ import annotations

from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.run import Run

_MEASURED_TOKENS_MIN = 16
"""Runs of fewer tokens say little of what a prompt's token takes."""
_TBT_PERCENT = 80
"""Of the time between tokens that is aimed at, what a Run may take: some passes between Runs."""
_MIXED_TOKENS_MIN = 64
"""Of a Run with prompts beside decodes: prompts move on, also where every Run takes too long."""


class LivePace:
    """Reckons in what one token takes in one decoder layer."""

    def __init__(self, batcher: Batcher, limits: LiveLimits) -> None:
        self._batcher = batcher
        self._limits = limits
        self._decoder_layers = batcher.span.stop - 2
        #: what one token takes in one layer, measured; 0: not yet
        self.token_layer_ps = 0
        #: prompt tokens times layers that were computed in all, and the time of those Runs
        self._prefill_token_layers = 0
        self.prefill_ns = 0
        #: live work since decodes had their turn
        self.live_ns = 0

    def ran(self, run: Run, elapsed_ns: int, prefill_tokens: int) -> None:
        """How long a Run took, which computed so many tokens of prompts."""
        self.live_ns = self.live_ns + elapsed_ns if run.batch is not None else 0
        if prefill_tokens < _MEASURED_TOKENS_MIN:
            return
        layers = self._layers(run)
        self._prefill_token_layers += prefill_tokens * layers
        self.prefill_ns += elapsed_ns
        measured = elapsed_ns * 1000 // (run.token_count * layers)
        known = self.token_layer_ps
        self.token_layer_ps = measured if not known else (3 * known + measured) // 4

    def prefill_tokens_per_s(self) -> int | None:
        """Rate of prefills; None before the first one."""
        if not self.token_layer_ps:
            return None
        return max(1, 10**12 // (self.token_layer_ps * self._decoder_layers))

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that `prefill_ns` computed; parts of the layers count in part."""
        return self._prefill_token_layers // self._decoder_layers

    def batch_tokens_max(self) -> int:
        """Tokens of a live batch, so that one layer of it takes no longer than a Run may."""
        tokens_max = self._limits.batch_tokens_max
        if self.token_layer_ps:
            tokens_max = min(tokens_max, self._limits.span_ns * 1000 // self.token_layer_ps)
        return tokens_max

    def mixed_tokens_max(self) -> int:
        """Tokens of a Run in which requests decode, so that these get theirs in time
        (Sarathi-Serve, OSDI'24, §4.3, with a budget that follows from what Runs take here)."""
        most = self._batcher.config.run_tokens_max
        if not (self._limits.tbt_ns and self.token_layer_ps):
            return most
        run_ps = self._limits.tbt_ns * 10 * _TBT_PERCENT
        fitting = run_ps // (self.token_layer_ps * self._decoder_layers)
        return min(max(fitting, _MIXED_TOKENS_MIN), most)

    def layer_ns(self, batch: LiveBatch) -> int:
        """What one layer of the batch should take; 0: not known."""
        return self.token_layer_ps * batch.tokens // 1000

    def run_ns(self, run: Run) -> int:
        """What a live Run should take; 0: not known."""
        return self.token_layer_ps * run.token_count * self._layers(run) // 1000

    def left_ns(self, live_ns: int) -> int:
        """Live work that decodes still wait for before they have their turn, after that much."""
        gap_ns = self._limits.gap_ns or max(self._limits.span_ns, 3 * self._full_run_ps // 4000)
        return gap_ns - live_ns

    @property
    def full_run_ns(self) -> int:
        """What a Run full of prompt tokens takes that decodes wait for; 0: not known."""
        return self._full_run_ps // 1000

    @property
    def _full_run_ps(self) -> int:
        return self.mixed_tokens_max() * self._decoder_layers * self.token_layer_ps

    @property
    def full_batch_ns(self) -> int:
        """What all layers of the largest live batch take; 0: not known."""
        return self.batch_tokens_max() * self._decoder_layers * self.token_layer_ps // 1000

    def _layers(self, run: Run) -> int:
        return run.span.decoder_layers(self._decoder_layers + 2)
