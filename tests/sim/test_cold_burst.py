"""A model at zero under a burst: its first token comes right behind its last layer."""

from __future__ import annotations

import msgspec
import pytest
from test_live_scaling import config_of
from worlds import MS, Row

from livescale.clusters.topology import Host
from livescale.latency.work import RunWork, span_ns
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.simulate import simulate
from livescale.values.types import Outcome

_S = 1000 * MS
_GBIT = 125_000_000
_BURST_NS = 60 * _S
_PROMPT_TOKENS = 2000
_REQUESTS = 4


def cold_config(live_order: str) -> SimConfig:
    """No instance when nobody asks; the model lies in a host's memory."""
    plain = config_of(live_order)
    policy = msgspec.structs.replace(
        plain.controller.models[0], instances_min=0, instances_max=1, idle_ns=_S
    )
    controller = msgspec.structs.replace(plain.controller, models=(policy,))
    config = msgspec.structs.replace(plain, controller=controller)
    hosts = tuple(
        Host(f"host-{n}", "leaf", 1 << 36, 100 * _GBIT, 100 * _GBIT, 128 * _GBIT) for n in range(2)
    )
    controller = msgspec.structs.replace(controller, agents_expected=2)
    return msgspec.structs.replace(config, controller=controller, hosts=hosts)


def cold_burst(live_order: str) -> SimResult:
    rows = [Row(_BURST_NS, _PROMPT_TOKENS, 4)] * _REQUESTS
    return simulate(rows, cold_config(live_order), 1, None)


def first_token_ns(result: SimResult) -> int:
    requests = [r for r in result.requests if r.queued_ns >= _BURST_NS]
    assert len(requests) == _REQUESTS
    assert all(r.outcome is Outcome.FINISHED for r in requests)
    return min(r.token_ns[0] for r in requests) - _BURST_NS


def load_ns(result: SimResult) -> int:
    """From the decision to the last layer."""
    line = next(s for s in result.scales if s.decided_ns >= _BURST_NS and s.loads)
    loaded_ns = line.loads[0].loaded_ns
    assert loaded_ns is not None
    return loaded_ns - line.decided_ns


@pytest.mark.parametrize("live_order", ["zigzag", "overlap", "best-effort"])
def test_the_first_token_comes_behind_the_last_layer(live_order: str) -> None:
    live = cold_burst(live_order)
    config = cold_config(live_order)
    spec = config.controller.models[0].spec
    latency = config.latency_of(spec.name)
    # All prompts that fit are one batch: its last layer is all that is left when the load ends.
    work = RunWork(((_PROMPT_TOKENS, 0),), sampled=1)
    last_layer_ns = span_ns(latency, work, 1, spec.layers - 2)
    load = load_ns(live)
    assert load <= first_token_ns(live) <= load + last_layer_ns + load // 20
    # What is waited for takes a whole prefill more.
    stopped = cold_burst("stop-the-world")
    assert first_token_ns(stopped) >= load_ns(stopped) + latency.run_ns(work)
