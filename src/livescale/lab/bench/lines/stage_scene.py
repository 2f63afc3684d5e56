"""What `bench stages` plays, as values, and the same in virtual time.

A line of stages, one of which takes 1.5 times as long as each of the others, and requests of one
pass: every prompt fills a Run and has one token to answer. A burst comes, open loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.engine.files.make import Preset
from livescale.lab.bench.base.made_models import bare_hosts
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.runs import lead_ns, recorded, run_pool
from livescale.telemetry.record.record import AnyLine
from livescale.values.stages import stage_name
from livescale.values.types import LayerSpan
from livescale.values.units import NS_PER_MS, NS_PER_US

MODEL = "line"
POLICIES = OWN, UNIFORM = "stages", "pipelines"
"""Values of `scaling_policy`: by each stage's queue, and as many of each stage."""
BLOCK_TOKENS = 16
_LAYERS, _SLOW_LAYERS = 2, 3
"""Decoder layers of a stage: a timed worker takes as long for each."""
_PROMPT_TOKENS = 16
_PHASES = ((10, 0.3), (85, 0.75), (100, 0.3))
"""Until so many percent of the requests have come: how many come in the time that an even stage
takes for one. The slow stage serves two thirds of one in that time."""
# All in the time that an even stage takes for a request.
_LOAD_SERVICES, _PERIOD_SERVICES, _TIMEOUT_SERVICES = 20, 50, 150
_SLO_FACTOR = 4
_SPARE_WORKERS = 4
_SIM_SEED = 0


@dataclass(frozen=True, slots=True)
class StageScene:
    """`run_ms`: what an even stage takes for a request. About everything else is so many of these:
    how fast requests come, loads (of an even stage), periods of the policy, the SLO."""

    stages: int = 8
    run_ms: int = 50
    requests: int = 600

    @property
    def slow_stage(self) -> int:
        """Its number."""
        return (self.stages - 1) // 2

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        return tuple(
            _SLOW_LAYERS if number == self.slow_stage else _LAYERS for number in range(self.stages)
        )

    @property
    def shape(self) -> Preset:
        """1.6 MB and rows of 256 bytes: wide layers and narrow rows, so that rows take as small a
        part of a link as those of a large model do; embedding and head are small beside a layer."""
        return Preset(sum(self.layers), 64, 2048, 4, 4, 512)

    @property
    def spans(self) -> tuple[LayerSpan, ...]:
        """Layers of each stage, the embedding and the head among them."""
        stops, at = [], 1
        for layers in self.layers:
            at += layers
            stops.append(at)
        stops[-1] += 1
        return tuple(map(LayerSpan, [0, *stops[:-1]], stops))

    @property
    def slo_ns(self) -> int:
        """For the first token: four times what a request takes that never waits."""
        pass_ns = sum(self.layers) * self.run_ms * NS_PER_MS // _LAYERS
        return _SLO_FACTOR * pass_ns

    @property
    def workers(self) -> int:
        """Two for each stage, and some more."""
        return 2 * self.stages + _SPARE_WORKERS

    @property
    def token_us(self) -> int:
        """Of a prompt token in the whole model, on a worker that had all of it."""
        return self.run_ms * 1000 * sum(self.layers) // (_LAYERS * _PROMPT_TOKENS)

    def rows(self, seed: int) -> list[TraceRow]:
        """The requests, at random (Poisson) times that the seed draws: few, many, few."""
        rng, at_ns = random.Random(seed), 0
        rows: list[TraceRow] = []
        for percent, rate in _PHASES:
            while len(rows) * 100 < self.requests * percent:
                at_ns += int(rng.expovariate(rate) * self.run_ms * NS_PER_MS)
                rows.append(TraceRow(at_ns, _PROMPT_TOKENS, 1))
        return rows

    def settings(self, policy: str, model_bytes: int) -> dict[str, object]:
        """Of a real pool. Nothing is loaded ahead or kept."""
        link = model_bytes * _LAYERS // sum(self.layers) * 1000 // (_LOAD_SERVICES * self.run_ms)
        return {
            **bare_hosts(self.workers, link),
            "device": "timed",
            "timed_run_us": 0,
            "timed_token_us": self.token_us,
            "arena_bytes": model_bytes,
            "block_tokens": BLOCK_TOKENS,
            "run_tokens_max": _PROMPT_TOKENS,
            "sequences_max": _PROMPT_TOKENS,
            "scaling_policy": policy,
            "stage_period_ms": _PERIOD_SERVICES * self.run_ms,
            "scale_down_timeout_ms": _TIMEOUT_SERVICES * self.run_ms,
            "ttft_aim_ms": self.slo_ns // NS_PER_MS,
            "spares_ahead": "none",
            "queue_timeout_s": 600,
        }

    def facts(self) -> dict[str, object]:
        """As JSON."""
        return {
            **asdict(self),
            "slow_stage": self.slow_stage,
            "decoder_layers": list(self.layers),
            "slo_s": self.slo_ns / 1e9,
            "workers": self.workers,
        }


def play_simulated(
    scene: StageScene,
    controller: ControllerConfig,
    devices: Sequence[Device],
    rows: Sequence[TraceRow],
    live: LiveLimits,
) -> list[AnyLine]:
    """The run record of these requests in virtual time, with the settings that a real pool's
    controller was told. They begin when each stage has an instance."""
    whole = sum(scene.layers)
    config = SimConfig(
        controller=controller,
        devices=tuple(devices),
        latency={
            stage_name(MODEL, number): LinearLatency(
                0, scene.token_us * NS_PER_US * layers // whole
            )
            for number, layers in enumerate(scene.layers)
        },
        block_tokens=BLOCK_TOKENS,
        run_tokens_max=_PROMPT_TOKENS,
        live=live,
    )
    return recorded(partial(run_pool, config, {MODEL: rows}, lead_ns(config), _SIM_SEED), list)[1]
