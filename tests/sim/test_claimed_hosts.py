"""Hosts that a pool asks its cluster for, in the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from worlds import MIB, MS, Row, make_config, make_model

from livescale.control.cluster.host_ledger import LIVES_PER_START
from livescale.messages.events import WorkerJoined, WorkerLost
from livescale.sim.base.config import FaultConfig, HostDemand, SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import WorkerRef

_S = 1000 * MS
DEMAND = HostDemand(("b", "c"), idle_ns=2 * _S, look_ns=100 * MS, placing_ns=300 * MS)
"""Two hosts with two workers each, beside one with a single worker that is always there."""


def world(demand: HostDemand = DEMAND, **faults: int) -> SimConfig:
    policy = ModelPolicy(make_model("m", 8, 4 * MIB), 1, 5, 10_000, 512, idle_ns=500 * MS)
    config = make_config((policy,), workers=5)
    hosts = ("a", *(host for host in demand.hosts for _ in range(2)))
    devices = [
        replace(device, host=host) for device, host in zip(config.devices, hosts, strict=True)
    ]
    controller = replace(config.controller, workers_expected=1)
    return replace(
        config,
        controller=controller,
        devices=tuple(devices),
        demand=demand,
        faults=FaultConfig(**faults),
    )


def bursts(*starts_s: int) -> list[Row]:
    """Each is more than one worker computes in ten seconds."""
    return [Row(at_s * _S + n * 5 * MS, 500, 20) for at_s in starts_s for n in range(400)]


def joins_and_losses(
    config: SimConfig, rows: list[Row], path: Path
) -> list[WorkerJoined | WorkerLost]:
    with path.open("wb") as file:
        result = simulate({"m": rows}, config, 0, file)
    assert len(result.requests) == len(rows)
    return [
        event
        for line in read_record(path)
        if isinstance(line, StepLine)
        for event in line.events
        if isinstance(event, WorkerJoined | WorkerLost)
    ]


def test_hosts_come_for_a_burst_and_go_after_it(tmp_path: Path) -> None:
    """And for the next one again, under the same numbers, in later lives."""
    found = joins_and_losses(world(), bursts(5, 60), tmp_path / "record.jsonl")
    joined = [event.worker for event in found if isinstance(event, WorkerJoined)]
    lost = [event.worker for event in found if isinstance(event, WorkerLost)]
    first = [WorkerRef(number) for number in range(1, 5)]
    again = [WorkerRef(number, LIVES_PER_START) for number in range(1, 5)]
    assert sorted(joined) == sorted([WorkerRef(0), *first, *again])
    assert sorted(lost) == sorted([*first, *again])


def test_the_least_number_of_hosts_is_there_without_requests(tmp_path: Path) -> None:
    found = joins_and_losses(world(replace(DEMAND, hosts_min=1)), [], tmp_path / "record.jsonl")
    assert sorted(event.worker for event in found) == [WorkerRef(number) for number in range(3)]


@pytest.mark.parametrize("seed", range(5))
def test_controllers_that_come_and_go_lose_no_host_and_no_request(seed: int) -> None:
    config = world(controller_restarts=3, worker_losses=2, until_ns=30 * _S)
    rows = bursts(5)
    assert len(simulate({"m": rows}, config, seed).requests) == len(rows)
