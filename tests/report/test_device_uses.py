"""What devices do over time, as stacked areas: against the sums of the record, and as drawn."""

from __future__ import annotations

import functools
import io
import re

import msgspec
import numpy as np
import pytest
from reported_records import S, reported, simulated

from livescale.lab.commands.pool_choices import a800_workers
from livescale.load.traces import TraceRow
from livescale.report.comparison import compared_figures
from livescale.report.html import html_report
from livescale.report.pictures.keys import USE_COLOURS
from livescale.report.pictures.series import sampled, use_steps
from livescale.report.run.reported_run import ReportedRun
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.telemetry.history.device_time import DeviceUse
from livescale.telemetry.record.record import AnyLine
from livescale.values.units import NS_PER_S

DEVICES = 5
FIELDS = {
    DeviceUse.SERVING: "serve_ns",
    DeviceUse.LOADING: "load_ns",
    DeviceUse.DRAINING: "drain_ns",
    DeviceUse.SPARE: "spare_ns",
    DeviceUse.IDLE: "idle_ns",
}


@functools.cache
def shared_pool() -> ReportedRun:
    """Two models with a burst each, one after the other, on one pool."""
    models = [PooledModel(name, "llama-3-8b") for name in ("first", "second")]
    config = build_config(a800_workers(DEVICES, hosts=1), models, SYSTEMS["livescale-on-demand"])
    loads = {
        name: [TraceRow(at * S + n * S // 40, 1_500, 10) for n in range(80)]
        for name, at in (("first", 1), ("second", 5))
    }
    file, start_ns = io.BytesIO(), lead_ns(config)
    run_pool(config, loads, start_ns, 0, file)
    decoder = msgspec.json.Decoder(AnyLine)
    lines = tuple(decoder.decode(line) for line in file.getvalue().splitlines())
    return reported("shared", lines, start_ns)


RUNS = pytest.mark.parametrize(
    ("run", "devices"),
    [(shared_pool(), DEVICES), (reported("a", simulated()), 4)],
    ids=["two models", "one model"],
)


@RUNS
def test_every_device_counts_once_at_any_time(run: ReportedRun, devices: int) -> None:
    at_s = np.linspace(0, run.end_ns / NS_PER_S, 500, endpoint=False)
    steps = [steps for of in use_steps(run).values() for steps in of.values()]
    assert (np.sum([sampled(one, at_s) for one in steps], axis=0) == devices).all()


@RUNS
def test_areas_are_the_device_time_of_the_run(run: ReportedRun, devices: int) -> None:
    spent = dict.fromkeys(DeviceUse, 0.0)
    end_s = run.end_ns / NS_PER_S
    for of in use_steps(run).values():
        for use, steps in of.items():
            times = [at for at, _ in steps] + [end_s]
            spent[use] += sum(n * (times[k + 1] - times[k]) for k, (_, n) in enumerate(steps))
    for use, field in FIELDS.items():
        assert spent[use] * NS_PER_S == pytest.approx(getattr(run.device_time, field), abs=1e4)
    spare_s = sum(usage.spare_ns for usage in run.usage.values()) / NS_PER_S
    assert spent[DeviceUse.SPARE] == pytest.approx(spare_s)


def section(page: str) -> str:
    return page[page.index('<h2 id="devices"') : page.index('<h2 id="instances"')]


def areas(svg: str) -> dict[DeviceUse, np.ndarray]:
    """Corners (x, y) of the filled area of each use."""
    found = {}
    for use, colour in USE_COLOURS.items():
        drawn = re.search(rf'<path d="([^"]*)"[^>]*fill: {colour}', svg, re.IGNORECASE)
        if drawn:
            numbers = [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?", drawn[1])]
            found[use] = np.array(numbers).reshape(-1, 2)
    return found


def test_the_pool_and_each_model_have_an_area() -> None:
    page = section(html_report([shared_pool()], "Shared"))
    pool, first, second = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    assert "<figcaption>" not in pool
    assert [re.search("<figcaption>(.*?)</", one)[1].strip() for one in (first, second)] == [  # type: ignore[index]
        *sorted(shared_pool().usage, key=lambda name: -shared_pool().usage[name].device_ns)
    ]
    assert "spare: parameters, no instance" in page
    drawn = areas(pool)
    assert {DeviceUse.SERVING, DeviceUse.LOADING, DeviceUse.SPARE} <= set(drawn)
    # One on top of the other: the area is as high at any time, and none lies under the first.
    lowest = max(corners[:, 1].max() for corners in drawn.values())
    tops: dict[float, float] = {}
    for corners in drawn.values():
        for x, y in corners:
            tops[x] = min(tops.get(x, y), y)
    heights = {round(lowest - top, 2) for top in tops.values()}
    assert len(heights) == 1
    # No device is idle for a model: it has none then.
    assert all(DeviceUse.IDLE not in areas(one) for one in (first, second))


def test_a_single_model_needs_no_second_picture() -> None:
    page = section(html_report([reported("a", simulated())], "One"))
    assert page.count("<figure>") == 1


def test_spare_time_has_a_ratio_where_gpu_time_has_one() -> None:
    runs = [reported("a", simulated()), reported("b", simulated("storage"))]
    rows = {row.label: row for row in compared_figures(runs)}
    gpu, spare = rows["GPU time"], rows["spare: parameters, no instance"]
    assert gpu.ratios
    assert spare.ratios
