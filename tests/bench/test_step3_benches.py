"""Benchmarks of transfers: multicast on emulated links, loads from storage, the mesh."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.lab.bench.engines.load_bench import shape_of_size
from livescale.lab.bench.transfer.mesh import eager_connections
from livescale.lab.bench.transfer.multicast_peers import gloo_seconds
from livescale.lab.bench.transfer.multicast_report import (
    MulticastReport,
    MulticastRow,
    MulticastRun,
)
from livescale.lab.bench.transfer.multicast_tls import TlsReport
from livescale.lab.bench.transfer.multicast_worker import layer_sizes
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec
from livescale.main import main


def figures_of(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert main(["bench", *words, "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures.keys() >= {"machine", "versions", "command"}
    return figures


@pytest.mark.usefixtures("network_namespaces")
def test_multicast_measures_strategies(tmp_path: Path) -> None:
    figures = figures_of(
        *(tmp_path, "multicast", "--hosts", "3", "--link", "200mbit", "--size", "4MiB"),
        *("--layers", "4", "--chunk", "64KiB", "--strategies", "chain,unicast"),
        *("--repetitions", "1", "--no-gloo"),
    )
    assert figures["strategy"] == "chain"
    assert figures["receivers"] == 2
    assert figures["bytes"] == 4 << 20
    assert figures["link_efficiency"] > 0
    assert 0 < figures["overhead_share"] < 1
    assert "peer_gloo_seconds" not in figures
    assert figures["both_ways_over_alone"] > 0
    rows = {(row["strategy"], row["receivers"]): row for row in figures["rows"]}
    assert rows.keys() >= {(s, n) for s in ("chain", "unicast") for n in (1, 2)}
    assert figures["t_over_t1"] == rows["chain", 2]["t_over_t1"]
    for strategy in ("chain", "unicast"):
        one, two = (rows[strategy, receivers] for receivers in (1, 2))
        assert two["t_over_t1"] == pytest.approx(two["seconds"] / one["seconds"])
    # A chain passes on while it receives; without one the source's link is used twice.
    assert rows["chain", 2]["predicted_seconds"] < rows["unicast", 2]["predicted_seconds"]
    for row in figures["rows"]:
        assert len(row["layer_ms"]) == 4
        assert row["layer_ms"][-1] == max(row["layer_ms"])
        assert row["layer_ms"][-1] <= row["seconds"] * 1e3
        from_first_byte_s = row["seconds"] - row["start_ms"] / 1e3
        error = from_first_byte_s / row["predicted_seconds"] - 1
        assert row["predicted_error"] == pytest.approx(error)


@pytest.mark.long
@pytest.mark.usefixtures("network_namespaces")
def test_modes_of_tls_take_turns(tmp_path: Path) -> None:
    figures = figures_of(
        *(tmp_path, "multicast", "--tls", "--hosts", "3", "--link", "200mbit", "--size", "4MiB"),
        *("--layers", "4", "--chunk", "64KiB", "--strategies", "chain", "--repetitions", "2"),
    )
    assert (figures["strategy"], figures["receivers"]) == ("chain", 2)
    modes = figures["modes"]
    assert set(modes) == {"unchecked", "plain", "off", "on"}
    for mode in modes.values():
        assert mode["seconds"] > 0
        assert mode["cpu_s_per_gb"] > 0
        assert len(mode["cpu_over_plain_all"]) == 2
    assert modes["plain"]["seconds_over_plain"] == modes["plain"]["cpu_over_plain"] == 1


@pytest.mark.long
@pytest.mark.usefixtures("network_namespaces")
def test_a_chain_and_shards_cross_the_spine_once(tmp_path: Path) -> None:
    figures = figures_of(
        *(tmp_path, "multicast", "--hosts", "4", "--link", "100mbit", "--leaves", "2"),
        *("--devices-per-host", "2", "--size", "4MiB", "--layers", "4", "--chunk", "64KiB"),
        *("--strategies", "chain,sharded", "--receivers", "3", "--repetitions", "1", "--no-gloo"),
    )
    chain, sharded = figures["rows"]
    assert (chain["receivers"], sharded["receivers"]) == (6, 6)
    assert 0.9 < chain["spine_crossings"] < 1.3
    assert 0.9 < sharded["spine_crossings"] < 1.3


@pytest.mark.usefixtures("network_namespaces")
def test_shards_use_the_links_of_all_devices(tmp_path: Path) -> None:
    # One leaf: across two, the link to the spine would hold shards to a chain's time.
    figures = figures_of(
        *(tmp_path, "multicast", "--hosts", "3", "--link", "100mbit", "--devices-per-host", "2"),
        *("--size", "4MiB", "--layers", "4", "--chunk", "64KiB"),
        *("--strategies", "chain,sharded", "--receivers", "2", "--repetitions", "1", "--no-gloo"),
    )
    chain, sharded = figures["rows"]
    assert (chain["receivers"], sharded["receivers"]) == (4, 4)
    # How much faster shards are is for a quiet machine to say; no link carries more than it can.
    assert 0 < sharded["predicted_seconds"] < 0.8 * chain["predicted_seconds"]
    for row in (chain, sharded):
        assert row["seconds"] > 0.5 * row["predicted_seconds"]


@pytest.mark.long
@pytest.mark.usefixtures("network_namespaces")
def test_gloo_broadcasts_on_the_same_links() -> None:
    size = 1 << 20
    with Testbed(NetworkSpec(2, 100_000_000)) as testbed:
        seconds = gloo_seconds(testbed, size, [1])
    # No faster than the link, so the link is what it used.
    assert seconds[1] > 0.5 * size / (100_000_000 / 8)


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_load_compares_with_what_is_installed(tmp_path: Path) -> None:
    figures = figures_of(tmp_path, "load", "--size", "20MiB", "--repetitions", "1")
    rows = {(row["loader"], row["cache"]): row for row in figures["rows"]}
    loaders = {"livescale", "safetensors"}
    assert rows.keys() >= {(name, cache) for name in loaders for cache in ("warm", "cold")}
    assert len({row["bytes"] for row in rows.values()}) == 1
    assert all(row["bytes_per_s"] > 0 for row in rows.values())
    assert figures["load_ratio_to_safetensors_warm"] > 0
    # What is not installed is named, and has no figures.
    for name in figures["absent"]:
        assert not any(loader == name for loader, _ in rows)
        assert f"load_ratio_to_{name}_warm" not in figures
    assert {loader for loader, _ in rows} | set(figures["absent"]) == {
        *("livescale", "safetensors", "runai", "fastsafetensors")
    }


@pytest.mark.usefixtures("machine")
def test_mesh_counts_connections(tmp_path: Path) -> None:
    (few, full) = figures_of(tmp_path, "mesh", "--workers", "2,4")["rows"]
    assert (few["connections"], full["connections"]) == (1, 6)
    assert full["threads"] > few["threads"]
    assert min(few["setup_ns"], few["rss_bytes"]) > 0
    (lazy,) = figures_of(tmp_path, "mesh", "--workers", "4", "--eager-peers-max", "1")["rows"]
    assert lazy["connections"] == 3


@given(workers=st.integers(2, 40), eager=st.integers(0, 50))
def test_everybody_calls_the_next_ones(workers: int, eager: int) -> None:
    pairs = [(a, b) for a in range(workers) for b in range(a + 1, workers) if b - a <= eager]
    for number in range(workers):
        assert eager_connections(number, workers, eager) == sum(number in pair for pair in pairs)


@given(size=st.integers(1, 1 << 40), layers=st.integers(1, 100))
def test_layers_are_even_whole_pages(size: int, layers: int) -> None:
    sizes = layer_sizes(size, layers)
    assert len(sizes) == layers
    assert size <= sum(sizes) < size + 4096
    assert all(layer % 4096 == 0 for layer in sizes)
    assert max(sizes) - min(sizes) <= 4096


@given(size=st.integers(64 << 20, 64 << 30))
def test_a_made_model_has_about_the_size_asked_for(size: int) -> None:
    shape = shape_of_size(size)
    preset = shape.preset(8192)
    attention = preset.hidden_size * preset.head_dim * 2 * (preset.heads + preset.kv_heads)
    layer = attention + 3 * preset.hidden_size * preset.intermediate_size
    parameters = preset.decoder_layers * layer + 2 * 8192 * preset.hidden_size
    assert 2 * parameters == pytest.approx(size, rel=0.2)


# -- the report -----------------------------------------------------------------------------------


def row(strategy: str, receivers: int, seconds: float, **fields: Any) -> MulticastRow:
    ns = int(seconds * 1e9)
    run = MulticastRun(
        plan_ns=1, start_ns=ns // 100, completed_ns=ns, layer_ns=(ns // 2, ns), cpu_s=1.0,
        spine_bytes=0,
    )  # fmt: skip
    made = MulticastRow(
        strategy=strategy,
        planned=strategy,
        receivers=receivers,
        size_bytes=125_000_000,
        link_bits_per_s=1_000_000_000,
        connect_ns=0,
        predicted_ns=None,
        runs=(run,),
    )
    return dataclasses.replace(made, **fields)


NETWORK = {"hosts": 4, "leaves": 1}


def test_ratios_are_those_of_one_strategy() -> None:
    rows = (row("chain", 1, 1.0), row("chain", 3, 1.1), row("unicast", 1, 2.0))
    report = MulticastReport(rows, NETWORK, 1.0, {3: 3.0})
    assert [report.t_over_t1(found) for found in rows] == [None, pytest.approx(1.1), None]
    figures = report.as_json()
    assert (figures["strategy"], figures["receivers"]) == ("chain", 3)
    assert figures["link_efficiency"] == pytest.approx(1 / 1.1)
    assert figures["overhead_share"] == pytest.approx(0.01)
    assert figures["peer_gloo_seconds"] == 3.0
    assert "predicted_error" not in figures
    assert "chain" in report.text()


def test_modes_are_compared_turn_by_turn() -> None:
    plain = [row("chain", 2, seconds).run for seconds in (1.0, 2.0, 4.0)]
    sealed = [
        dataclasses.replace(row("chain", 2, seconds).run, cpu_s=cpu_s)
        for seconds, cpu_s in ((1.1, 1.5), (2.0, 2.0), (8.0, 4.0))
    ]
    report = TlsReport("chain", 2, 500_000_000, NETWORK, {"plain": plain, "on": sealed})
    found = report.as_json()["modes"]
    assert found["on"]["seconds_over_plain_all"] == pytest.approx([1.1, 1.0, 2.0])
    assert found["on"]["seconds_over_plain"] == pytest.approx(1.1)
    assert found["plain"]["cpu_s_per_gb"] == pytest.approx(1.0)
    assert found["on"]["cpu_over_plain"] == pytest.approx(2.0)
    assert "on" in report.text()


def test_what_was_not_measured_is_absent() -> None:
    report = MulticastReport((row("chain", 1, 1.0),), NETWORK, 1.0)
    figures = report.as_json()
    for name in ("peer_gloo_seconds", "both_ways_over_alone", "t_over_t1"):
        assert name not in figures


def test_prediction_and_connections_count() -> None:
    late = row("chain", 1, 1.0, predicted_ns=900_000_000, connect_ns=500_000_000)
    assert late.predicted_error == pytest.approx(0.1)
    assert late.overhead_share == pytest.approx((0.01 + 0.5) / 1.5)
    slow = dataclasses.replace(late.run, completed_ns=9_000_000_000)
    assert dataclasses.replace(late, runs=(slow, late.run, slow, late.run)).seconds == 1.0


# -- wrong words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["multicast", "--hosts", "1"], "--hosts"),
        (["multicast", "--hosts", "99"], "hosts"),
        (["multicast", "--link", "fast"], "fast"),
        (["multicast", "--strategies", "chain,magic"], "magic"),
        (["multicast", "--receivers", "6"], "--receivers"),
        (["multicast", "--size", "much"], "much"),
        (["multicast", "--chunk", "0"], "--chunk"),
        (["multicast", "--repetitions", "0"], "--repetitions"),
        (["load", "--size", "0"], "--size"),
        (["load", "--repetitions", "0"], "--repetitions"),
        (["mesh", "--workers", "1"], "--workers"),
        (["mesh", "--workers", "4,x"], "4,x"),
        (["mesh", "--eager-peers-max", "-1"], "--eager-peers-max"),
    ],
)
def test_wrong_flags_of_transfer_benches_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["bench", *words]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("flag", ["--model", "--peer-python"])
def test_what_is_not_there_is_named(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main(["bench", "load", flag, "/nowhere/it"]) == 1
    error = capsys.readouterr().err
    assert "/nowhere/it" in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("machine")
def test_a_model_that_cannot_be_loaded_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    assert main(["bench", "load", "--model", str(tmp_path)]) == 1
    assert "OddForCausalLM" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
def test_without_the_tools_multicast_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["bench", "multicast"]) == 1
    error = capsys.readouterr().err
    assert "root" in error or "iproute2" in error
