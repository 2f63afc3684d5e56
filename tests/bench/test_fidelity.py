"""`bench fidelity`: verdicts, a calibration that finds what is known, and a real pool."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.state.config import ControllerConfig
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.pools.fidelity import FidelityPool, timed_pool
from livescale.lab.bench.pools.fidelity_figures import (
    Agreement,
    agreement_table,
    agreements,
    run_figures,
)
from livescale.lab.bench.pools.fidelity_profile import (
    BURSTS,
    calibration_rows,
    measure_profile,
    simulated_pool,
)
from livescale.lab.bench.pools.fidelity_runs import ClientDelays, PlayedRun, play_simulated
from livescale.latency.models import OverheadLatency
from livescale.latency.work import LinearLatency, RunWork
from livescale.load.traces import TraceRow
from livescale.main import main
from livescale.runtime.layout.pool_layout import local_layout
from livescale.runtime.models.catalog import live_limits, prepare_models
from livescale.sim.base.config import SimConfig
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import RequestLine, ScaleLine, read_record
from livescale.values.scaling_policies import ModelPolicy

MS = 1_000_000
figures = st.floats(0.001, 1e6)
runs = st.lists(figures, min_size=1, max_size=5).map(tuple)


@given(real=runs, simulated=runs)
def test_a_verdict_is_what_its_parts_say(
    real: tuple[float, ...], simulated: tuple[float, ...]
) -> None:
    agreement = Agreement("ttft_p50_s", real, simulated)
    middle, sim = median(real), median(simulated)
    assert agreement.is_inside == (min(real) <= sim <= max(real))
    assert agreement.is_within == (abs(sim / middle - 1) <= 0.05) or (
        # On the very edge rounding decides.
        abs(sim / middle - 1) == pytest.approx(0.05)
    )
    told = agreement.as_json()
    assert told["real"] == list(real)
    assert (told["min"], told["median"], told["max"]) == (min(real), middle, max(real))
    assert (told["sim"], told["within_5_percent"]) == (sim, agreement.is_within)
    assert agreement.off == pytest.approx(sim / middle - 1)


def test_only_what_all_runs_have_is_compared() -> None:
    real = [{"ttft_p50_s": 1.0, "loaded_p50_s": 2.0}, {"ttft_p50_s": 1.0}]
    found = agreements(real, [{"ttft_p50_s": 1.04, "tbt_p50_s": 1.0}])
    assert [item.name for item in found] == ["ttft_p50_s"]
    assert "within 5 %" in agreement_table(found)


def test_nothing_is_right_about_a_figure_that_is_zero_in_one_world_only() -> None:
    assert Agreement("scale_ups", (0.0, 0.0), (0.0,)).is_within
    one = Agreement("scale_ups", (0.0, 0.0), (1.0,))
    assert not one.is_within
    assert one.off is None


@given(
    overhead=st.tuples(st.integers(0, 10**7), st.integers(0, 10**5)),
    decodes=st.integers(1, 64),
    context=st.integers(64, 10**5),
    steps=st.integers(1, 20),
)
def test_overhead_comes_with_every_run(
    overhead: tuple[int, int], decodes: int, context: int, steps: int
) -> None:
    bare = LinearLatency(40 * MS, 400_000, 65)
    latency = OverheadLatency(bare, *overhead)
    runs = [RunWork((), decodes, context + decodes * step, decodes) for step in range(steps)]
    assert latency.decode_ns(decodes, context, steps) == [latency.run_ns(run) for run in runs]
    prefill = RunWork(((100, 0), (28, 100)), decodes, context, decodes)
    more_ns = overhead[0] + overhead[1] * (128 + decodes)
    assert latency.run_ns(prefill) == bare.run_ns(prefill) + more_ns


# -- the calibration: a pool of which everything is known -----------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> FidelityPool:
    return timed_pool(tmp_path_factory.mktemp("fidelity"), workers=4, load_s=0.4)


@pytest.fixture(scope="module")
def policy(pool: FidelityPool) -> ModelPolicy:
    [entry] = prepare_models(pool.config)
    return ModelPolicy(entry.spec, instances_min=1, instances_max=pool.config.workers)


def known_world(pool: FidelityPool, policy: ModelPolicy, **others: object) -> SimConfig:
    """The pool as it would be simulated, with these values in place of measured ones."""
    config = pool.config
    world = SimConfig(
        controller=ControllerConfig(
            (policy,),
            workers_expected=config.workers,
            sequences_max=config.sequences_max,
            chunk_bytes=config.chunk_bytes,
            warm_spares=config.warm_spares,
        ),
        devices=tuple(seat.device for _, seat in local_layout(config).seats),
        latency={"": pool.latency},
        run_tokens_max=config.run_tokens_max,
    )
    return msgspec.structs.replace(world, **others)


def calibrate(
    pool: FidelityPool, world: SimConfig, record: Path, client: ClientDelays
) -> PlayedRun:
    rows = calibration_rows(pool.latency, pool.config, BURSTS)
    return play_simulated(world, rows, "known", client, seed=0, record=record)


@pytest.mark.parametrize(
    ("delay_ns", "overhead_ns", "token_ns", "setup_ns", "rate_percent"),
    [(200_000, 0, 0, 0, 100), (2 * MS, 3 * MS, 10_000, 30 * MS, 70)],
)
def test_a_calibration_finds_what_is_known(
    pool: FidelityPool,
    policy: ModelPolicy,
    tmp_path: Path,
    delay_ns: int,
    overhead_ns: int,
    token_ns: int,
    setup_ns: int,
    rate_percent: int,
) -> None:
    rate = (pool.config.uplink_bytes_per_s or 0) * rate_percent // 100
    base = known_world(pool, policy)
    devices = [
        msgspec.structs.replace(device, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate)
        for device in base.devices
    ]
    world = msgspec.structs.replace(
        base,
        devices=tuple(devices),
        latency={"": OverheadLatency(pool.latency, overhead_ns, token_ns)},
        message_delay_ns=delay_ns,
        step_gap_ns=1_300_000,
        group_setup_ns=setup_ns,
    )
    client = ClientDelays(intake_ns=(2 * MS,), spacing_ns=MS // 2, delivery_ns=MS)
    run = calibrate(pool, world, tmp_path / "record.jsonl", client)
    profile = measure_profile(run, pool.latency, pool.config, BURSTS)
    assert set(profile.client.intake_ns) == set(client.intake_ns)
    assert (profile.client.spacing_ns, profile.client.delivery_ns) == (MS // 2, MS)
    assert profile.message_delay_ns == pytest.approx(delay_ns, abs=20_000)
    assert profile.run_overhead_ns == pytest.approx(overhead_ns + token_ns, abs=1000)
    assert profile.token_overhead_ns == pytest.approx(token_ns, abs=1000)
    assert profile.step_gap_ns == pytest.approx(1_300_000, rel=0.05)
    assert profile.load_bytes_per_s == pytest.approx(rate, rel=0.03)
    # A step's gap is in it.
    assert profile.load_setup_ns == pytest.approx(setup_ns, abs=5 * MS)
    assert profile.calibration_loads >= pool.config.workers - 1
    # What was measured is a world again, and it behaves like the one that was known.
    again = calibrate(
        *(pool, simulated_pool(run, pool.config, profile)),
        *(tmp_path / "again.jsonl", profile.client),
    )
    known, found = (run_figures(r.reported("known", "5x-mean")) for r in (run, again))
    for name in ("ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "scale_up_p50_s", "loaded_p50_s"):
        assert found[name] == pytest.approx(known[name], rel=0.1), name


def test_a_simulated_pool_measures_its_own_rate_of_prefills_as_a_real_one_does(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    """A pool times a Run full of prompt tokens before it serves, the calibration's was short where
    its first instance had work. A simulated pool that was given that rate started instances at half
    of the load."""
    client = ClientDelays((0,), 0, 0)
    known = known_world(pool, policy)
    live = msgspec.structs.replace(known.controller, live_order="zigzag")
    known = msgspec.structs.replace(known, controller=live)
    run = calibrate(pool, known, tmp_path / "record.jsonl", client)
    profile = measure_profile(run, pool.latency, pool.config, BURSTS)
    world = simulated_pool(run, pool.config, profile)
    assert all(model.prefill_tokens_per_s is None for model in world.controller.models)
    tokens = pool.config.run_tokens_max
    rows = [TraceRow(0, tokens, 2), TraceRow(1000 * MS, 64, 2)]
    played = play_simulated(world, rows, "own", client, 0, tmp_path / "own.jsonl")
    [measured] = read_history(played.lines).measured
    prompt_ns = pool.latency.run_ns(RunWork(((tokens, 0),)))
    assert measured.prefill_tokens_per_s == pytest.approx(tokens * 1e9 / prompt_ns, rel=0.01)


def test_instances_of_both_worlds_have_the_same_limits(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    """Real ones put 256 tokens into a live batch, simulated ones put 2,048 there."""
    config = msgspec.structs.replace(pool.config, live_batches_max=5, resident_bytes=1 << 20)
    run = calibrate(pool, known_world(pool, policy), tmp_path / "r.jsonl", ClientDelays((0,), 0, 0))
    profile = measure_profile(run, pool.latency, config, BURSTS)
    world = simulated_pool(run, config, profile)
    assert world.live == live_limits(config)
    assert world.live.batches_max == 5
    assert world.live.batch_tokens_max == config.run_tokens_max == 256
    assert world.resident_bytes == 1 << 20


def test_what_a_chain_waits_for_is_no_part_of_how_a_load_begins(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    """Of three that follow one another, two wait for the chunks of the one before."""
    # A chunk takes as long as a tenth of the load: 40 ms.
    chunk_bytes = policy.spec.size_bytes // 10
    known = known_world(pool, policy, group_setup_ns=8 * MS)
    controller = msgspec.structs.replace(known.controller, chunk_bytes=chunk_bytes)
    known = msgspec.structs.replace(known, controller=controller)
    # All requests of a burst are there at once, so that all workers load by one plan.
    run = calibrate(pool, known, tmp_path / "record.jsonl", ClientDelays((0,), 0, 0))
    chained = [line for line in run.lines if isinstance(line, ScaleLine) and len(line.loads) == 3]
    assert any(route.count("->") == 3 for line in chained for route in line.routes)
    profile = measure_profile(run, pool.latency, pool.config, BURSTS)
    assert profile.load_setup_ns == pytest.approx(8 * MS, abs=2 * MS)


def test_a_pool_that_never_grows_cannot_be_calibrated(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    alone = msgspec.structs.replace(policy, instances_max=1)
    run = calibrate(pool, known_world(pool, alone), tmp_path / "r.jsonl", ClientDelays((0,), 0, 0))
    with pytest.raises(BenchError, match="did not grow"):
        measure_profile(run, pool.latency, pool.config, BURSTS)


def test_figures_are_those_of_the_record(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    rows = [TraceRow(0, 100, 5), *[TraceRow(1000 * MS, 300, 20)] * 60]
    record = tmp_path / "record.jsonl"
    client = ClientDelays((5 * MS,), 0, 2 * MS)
    played = play_simulated(known_world(pool, policy), rows, "one", client, 0, record)
    found = run_figures(played.reported("by hand", "5x-mean"))
    first = played.timings[0]
    assert first.scheduled_ns == played.started_ns
    # Two ways of HTTP, two to the controller, two to the worker, and the prefill between them.
    prefill_ns = pool.latency.run_ns(RunWork(((100, 0),), sampled=1))
    assert first.ttft_ns == pytest.approx(7 * MS + 4 * 200_000 + prefill_ns, abs=1000)
    scales = [line for line in read_record(record) if isinstance(line, ScaleLine)]
    loads = [
        (line, load)
        for line in scales
        for load in line.loads
        if line.decided_ns >= played.started_ns
    ]
    assert found["instances_started"] == len(loads) > 0
    times = sorted((load.loaded_ns or 0) - line.decided_ns for line, load in loads)
    assert found["scale_up_p50_s"] == pytest.approx(median(times) / 1e9)
    assert found["scale_up_p90_s"] <= times[-1] / 1e9
    gaps = [b - a for timing in played.timings for a, b in itertools.pairwise(timing.token_ns)]
    assert found["tbt_mean_s"] == pytest.approx(sum(gaps) / len(gaps) / 1e9)
    assert 1 < found["instances_mean"] <= found["instances_max"] <= pool.config.workers


def test_seeds_make_requests_late_as_a_client_was(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    rows = [TraceRow(number * 100 * MS, 50, 3) for number in range(30)]
    client = ClientDelays((MS, 4 * MS, 9 * MS), 0, 0)
    world = known_world(pool, policy)
    played = [
        play_simulated(world, rows, "late", client, seed, tmp_path / f"{number}.jsonl")
        for number, seed in enumerate((1, 1, 2))
    ]
    assert played[0].timings == played[1].timings != played[2].timings
    for run in played:
        due = [timing.scheduled_ns - run.started_ns for timing in run.timings]
        assert due == [row.arrival_ns for row in rows]
        queued = {
            line.request: line.queued_ns for line in run.lines if isinstance(line, RequestLine)
        }
        late = {queued[timing.request] - timing.scheduled_ns for timing in run.timings}
        assert late == set(client.intake_ns)


def test_a_failing_request_fails_the_run(
    pool: FidelityPool, policy: ModelPolicy, tmp_path: Path
) -> None:
    world = known_world(pool, policy, queue_requests_max=1)
    rows = [TraceRow(0, 100, 5)] * 40
    with pytest.raises(BenchError, match="failed in the simulator"):
        play_simulated(world, rows, "full", ClientDelays((0,), 0, 0), 0, tmp_path / "record.jsonl")


# -- a real pool ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_a_real_pool_behaves_as_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "gamma:rate=8,cv=2,seconds=5,input=400,output=8,seed=3"
    file, folder = tmp_path / "figures.json", tmp_path / "report"
    # The verdict may be either on a busy machine: it is the exit code.
    main(
        [
            *("bench", "fidelity", "--workers", "timed", "--count", "3", "--runs", "1"),
            *("--trace", trace, "--seconds", "5", "--divide-lengths", "1", "--bursts", "1"),
            *("--load-seconds", "0.3", "--json", str(file), "--report", str(folder)),
        ]
    )
    assert "the capacity of" in capsys.readouterr().out
    told = json.loads(file.read_text())
    found = {item["name"]: item for item in told["figures"]}
    assert told["load_percent_of_capacity"] == 60
    assert told["profile"]["calibration_loads"] > 0
    assert found.keys() >= {"ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "instances_mean"}
    # How near they are is for a quiet machine to say.
    for name in ("ttft_p50_s", "ttft_mean_s", "tbt_mean_s", "instances_mean"):
        assert min(found[name]["sim"], found[name]["median"]) > 0, found[name]
    assert {path.name for path in folder.iterdir()} == {
        *("timed-calibration.jsonl", "timed-real-1.jsonl", "timed-simulated-1.jsonl"),
        "timed.html",
    }


@pytest.mark.parametrize(
    "words",
    [("--workers", "gpu"), ("--workers", "timed,timed"), ("--load-percent", "0"), ("--runs", "0")],
)
def test_wrong_arguments_are_named(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "fidelity", "--seconds", "5", "--trace", "burst", *words]) == 1
    assert words[0] in capsys.readouterr().err
