"""`livescale bench kv`: KV beside a load, in virtual time and on emulated hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from interrupted import nothing_is_left
from livescale.main import main

KEYS = {
    *("kv_share_of_bandwidth", "load_share_of_bandwidth", "interfering_load_ratio"),
    *("mutation_ms", "mutation_first_request_ms", "mutation_bytes"),
    "decode_begins_ratio",
}
OF_MUTATION = {name for name in KEYS if name.startswith("mutation")}
SHARED_KEY, BEHIND_KEY = "equal_shares_tbt_p99_ratio", "behind_decode_begins_ratio"
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    def ran(*words: object) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        assert main(["bench", "kv", *map(str, words), "--json", str(file)]) == 0
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return ran


def test_the_controllers_plan_takes_the_free_way_and_the_other_meets_kv(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """BlitzScale's Figure 12 (B16): KV of a third of the link makes a load that meets it take half
    as long again, and with equal shares it is KV that is late, too."""
    figures = bench("--simulated")
    assert "interfering_load_ratio" in capsys.readouterr().out
    assert {*KEYS, SHARED_KEY, BEHIND_KEY} <= figures.keys()
    assert "emulated" not in figures
    plays = figures["simulated"]["plays"]
    assert {name: play["source"] for name, play in plays.items()} == {
        "planned": "decode",
        "planned_shared": "decode",
        "interfering": "prefill",
        "interfering_shared": "prefill",
    }
    assert figures["load_share_of_bandwidth"] >= 0.95
    assert 1.3 <= figures["interfering_load_ratio"] <= 2
    assert figures["kv_share_of_bandwidth"] >= 0.9
    assert figures[SHARED_KEY] > 1.3
    assert plays["planned_shared"]["kv_share_of_bandwidth"] >= 0.9
    assert plays["interfering_shared"]["kv_share_of_bandwidth"] < 0.6
    assert figures["mutation_bytes"] == 0
    # The next request that is ready, or the one after it, goes to the mutated instance.
    every_ms = 1000 * figures["kv_bytes_per_prompt"] / figures["link_bytes_per_s"]
    every_ms *= 1000 / figures["kv_permille_of_link"]
    assert 0 < figures["mutation_first_request_ms"] < 2 * every_ms
    assert 0 < figures["mutation_ms"] <= 10
    assert figures["simulated"]["failed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("link", ["50mbit", "200mbit", "1gbit"])
def test_requests_decode_a_layers_kv_and_a_run_after_their_prompts_at_the_latest(
    bench: Bench, link: str
) -> None:
    """Where a layer computes longer than its KV travels: BlitzScale §5.1."""
    figures = bench("--simulated", "--link", link, "--kv-permille", 100)
    ahead, behind = (figures["simulated"]["second_tokens"][way] for way in ("ahead", "behind"))
    assert ahead["failed"] == behind["failed"] == 0
    assert ahead["layer_ms"] > ahead["layer_kv_ms"]
    assert 0 < ahead["decode_begins_p50"] <= ahead["decode_begins_max"] <= 1
    # A layer's KV is the least, and behind its request all of it: eight layers.
    assert ahead["second_token_p50_ms"] >= ahead["layer_kv_ms"] + ahead["run_ms"]
    assert behind["second_token_p50_ms"] >= 8 * behind["layer_kv_ms"] + behind["run_ms"]
    assert figures["decode_begins_ratio"] == ahead["decode_begins_max"] < figures[BEHIND_KEY]


@pytest.mark.long
@pytest.mark.parametrize("permille", [200, 500])
def test_a_load_that_meets_kv_gets_what_that_leaves(bench: Bench, permille: int) -> None:
    """1 / (1 - u), whatever u is."""
    link = {200: "200mbit", 500: "100mbit"}[permille]
    figures = bench("--simulated", "--kv-permille", permille, "--link", link)
    expected = 1000 / (1000 - permille)
    assert figures["interfering_load_ratio"] == pytest.approx(expected, rel=0.05)
    assert figures["load_share_of_bandwidth"] >= 0.95


@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.usefixtures("network_namespaces")
def test_hosts_play_the_same_scene(bench: Bench, tmp_path: Path) -> None:
    figures = bench("--folder", tmp_path / "run")
    emulated = figures["emulated"]
    assert KEYS - {"mutation_first_request_ms"} <= emulated.keys()
    # Only the data plane's own order is there: equal shares are the simulator's.
    assert SHARED_KEY not in emulated
    # Pools always have KV go ahead.
    assert BEHIND_KEY not in emulated
    assert emulated["unbound_tbt_p99_ratio"] > 0
    assert emulated["failed"] == emulated["token_mismatches"] == 0
    # Answers of the scene of second tokens are longer.
    second = emulated["second_tokens"]["ahead"]["requests"]
    assert emulated["tokens"] == 20 * (emulated["requests"] - second) + 40 * second > 0
    assert emulated["mutation_bytes"] == 0
    plays = emulated["plays"]
    assert plays["planned"]["source"] == "decode"
    assert plays["interfering"]["source"] == plays["interfering_shared"]["source"] == "prefill"
    for play in plays.values():
        assert play["load_ratio"] == pytest.approx(play["load_beside_kv_s"] / play["load_alone_s"])
    assert emulated["interfering_load_ratio"] == plays["interfering"]["load_ratio"]
    assert emulated["load_share_of_bandwidth"] == pytest.approx(1 / plays["planned"]["load_ratio"])
    assert set(figures["difference_percent"]) == KEYS - OF_MUTATION
    assert nothing_is_left(psutil.Process().pid)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--kv-permille", "0"], "--kv-permille"),
        (["--prompt-tokens", "5000"], "--prompt-tokens"),
        (["--output-tokens", "2"], "--output-tokens"),
        (["--link", "fast"], "fast"),
        (["--link", "10gbit"], "--link"),
    ],
)
def test_wrong_flags_are_named(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kv", "--simulated", *words]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
