"""Figures of a paper: their files, and what runs say over time."""

from __future__ import annotations

import csv
import functools
import itertools
import os
from pathlib import Path

import pytest

from effort import mostly_long
from livescale.lab.reproduce.base import series
from livescale.lab.reproduce.base.claim import Conditions, Curve, Picture
from livescale.lab.reproduce.base.models import cluster_of
from livescale.lab.reproduce.base.paper_figures import PaperFigure, Printed, index, write_figure
from livescale.lab.reproduce.blitzscale.blitzscale_figures import FIGURES
from livescale.lab.reproduce.figure_run import UnknownFigureError, choose_figures
from livescale.load.traces import TraceRow
from livescale.main import main
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel, PooledRoles
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import find_system
from livescale.values.units import NS_PER_S

PANELS = (
    Picture("lines", "x", "y", (Curve("a", ((0.0, 1.0), (1.5, 2.0))),)),
    Picture("bars", "", "y", (Curve("b", ((0.0, 1.0), (1.0, 3.0))),), names=("one", "two")),
)
FIGURE = PaperFigure(7, "made", (PANELS,), (Printed("B0", "1 s", "2 s"),), "a note")


QUICK_FIGURES = (3, 4, 18, 21, 23)
"""The others play minutes of traces, which `livescale reproduce figures` and verdicts do."""


def test_a_figure_has_drawings_data_and_what_the_paper_prints(tmp_path: Path) -> None:
    names = write_figure(FIGURE, tmp_path)
    assert names == [f"figure-07{kind}" for kind in (".svg", ".pdf", ".csv", "-printed.csv")]
    assert (tmp_path / "figure-07.pdf").read_bytes().startswith(b"%PDF")
    rows = list(csv.reader((tmp_path / "figure-07.csv").read_text().splitlines()))
    assert rows[0] == ["panel", "curve", "x", "y"]
    assert rows[1:] == [
        ["lines", "a", "0", "1.0"],
        ["lines", "a", "1.5", "2.0"],
        ["bars", "b", "one", "1.0"],
        ["bars", "b", "two", "3.0"],
    ]
    printed = (tmp_path / "figure-07-printed.csv").read_text()
    assert printed == "what,paper,ours\nB0,1 s,2 s\n"
    before = [(tmp_path / name).read_bytes() for name in names]
    write_figure(FIGURE, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in names] == before


def test_the_index_has_all_figures_and_says_what_is_missing() -> None:
    text = index([FIGURE], [(8, "no trace")])
    assert "| B0 | 1 s | 2 s |" in text
    assert "A note." in text
    assert "- Figure 8: no trace" in text


def test_figures_are_chosen_by_number() -> None:
    assert choose_figures([]) == list(FIGURES)
    assert choose_figures(["18", "3"]) == [3, 18]
    with pytest.raises(UnknownFigureError, match="no figure '5'; 3, 4, 17"):
        choose_figures(["5"])


@pytest.mark.long
@pytest.mark.skipif("LIVESCALE_DATA" not in os.environ, reason="a folder without traces is made")
def test_without_traces_the_command_says_what_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIVESCALE_DATA")
    arguments = ["reproduce", "figures", "21", "4", "--out", str(tmp_path), "--jobs", "1"]
    assert main(arguments) == 0
    assert "not drawn: Figure 4: trace" in capsys.readouterr().out
    assert (tmp_path / "figure-21.svg").exists()
    assert "Figure 4: trace" in (tmp_path / "figures.md").read_text()


@pytest.mark.skipif("LIVESCALE_DATA" not in os.environ, reason="figures of public traces")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", mostly_long(QUICK_FIGURES, []))
def test_every_figure_has_curves_and_what_the_paper_prints(number: int, tmp_path: Path) -> None:
    figure = FIGURES[number](Conditions(0, Path(os.environ["LIVESCALE_DATA"])))
    assert figure.number == number
    assert figure.printed
    for row in figure.rows:
        for picture in row:
            assert picture.curves
            assert all(curve.points for curve in picture.curves)
    write_figure(figure, tmp_path)


@pytest.mark.parametrize(
    "arguments", [["figures", "5"], ["figures", "--json", "x"], ["B10", "--out", "x"]]
)
def test_a_call_that_makes_no_sense_is_a_usage_error(arguments: list[str]) -> None:
    assert main(["reproduce", *arguments]) == 2


# -- what runs say over time ----------------------------------------------------------------------

ROWS = [TraceRow(n * NS_PER_S // 20, 1000, 5) for n in range(100)]


@functools.cache
def played() -> PoolRun:
    """Five seconds of a regular load on prefill and decode instances."""
    model = PooledModel("m", "llama-3-8b", roles=PooledRoles())
    config = build_config(cluster_of("blitzscale-b"), [model], find_system("livescale-bounds"))
    return run_pool(config, {"m": ROWS}, lead_ns(config), 0)


def test_arrivals_and_kv_are_counted_once() -> None:
    run = played()
    assert sum(count for _, count in series.arrivals(run, "").points) == len(ROWS)
    percents = [percent for _, percent in series.kv_percents(run, "").points]
    sent = sum(percents) / 100 * series.nic_bytes_per_s(run)
    assert sent == pytest.approx(len(ROWS) * 1000 * 131_072)


def test_devices_over_time_are_the_device_time() -> None:
    run = played()
    total, prefill, decode = (
        _area(series.devices(run, "", decode=part)) for part in (None, False, True)
    )
    assert total == pytest.approx(run.device_ns() / NS_PER_S)
    assert prefill + decode == pytest.approx(total)
    assert decode > 0


def test_distributions_rise_to_all_and_means_lie_within_them() -> None:
    run = played()
    for shares, means, unit in (
        (series.ttft_shares(run, ""), series.ttft_means(run, ""), 1),
        (series.tbt_shares(run, ""), series.tbt_means(run, ""), 1),
    ):
        values = [value for value, _ in shares.points]
        assert values == sorted(values)
        assert shares.points[-1][1] == 100
        assert 0 < max(mean for _, mean in means.points) <= values[-1] * unit * (1 + 1e-9)


def test_parameters_per_second_sum_up_to_what_was_carried() -> None:
    run = played()
    times = range(run.started_ns, run.ended_ns, NS_PER_S // 3)
    carried = {at_ns: 10**9 * number for number, at_ns in enumerate(times, 5)}
    points = series.per_second(run, carried, "").points
    sent = sum(percent for _, percent in points) / 100 * series.nic_bytes_per_s(run)
    assert sent == pytest.approx(10**9 * (len(times) - 1))


def _area(curve: Curve) -> float:
    pairs = itertools.pairwise(curve.points)
    return sum(value * (after - at) for (at, value), (after, _) in pairs)
