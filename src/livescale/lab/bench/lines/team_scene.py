"""What `bench teams` plays, as values, and the same scene in virtual time.

Two instances serve, prompts are queued, and six more instances are loaded at once over links that
carry the model in about `load_s`. Every prompt is one Run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from livescale.batching.live.live_batch import CHEAPER, LiveLimits
from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.engine.files.make import Preset
from livescale.lab.bench.base.made_models import bare_hosts
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow
from livescale.sim.base.config import ModelChange, SimConfig
from livescale.sim.pools.runs import lead_ns, recorded, run_pool
from livescale.telemetry.record.record import AnyLine
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.units import NS_PER_S, NS_PER_US

MODEL = "teams"
NO_TEAMS = "none"
SHAPE = Preset(32, 64, 2048, 4, 4, 512)
"""50 MB in layers of 1.6 MB, and rows of 256 bytes: wide layers and narrow rows, so that what
members pass on takes about as small a part of a link as that of a large model does."""
SOURCES, TARGETS = 2, 6
WORKERS = SOURCES + TARGETS
BLOCK_TOKENS = 16
# A tenth of a Run is its own, the rest its tokens'.
_BASE_PERCENT = 10
_LEAD_NS = 3 * NS_PER_S
# Prompts come until so much of the load is over, faster than they are computed: with hundreds of
# them open at once the client takes most of a core, and sends late.
_ARRIVING_PERCENT = 60
# Of what is computed until the load is over, if a target is half an instance all the time.
_MORE_PERCENT = 120
_SEED = 0


@dataclass(frozen=True, slots=True)
class TeamWay:
    """How the six instances are loaded, and what they do meanwhile: settings of the pool."""

    teams: str
    team_end: str = CHEAPER
    multicast: str = "binomial"
    live_order: str = "stop-the-world"


@dataclass(frozen=True, slots=True)
class TeamScene:
    """`load_s`: what a link takes for the model's `size_bytes`. `run_ms`: what a whole instance
    takes for a Run of one prompt, which has `output_tokens` to answer."""

    size_bytes: int
    load_s: float = 10.0
    run_ms: int = 200
    prompt_tokens: int = 16
    output_tokens: int = 1

    @property
    def bytes_per_s(self) -> int:
        """What a worker sends and receives at most."""
        return max(1 << 20, int(self.size_bytes / self.load_s))

    @property
    def run_us(self) -> int:
        """Of a Run, whatever it computes."""
        return self.run_ms * 10 * _BASE_PERCENT

    @property
    def token_us(self) -> int:
        """Of each token of a Run."""
        return (self.run_ms * 1000 - self.run_us) // self.prompt_tokens

    @property
    def ordered_ns(self) -> int:
        """From the first prompt until six more instances are asked for."""
        return _LEAD_NS

    def rows(self) -> list[TraceRow]:
        """All prompts: so many that some are left when the load is over."""
        before_ms, load_ms = _LEAD_NS // 1_000_000, int(self.load_s * 1000)
        busy_ms = SOURCES * before_ms + (2 * SOURCES + TARGETS) * load_ms // 2
        # Tokens of answers are computed as those of prompts are.
        tokens = self.prompt_tokens + self.output_tokens - 1
        count = busy_ms * self.prompt_tokens * _MORE_PERCENT // (100 * self.run_ms * tokens)
        arriving_ns = _LEAD_NS + load_ms * 1_000_000 * _ARRIVING_PERCENT // 100
        times = [arriving_ns * number // count for number in range(count)]
        return [TraceRow(at_ns, self.prompt_tokens, self.output_tokens) for at_ns in times]

    def settings(self, way: TeamWay) -> dict[str, object]:
        """Of a real pool. Nothing is loaded ahead or kept."""
        return {
            **bare_hosts(WORKERS, self.bytes_per_s),
            "device": "timed",
            "timed_run_us": self.run_us,
            "timed_token_us": self.token_us,
            "arena_bytes": 2 * self.size_bytes,
            "block_tokens": BLOCK_TOKENS,
            "run_tokens_max": self.prompt_tokens,
            "sequences_max": self.prompt_tokens,
            "scaling_policy": "bounds",
            "multicast": way.multicast,
            "teams": way.teams,
            "team_end": way.team_end,
            "live_order": way.live_order,
            "spares_ahead": "none",
            "queue_timeout_s": 600,
        }


def play_simulated(
    scene: TeamScene,
    controller: ControllerConfig,
    devices: Sequence[Device],
    kv_blocks: int,
    more: ModelPolicy,
    live: LiveLimits,
) -> list[AnyLine]:
    """The run record of the scene in virtual time, with the settings that a real pool's controller
    was told and the limits (`more`) that asked that pool for six more instances."""
    latency = LinearLatency(scene.run_us * NS_PER_US, scene.token_us * NS_PER_US)
    config = SimConfig(
        controller=controller,
        devices=tuple(devices),
        latency={"": latency},
        kv_blocks=kv_blocks,
        block_tokens=BLOCK_TOKENS,
        run_tokens_max=scene.prompt_tokens,
        live=live,
    )
    # The second source gets its parameters from the first one.
    began_ns = lead_ns(config) + int(2 * scene.load_s * NS_PER_S)
    change = ModelChange(began_ns + scene.ordered_ns, changed=more)
    config = msgspec.structs.replace(config, changes=(change,))
    loads = {more.spec.name: scene.rows()}
    return recorded(partial(run_pool, config, loads, began_ns, _SEED), list)[1]
