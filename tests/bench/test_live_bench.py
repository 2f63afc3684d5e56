"""`bench live`: what its figures mean, and that a quick run measures all of them with right tokens.

How fast anything is depends on the machine and is not asserted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.contract.live_order import LIVE_ORDERS, ZIGZAG
from livescale.batching.runs.run import Run, Segment
from livescale.engine.timed import TimedExecutor
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.live.live import count_mismatches
from livescale.lab.bench.live.live_fleet import SOURCE, AskedRequest
from livescale.lab.bench.live.live_models import (
    LINK_BYTES_PER_S_MAX,
    PairSetting,
    cpu_setting,
    make_live_model,
    timed_setting,
)
from livescale.lab.bench.live.live_runs import ALONE, Burst, PairPlay
from livescale.lab.bench.live.live_twin import layer_ns, simulate
from livescale.lab.bench.live.live_worker import WorkItem
from livescale.lab.bench.live.play_figures import (
    finished_at_half_load,
    half_load_ratio,
    ideal_last_to_stop,
    mean_to_optimum,
    source_idle_share,
    throughput_curve,
)
from livescale.latency.work import LinearLatency
from livescale.main import main
from livescale.sim.pair.player import LivePlay, loaded_every, play
from livescale.values.types import SamplingParams

LAYERS, UNIT_NS = 16, 20_000_000
TRIES = 5
KEYS = {
    "last_ttft_ratio_to_stop",
    "first_help_fraction_of_load",
    "throughput_ratio_at_half_load",
    "tbt_p99_ratio_to_no_scaling",
    "token_mismatches",
    "mean_latency_ratio_to_optimum",
    "rows",
}
ORDERS = [*LIVE_ORDERS, ALONE]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> PairSetting:
    """Timed workers at ratio 6."""
    directory, manifest = make_live_model(tmp_path_factory.mktemp("live"), "timed", LAYERS)
    return timed_setting(directory, manifest, 6, UNIT_NS)


# -- whole runs -----------------------------------------------------------------------------------


def quick(tmp_path: Path, kind: str) -> dict[str, Any]:
    file = tmp_path / "live.json"
    words = ["bench", "live", "--quick", "--workers", kind, "--json", str(file)]
    assert main(words) == 0, "a token was wrong"
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["token_mismatches"] == 0
    for row in figures["rows"]:
        for both in row["figures"].values():
            assert both["measured"] > 0
            assert both["simulated"] > 0
    assert {row["order"] for row in figures["rows"]} == set(ORDERS)
    found = figures["kinds"][kind]
    # On a busy machine a source that computes may leave nothing for the target to help with.
    assert 0 < found.get("first_help_fraction_of_load", 0.5) < 1
    assert set(found["tbt_p99_s"]) == {ALONE, ZIGZAG.name}
    # One for every layer but the last.
    assert [point["fraction_loaded"] for point in found["throughput"]] == [0.25, 0.5, 0.75]
    return figures


@pytest.mark.usefixtures("machine")
def test_timed_workers_give_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = quick(tmp_path, "timed")
    # On a busy machine the source may take all that the target could have helped with.
    helped = {"first_help_fraction_of_load"}
    assert figures.keys() | helped >= KEYS | {"machine", "versions", "command"}
    assert figures["mean_latency_ratio_to_optimum"] >= 1
    batches, orders, decoded = 4, len(LIVE_ORDERS), 4
    # Orders; alone, twice as many, from the start twice; with decodes of unknown length.
    assert figures["tokens"] >= batches * orders + 5 * batches + 2 * decoded * batches
    printed = capsys.readouterr().out
    assert "zigzag, from the start" in printed
    assert "0 wrong of" in printed


@pytest.mark.usefixtures("machine")
def test_some_orders_are_played_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "live.json"
    words = ["--quick", "--workers", "timed", "--order", "overlap,zigzag,overlap"]
    assert main(["bench", "live", *words, "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    assert [row["order"] for row in figures["rows"]] == ["overlap", "zigzag"]
    assert figures["tokens"] == 4 * 2
    assert "2 orders" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(1500)
def test_chain_and_teams_are_played_beside_stop_the_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lambda.json"
    for _ in range(TRIES):
        assert main(["bench", "live", "--quick", "--order", "lambda", "--json", str(file)]) == 0
        table = capsys.readouterr().out
        figures: dict[str, Any] = json.loads(file.read_text())
        assert figures["token_mismatches"] == 0
        has_teams = {name: bool(plays[0]["teams"]) for name, plays in figures["plays"].items()}
        # On a busy machine all may be loaded before a team is made.
        if has_teams["lambda"] and has_teams["both"]:
            break
    ways = ["stop", "chain", "lambda", "both", "auto"]
    assert figures["tokens"] == len(ways) * figures["prompts"]
    assert list(figures["ways"]) == list(figures["plays"]) == ways
    for name, way in figures["ways"].items():
        assert name in table
        for found in (way, way["simulated"]):
            assert 0 < found["ttft_mean_s"] < found["ttft_p99_s"]
            assert found["load_s"] > 0
    assert has_teams.pop("auto") in (True, False)
    assert has_teams == {"stop": False, "chain": False, "lambda": True, "both": True}
    stop, *others = [way["simulated"] for way in figures["ways"].values()]
    assert {stop[f"ttft_{what}_ratio_to_stop"] for what in ("mean", "p99")} == {1}
    # In virtual time every way helps, and the chain's targets do so first.
    assert all(way["ttft_mean_ratio_to_stop"] < 1 for way in others)
    first = [way["first_new_token_ratio_to_load"] for way in (*others, stop)]
    assert first[0] < 0.3 < first[1] < 0.62 < 1 < first[-1]


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_workers_that_compute_give_right_tokens(tmp_path: Path) -> None:
    figures = quick(tmp_path, "cpu")
    # The figures at the top are those of timed workers.
    assert "last_ttft_ratio_to_stop" not in figures


def test_a_source_that_waits_is_idle_while_something_could_be_had(setting: PairSetting) -> None:
    """Two exact machines: the source waits only when the last batch is left, which the target has
    begun."""
    loaded = loaded_every(6 * UNIT_NS, LAYERS)
    played = play(ZIGZAG, LAYERS, (UNIT_NS,) * 8, loaded)
    measured = as_played(setting, ZIGZAG.name, played, loaded)
    assert source_idle_share(measured) == pytest.approx(0)
    slower = tuple(
        WorkItem(i.start_ns, i.start_ns + (i.stop_ns - i.start_ns) // 2, i.layers, i.requests, 1, 0)
        for i in measured.source_work
    )
    assert source_idle_share(replace(measured, source_work=slower)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "fast"], "--link"),
        (["--link", "20MB/s", "--prompt", "1"], "--prompt from 2"),
        (["--prompt", "256"], "--prompt is for --link"),
        (["--workers", "gpu"], "--workers 'gpu'"),
        (["--workers", "cpu,cpu"], "--workers 'cpu,cpu'"),
        (["--ratios", "6,fast"], "--ratios '6,fast'"),
        (["--ratios", "1"], "from 2 on"),
        (["--plays", "0"], "--plays must be at least 1"),
        (["--order", "lamda"], ", ".join(("'lamda', there are zigzag", *ORDERS[1:-1], "lambda"))),
        (["--order", "lambda,zigzag"], "--order lambda stands alone"),
        (["--order", "lambda", "--workers", "cpu"], "--workers is not for --order lambda"),
        (["--order", "lambda", "--ratios", "6"], "--ratios is not for --order lambda"),
        (["--order", "zigzag", "--link", "20MB/s"], "--order is not for --link"),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "live", *arguments]) == 1
    assert words in capsys.readouterr().err


# -- settings -------------------------------------------------------------------------------------


@given(ratio=st.integers(2, 64), layer_ns=st.integers(20_000_000, 100_000_000))
def test_a_timed_pair_has_the_ratio_that_was_asked_for(
    setting: PairSetting, ratio: int, layer_ns: int
) -> None:
    made = timed_setting(setting.directory, setting.manifest, ratio, layer_ns)
    assert made.layer_load_ns == pytest.approx(ratio * layer_ns, rel=1e-5)
    assert made.link_bytes_per_s <= LINK_BYTES_PER_S_MAX
    prompt = made.latency.base_ns + made.latency.per_token_ns * made.batch_tokens
    assert prompt == pytest.approx(LAYERS * layer_ns, rel=1e-5)


def test_a_link_that_would_be_too_fast_is_refused(setting: PairSetting) -> None:
    with pytest.raises(BenchError, match="needs more than"):
        timed_setting(setting.directory, setting.manifest, 2, UNIT_NS // 2)


@given(
    linear_ns=st.integers(1_000, 100_000),
    square_ns=st.integers(0, 50),
    first=st.integers(64, 500),
    more=st.integers(64, 1000),
    ratio=st.integers(2, 40),
)
def test_batches_of_cpu_workers_take_as_long_as_the_ratio_wants(
    setting: PairSetting, linear_ns: int, square_ns: int, first: int, more: int, ratio: int
) -> None:
    def takes_ns(tokens: int) -> int:
        return linear_ns * tokens + square_ns * tokens * tokens

    measured = [(tokens, takes_ns(tokens)) for tokens in (first, first + more)]
    size_bytes = setting.manifest.layers[1].size_bytes
    wanted_ns = size_bytes * 10**9 // LINK_BYTES_PER_S_MAX // ratio
    try:
        made = cpu_setting(setting.directory, setting.manifest, ratio, measured)
    except BenchError:
        assert not takes_ns(1) / 2 < wanted_ns < takes_ns(3000)
    else:
        assert takes_ns(made.batch_tokens - 1) <= wanted_ns <= takes_ns(made.batch_tokens + 1)


# -- figures --------------------------------------------------------------------------------------


def asked(number: int, first_token_ns: int) -> AskedRequest:
    request = AskedRequest(f"r{number}", (1, 2, 3), 1, SOURCE)
    request.token_ids, request.token_ns = [0], [first_token_ns]
    return request


def work(played: LivePlay, on_target: bool, tokens: int) -> tuple[WorkItem, ...]:
    return tuple(
        WorkItem(s.start_ns, s.stop_ns, (0, s.layers), (f"r{s.batch}",), tokens, 0)
        for s in played.stretches
        if s.on_target == on_target
    )


def as_played(
    setting: PairSetting, order: str, played: LivePlay, loaded: tuple[int, ...]
) -> PairPlay:
    """A play of two exact machines, as if it had been measured."""
    head_ns = loaded[-1]
    return PairPlay(
        burst=Burst(order, len(played.finished_ns)),
        began_ns=0,
        zero_ns=0,
        arrived_ns=(0, *loaded, head_ns),
        loaded_ns=head_ns,
        requests=tuple(asked(n, at_ns) for n, at_ns in enumerate(played.finished_ns)),
        decodes=(),
        source_work=work(played, False, setting.batch_tokens),
        target_work=work(played, True, setting.batch_tokens),
        taken=(),
    )


def exact_rate(played: LivePlay, from_ns: int, to_ns: int) -> float:
    """Layers that were run in this time, by their time: the source alone makes 1."""
    stretches = [(max(s.start_ns, from_ns), min(s.stop_ns, to_ns)) for s in played.stretches]
    return sum(max(0, stop - start) for start, stop in stretches) / (to_ns - from_ns)


def alone_play(setting: PairSetting, batches: int) -> PairPlay:
    never = (1 << 62,) * LAYERS
    played = play(LIVE_ORDERS["stop-the-world"], LAYERS, (UNIT_NS,) * batches, never)
    return as_played(setting, ALONE, played, never)


@pytest.mark.parametrize("ratio", [2, 6, 12])
def test_exact_machines_have_the_throughput_that_they_have(
    setting: PairSetting, ratio: int
) -> None:
    loaded = loaded_every(ratio * UNIT_NS, LAYERS)
    played = play(ZIGZAG, LAYERS, (UNIT_NS,) * 16, loaded)
    measured = as_played(setting, ZIGZAG.name, played, loaded)
    assert layer_ns(measured, setting.batch_tokens) == UNIT_NS
    twin = simulate(measured, setting)
    alone = alone_play(setting, 8)
    half = half_load_ratio(measured, twin, alone, LAYERS)
    assert half.measured == pytest.approx(exact_rate(played, loaded[5], loaded[10]))
    assert half.measured == pytest.approx(half.simulated, rel=0.05)
    curve = throughput_curve(measured, twin, alone, LAYERS)
    assert [fraction for fraction, _, _ in curve] == [k / LAYERS for k in range(1, LAYERS)]
    for loaded_layers, (_, rate, _) in enumerate(curve[:-1], 1):
        exact = exact_rate(played, loaded[loaded_layers - 1], loaded[loaded_layers])
        assert rate == pytest.approx(exact)


def test_a_source_without_help_finishes_what_it_finishes(setting: PairSetting) -> None:
    alone = alone_play(setting, 8)
    loaded = loaded_every(6 * UNIT_NS, LAYERS)
    beside = replace(alone, arrived_ns=(0, *loaded, loaded[-1]))
    assert finished_at_half_load(beside, alone, LAYERS) == pytest.approx(1)


@pytest.mark.parametrize("order", ["zigzag", "stop-the-world"])
def test_a_burst_is_simulated_as_exact_machines_play_it(setting: PairSetting, order: str) -> None:
    """Messages and rows cost a little; without them it would be the same."""
    loaded = loaded_every(6 * UNIT_NS, LAYERS)
    played = play(LIVE_ORDERS[order], LAYERS, (UNIT_NS,) * 8, loaded)
    twin = simulate(as_played(setting, order, played, loaded), setting)
    assert list(twin.ttft_ns) == pytest.approx(played.finished_ns, rel=0.04)


def test_a_source_alone_is_simulated_batch_by_batch(setting: PairSetting) -> None:
    alone = alone_play(setting, 8)
    assert list(simulate(alone, setting).ttft_ns) == alone.ttft_ns


@pytest.mark.parametrize(("ratio", "ideal"), [(2, 0.85), (6, 0.634), (12, 0.727)])
def test_the_ideal_of_sixteen_layers_and_eight_batches(ratio: int, ideal: float) -> None:
    assert ideal_last_to_stop(ZIGZAG.name, 16, 8, ratio) == pytest.approx(ideal, abs=0.0005)


def test_zigzag_is_as_good_as_the_optimum_of_that_burst() -> None:
    pytest.importorskip("highspy")
    assert mean_to_optimum(16, 8, 6) == pytest.approx(1, abs=0.01)


# -- tokens ---------------------------------------------------------------------------------------


def answered(setting: PairSetting, count: int) -> AskedRequest:
    """A request with the tokens that a timed executor gives it."""
    manifest = setting.manifest
    executor = TimedExecutor(setting.kv_bytes, 16, LinearLatency(0, 0))
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for entry in manifest.layers:
        executor.materialize(entry.layer)
    request = AskedRequest("r1", tuple(range(40)), count, SOURCE)
    for _ in range(count):
        segment = Segment(
            *("r1", 1, 39, (0,), (), True, SamplingParams(count)),
            *(request.prompt_ids, tuple(request.token_ids)),
        )
        request.token_ids += executor.run(Run(0, manifest.span, (segment,))).token_ids
    return request


def test_wrong_missing_and_stray_tokens_are_counted(setting: PairSetting) -> None:
    right = answered(setting, 6)
    assert count_mismatches(setting, [right]) == 0
    wrong = answered(setting, 6)
    wrong.token_ids[5] += 1
    missing = answered(setting, 6)
    del missing.token_ids[5]
    stray = answered(setting, 6)
    stray.strays = 2
    assert count_mismatches(setting, [right, wrong, missing, stray]) == 1 + 1 + 2
    missing.is_cancelled = True
    assert count_mismatches(setting, [missing]) == 0
