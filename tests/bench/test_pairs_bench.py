"""`bench pairs`: rows of small bursts; what they mean, not how large they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from livescale.main import main

SYSTEMS = {"livescale-stop", "livescale-overlap", "livescale-pairs", "livescale-bounds"}
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    def ran(*words: object) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        assert main(["bench", "pairs", *map(str, words), "--json", str(file)]) == 0
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return ran


def rows_of(figures: dict[str, Any]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["link_gbit"], row["system"]): row for row in figures["rows"]}


def test_a_pair_is_made_where_it_pays(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """At 5 Gbit/s KV would be three times the link, at 400 the load is over too soon; between the
    two the pair is better than either alternative, also where not all KV fits."""
    figures = bench("--model", "llama-3-8b", "--link-gbit", "5,10,50,400", "--seed", 3)
    assert "worst: mean_over_better" in capsys.readouterr().out
    rows = rows_of(figures)
    assert {system for _, system in rows} == SYSTEMS
    assert not any(row["failed"] for row in rows.values())
    found = {
        link: {s: {k: v for k, v in rows[link, s].items() if k != "system"} for s in SYSTEMS}
        for link in (5, 10, 50, 400)
    }
    assert (
        found[5]["livescale-bounds"] == found[5]["livescale-overlap"] != found[5]["livescale-pairs"]
    )
    assert (
        found[10]["livescale-bounds"]
        == found[10]["livescale-pairs"]
        != found[10]["livescale-overlap"]
    )
    assert (
        found[50]["livescale-bounds"]
        == found[50]["livescale-pairs"]
        != found[50]["livescale-overlap"]
    )
    assert found[400]["livescale-bounds"] == found[400]["livescale-overlap"]
    fast = found[50]
    assert (
        fast["livescale-bounds"]["ttft_mean_s"] <= 0.85 * fast["livescale-overlap"]["ttft_mean_s"]
    )
    assert fast["livescale-bounds"]["tbt_p99_s"] <= 1.1 * fast["livescale-stop"]["tbt_p99_s"]


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    ["llama-3-8b", "mistral-24b,tp=2", "qwen2.5-72b,tp=4"],
)
def test_pairs_are_as_good_as_the_better_of_always_and_never(bench: Bench, model: str) -> None:
    """Bursts that come at once, at the rates of today's networks; never worse than waiting."""
    worst = bench("--model", model)["worst"]
    assert worst["mean_over_better"] <= 1.02
    assert worst["p99_over_better"] <= 1.05
    assert worst["mean_over_stop"] <= 1.001
    assert worst["tbt_p99_over_stop"] <= 1.05


@pytest.mark.parametrize(
    "words",
    [
        ("--link-gbit", "0"),
        ("--requests", "x"),
        ("--gap-ms", "-1"),
        ("--instances", "1"),
        ("--model", "llama-3-8b,max=2"),
    ],
)
def test_wrong_flags_are_named(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pairs", *words]) == 1
    assert words[0] in capsys.readouterr().err


def test_loads_that_join_behind_a_target_are_not_held_up(bench: Bench) -> None:
    """Prompts come one after the other, and so do loads: p99 is that of overlap, where what the
    first target handed over went before the parameters of the others."""
    figures = bench(
        "--model", "llama-3-8b", "--link-gbit", 50, "--requests", 40, "--gap-ms", 10, "--seed", 3
    )
    rows = rows_of(figures)
    judged, alone = rows[50, "livescale-bounds"], rows[50, "livescale-overlap"]
    assert judged["ttft_p99_s"] <= 1.05 * alone["ttft_p99_s"]
    assert judged["ttft_mean_s"] <= 0.95 * alone["ttft_mean_s"]
