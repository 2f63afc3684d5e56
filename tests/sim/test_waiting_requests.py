"""Long answers to short prompts: what is short are places and KV, hardly any prefill work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec
import pytest
from pool_plays import CLUSTER, MODEL, MS, S, cluster
from worlds import MIB, Row, make_config, make_model

from livescale.config.pool import PoolConfig
from livescale.load.traces import TraceRow
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import find_system
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import RequestLine, ScaleLine
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Outcome

SPEC = make_model("m", 8, 4 * MIB)


def config_of(system: str) -> SimConfig:
    """Eight devices on two hosts."""
    return build_config(
        cluster(CLUSTER.replace("count: 2, kind", "count: 4, kind")), [MODEL], find_system(system)
    )


@dataclass(frozen=True)
class Played:
    ttft_ns: float
    instances: float
    ups: list[ScaleLine]


@functools.cache
def played(system: str) -> Played:
    """25 requests a second for 20 s, 20 tokens each, answered by 500."""
    rows = [TraceRow(n * S // 25, 20, 500) for n in range(500)]
    config = config_of(system)
    run = run_pool(config, {MODEL.name: rows}, 2 * lead_ns(config), seed=0)
    lines = run.result.requests
    assert {line.outcome for line in lines} == {Outcome.FINISHED}
    ups = [s for s in run.result.scales if s.to_instances > s.from_instances > 0]
    span_ns = run.ended_ns - run.started_ns
    served_ns, since_ns, serving = 0, run.started_ns, 0
    for count in run.result.instances:
        at_ns = min(max(count.now_ns, run.started_ns), run.ended_ns)
        served_ns += serving * (at_ns - since_ns)
        since_ns, serving = at_ns, count.serving
    served_ns += serving * (run.ended_ns - since_ns)
    return Played(fmean(map(waited_ns, lines)), served_ns / span_ns, ups)


def waited_ns(line: RequestLine) -> int:
    return line.token_ns[0] - line.queued_ns


def test_few_prompt_tokens_and_long_answers_scale_a_pool() -> None:
    """Nearly as fast as with all devices all the time, which are far more than are needed."""
    own, full = played("livescale"), played("fixed-full")
    assert own.ups
    assert own.ttft_ns < 5 * full.ttft_ns
    assert own.instances < full.instances * 2 / 3


def test_a_decision_for_those_that_wait_says_so() -> None:
    for line in played("livescale-bounds").ups:
        assert line.reason in ("requests", "waiting_requests")
        assert line.values["requests"] > 0.8 * line.from_instances * line.values["places"]


def test_places_are_one_number_in_simulated_and_real_pools() -> None:
    default = PoolConfig.__struct_defaults__
    names = PoolConfig.__struct_fields__[-len(default) :]
    places = dict(zip(names, default, strict=True))["sequences_max"]
    config = config_of("livescale")
    assert (
        config.batcher(config.controller.models[0].spec, config.device(0)).sequences_max == places
    )


def world(kv_blocks: int, places: int) -> SimConfig:
    """Six workers whose instances have so much room."""
    config = make_config((ModelPolicy(SPEC, 1, 6, 100_000, kv_blocks),), workers=6)
    controller = msgspec.structs.replace(config.controller, sequences_max=places)
    return msgspec.structs.replace(config, controller=controller, kv_blocks=kv_blocks)


def shrinks(result: SimResult) -> list[int]:
    """When an instance was given up."""
    return [s.decided_ns for s in result.scales if s.to_instances < s.from_instances]


def left_waiting(result: SimResult, now_ns: int) -> int:
    """Requests that had waited for a while, and had no first token yet."""
    return sum(
        line.queued_ns < now_ns - 100 * MS < line.token_ns[0] - 100 * MS for line in result.requests
    )


def burst_and_trickle(requests: int) -> Sequence[Row]:
    burst = [Row(2 * S, 5, 100)] * requests
    return [*burst, *(Row(2 * S + n * 100 * MS, 5, 100) for n in range(50))]


@pytest.mark.parametrize(
    ("kv_blocks", "places"), [(40, 16), (150, 64), (512, 4)], ids=["kv", "some kv", "places"]
)
def test_a_pool_grows_for_requests_without_places_or_kv(kv_blocks: int, places: int) -> None:
    result = simulate({"m": burst_and_trickle(236)}, world(kv_blocks, places), seed=0)
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
    assert max(count.serving for count in result.instances) == 6
    assert shrinks(result), "it shrinks at the end"
    for at_ns in shrinks(result):
        assert left_waiting(result, at_ns) == 0


@pytest.mark.parametrize(
    ("kv_blocks", "places", "rate", "output_tokens"),
    [(60, 64, 100, 100), (512, 8, 40, 150)],
    ids=["kv", "places"],
)
def test_a_steady_load_has_a_steady_number_of_instances(
    kv_blocks: int, places: int, rate: int, output_tokens: int
) -> None:
    """Also where most KV is not in use, but kept for what runs: it would be short on fewer."""
    rows = [Row(2 * S + n * S // rate, 5, output_tokens) for n in range(8 * rate)]
    result = simulate({"m": rows}, world(kv_blocks, places), seed=0)
    assert any(s.from_instances == 1 for s in result.scales)
    assert [s for s in result.scales if 4 * S < s.decided_ns < 10 * S] == []
