"""More requests than the pool can serve for a while: what late binding costs then."""

from __future__ import annotations

import random

import pytest
from pool_plays import MODEL, S, cluster

from livescale.load.traces import TraceRow
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import find_system


def overload(seed: int) -> list[TraceRow]:
    """Six hundred requests in ten seconds: more than twice what four devices do."""
    rng = random.Random(seed)
    arrivals = sorted(rng.randrange(10 * S) for _ in range(600))
    lengths = [min(int(rng.lognormvariate(7.2, 0.9)), 7_500) for _ in arrivals]
    return [TraceRow(at_ns, tokens, 16) for at_ns, tokens in zip(arrivals, lengths, strict=True)]


def ttfts_ns(run: PoolRun) -> list[int]:
    return sorted(line.token_ns[0] - line.queued_ns for line in run.result.requests)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_backlog_in_the_router_costs_no_more_than_one_on_instances(seed: int) -> None:
    """Whichever queue the requests wait in, the oldest and the shortest share it in the same way:
    the mean and the 99th percentile of TTFT are those of early binding, or better."""
    found = {}
    for name in ("fixed:4+early", "fixed:4"):
        config = build_config(cluster(), [MODEL], find_system(name))
        run = run_pool(config, {MODEL.name: overload(seed)}, lead_ns(config), 0)
        assert not run.failed
        found[name] = ttfts_ns(run)
    early, late = found["fixed:4+early"], found["fixed:4"]
    assert sum(late) <= sum(early) * 1.02
    assert late[-len(late) // 100] <= early[-len(early) // 100] * 1.05
