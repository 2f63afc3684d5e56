"""A device more on small shared pools: what it may cost at most, over random models and loads.

On more devices the same copies lie elsewhere. So a burst may find one copy fewer of its model that
no instance of another model keeps from use. Then those requests are late that one more instance
would have computed within the TTFT bound: 8,000 prompt tokens here, two of the longest prompts.
FALLS is as much for two bursts. Of 475 drawn worlds 7 lost one or two requests, and none lost more.
A model that is alone loses none, because all devices hold the same.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.config.slo import SloAbsolute
from livescale.lab.commands.pool_choices import a800_workers
from livescale.load.traces import TraceRow
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import lead_ns, run_pool, token_weights
from livescale.sim.pools.systems import SYSTEMS

S, MS = 1_000_000_000, 1_000_000
DEVICES_MAX = 8
SLO = SloAbsolute(600 * MS, 100 * MS)
FALLS = 4
"""Requests that a device more may cost where several models share the pool."""


class Asked(NamedTuple):
    """Of one model: so many prompts at once, and again after a pause, for some seconds."""

    first_ms: int
    pause_ms: int
    at_once: int
    prompt_tokens: int
    answer_tokens: int

    def rows(self, until_s: int) -> list[TraceRow]:
        starts = range(self.first_ms, 1000 * until_s, self.pause_ms)
        return [
            TraceRow((at_ms + 10 * n) * MS, self.prompt_tokens, self.answer_tokens)
            for at_ms in starts
            for n in range(self.at_once)
        ]


asked = st.builds(
    Asked,
    st.integers(0, 4_000),
    st.integers(250, 6_000),
    st.integers(1, 12),
    st.integers(100, 5_000),
    st.integers(1, 50),
)
worlds = st.lists(asked, min_size=1, max_size=3).flatmap(
    lambda models: st.tuples(st.just(models), st.integers(len(models), DEVICES_MAX - 1))
)


def met(models: list[Asked], devices: int, system: str = "livescale") -> int:
    """Requests within the SLO, of ten seconds."""
    loads = {f"m{n}": model.rows(10) for n, model in enumerate(models)}
    pooled = [PooledModel(name, "llama-3-8b", slo=SLO) for name in loads]
    cluster = a800_workers(devices, hosts=1)
    config = build_config(cluster, pooled, SYSTEMS[system], token_weights(loads))
    run = run_pool(config, loads, lead_ns(config), 0)
    assert run.failed == 0
    return sum(map(SLO.is_met, run.timings()))


@settings(max_examples=examples(200, 8))
@given(world=worlds)
def test_a_device_more_costs_few_requests(world: tuple[list[Asked], int]) -> None:
    models, devices = world
    before, after = met(models, devices), met(models, devices + 1)
    assert after >= before - (FALLS if len(models) > 1 else 0)
