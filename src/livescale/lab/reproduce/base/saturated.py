"""One saturated moment: a few instances serve, and a burst wants all of the cluster's devices.

Prompts of one length that are all there at once, with answers of one token: what counts is prefill.
Copies of the model are on the devices of the first instances only, so that their number is λScale's
k; or in the memory of every host, and no instance serves yet.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from livescale.config.slo import percentile
from livescale.lab.reproduce.base.models import cluster_of, layers_of, prefill_ms
from livescale.load.traces import TraceRow
from livescale.messages.commands import ChangeDuty
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.configs import build_config, first_hosts
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import PoolRun, lead_ns, recorded, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.telemetry.record.record import AnyLine, StepLine
from livescale.values.copy_strategies import AllCopies, NoCopies
from livescale.values.routes import Team
from livescale.values.units import GBIT_BYTES, NS_PER_S

_BURST_AFTER_NS = NS_PER_S
_IDLE_NS = NS_PER_S
_MODEL = "llama-2-13b"


@dataclass(frozen=True, slots=True)
class Scene:
    """Of `hosts` hosts of the cluster `serving` have an instance when `requests` prompts of
    `prompt_tokens` come. `nic_gbit_per_s` None: the cluster's. `in_memory`: every host has a copy
    of the model. A message takes `message_delay_ns`: one hop of a Run costs that."""

    serving: int
    hosts: int = 12
    requests: int = 400
    prompt_tokens: int = 2000
    nic_gbit_per_s: int | None = None
    in_memory: bool = False
    message_delay_ns: int = 200_000
    preset: str = _MODEL
    tp_size: int = 1
    cluster: str = "lambdascale-1"

    def config(self, system: str) -> SimConfig:
        model = PooledModel(
            self.preset, self.preset, self.tp_size, instances_min=self.serving, idle_ns=_IDLE_NS
        )
        placement = AllCopies() if self.in_memory else NoCopies()
        placed = msgspec.structs.replace(SYSTEMS[system], placement=placement)
        config = build_config(first_hosts(cluster_of(self.cluster), self.hosts), [model], placed)
        config = msgspec.structs.replace(config, message_delay_ns=self.message_delay_ns)
        if self.nic_gbit_per_s is None:
            return config
        rate = self.nic_gbit_per_s * GBIT_BYTES
        devices = tuple(
            msgspec.structs.replace(d, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate)
            for d in config.devices
        )
        return msgspec.structs.replace(config, devices=devices)

    @property
    def prompt_ns(self) -> float:
        """What an instance takes for one prompt."""
        kind = next(iter(cluster_of(self.cluster).topology.devices.values())).kind
        return prefill_ms(kind, self.preset, self.prompt_tokens, self.tp_size) * 1e6

    @property
    def load_ns(self) -> float:
        """A copy of the model over one NIC: an instance-load."""
        devices = cluster_of(self.cluster).topology.devices
        rate = next(iter(devices.values())).uplink_bytes_per_s
        if self.nic_gbit_per_s is not None:
            rate = self.nic_gbit_per_s * GBIT_BYTES
        assert rate is not None, "the papers' clusters have known links"
        return sum(layers_of(self.preset, self.tp_size)) / rate * NS_PER_S


@dataclass(frozen=True, slots=True)
class Ramp:
    """What came of a scene. Times are nanoseconds since the burst: of all first tokens, in order,
    and of those of instances that are new; when the last of these had every layer. `team_ns` is
    the sum over teams of members · (end - ready)."""

    scene: Scene
    run: PoolRun
    firsts_ns: tuple[int, ...]
    new_firsts_ns: tuple[int, ...]
    full_ns: int
    team_ns: int

    @property
    def added(self) -> float:
        """First tokens until all are full beyond those of the instances that served at first, in
        instance-loads."""
        firsts = sum(ns <= self.full_ns for ns in self.firsts_ns)
        alone = self.scene.serving * int(self.full_ns / self.scene.prompt_ns)
        return (firsts - alone) * self.scene.prompt_ns / self.scene.load_ns

    @property
    def team_part(self) -> float:
        """First tokens of new instances until all are full, as a part of what the members of teams
        compute in that time. 0: there was no team."""
        firsts = sum(ns <= self.full_ns for ns in self.new_firsts_ns)
        return firsts * self.scene.prompt_ns / self.team_ns if self.team_ns else 0.0

    @property
    def mean_s(self) -> float:
        return sum(self.firsts_ns) / len(self.firsts_ns) / NS_PER_S

    def percentile_s(self, q: int) -> float:
        return percentile(list(self.firsts_ns), q) / NS_PER_S

    @property
    def first_new_s(self) -> float:
        """When the first token of a new instance was there."""
        return self.new_firsts_ns[0] / NS_PER_S

    @property
    def device_s(self) -> float:
        return self.run.device_ns() / NS_PER_S


@functools.cache
def play(scene: Scene, system: str, seed: int) -> Ramp:
    """The scene as that system. Requests that fail have no first token."""
    config = scene.config(system)
    rows = [TraceRow(_BURST_AFTER_NS, scene.prompt_tokens, 1)] * scene.requests
    lead = lead_ns(config)
    burst_ns = lead + _BURST_AFTER_NS
    run, team_ns = recorded(
        functools.partial(run_pool, config, {scene.preset: rows}, lead, seed),
        lambda lines: _team_ns(lines, burst_ns),
    )
    lines = [line for line in run.result.scales if line.decided_ns >= burst_ns and line.loads]
    grown = min(lines, key=lambda line: line.decided_ns)
    loaded_ns = [load.loaded_ns for load in grown.loads if load.loaded_ns is not None]
    new = {load.worker: None for load in grown.loads}
    answered = [r for r in run.result.requests if r.token_ns]
    return Ramp(
        scene=scene,
        run=run,
        firsts_ns=tuple(sorted(r.token_ns[0] - burst_ns for r in answered)),
        new_firsts_ns=tuple(sorted(r.token_ns[0] - burst_ns for r in answered if r.worker in new)),
        full_ns=max(loaded_ns) - burst_ns,
        team_ns=team_ns,
    )


# -- helpers --------------------------------------------------------------------------------------


def _team_ns(lines: Iterable[AnyLine], from_ns: int) -> int:
    """Members · (end - ready), over all teams. A team is over when the first member leaves it."""
    total = 0
    teams: dict[Team, int] = {}
    duties: dict[int, Team] = {}
    for line in lines:
        if not isinstance(line, StepLine) or line.now_ns < from_ns:
            continue
        for command in line.commands:
            if not isinstance(command, ChangeDuty):
                continue
            duty = command.duty
            left = duties.pop(duty.instance, None)
            if left is not None and left != duty.team and left in teams:
                total += len(left.members) * (line.now_ns - teams.pop(left))
            if duty.team is not None:
                duties[duty.instance] = duty.team
                teams.setdefault(duty.team, line.now_ns)
    return total
