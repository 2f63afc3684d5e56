"""Cores make up for replicas: less device time, and never more cores than a host may have."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from stage_worlds import BEGIN_NS, SERVICE_NS, TOKENS, StageRun, play, stage_world
from worlds import MS, Row

from effort import mostly_long
from livescale.messages.commands import AnyCommand, CoresDecided, ScaleDecided, SetCores
from livescale.messages.events import AnyEvent, CoresChanged
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.checkers.invariants import InvariantBroken
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.scaling_policies import CoresModel, StagesByQueue

MODEL = CoresModel(0.3, 0.7)
SLO_NS = 14 * SERVICE_NS
HOSTS, CORES_MAX = 3, 8
PHASES = ((0.3, 4), (0.8, 15), (0.3, 6))


def even_load(phases: tuple[tuple[float, int], ...] = PHASES) -> list[Row]:
    """Per phase, how many come in the time of a service at an even stage, evenly spaced, and for
    how many seconds."""
    at_ns, rows = BEGIN_NS, []
    for rate, seconds in phases:
        end_ns = at_ns + seconds * 1000 * MS
        while at_ns < end_ns:
            rows.append(Row(at_ns, TOKENS, 1))
            at_ns += int(SERVICE_NS / rate)
    return rows


def world(model: CoresModel | None, *, works: bool = True, **faults: int) -> SimConfig:
    """Four stages, one of them four times as slow, on three hosts."""
    policy = StagesByQueue(slo_ns=SLO_NS, cores=model, cores_max=CORES_MAX)
    config = stage_world(policy, workers=12, stages=4, slow="m/1", factor=4.0)
    hosts = tuple(replace(d, host=f"h{n % HOSTS}") for n, d in enumerate(config.devices))
    cores = {"": MODEL} if works else {}
    return replace(config, devices=hosts, cores=cores, faults=FaultConfig(**faults))


@functools.cache
def played(model: CoresModel | None) -> StageRun:
    return play(world(model), even_load(), SLO_NS)


@dataclass(frozen=True)
class Step:
    now_ns: int
    events: tuple[AnyEvent, ...]
    commands: tuple[AnyCommand, ...]


def steps_of(config: SimConfig, seed: int = 0) -> list[Step]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        with path.open("wb") as file:
            result = simulate({"m": even_load()}, config, seed, file)
        assert all(line.token_ns for line in result.requests)
        lines = [line for line in read_record(path) if isinstance(line, StepLine)]
    return [Step(line.now_ns, line.events, line.commands) for line in lines]


def test_with_cores_the_smooth_reclaim_uses_less_device_time() -> None:
    """At the same SLO. How much less is in benchmarks/RESULTS.md."""
    without, own = played(None), played(MODEL)
    assert own.device_s < without.device_s
    assert own.good >= without.good


def test_cores_come_before_a_replica_goes_and_go_back_in_the_end() -> None:
    """With a reason and figures, and one answer for each order."""
    told: dict[object, int] = {}
    ordered: Counter[object] = Counter()
    reclaims = 0
    for step in steps_of(world(MODEL)):
        for event in step.events:
            if isinstance(event, CoresChanged):
                told[event.worker] = event.cores
                ordered[event.worker] -= 1
        for command in step.commands:
            if isinstance(command, SetCores):
                ordered[command.worker] += 1
                assert ordered[command.worker] == 1
            elif isinstance(command, CoresDecided) and command.reason == "more_cores":
                assert {
                    "sojourn_after_ns",
                    "target_ns",
                    "served_per_1000_s",
                } <= command.values.keys()
                assert command.to_cores > command.from_cores
            elif isinstance(command, ScaleDecided) and command.reason == "even_arrivals":
                wanted = command.values["to_cores"]
                if wanted > command.values["cores"]:
                    reclaims += 1
                    ready = sum(cores >= wanted for cores in told.values())
                    assert ready >= command.values["to_replicas"]
    assert reclaims > 0
    assert max(told.values()) == 1, "all have what they began with"
    assert not any(ordered.values())


@pytest.mark.parametrize("seed", mostly_long(range(2, 9), short=[2]))
@pytest.mark.parametrize(
    "faults",
    [
        {"worker_losses": 3, "until_ns": 20_000 * MS},
        {"controller_restarts": 2, "late_permille": 300, "late_ns_max": 300 * MS},
        {"takeovers": 2, "takeover_ns_max": 1_000 * MS},
        {"silences": 2, "silence_ns_max": 400 * MS, "lost_permille": 100},
    ],
    ids=["workers", "controllers", "takeovers", "silences"],
)
def test_whatever_happens_no_host_has_too_many(faults: dict[str, int], seed: int) -> None:
    """The checkers look at each order, at each answer, and at what workers have in the end."""
    steps = steps_of(world(MODEL, **{"until_ns": 20_000 * MS, **faults}), seed=seed)
    assert any(isinstance(command, SetCores) for step in steps for command in step.commands)


def test_workers_that_have_no_use_for_cores_are_asked_once_and_keep_their_replicas() -> None:
    steps = steps_of(world(MODEL, works=False))
    asked = Counter(c.worker for step in steps for c in step.commands if isinstance(c, SetCores))
    assert asked
    assert set(asked.values()) == {1}
    told = [e for step in steps for e in step.events if isinstance(e, CoresChanged)]
    assert {event.cores for event in told} == {1}
    scaled = [c for step in steps for c in step.commands if isinstance(c, ScaleDecided)]
    assert not any(c.values.get("to_cores", 0) > c.values.get("cores", 1) for c in scaled)


def test_the_checker_sees_a_host_with_too_many() -> None:
    """The first stage's policy is the line's; what others allow is checked, too."""
    config = world(MODEL)
    first, *others = config.controller.models
    policy = StagesByQueue(slo_ns=SLO_NS, cores=MODEL, cores_max=4)
    told = (first, *(replace(other, scaling=policy) for other in others))
    broken = replace(config, controller=replace(config.controller, models=told))
    with pytest.raises(InvariantBroken, match="no more cores"):
        play(broken, even_load(), SLO_NS)
