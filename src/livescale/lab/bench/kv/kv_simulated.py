"""`bench kv` in virtual time: the production controller and members, with simulated links."""

from __future__ import annotations

from functools import partial

import msgspec

from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.lab.bench.kv.kv_scene import RUN_TOKENS_MAX, RUN_US, WORKERS, KvScene, RolesWanted
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow
from livescale.sim.base.config import SERVING_FIRST, ModelChange, SimConfig
from livescale.sim.pools.runs import recorded
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import AnyLine
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.types import Role
from livescale.values.units import NS_PER_US

_MIN_ARENA_BYTES = 1 << 30
_KV_BYTES = 256 << 20
# By then both instances serve.
_ZERO_NS = 10_000_000_000
_SEED = 0


def play_simulated(
    scene: KvScene,
    *,
    avoids_serving: bool = True,
    link_sharing: str = SERVING_FIRST,
    kv_ahead: bool = True,
) -> list[AnyLine]:
    """The run record of the scene. `link_sharing` as in SimConfig, `kv_ahead` as in LiveLimits."""
    rows = [
        TraceRow(row.arrival_ns + _ZERO_NS, row.input_tokens, row.output_tokens)
        for row in scene.rows()
    ]
    config = _config(scene, avoids_serving, link_sharing)
    live = msgspec.structs.replace(config.live, kv_ahead=kv_ahead)
    config = msgspec.structs.replace(config, live=live)
    return recorded(partial(simulate, rows, config, _SEED), list)[1]


# -- helpers, in the order used -------------------------------------------------------------------


def _config(scene: KvScene, avoids_serving: bool, link_sharing: str) -> SimConfig:
    """As the pool on emulated hosts: nothing is loaded ahead, kept or worked on while it loads."""
    rate = scene.bytes_per_s
    device = Device(
        kind="timed",
        host="",
        leaf="leaf0",
        arena_bytes=max(scene.spec.size_bytes, _MIN_ARENA_BYTES),
        kv_bytes=_KV_BYTES,
        uplink_bytes_per_s=rate,
        downlink_bytes_per_s=rate,
    )
    controller = ControllerConfig(
        (_policy(scene, RolesWanted(0, 1, 1)),),
        workers_expected=WORKERS,
        avoids_serving=avoids_serving,
        warm_spares="off",
    )
    return SimConfig(
        controller=controller,
        devices=(device,) * WORKERS,
        latency={"": LinearLatency(RUN_US * NS_PER_US, scene.token_us * NS_PER_US)},
        run_tokens_max=RUN_TOKENS_MAX,
        link_sharing=link_sharing,
        changes=tuple(
            ModelChange(_ZERO_NS + wanted.at_ns, changed=_policy(scene, wanted))
            for wanted in scene.wanted
        ),
    )


def _policy(scene: KvScene, wanted: RolesWanted) -> ModelPolicy:
    count = wanted.prefill + wanted.decode
    roles = (
        RoleLimits(Role.PREFILL, wanted.prefill, wanted.prefill),
        RoleLimits(Role.DECODE, wanted.decode, wanted.decode),
    )
    return ModelPolicy(scene.spec, instances_min=count, instances_max=count, roles=roles)
