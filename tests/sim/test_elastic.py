"""Elastic planes in the simulator: host copies, zero instances, models that share workers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from worlds import MIB, MS, Row, make_config, make_model

from livescale.clusters.topology import Host
from livescale.messages.commands import ModelGone, ScaleDecided, StartHolding
from livescale.messages.events import InstanceReported
from livescale.sim.base.config import FaultConfig, ModelChange, SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.swarm.worlds import changed
from livescale.sim.world.simulate import simulate
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import AnyLine, ScaleLine, StepLine, read_record
from livescale.telemetry.timeline import host_copy_use
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.scaling_policies import Bounds, ModelPolicy
from livescale.values.types import FromStorage, Outcome

_S = 1000 * MS
MODEL = make_model("m", 8, 4 * MIB)
"""48 MiB: 47 ms on a link, 188 ms from storage."""


def with_hosts(
    config: SimConfig,
    hosts: int,
    placement: Placement,
    multicast: str = "auto",
    memory_bytes: int = 1 << 30,
) -> SimConfig:
    """The world with that many hosts, among which its workers are dealt."""
    controller = msgspec.structs.replace(
        config.controller,
        agents_expected=hosts,
        placement=placement,
        multicast=multicast,
        chunk_bytes=MIB,
    )
    named = tuple(Host(f"host-{n}", "leaf", memory_bytes) for n in range(hosts))
    return msgspec.structs.replace(config, controller=controller, hosts=named)


def lazy(name: str, idle_ns: int = 300 * MS, most: int = 4) -> ModelPolicy:
    """A model that may have no instance at all."""
    spec = msgspec.structs.replace(MODEL, name=name)
    return ModelPolicy(spec, 0, most, 10_000, 512, idle_ns=idle_ns)


def run(
    rows: Mapping[str, Sequence[Row]], config: SimConfig, path: Path, seed: int = 0
) -> tuple[SimResult, list[AnyLine]]:
    file = io.BytesIO()
    result = simulate(rows, config, seed, file)
    path.write_bytes(file.getvalue())
    return result, list(read_record(path))


def commands_of(lines: list[AnyLine], kind: type) -> list[object]:
    steps = [line for line in lines if isinstance(line, StepLine)]
    return [c for line in steps for c in line.commands if isinstance(c, kind)]


def copies_of(lines: list[AnyLine]) -> list[StartHolding]:
    """Orders to host agents."""
    return [c for c in commands_of(lines, StartHolding) if c.duty is None]


def serving_at(result: SimResult, model: str, now_ns: int) -> int:
    """Instances of the model that serve at that time."""
    counts = [c for c in result.instances if c.model == model and c.now_ns <= now_ns]
    return counts[-1].serving if counts else 0


def waves(models: int, until_s: int = 12, requests: int = 40) -> dict[str, list[Row]]:
    """Every model has a burst now and then, each at another time."""
    rows: dict[str, list[Row]] = {}
    for n in range(models):
        starts = range(1 + n, until_s, models)
        rows[f"m{n}"] = [
            Row(start * _S + k * 10 * MS, 200, 10) for start in starts for k in range(requests)
        ]
    return rows


def test_one_host_copy_per_model_at_every_moment_and_a_cache_has_more(tmp_path: Path) -> None:
    """TARGETS B28 (BlitzScale, Figure 19): O(1) copies per model, with losses of hosts too."""
    models, hosts = 4, 3
    policies = tuple(lazy(f"m{n}") for n in range(models))
    faults = FaultConfig(agent_losses=3, worker_losses=2, until_ns=8 * _S)
    config = make_config(policies, workers=6, faults=faults)
    spread = with_hosts(config, hosts, SpreadCopies())
    rows = waves(models, until_s=8, requests=100)
    result, lines = run(rows, spread, tmp_path / "spread.jsonl")
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
    uses = host_copy_use(read_history(lines))
    assert {use.copies_max for use in uses.values()} == {1}
    # Hosts that were lost cost some time without a copy.
    assert all(use.copies_mean > 0.9 for use in uses.values())
    assert all(use.bytes_max == MODEL.size_bytes for use in uses.values())

    cached = with_hosts(config, hosts, CacheCopies(20 * _S), "host")
    _, lines = run(rows, cached, tmp_path / "cache.jsonl")
    assert max(use.copies_max for use in host_copy_use(read_history(lines)).values()) > 1


@pytest.mark.long
def test_the_strategies_do_what_their_names_say(tmp_path: Path) -> None:
    policies = tuple(lazy(f"m{n}") for n in range(3))
    config = make_config(policies, workers=4)
    # Hosts share storage: all six copies are to be there before the first wave.
    faster = msgspec.structs.replace(config.controller, remote_storage_bytes_per_s=1 << 30)
    config = msgspec.structs.replace(config, controller=faster)
    # Where bytes come from is looked at: with warm spares most starts load none.
    config = changed(config, controller={"warm_spares": "off"})
    strategies: list[tuple[Placement, str]] = [
        (SpreadCopies(), "auto"),
        (AllCopies(), "host"),
        (CacheCopies(60 * _S), "host"),
        (CacheCopies(1 * MS), "host"),
        (NoCopies(), "storage"),
    ]
    from_storage = []
    for number, (placement, multicast) in enumerate(strategies):
        world = with_hosts(config, 2, placement, multicast)
        result, lines = run(waves(3), world, tmp_path / f"{number}.jsonl")
        assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
        loads = [c for c in commands_of(lines, StartHolding) if c.duty is not None]
        read = [load for load in loads if load.feeds[0].upstream == FromStorage()]
        from_storage.append(len(read) / len(loads))
        use = host_copy_use(read_history(lines))["m0"]
        if isinstance(placement, NoCopies):
            assert use.copies_max == 0
            assert not copies_of(lines)
        elif isinstance(placement, AllCopies):
            assert use.copies_max == 2
    spread, everywhere, cache, forgetful, none = from_storage
    assert (spread, everywhere, none) == (0, 0, 1)
    assert 0 < cache < forgetful, "a cache misses at first, and more when it forgets"


def test_a_full_cache_gives_up_what_was_used_least_recently(tmp_path: Path) -> None:
    policies = tuple(lazy(f"m{n}") for n in range(3))
    config = make_config(policies, workers=1)
    world = with_hosts(config, 1, CacheCopies(60 * _S), "host", 2 * MODEL.size_bytes)
    # Warm spares would be read no more.
    world = changed(world, controller={"warm_spares": "off"})
    _, lines = run(waves(3, until_s=7, requests=3), world, tmp_path / "lru.jsonl")
    assert {use.copies_max for use in host_copy_use(read_history(lines)).values()} == {1}
    assert len(copies_of(lines)) > 3


def test_to_zero_and_from_zero_and_the_record_shows_where_the_time_went(tmp_path: Path) -> None:
    config = with_hosts(make_config((lazy("m"),), workers=2), 2, SpreadCopies())
    # With warm spares the second start would load nothing.
    config = changed(config, controller={"warm_spares": "off"})
    rows = {"m": [Row(2 * _S, 100, 5), Row(6 * _S, 100, 5)]}
    result, lines = run(rows, config, tmp_path / "zero.jsonl")
    counts = [(c.now_ns, c.loading + c.serving + c.draining) for c in result.instances]
    assert counts[-1][1] == 0
    assert any(now_ns < 6 * _S and count == 0 for now_ns, count in counts if now_ns > 2 * _S)
    woken = [line for line in result.scales if line.to_instances > line.from_instances]
    assert [line.woken_by for line in woken] == ["m-0", "m-1"]
    for line, request in zip(woken, result.requests, strict=True):
        (load,) = line.loads
        assert load.upstream.startswith("h"), "from the host copy"
        assert line.strategy
        assert line.routes == (f"{load.upstream} -> {load.worker}",)
        phases = (request.queued_ns, line.asked_ns, line.decided_ns, line.planned_ns)
        later = (load.first_byte_ns, load.first_layer_ns, load.loaded_ns, load.first_token_ns)
        times = [ns for ns in (*phases, *later) if ns is not None]
        assert len(times) == 8
        assert times == sorted(times)
    assert not [c for c in copies_of(lines) if c.reason != "spread"]


@pytest.mark.parametrize("first_has_priority", [False, True])
def test_two_models_share_three_workers_under_opposite_bursts(
    tmp_path: Path, first_has_priority: bool
) -> None:
    """Each gets devices when it needs them, and nothing goes to and fro."""
    first = msgspec.structs.replace(lazy("a"), priority=int(first_has_priority))
    config = make_config((first, lazy("b")), workers=3)
    config = with_hosts(config, 2, SpreadCopies())
    bursts = 6
    rows = {
        name: [
            Row((4 * n + 2 + 2 * turn) * _S + k * 10 * MS, 200, 10)
            for n in range(bursts // 2)
            for k in range(120)
        ]
        for turn, name in enumerate("ab")
    }
    result, lines = run(rows, config, tmp_path / "bursts.jsonl")
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
    for turn, name in enumerate("ab"):
        for n in range(bursts // 2):
            start_ns = (4 * n + 2 + 2 * turn) * _S
            during = [
                c.serving
                for c in result.instances
                if c.model == name and start_ns <= c.now_ns < start_ns + 2 * _S
            ]
            assert max(during) >= 2, f"{name} grows in its burst {n}"
    # At most up to three, down to zero, and a few steps in between, per burst.
    decisions = commands_of(lines, ScaleDecided)
    assert len(decisions) <= 12 * bursts, len(decisions)
    assert any("makes room" in d.reason for d in decisions) or not first_has_priority


def test_what_outranks_gets_the_workers_and_the_other_keeps_one(tmp_path: Path) -> None:
    high = msgspec.structs.replace(lazy("high"), priority=1)
    config = with_hosts(make_config((high, lazy("low")), workers=3), 2, SpreadCopies())
    flood = [Row(2 * _S + k * 10 * MS, 400, 20) for k in range(500)]
    rows = {"low": flood, "high": [Row(r.arrival_ns + _S, 400, 20) for r in flood]}
    result, lines = run(rows, config, tmp_path / "rank.jsonl")
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
    assert serving_at(result, "low", 3 * _S) == 3
    for tenth in range(40, 60):
        at_ns = tenth * _S // 10
        now = (serving_at(result, "high", at_ns), serving_at(result, "low", at_ns))
        assert now == (2, 1), f"at {tenth / 10} s"
    reasons = [d.reason for d in commands_of(lines, ScaleDecided) if d.model == "low"]
    # Two leave; the backlog that asks for the second may come and go.
    assert 2 <= reasons.count("makes room for high") <= 4


def test_growing_outputs_scale_up_by_the_kv_bound_without_a_preemption_storm(
    tmp_path: Path,
) -> None:
    """Arrivals stay as they are; what is generated grows, and with it the context in memory."""
    model = msgspec.structs.replace(MODEL, name="m")
    policy = ModelPolicy(model, 1, 6, 100_000, 512)
    config = make_config((policy,), workers=6)
    config = msgspec.structs.replace(
        config,
        kv_blocks=512,
        controller=msgspec.structs.replace(
            config.controller,
            scaling=Bounds(kv_upper_permille=600, kv_lower_permille=300),
            sequences_max=64,
        ),
    )
    rows = [Row(2 * _S + k * 50 * MS, 64, 20 + 5 * k) for k in range(180)]
    result, lines = run({"m": rows}, config, tmp_path / "kv.jsonl")
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
    ups = [s for s in result.scales if 0 < s.from_instances < s.to_instances]
    assert ups
    assert {line.reason for line in ups} == {"kv_in_use"}
    assert max(count.serving for count in result.instances) >= 3
    reports = [
        event
        for line in lines
        if isinstance(line, StepLine)
        for event in line.events
        if isinstance(event, InstanceReported)
    ]
    preemptions = {r.instance: r.preemptions for r in reports}
    assert sum(preemptions.values()) <= len(rows) // 10, preemptions


def test_a_model_comes_and_another_goes_while_requests_run(tmp_path: Path) -> None:
    config = with_hosts(make_config((lazy("old"),), workers=3), 2, SpreadCopies())
    changes = (ModelChange(3 * _S, added=lazy("new")), ModelChange(5 * _S, removed="old"))
    config = msgspec.structs.replace(config, changes=changes)
    rows = {
        "old": [Row(4 * _S + k * 50 * MS, 100, 400) for k in range(40)],
        "new": [Row(2 * _S + k * 100 * MS, 100, 5) for k in range(40)],
    }
    result, lines = run(rows, config, tmp_path / "changes.jsonl")
    for line in result.requests:
        is_served = line.queued_ns >= 3 * _S if line.model == "new" else line.queued_ns < 5 * _S
        assert line.outcome is (Outcome.FINISHED if is_served else Outcome.FAILED), line
        assert line.error == (None if is_served else f"{line.model} is not served")
    late = [line for line in result.requests if line.finished_ns > 5 * _S and line.model == "old"]
    assert any(line.outcome is Outcome.FINISHED for line in late), "what ran was finished"
    assert commands_of(lines, ModelGone) == [ModelGone("old")]
    (first,) = [c for c in copies_of(lines) if c.model == "new"][:1]
    assert first.reason == "spread"


def test_every_decision_is_explained(tmp_path: Path) -> None:
    config = with_hosts(make_config((lazy("m0"), lazy("m1")), workers=4), 2, SpreadCopies())
    result, _ = run(waves(2), config, tmp_path / "why.jsonl")
    assert result.scales
    for line in result.scales:
        assert isinstance(line, ScaleLine)
        assert line.reason
        assert {"instances", "requests", "at_least", "at_most"} <= set(line.values)
        assert line.values["instances"] == line.from_instances
        if any(load.upstream != "spare" for load in line.loads):
            assert line.plan is not None
            assert line.strategy
            assert line.routes
