"""Teams of instances that each load from their own host's memory (λScale §4.4, warm start)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from livescale.lab.reproduce.base.saturated import Scene
from livescale.load.traces import TraceRow
from livescale.messages.commands import ChangeDuty
from livescale.messages.events import HoldingCompleted
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.types import Outcome

S = 1_000_000_000


def teams_and_loads(scene: Scene, **controller: object) -> tuple[list[int], int, float]:
    """When each team was formed and the first new instance had everything, since the burst, and the
    mean time to first tokens, all in ns."""
    config = scene.config("lambda-memory")
    config = replace(config, controller=replace(config.controller, **controller))
    rows = [TraceRow(S, scene.prompt_tokens, 1)] * scene.requests
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        run = run_pool(config, {scene.preset: rows}, lead_ns(config), 0, file)
        file.flush()
        steps = [line for line in read_record(Path(file.name)) if isinstance(line, StepLine)]
    burst_ns = run.started_ns + S
    assert {line.outcome for line in run.result.requests} == {Outcome.FINISHED}
    teams: dict[int, int] = {}
    whole = []
    for step in steps:
        for command in step.commands:
            if isinstance(command, ChangeDuty) and command.duty.team is not None:
                teams.setdefault(command.duty.team.number, step.now_ns - burst_ns)
        is_whole = any(
            isinstance(e, HoldingCompleted) and not e.holding.member.is_agent for e in step.events
        )
        whole += [step.now_ns - burst_ns] if is_whole and step.now_ns > burst_ns else []
    firsts = [line.token_ns[0] - burst_ns for line in run.result.requests]
    return list(teams.values()), whole[0], sum(firsts) / len(firsts)


@pytest.mark.parametrize("serving", [0, 1])
@pytest.mark.parametrize("multicast", ["host-k-way", "binomial"])
def test_a_team_is_there_long_before_any_copy_has_been_read(multicast: str, serving: int) -> None:
    """In plain order no instance has what another lacks, so no team is formed. Also where an
    instance serves, whose device is one more source of a multicast."""
    scene = Scene(serving, hosts=8, requests=300, in_memory=True)
    plain, plain_ns, plain_mean_ns = teams_and_loads(scene, multicast="host")
    teams, whole_ns, mean_ns = teams_and_loads(scene, multicast=multicast)
    assert not plain
    assert teams[0] < whole_ns / 4
    assert whole_ns < plain_ns * 1.05
    assert mean_ns < plain_mean_ns


def test_without_teams_the_plan_is_what_it_was() -> None:
    scene = Scene(0, hosts=4, requests=40, in_memory=True)
    assert teams_and_loads(scene, teams=None)[0] == []


def test_instances_of_several_ranks_are_a_team() -> None:
    """Two nodes with 70B in memory, four ranks each: the team is there at half of the load."""
    scene = Scene(
        0,
        hosts=2,
        requests=60,
        in_memory=True,
        preset="llama-2-70b",
        tp_size=4,
        cluster="lambdascale-2",
    )
    plain, plain_ns, plain_mean_ns = teams_and_loads(scene, multicast="host")
    teams, whole_ns, mean_ns = teams_and_loads(scene)
    assert not plain
    assert teams[0] < whole_ns * 0.6
    assert whole_ns < plain_ns * 1.05
    assert mean_ns < plain_mean_ns
