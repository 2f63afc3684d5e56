"""Baselines stay what they are, and fixed pools take the device time of what they are like."""

from __future__ import annotations

import msgspec
import pytest
from pool_plays import MODEL, S, burst, cluster, play

from livescale.control.state.config import ControllerConfig
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.baseline import BASELINE, BASELINE_WORLD
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.equal_time import play_equal
from livescale.sim.pools.limits import PooledModel, PoolError
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS, System, find_system
from livescale.values.scaling_policies import Bounds

BASELINES = {"stop": "stop-the-world", "overlap": "overlap", "zigzag": "zigzag"}
#: what a cluster, its models or a system say, or what only a real pool has
NOT_SETTINGS = {
    *("models", "workers_expected", "agents_expected", "epoch", "wall_ns"),
    *("multicast", "placement", "live_order", "teams"),
    *("leaves", "group_bytes_per_s", "remote_storage_bytes_per_s"),
}
NOT_SETTINGS_OF_WORLDS = {
    *("controller", "devices", "latency", "cores", "hosts", "kv_blocks", "block_tokens"),
    *("changes",),
    *("load_ns", "group_setup_ns", "resident_bytes", "grace_ns", "faults", "coalesces"),
    *("stays", "demand"),
    *("queue_requests_max", "queue_prompt_tokens_max", "queue_timeout_ns", "client_weights"),
    *("gateways",),
    *("step_gap_ns", "message_delay_ns", "report_gap_ns", "holder_wait_ns", "stall_ns"),
}


def test_a_new_setting_says_what_baselines_have() -> None:
    """A field that is in neither set would change the baselines with the default of the product:
    add it to BASELINE with the value that turns the new thing off."""
    fields = {field.name for field in msgspec.structs.fields(ControllerConfig)}
    assert fields == NOT_SETTINGS | set(BASELINE)
    worlds = {field.name for field in msgspec.structs.fields(SimConfig)}
    assert worlds == NOT_SETTINGS_OF_WORLDS | set(BASELINE_WORLD)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_scale_by_bounds_and_differ_in_their_order_alone(name: str) -> None:
    config = build_config(cluster(), (MODEL,), SYSTEMS[name])
    assert config.controller.live_order == BASELINES[name]
    (policy,) = config.policies
    bounds = policy.scaling or config.controller.scaling
    assert isinstance(bounds, Bounds)
    assert bounds == Bounds(
        *(900, 600, 700_000_000, 500_000_000, 950, 750, 850, 750, S, 333_000_000)
    )
    assert (policy.prefill_tokens_per_s, config.resident_bytes) == (15_000, 0)
    stop = build_config(cluster(), (MODEL,), SYSTEMS["stop"])
    controller = msgspec.structs.replace(config.controller, live_order="stop-the-world")
    assert msgspec.structs.replace(config, controller=controller) == stop


@pytest.mark.parametrize(
    ("name", "ttft_ns", "device_ns"),
    [
        ("stop", 173_365_470_582, 22_797_293_645),
        ("overlap", 105_781_921_515, 19_918_092_780),
        ("zigzag", 102_748_736_355, 19_838_466_977),
    ],
)
def test_baselines_do_what_they_did(name: str, ttft_ns: int, device_ns: int) -> None:
    """Sums over a burst, to the nanosecond: what changes them changes the baseline."""
    run = play(name).run
    found = sum(line.token_ns[0] - line.queued_ns for line in run.result.requests)
    assert (found, run.device_ns()) == (ttft_ns, device_ns)


@pytest.mark.parametrize("name", ["livescale", "stop"])
def test_a_fixed_pool_takes_the_device_time_of_what_it_is_like(name: str) -> None:
    """At least the mean of the instances that were held on, and no more than it takes."""
    like = play(name).run
    tried: list[int] = []

    def fixed(system: System) -> PoolRun:
        tried.append(system.fixed_devices or 0)
        config = build_config(cluster(), (MODEL,), system)
        return run_pool(config, {"m": burst(S)}, lead_ns(config), 0)

    system, run = play_equal(find_system(f"fixed:auto={name}"), like, 4, 1, fixed)
    count = system.fixed_devices or 0
    assert max(instances.serving for instances in run.result.instances) == count == tried[-1]
    assert count == 4 or run.device_ns() >= like.device_ns()
    assert tried[0] == -(-like.device_ns() // (like.ended_ns - like.started_ns))
    assert tried == list(range(tried[0], count + 1))


def test_a_fixed_pool_has_whole_instances_and_no_more_than_all_devices() -> None:
    """Instances of two ranks, and nothing but the whole pool would do."""
    model = PooledModel("m", "llama-3-8b", 2)
    full = build_config(cluster(), (model,), SYSTEMS["fixed-full"])
    like = run_pool(full, {"m": burst(S)}, lead_ns(full), 0)

    def fixed(system: System) -> PoolRun:
        assert (system.fixed_devices or 1) % 2 == 0
        config = build_config(cluster(), (model,), system)
        return run_pool(config, {"m": burst(S)}, lead_ns(config), 0)

    system, _ = play_equal(find_system("fixed:auto"), like, 4, 2, fixed)
    assert system.fixed_devices == 4


def test_a_fixed_pool_like_another_has_no_size_of_its_own() -> None:
    with pytest.raises(PoolError, match="no size before livescale has run"):
        build_config(cluster(), (MODEL,), find_system("fixed:auto"))
