"""Systems for comparison do what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_plays import MODEL, MS, S, cluster, loaded_after_ns, play

from livescale.load.traces import TraceRow
from livescale.messages.commands import PlanMade, StartHolding
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS, UnknownSystem, find_system
from livescale.telemetry.record.record import StepLine
from livescale.values.types import FromWorker, Outcome


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_serves_the_same_load(name: str) -> None:
    played = play(name)
    assert [r.outcome for r in played.run.result.requests] == [Outcome.FINISHED] * 120
    assert bool(played.grown) is not SYSTEMS[name].is_fixed


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_rests_soon_after_its_last_request(name: str) -> None:
    """Copies without use are kept for five minutes at most. A pool that looked at its load
    for ever would be played until it counts as stuck, a month later."""
    run = play(name).run
    assert run.result.end_ns - run.ended_ns <= 400 * S


def test_an_ideal_system_loads_at_once_and_a_fixed_delay_takes_its_time() -> None:
    for system, delay_ns in (("ideal", 0), ("fixed-delay:2s", 2 * S), ("fixed-delay", S)):
        for line, load in play(system).loads:
            # The order and the news of it cross the network, and the controller takes its steps.
            assert delay_ns <= loaded_after_ns(line, load) <= delay_ns + 5 * MS


def test_systems_differ_in_loading_alone() -> None:
    """The same policy, the same first decision."""
    ours = [system for system in SYSTEMS.values() if not system.is_fixed and system.aim is None]
    plays = [play(system.name) for system in ours]
    # They are written down when they are over.
    first = [min(played.grown, key=lambda line: line.decided_ns) for played in plays]
    assert len({(line.from_instances, line.to_instances, line.reason) for line in first}) == 1


@pytest.mark.parametrize("name", ["unicast", "tree", "binomial", "storage"])
def test_a_strategy_is_the_one_that_plans_name(name: str) -> None:
    assert {line.strategy for line in play(name).grown if line.loads} == {name}


def test_a_group_is_formed_before_the_first_byte() -> None:
    setup_ns = SYSTEMS["nccl"].group_setup_ns
    assert setup_ns > 0
    played = play("nccl")
    for line, load in played.loads:
        assert load.upstream != "storage"
        assert load.first_byte_ns is not None
        assert setup_ns <= load.first_byte_ns - line.planned_ns
    ours = [loaded_after_ns(*pair) for pair in play("livescale-stop").loads]
    theirs = [loaded_after_ns(*pair) for pair in played.loads]
    assert min(theirs) >= min(ours) + setup_ns


def test_every_host_has_every_model_and_storage_is_not_read_again() -> None:
    played = play("allcache")
    names = {"w0.0": "h0.0", "w1.0": "h0.0", "w2.0": "h1.0", "w3.0": "h1.0"}
    assert played.loads
    for _, load in played.loads:
        assert load.upstream == names[str(load.worker)]
    counted = {"devices": 0, "host_memory": len(played.loads), "storage": 0, "spares": 0}
    assert played.run.loads_from() == counted


def test_without_copies_storage_is_all_there_is() -> None:
    played = play("storage")
    assert set(played.upstreams()) == {"storage"}
    commands = [c for line in played.lines if isinstance(line, StepLine) for c in line.commands]
    assert not any(isinstance(c, StartHolding) and c.duty is None for c in commands)


def test_a_cache_misses_on_new_hosts_hits_again_and_forgets_after_its_time() -> None:
    """Two bursts, 60 s apart: within 5 min, but not within 30 s."""
    bursts, later = (1 * S, 61 * S), 50 * S
    long, short = play("serverlessllm", bursts), play("serverlessllm-30s", bursts)
    for played in (long, short):
        assert "storage" in played.upstreams(0, later), "the other host has never seen the model"
    assert long.upstreams(later)
    assert "storage" not in long.upstreams(later)
    misses = short.upstreams(later).count("storage")
    assert misses >= 1
    counted = long.run.loads_from()
    assert counted["storage"] == long.upstreams().count("storage") < len(long.loads)
    assert counted["storage"] + counted["host_memory"] == len(long.loads)
    copies = [
        command
        for line in short.lines
        if isinstance(line, StepLine) and line.now_ns > short.run.started_ns + later
        for command in line.commands
        if isinstance(command, StartHolding) and command.duty is None
    ]
    assert {c.reason for c in copies} == {"cache miss"}
    # From the device that reads storage on its host: storage is read once for a miss.
    assert all(isinstance(feed.upstream, FromWorker) for c in copies for feed in c.feeds)


def test_fixed_systems_never_scale() -> None:
    for name, count in (("fixed-full", 4), ("fixed-half", 2), ("fixed:3", 3), ("fixed", 1)):
        played = play(name)
        serving = {
            c.serving
            for c in played.run.result.instances
            if played.run.started_ns <= c.now_ns <= played.run.ended_ns
        }
        assert serving <= {count}
        assert max(c.serving for c in played.run.result.instances) == count


def ttft_mean_ns(system: str) -> float:
    lines = play(system).run.result.requests
    return sum(line.token_ns[0] - line.queued_ns for line in lines) / len(lines)


def test_faster_loading_never_serves_less() -> None:
    """First tokens come no later, on average, than with a system whose loads take longer."""
    assert ttft_mean_ns("fixed-full") <= ttft_mean_ns("ideal")
    assert ttft_mean_ns("ideal") < ttft_mean_ns("livescale-stop") < ttft_mean_ns("storage")


def test_live_instances_work_before_everything_is_there() -> None:
    """They take requests while they load, and those that have a source hand batches over to it."""
    for name in ("livescale-bounds", "livescale-stop", "best-effort", "overlap"):
        loads = [load for _, load in play(name).loads]
        assert loads
        is_live = SYSTEMS[name].live_order != "stop-the-world"
        assert all((load.live_ns is not None) is is_live for load in loads), name
        early = [
            load
            for load in loads
            if load.first_help_ns and load.loaded_ns and load.first_help_ns < load.loaded_ns
        ]
        assert bool(early) is (name in ("livescale-bounds", "best-effort")), name


def test_plans_avoid_serving_traffic_or_tell_what_they_meet() -> None:
    """One plan of this load meets rows and KV if it does not avoid them. Equal shares move the same
    bytes, at other times."""
    bounds, interfering, equal = (
        [
            command.plan
            for line in play(name).lines
            if isinstance(line, StepLine)
            for command in line.commands
            if isinstance(command, PlanMade)
        ]
        for name in ("livescale-bounds", "livescale-interfering", "livescale-interfering-equal")
    )
    assert any(plan.serving for plan in bounds)
    assert all(plan.avoided == plan.serving and not plan.serving_bytes for plan in bounds)
    met = [plan for plan in interfering if plan.serving_bytes]
    assert [plan.serving_bytes for plan in met] == [plan.bytes_per_target for plan in met]
    assert met
    assert equal == interfering
    first, second = (play(f"livescale-interfering{more}").run for more in ("", "-equal"))
    times = [[line.token_ns for line in run.result.requests] for run in (first, second)]
    assert times[0] != times[1]


def test_live_orders_differ_as_they_should() -> None:
    """Mean time to the first token: sharing shortens it, and more so in the better order."""
    names = ("ideal-bounds", "livescale-bounds", "best-effort", "livescale-stop")
    ideal, zigzag, best_effort, stop = map(ttft_mean_ns, names)
    assert ideal < zigzag < best_effort < stop


@given(st.integers(0, 10**9), st.sampled_from(["s", "ms", "us"]), st.text("0123456789", max_size=6))
def test_a_delay_is_read_exactly(whole: int, unit: str, fraction: str) -> None:
    units = {"s": S, "ms": MS, "us": 1_000}
    whole = whole % 10**9
    dot = f".{fraction}" if fraction else ""
    found = find_system(f"fixed-delay:{whole}{dot}{unit}")
    exact = whole * units[unit] + int(fraction or 0) * units[unit] // 10 ** len(fraction)
    assert found.load_ns == exact


def test_an_aim_for_the_ttft_decides_where_bounds_did() -> None:
    """What asked for instances is the aim, or the length of a Run where there is none; a
    shorter aim brings first tokens sooner."""
    for name in ("livescale", "livescale-slo", "livescale-slo:225ms"):
        played = play(name)
        lines = [line for line in played.grown if line.reason == "ttft_aim"]
        assert lines
        assert all(line.values["load_ms"] < 2_000 for line in lines)
    assert ttft_mean_ns("livescale-slo:225ms") < ttft_mean_ns("livescale-slo:2s")


def test_requests_that_come_at_once_spread_over_instances_that_wake() -> None:
    """The first instance gets its part of them, although the others serve a moment later: the last
    first token comes nearly as soon as from the whole pool."""
    rows = [TraceRow(S, 1_000, 8)] * 8
    last_ns = {}
    for name in ("livescale", "fixed-full"):
        config = build_config(cluster(), (MODEL,), find_system(name))
        lines = run_pool(config, {"m": rows}, lead_ns(config), 0).result.requests
        last_ns[name] = max(line.token_ns[0] - line.queued_ns for line in lines)
    assert last_ns["livescale"] < 1.1 * last_ns["fixed-full"]


def test_parameters_are_on_devices_before_a_burst() -> None:
    """No instance of the burst loads, all find their parameters; the first tokens come sooner."""
    ahead, late = play("livescale"), play("livescale-on-demand")
    assert ahead.run.loads_from() == {
        **dict.fromkeys(("devices", "host_memory", "storage"), 0),
        "spares": len(ahead.loads),
    }
    assert late.run.loads_from()["spares"] < len(late.loads)
    assert ttft_mean_ns("livescale") < ttft_mean_ns("livescale-on-demand")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("serverles", "did you mean 'serverlessllm'"),
        ("quart", "there is no strategy 'quart'"),
        ("fixed-delay:soon", "write a time"),
        ("fixed:0", "write a number of instances"),
        ("fixed:auto=fixed-full", "fixed-full is fixed itself"),
        ("fixed:auto=nothing", "there is no strategy 'nothing'"),
        ("tree:3", "only fixed-delay:TIME, livescale-slo:TIME and fixed:N"),
        ("livescale-slo:fast", "write a time"),
        ("livescale-slo:0s", "the aim is longer than no time"),
    ],
)
def test_what_is_no_system_is_said(name: str, words: str) -> None:
    with pytest.raises(UnknownSystem, match=words):
        find_system(name)
