"""Hosts that join in the simulator, all at one moment: what the controller needs for them, in
virtual time, and what its steps take of a real core.

A member's first word is all of its joining there: no HostHello, and no time in which a process
starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import msgspec

from livescale.clusters.files import find_cluster, read_topology
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.pools.controller_steps import replayed_ns
from livescale.messages.events import WorkerJoined
from livescale.sim.base.config import HostStay, SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.pools.configs import build_config, first_hosts
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import recorded
from livescale.sim.pools.systems import find_system
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import StepLine
from livescale.values.units import NS_PER_S

_CLUSTER, _PRESET = "leaf-spine-1024", "llama-3-8b"
# The head has been there for a while, alone.
_FROM_NS = 5 * NS_PER_S
HOSTS_MAX = 128


@dataclass(frozen=True, slots=True)
class SimulatedJoins:
    """`joined_ns` is from the moment that all hosts begin until the last worker is in the pool,
    `serving_ns` until there is an instance for each host; both are virtual. `step_ns` is what each
    step of the controller took of a real core."""

    hosts: int
    workers: int
    joined_ns: int
    serving_ns: int
    step_ns: tuple[int, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "hosts": self.hosts,
            "workers": self.workers,
            "joined_s": self.joined_ns / NS_PER_S,
            "serving_s": self.serving_ns / NS_PER_S,
            "steps": len(self.step_ns),
            "steps_s": sum(self.step_ns) / NS_PER_S,
            "step_ms_median": median(self.step_ns) / 1e6,
            "step_ms_max": max(self.step_ns) / 1e6,
        }

    def text(self) -> str:
        return (
            f"{self.hosts} simulated hosts, {self.workers} workers: in the pool after"
            f" {self.joined_ns / 1e6:.1f} ms of virtual time, an instance for each host after"
            f" {self.serving_ns / NS_PER_S:.2f} s; the controller's {len(self.step_ns)} steps took"
            f" {sum(self.step_ns) / NS_PER_S:.2f} s of a core, the longest"
            f" {max(self.step_ns) / 1e6:.1f} ms"
        )


def join_simulated(hosts: int) -> SimulatedJoins:
    """Hosts of eight accelerators join a head that has none, with a model that wants an instance
    for each of them. Raises BenchError."""
    config = _config(hosts)
    model = config.controller.models[0].spec.name
    result, lines = recorded(partial(simulate, {model: []}, config, 0), list)
    joined_ns = [
        line.now_ns
        for line in lines
        if isinstance(line, StepLine)
        for event in line.events
        if isinstance(event, WorkerJoined)
    ]
    if len(joined_ns) != config.workers:
        raise BenchError(f"{len(joined_ns)} of {config.workers} simulated workers joined")
    return SimulatedJoins(
        hosts=hosts,
        workers=config.workers,
        joined_ns=max(joined_ns) - _FROM_NS,
        serving_ns=_serving_ns(result, hosts) - _FROM_NS,
        step_ns=tuple(replayed_ns(config, lines)),
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _config(hosts: int) -> SimConfig:
    cluster = first_hosts(read_topology(find_cluster(_CLUSTER)), hosts)
    model = PooledModel("model", _PRESET, instances_min=hosts, instances_max=hosts)
    config = build_config(cluster, [model], find_system("livescale"))
    # As for `serve --workers 0`: no host is expected.
    controller = msgspec.structs.replace(config.controller, workers_expected=0, agents_expected=0)
    stays = tuple(HostStay(host.name, from_ns=_FROM_NS) for host in config.hosts)
    return msgspec.structs.replace(config, controller=controller, stays=stays)


def _serving_ns(result: SimResult, instances: int) -> int:
    """When there were so many. Raises BenchError."""
    for count in result.instances:
        if count.serving >= instances:
            return count.now_ns
    raise BenchError(f"there were never {instances} simulated instances")
