"""The end of a team with requests that decode: `cheaper` beside both ways, played in virtual time.

λScale §4.4. With real models' sizes and rates, over links on both sides of the rate at which moving
KV takes as long as computing it anew.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from effort import mostly_long
from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.lab.bench.lines.team_switch import Dispatches, TeamTime, switched, team_times
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.load.traces import TraceRow
from livescale.sim.base.config import ModelChange, SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine, read_record
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Outcome

S, MS = 1_000_000_000, 1_000_000
GBIT_BYTES = 125_000_000
KV_BYTES = 60_000_000_000


class Setting(NamedTuple):
    """`sources` serve, and twice as many are loaded: each team has a member of every source's."""

    model: str
    gbit: int
    prompt_tokens: int
    requests: int
    sources: int = 2


SETTINGS = [
    # Both ways take as long at 86 Gbit/s.
    Setting("llama-2-7b", 400, 1000, 20),
    Setting("llama-2-7b", 110, 300, 80),
    Setting("llama-2-7b", 110, 3000, 24),
    Setting("llama-2-7b", 80, 300, 120),
    Setting("llama-2-7b", 60, 300, 120),
    Setting("llama-2-7b", 60, 3000, 36),
    Setting("llama-2-7b", 40, 1000, 60),
    # 73.
    Setting("llama-2-13b", 400, 1000, 20),
    Setting("llama-2-13b", 90, 300, 120),
    Setting("llama-2-13b", 70, 300, 120),
    Setting("llama-2-13b", 50, 300, 120),
    # 20.
    Setting("llama-3-8b", 100, 2000, 60),
    Setting("llama-3-8b", 30, 300, 120),
    Setting("llama-3-8b", 15, 300, 120),
    Setting("llama-3-8b", 10, 2000, 60),
    # With four members 129.
    Setting("llama-2-7b", 400, 1000, 40, sources=4),
    Setting("llama-2-7b", 150, 1000, 80, sources=4),
    Setting("llama-2-7b", 80, 1000, 120, sources=4),
]
FAST, SLOW = SETTINGS[0], SETTINGS[4]


@pytest.mark.parametrize("setting", mostly_long([(s,) for s in SETTINGS], [(FAST,), (SLOW,)]))
def test_the_cheaper_way_is_the_better_one(setting: Setting) -> None:
    """Its pauses and latencies are within 5 % of the better of the two, on average.

    One setting that is not here misses that: 7B, four members, 110 Gbit/s, where latency is 5.8 %
    longer than if KV had moved. It lies between the rates at which the pauses and the latencies of
    both ways are equal, so that none is better in both, and the pause decides.
    """
    ways = {how: ends_of(setting, how) for how in ("move", "anew", "cheaper")}
    for of in (pause_ns, latency_ns):
        found = {how: of(ends) for how, ends in ways.items()}
        assert found["cheaper"] <= 1.05 * min(found["move"], found["anew"]), found


def test_each_way_is_the_better_one_somewhere() -> None:
    assert pause_ns(ends_of(FAST, "move")) < 0.8 * pause_ns(ends_of(FAST, "anew"))
    assert pause_ns(ends_of(SLOW, "anew")) < 0.8 * pause_ns(ends_of(SLOW, "move"))


# -- helpers, in the order used -------------------------------------------------------------------


class End(NamedTuple):
    """Of a request that decoded in a team when that ended."""

    longest_gap_ns: int
    latency_ns: int


def pause_ns(ends: list[End]) -> float:
    return fmean(end.longest_gap_ns for end in ends)


def latency_ns(ends: list[End]) -> float:
    return fmean(end.latency_ns for end in ends)


@functools.cache
def ends_of(setting: Setting, how: str) -> list[End]:
    """Requests come one after the other in the first part of the teams' time."""
    team = first_team(setting)
    spread_ns = (team.ended_ns - team.formed_ns) * 6 // 10
    output_tokens = 200 if setting.gbit > 100 else 400
    times = [team.formed_ns + spread_ns * n // setting.requests for n in range(setting.requests)]
    rows = [TraceRow(at_ns, setting.prompt_tokens, output_tokens) for at_ns in times]
    lines = play(config_of(setting, how), rows)
    requests = [line for line in lines if isinstance(line, RequestLine)]
    assert {line.outcome for line in requests} == {Outcome.FINISHED}
    steps = [line for line in lines if isinstance(line, StepLine)]
    dispatches = Dispatches(steps)
    found = [
        End(one.longest_gap_ns, line.token_ns[-1] - line.due_ns)
        for time in team_times(steps)
        if time.ended_ns
        for line in requests
        for one in switched(time, [line], dispatches)
    ]
    assert len(found) > 3
    return found


@functools.cache
def first_team(setting: Setting) -> TeamTime:
    """With hardly any load, which is the same in every play."""
    config = config_of(setting, "move")
    lines = play(config, [TraceRow(config.changes[0].at_ns + MS, 16, 1)])
    return next(team_times(line for line in lines if isinstance(line, StepLine)))


def config_of(setting: Setting, how: str) -> SimConfig:
    shape, sources = PRESETS[setting.model], setting.sources
    spec, rate, workers = shape.spec(), setting.gbit * GBIT_BYTES, 3 * sources
    policy = ModelPolicy(spec, instances_min=sources, instances_max=sources)
    more = replace(policy, instances_min=workers, instances_max=workers)
    controller = ControllerConfig(
        (policy,),
        workers_expected=workers,
        settle_ns=100 * MS,
        multicast="binomial",
        teams="pairs",
        remote_storage_bytes_per_s=1 << 40,
    )
    device = Device("h800", "", "leaf", 2 * spec.size_bytes, KV_BYTES, rate, rate)
    loaded_ns = 3 * S + (1 + sources) * spec.size_bytes * S // rate
    return SimConfig(
        controller=controller,
        devices=(device,) * workers,
        latency={"": RooflineLatency.of(device.kind, shape, 1)},
        live=LiveLimits(team_end=how),
        changes=(ModelChange(loaded_ns, changed=more),),
        grace_ns=3600 * S,
    )


def play(config: SimConfig, rows: list[TraceRow]) -> list[AnyLine]:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        simulate(rows, config, 0, file)
        file.flush()
        return list(read_record(Path(file.name)))
