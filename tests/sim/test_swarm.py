"""Swarm: random worlds with faults. Every request ends, no rule breaks, and records replay."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from effort import examples, mostly_long
from livescale.config.variation import variation_weights
from livescale.main import main
from livescale.sim.base.run_notes import SimResult
from livescale.sim.swarm.fabrics import with_fabric
from livescale.sim.swarm.seeds import (
    draw_lone_world,
    draw_narrow_world,
    draw_world,
    run_seed,
    run_world,
)
from livescale.sim.swarm.worlds import SwarmWorld, draw_flat_world
from livescale.telemetry.record.record import read_record
from livescale.telemetry.replay import replay
from livescale.values.scaling_policies import StagesByQueue, StagesByRate
from livescale.values.types import Outcome

SEEDS = 50
PER_TEST = 10
_SEEDS_FILE = Path(__file__).parent / "seeds.txt"


def run(world: SwarmWorld, record_file: io.BytesIO | None = None) -> SimResult:
    """Simulate; a failure names the seed, which is the bug report."""
    try:
        return run_world(world, record_file)
    except Exception as error:
        pytest.fail(f"seed {world.seed}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("first", mostly_long(range(0, SEEDS, PER_TEST), [0]))
def test_random_worlds_come_to_rest(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        run(draw_world(seed))


def kept_seeds() -> list[int]:
    lines = _SEEDS_FILE.read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


@pytest.mark.long
@pytest.mark.timeout(1800)  # worlds that were hard
@pytest.mark.parametrize("first", range(0, len(kept_seeds()), PER_TEST))
def test_seeds_that_once_failed(first: int) -> None:
    """Some of them before there were clusters around their worlds, live instances in them, wide
    bounds, or several gateways: these run without, too."""
    for seed in kept_seeds()[first : first + PER_TEST]:
        flat = draw_flat_world(seed)
        worlds = [flat, with_fabric(flat), draw_narrow_world(seed), draw_lone_world(seed)]
        worlds.append(draw_world(seed))
        for number, world in enumerate(worlds):
            if world not in worlds[:number]:
                run(world)


def test_worlds_are_of_many_kinds() -> None:
    configs = [draw_world(seed).config for seed in range(SEEDS)]
    faults = [config.faults for config in configs]
    assert any(config.controller.leaves for config in configs)
    assert any(device.group for config in configs for device in config.devices)
    assert any(policy.instances_min == 0 for config in configs for policy in config.policies)
    assert any(policy.spec.tp_size > 1 for config in configs for policy in config.policies)
    assert len({type(config.controller.placement) for config in configs}) == 5
    assert len({config.controller.multicast for config in configs}) > 5
    orders = {config.controller.live_order for config in configs}
    assert orders == {"zigzag", "best-effort", "overlap", "stop-the-world"}
    for kind in ("worker", "agent", "host", "gateway"):
        assert any(getattr(fault, f"{kind}_losses") for fault in faults), kind
    assert {len(config.client_weights) for config in configs} == {1, 2, 3, 4, 5}
    assert any(len(set(config.client_weights)) > 1 for config in configs)
    assert {config.gateways for config in configs} == {1, 2, 3}
    assert any(config.queue_timeout_ns for config in configs)
    assert any(fault.pair_loss_permille for fault in faults)
    assert any(fault.line_loss_permille for fault in faults)
    stays = [stay for config in configs for stay in config.stays]
    assert any(stay.from_ns for stay in stays)
    assert any(stay.until_ns is not None for stay in stays)
    assert any(config.demand for config in configs)
    assert any(not device.reads_files for config in configs for device in config.devices)
    for kind in (
        "slow_links",
        "cut_links",
        "corruptions",
        "bad_files",
        "refusals",
        "clock_jumps",
        "stalls",
        "controller_restarts",
    ):
        assert any(getattr(fault, kind) for fault in faults), kind
    assert any(fault.late_permille and fault.lost_permille for fault in faults)


def test_stages_scale_in_many_ways() -> None:
    worlds = [draw_world(seed).config.policies for seed in range(1000)]
    stages = [next((p for p in world if p.spec.stage is not None), None) for world in worlds]
    policies = [stage.scaling for stage in stages if stage is not None]
    by_queue = [policy for policy in policies if isinstance(policy, StagesByQueue)]
    assert len(by_queue) < len(policies)
    assert any(isinstance(policy, StagesByRate) for policy in policies)
    assert {policy.weights for policy in by_queue} == {None, variation_weights()}
    for cores in (True, False):
        of_kind = [policy for policy in by_queue if (policy.cores is not None) == cores]
        assert any(policy.replicas_total is None for policy in of_kind)
        assert any(policy.replicas_total is not None for policy in of_kind)


def test_only_worlds_with_stages_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--stages", "--seeds", "2", "--jobs", "1"]) == 0
    assert "2 of 2 seeds, 0 violations" in capsys.readouterr().out


def test_every_model_can_come_to_an_instance_beside_the_least_numbers_of_the_others() -> None:
    """The least numbers of a world are never given up: beside them a request of any other model
    would wait for ever. Limits that change are drawn with that in mind."""
    raised = 0
    for seed in range(600, 800):
        config = draw_world(seed).config
        changed = [change.changed for change in config.changes if change.changed is not None]
        policies = [*config.policies, *changed]
        names = {policy.spec.name: policy.spec.tp_size for policy in policies}
        least = {
            name: max(p.instances_min for p in policies if p.spec.name == name) for name in names
        }
        for wanted in names:
            needed = sum(
                tp_size * max(least[name], int(name == wanted)) for name, tp_size in names.items()
            )
            assert needed <= config.workers, f"seed {seed}: {wanted} in {config.workers} workers"
        began = {policy.spec.name: policy.instances_min for policy in config.policies}
        raised += any(policy.instances_min > began[policy.spec.name] for policy in changed)
    assert raised, "some world raises a least number"


def test_without_faults_and_with_room_every_request_finishes() -> None:
    checked = 0
    for seed in range(4 * SEEDS):
        world = draw_world(seed)
        config = world.config
        if (
            config.changes
            or config.faults.until_ns
            or config.queue_requests_max < 1000
            or config.queue_timeout_ns is not None
            or config.kv_blocks != 512
        ):
            continue
        checked += 1
        outcomes = {line.outcome for line in run(world).requests}
        assert outcomes <= {Outcome.FINISHED}, f"seed {seed}"
    assert checked > 3


@pytest.mark.long
def test_most_worlds_without_poison_serve_most_of_their_requests() -> None:
    """Poison fails, and so do the requests of lost gateways, and those that may not wait for long:
    in some worlds these are many."""
    worlds = [draw_world(seed) for seed in range(200)]
    patient = [world for world in worlds if world.config.queue_timeout_ns is None]
    faults = {world.seed: world.config.faults for world in patient}
    deadly = {
        seed: f.raising_permille or f.killing_permille or f.gateway_losses
        for seed, f in faults.items()
    }
    seeds = [seed for seed, count in deadly.items() if not count]
    outcomes = [run_seed(seed) for seed in seeds]
    assert not any(outcome.error for outcome in outcomes)
    above_tenth = [o.seed for o in outcomes if o.failed * 10 > o.requests]
    assert len(above_tenth) * 8 < len(outcomes), above_tenth
    assert any(outcome.failed for outcome in outcomes), "but some must fail"


@pytest.mark.more
def test_records_replay(tmp_path: Path) -> None:
    lives = runs = 0
    for seed in range(0, 4 * SEEDS, 4 * SEEDS // examples(32, least=8)):
        file = io.BytesIO()
        result = run(draw_world(seed), file)
        path = tmp_path / f"{seed}.jsonl"
        path.write_bytes(file.getvalue())
        replayed = replay(read_record(path))
        assert replayed.steps == result.steps, f"seed {seed}"
        lives += replayed.lives
        runs += 1
    assert lives > runs, "some world restarts its controller"


@pytest.mark.usefixtures("machine")
def test_the_command_counts_the_same_with_any_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        arguments = ["--seeds", "6", "--first", "70", "--jobs", jobs, "--json", str(path)]
        assert main(["swarm", *arguments]) == 0
        figures = json.loads(path.read_text())
        assert figures.pop("seconds") > 0
        found.append(figures)
    assert found[0] == found[1]
    assert found[0]["seeds"] == 6
    assert found[0]["violations"] == 0
    assert found[0]["events"] > 0
    assert 0 <= found[0]["failed"] < found[0]["requests"]
    assert found[0]["failed_unexplained"] == 0
    assert 0 <= found[0]["worlds_above_tenth_failed"] <= 6
    printed = capsys.readouterr().out
    assert "6 of 6 seeds, 0 violations" in printed
    assert f"{found[0]['failed']} of {found[0]['requests']} requests failed, 0 without" in printed
