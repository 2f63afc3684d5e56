"""Teams of loading instances in pools without chance, under all checks of the simulator."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path

import pytest
from msgspec.structs import replace
from worlds import MIB, MS, Row, make_config, make_device, make_model

from effort import examples
from livescale.batching.live.live_batch import TEAM_ENDS, LiveLimits
from livescale.latency.work import LinearLatency
from livescale.messages.commands import ChangeDuty
from livescale.messages.events import HoldingCompleted, TeamBroke
from livescale.sim.base.config import FaultConfig, ModelChange, SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.bindings import LateBinding
from livescale.values.routes import Team
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import InstanceId, Outcome, WorkerRef

S = 1_000 * MS


def config_with(strategy: str, layers: int = 34, sources: int = 2) -> SimConfig:
    """`sources` instances serve; at 4 s eight are wanted. A load takes about 1.2 s."""
    spec = make_model("m", layers, 68 // layers * MIB)
    policy = ModelPolicy(spec, instances_min=sources, instances_max=sources)
    config = make_config((policy,), workers=8)
    controller = replace(
        config.controller,
        multicast="binomial",
        teams=strategy,
        chunk_bytes=64 << 10,
        binding=LateBinding(ahead_tokens_max=32, run_tokens_max=16),
    )
    return replace(
        config,
        controller=controller,
        devices=(make_device(64 * MIB),) * 8,
        latency={"": LinearLatency(2 * MS, MS)},
        run_tokens_max=16,
        changes=(ModelChange(4 * S, changed=replace(policy, instances_min=8, instances_max=8)),),
    )


WELL = frozenset([Outcome.FINISHED])


def play(config: SimConfig, seed: int = 0, outcomes: Set[Outcome] = WELL) -> list[StepLine]:
    """All requests end as they may."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        result = simulate([Row(3 * S, 16, 1)] * 600, config, seed, file)
        file.flush()
        lines = list(read_record(Path(file.name)))
    assert {r.outcome for r in result.requests} <= outcomes
    return [line for line in lines if isinstance(line, StepLine)]


def told(steps: Sequence[StepLine]) -> list[ChangeDuty]:
    return [c for step in steps for c in step.commands if isinstance(c, ChangeDuty)]


def teams_of(strategy: str) -> list[Team]:
    """Play it; all requests end well."""
    teams = [c.duty.team for c in told(play(config_with(strategy))) if c.duty.team]
    return list({team.number: team for team in teams}.values())


def test_a_leader_with_all_layers_leads_until_all_members_have_them() -> None:
    """It holds what all members compute next, and the rule on single instances allows that."""
    assert teams_of("cover")


def test_pairs_are_of_both_sources_though_other_pairs_began_before() -> None:
    """Receivers of one source may be joined by one that has its team already."""
    teams = teams_of("pairs")
    assert [len(team.members) for team in teams] == [2, 2, 2]


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["pairs", "cover"])
def test_a_team_ends_where_a_link_breaks_and_the_two_are_in_no_team_again(strategy: str) -> None:
    """All others are as they were: whoever is left can be in another team."""
    faults = FaultConfig(line_loss_permille=3, link_ns=50 * MS, until_ns=6 * S)
    config = replace(config_with(strategy), faults=faults)
    ended = again = 0
    for seed in range(examples(8)):
        steps = play(config, seed)
        apart: set[frozenset[WorkerRef]] = set()
        members: dict[int, list[InstanceId]] = {}
        over: set[InstanceId] = set()
        for step in steps:
            broke = [event for event in step.events if isinstance(event, TeamBroke)]
            known = [event for event in broke if event.team in members]
            for duty in (command.duty for command in told([step])):
                if duty.team is None:
                    continue
                workers = [member.partner.worker for member in duty.team.members]
                assert not {*map(frozenset, itertools.combinations(workers, 2))} & apart
                again += duty.instance in over
                members[duty.team.number] = [m.partner.instance for m in duty.team.members]
            for event in known:
                left = {c.duty.instance for c in told([step]) if c.duty.team is None}
                assert left >= {*members.pop(event.team)}
                over |= left
            apart |= {frozenset(event.between) for event in broke if event.between}
            ended += len(known)
    assert ended
    assert again


@pytest.mark.more
def test_no_rule_breaks_when_lines_workers_and_the_controller_are_lost() -> None:
    """Every team of the swarm's worlds is chance; here each seed has some. In 111 an instance that
    left a team had more to report, and did nothing but wake up for the rest of the load."""
    broke = 0
    for seed in (111, *range(examples(40))):
        faults = FaultConfig(
            line_loss_permille=[0, 3, 30][seed % 3],
            link_ns=50 * MS,
            worker_losses=seed % 4,
            controller_restarts=seed % 5 // 2,
            late_permille=100 * (seed % 2),
            late_ns_max=20 * MS,
            lost_permille=100 * (seed % 2),
            cancelled_permille=20,
            until_ns=6 * S,
        )
        strategy, end = ["pairs", "cover"][seed // 2 % 2], TEAM_ENDS[seed % len(TEAM_ENDS)]
        config = replace(config_with(strategy), faults=faults, live=LiveLimits(team_end=end))
        steps = play(config, seed, {Outcome.FINISHED, Outcome.CANCELLED, Outcome.FAILED})
        broke += sum(isinstance(event, TeamBroke) for step in steps for event in step.events)
    assert broke


@pytest.mark.parametrize("strategy", ["pairs", "cover"])
@pytest.mark.parametrize(
    ("layers", "sources", "teams"), [(3, 2, 0), (4, 2, 1), (34, 1, 0), (34, 5, 1), (34, 7, 0)]
)
def test_odd_sizes_serve_in_teams_or_without(
    strategy: str, layers: int, sources: int, teams: int
) -> None:
    """One decoder layer, which no two instances can share; two; one source; more sources than
    targets, and one target only."""
    steps = play(config_with(strategy, layers, sources))
    formed = {c.duty.team.number for c in told(steps) if c.duty.team is not None}
    assert len(formed) >= teams
    assert formed or not teams
    whole = [e for step in steps for e in step.events if isinstance(e, HoldingCompleted)]
    assert len(whole) == 8


@pytest.mark.parametrize("strategy", ["pairs", "cover"])
@pytest.mark.parametrize(("slow_mib", "has_teams"), [(62, True), (48, False), (6, False)])
def test_sources_of_different_speed(strategy: str, slow_mib: int, has_teams: bool) -> None:
    """Of two sources, 64 MiB a second and less. The plan that ends first is taken, and with one
    source that is 18 steps in place of 17: from 17 / 18 of the rate on both are read."""
    config = config_with(strategy)
    slow = replace(config.devices[0], uplink_bytes_per_s=slow_mib * MIB)
    commands = told(play(replace(config, devices=(slow, *config.devices[1:]))))
    assert any(command.duty.team is not None for command in commands) == has_teams
