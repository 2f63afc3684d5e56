"""Lines of stages in the simulator: one of them slow, requests that end with their first token."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from worlds import MIB, MS, Row, make_config, make_model

from livescale.clusters.topology import Device, Host
from livescale.latency.work import LinearLatency
from livescale.messages.commands import ScaleDecided, StartHolding
from livescale.messages.events import HoldingCompleted
from livescale.sim.base.config import SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.history.device_time import device_time
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.copy_strategies import Placement
from livescale.values.scaling_policies import ModelPolicy, StagesByQueue
from livescale.values.stages import even_stages, stage_specs
from livescale.values.types import HoldingId

SERVICE_NS = 20 * MS
TOKENS = 256
"""Of a prompt, which fills a Run."""
BEGIN_NS = 3_000 * MS


@dataclass(frozen=True)
class StageRun:
    """What came of a run: `good` requests had their token in time, instances were there for
    `device_s` while requests came."""

    good: int
    requests: int
    device_s: float
    scaled: tuple[tuple[int, ScaleDecided], ...]

    @property
    def good_per_device_s(self) -> float:
        return self.good / self.device_s

    @property
    def grown(self) -> dict[str, int]:
        """By stage that grew beyond one replica: the most it came to."""
        found: dict[str, int] = {}
        for _, one in self.scaled:
            if one.to_instances > max(one.from_instances, 1):
                found[one.model] = max(found.get(one.model, 0), one.to_instances)
        return found


def stage_world(
    policy: StagesByQueue, workers: int, stages: int = 8, slow: str = "m/3", factor: float = 1.5
) -> SimConfig:
    """Stages of `SERVICE_NS` per Run but for a slow one. A load takes half a second."""
    spec = replace(make_model("m", 2 * stages, 4 * MIB), row_bytes_per_token=256)
    policies = tuple(
        ModelPolicy(stage, 1, workers, scaling=policy)
        for stage in stage_specs(spec, even_stages(spec, stages))
    )
    per_token_ns = SERVICE_NS // TOKENS
    return replace(
        make_config(policies, workers=workers),
        latency={
            "": LinearLatency(0, per_token_ns),
            slow: LinearLatency(0, int(per_token_ns * factor)),
        },
        load_ns=500 * MS,
    )


def burst(phases: Sequence[tuple[float, int]], seed: int = 1) -> list[Row]:
    """Requests at random (Poisson) times: per phase, how many come in the time of a service at an
    even stage, and for how many seconds."""
    rng, at_ns, rows = random.Random(seed), BEGIN_NS, []
    for rate, seconds in phases:
        end_ns = at_ns + seconds * 1000 * MS
        while rate and (at_ns := at_ns + int(rng.expovariate(rate / SERVICE_NS))) < end_ns:
            rows.append(Row(at_ns, TOKENS, 1))
        at_ns = end_ns
    return rows


def play(config: SimConfig, rows: Sequence[Row], slo_ns: int, seed: int = 0) -> StageRun:
    """Run the rows. All requests have to be answered."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        with path.open("wb") as file:
            result = simulate({"m": rows}, config, seed, file)
        history = read_history(read_record(path))
        scaled = [
            (line.now_ns, command)
            for line in read_record(path)
            if isinstance(line, StepLine)
            for command in line.commands
            if isinstance(command, ScaleDecided)
        ]
    good = [
        line
        for line in result.requests
        if line.token_ns and line.token_ns[0] - line.due_ns <= slo_ns
    ]
    held_ns = device_time(history, rows[0].arrival_ns, rows[-1].arrival_ns).held_ns
    return StageRun(len(good), len(result.requests), held_ns / 1e9, tuple(scaled))


# -- hosts with memory and storage ----------------------------------------------------------------

MEMORY_NS, STORAGE_NS = 800 * MS, 5_600 * MS
"""What a load of one stage takes from the host's memory and from its storage (QUART §4.2)."""


@dataclass(frozen=True)
class Start:
    """An instance of a stage was ordered at `at_ns` and served after `load_ns`."""

    at_ns: int
    stage: str
    load_ns: int
    reason: str


def hosted_world(
    policy: StagesByQueue,
    placement: Placement,
    stage_placement: str,
    hosts: int,
    per_host: int,
    slow: Mapping[str, float],
    stages: int,
) -> SimConfig:
    """Hosts whose memory has room for two stages below 85 %. Devices read their own host's memory,
    else its storage, and keep nothing when they are released."""
    config = stage_world(policy, hosts * per_host, stages)
    spec = replace(make_model("m", 2 * stages + 2, 4 * MIB), row_bytes_per_token=256)
    specs = stage_specs(spec, even_stages(spec, stages))
    size_bytes = specs[1].size_bytes
    names = [f"host-{number}" for number in range(hosts)]
    controller = replace(
        config.controller,
        models=tuple(ModelPolicy(one, 1, hosts * per_host, scaling=policy) for one in specs),
        placement=placement,
        stage_placement=stage_placement,
        multicast="host",
        warm_spares="off",
        chunk_bytes=MIB,
        remote_storage_bytes_per_s=None,
        agents_expected=hosts,
    )
    per_token_ns = SERVICE_NS // TOKENS
    slower = {name: LinearLatency(0, int(per_token_ns * factor)) for name, factor in slow.items()}
    return replace(
        config,
        controller=controller,
        devices=tuple(
            Device("sim", name, "leaf", max(one.size_bytes for one in specs), 1 << 26)
            for name in names
            for _ in range(per_host)
        ),
        hosts=tuple(
            Host(
                name,
                "leaf",
                int(size_bytes * 2.2 / 0.85),
                device_bytes_per_s=size_bytes * 1000 * MS // MEMORY_NS,
                storage_bytes_per_s=size_bytes * 1000 * MS // STORAGE_NS,
            )
            for name in names
        ),
        latency={"": LinearLatency(0, per_token_ns), **slower},
        load_ns=None,
    )


def starts(config: SimConfig, loads: Mapping[str, Sequence[Row]], after_ns: int) -> list[Start]:
    """The instances of stages that were ordered from then on, in the order of their ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        with path.open("wb") as file:
            simulate(loads, config, 0, file)
        begun: dict[HoldingId, tuple[int, StartHolding]] = {}
        found = []
        for line in read_record(path):
            if not isinstance(line, StepLine):
                continue
            for event in line.events:
                at = begun.pop(event.holding, None) if isinstance(event, HoldingCompleted) else None
                if at is not None and at[0] >= after_ns and "/" in at[1].model:
                    load_ns = line.now_ns - at[0]
                    found.append(Start(at[0], at[1].model, load_ns, at[1].reason))
            for command in line.commands:
                if isinstance(command, StartHolding) and command.duty is not None:
                    begun[command.holding] = line.now_ns, command
    return found
