"""Chain or teams: the controller takes for each load what has the shorter wait."""

from __future__ import annotations

import msgspec
import pytest

from effort import mostly_long
from livescale.lab.reproduce.base.half_loads import ttft_mean_s
from livescale.lab.reproduce.base.saturated import Scene, play
from livescale.load.traces import TraceRow
from livescale.sim.pools.runs import lead_ns, run_pool

CHAIN, TEAMS, EITHER = "livescale-cold", "lambda-pairs", "lambda-auto"


def mean_s(scene: Scene, system: str) -> float:
    ramp = play(scene, system, 0)
    assert ramp.run.failed == 0
    return ramp.mean_s


def scene(hosts: int, requests: int, gbit: int, sources: int) -> Scene:
    return Scene(sources, hosts=hosts, requests=requests, nic_gbit_per_s=gbit)


SHORT_QUEUE = Scene(4, hosts=12, requests=60, nic_gbit_per_s=100, preset="llama-2-7b")
"""Pairs have all of it at once, and instances that serve alone are idle."""
FIVE = Scene(5, hosts=10, requests=90, prompt_tokens=3500, nic_gbit_per_s=40)
SHORT = [
    (scene(8, 200, 100, 4), TEAMS),
    (scene(8, 60, 100, 2), CHAIN),
    (SHORT_QUEUE, TEAMS),
    (FIVE, TEAMS),
]
LONG = [
    (scene(8, 200, 25, 3), TEAMS),
    (scene(12, 400, 100, 4), TEAMS),
    (scene(12, 400, 400, 4), CHAIN),
    (scene(12, 400, 100, 2), CHAIN),
    (scene(12, 200, 25, 4), TEAMS),
    (scene(12, 800, 400, 2), CHAIN),
]


@pytest.mark.parametrize(("found", "better"), mostly_long([*SHORT, *LONG], short=SHORT))
def test_each_load_goes_the_better_way(found: Scene, better: str) -> None:
    """13B: k sources of the hosts, so many prompts of 2,000 tokens at once, links of so many
    Gbit/s. Teams are better with several sources, links that are slow beside prefill, and a queue
    that loading instances would be through with before they are loaded."""
    other = CHAIN if better == TEAMS else TEAMS
    best_s, other_s = mean_s(found, better), mean_s(found, other)
    assert best_s < other_s
    assert mean_s(found, EITHER) <= 1.05 * best_s


@pytest.mark.parametrize("requests", [60, 200])
def test_without_live_instances_the_chain_is_no_better_than_idle_ones(requests: int) -> None:
    """Where a chain's instances wait for the end of their load, teams are taken that else are not:
    over 400 Gbit/s a live chain is better."""
    found = scene(8, requests, 400, 4)
    assert mean_s(found, CHAIN) < mean_s(found, TEAMS)
    config = found.config(EITHER)
    controller = msgspec.structs.replace(config.controller, live_order="stop-the-world")
    config = msgspec.structs.replace(config, controller=controller)
    rows = {found.preset: [TraceRow(1_000_000_000, found.prompt_tokens, 1)] * requests}
    run = run_pool(config, rows, lead_ns(config), 0)
    assert run.failed == 0
    assert ttft_mean_s(run) <= 1.05 * mean_s(found, TEAMS)
