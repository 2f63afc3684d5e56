"""`livescale simulate TRACE`: the production controller and Batcher in virtual time.

With `--sweep bandwidth=…` from loading speed to SLO violations (BlitzScale's Figure 3): instances
serve nothing while they load ("stop the world"), and how long that takes is the size of a rank over
the bandwidth of its NIC. Where even that meets the SLO, no instance needs to serve while loading.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from livescale.cli.errors import UserError
from livescale.cli.loads import add_load_arguments, write_json
from livescale.cli.pool_choices import PoolChoice, add_pool_arguments, choose, choose_systems
from livescale.report.comparison import as_json, comparison_table
from livescale.report.html import write_html_report
from livescale.report.reported_run import ReportedRun
from livescale.report.run_report import RunReport
from livescale.report.summary import RunSummary, summarize
from livescale.report.terminal import seconds, table
from livescale.sim.config import SimConfig
from livescale.sim.pools.configs import microdollars_per_hour
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS, System
from livescale.slo import SloError, SloRule, parse_slo
from livescale.telemetry.record import read_record
from livescale.telemetry.record_file import create_record
from livescale.telemetry.record_parts import RecordError
from livescale.topology_files import NamedTopology

_MICRODOLLARS = 1_000_000
_MODELS_TOLD = 8
"""With more models a run is told in sums: its story would have lines for each of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace="TRACE", seconds=300, divide_lengths=1)
    add_pool_arguments(parser, strategy="livescale")
    add = parser.add_argument
    add("--json", type=Path, help="write the figures to this file")
    add("--slo", default="5x-mean", help="'5x-mean' or 'ttft=450ms,tbt=150ms'")
    words = "a run record of each strategy and a page about all, in this directory"
    add("--report", type=Path, metavar="DIR", help=words)
    add("--record", type=Path, metavar="FILE", help="the run record of a single strategy")
    words = "instead of strategies: loading speeds in Gbit/s, and what they do to the SLO"
    add("--sweep", metavar="bandwidth=10,25,…", help=words)


def run(arguments: argparse.Namespace) -> int:
    """0 when every request ended well."""
    try:
        slo = parse_slo(arguments.slo)
    except SloError as error:
        raise UserError(str(error)) from error
    systems = choose_systems(arguments)
    rates = parse_sweep(arguments.sweep) if arguments.sweep is not None else ()
    if rates and (arguments.strategy or arguments.report or arguments.record):
        raise UserError("--sweep has runs of its own: no --strategy, --report or --record with it")
    if arguments.record is not None and len(systems) > 1:
        raise UserError("--record holds one strategy's run: with several, use --report DIR")
    choice = choose(arguments)
    print(choice.describe())
    if rates:
        return sweep(choice, rates, slo, arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.report or Path(scratch)
        return _compare(choice, systems, slo, folder, arguments)


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A system's run, and where its record is."""

    system: System
    run: PoolRun
    path: Path
    elapsed_s: float


def _compare(
    choice: PoolChoice,
    systems: Sequence[System],
    slo: SloRule,
    folder: Path,
    arguments: argparse.Namespace,
) -> int:
    configs = [choice.config(system) for system in systems]
    # As in a real pool, the first instances are there before the load begins: for every system
    # at the same time, so that times of their records can be compared.
    start_ns = max(map(lead_ns, configs))
    recorded = []
    for system, config in zip(systems, configs, strict=True):
        path = arguments.record or folder / f"{system.file_name}.jsonl"
        recorded.append(_record(choice, system, config, start_ns, path, arguments.seed))
        print(f"{system.name}: {system.sentence}: {_speed(recorded[-1])}")
    reported = _reported(choice, recorded, slo, arguments.slo)
    print()
    is_single = len(reported) == 1 and len(choice.models) <= _MODELS_TOLD
    print(reported[0].report.text() if is_single else comparison_table(reported))
    if arguments.record is not None:
        print(f"record    {arguments.record}")
    if arguments.report is not None:
        page = folder / "report.html"
        try:
            write_html_report(page, reported, f"{choice.load_name} on {choice.cluster_name}")
        except OSError as error:
            raise UserError(f"{page}: cannot be written: {error.strerror}") from error
        print(f"report    {page}, with a record of each run beside it")
    if arguments.json is not None:
        write_json(arguments.json, _figures(choice, recorded, reported, arguments.seed))
    return 1 if any(item.run.failed for item in recorded) else 0


def _record(
    choice: PoolChoice, system: System, config: SimConfig, start_ns: int, path: Path, seed: int
) -> _Recorded:
    started_s = time.monotonic()
    try:
        with create_record(path) as file:
            run = run_pool(config, choice.loads, start_ns, seed, file)
    except RecordError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    return _Recorded(system, run, path, time.monotonic() - started_s)


def _speed(recorded: _Recorded) -> str:
    result = recorded.run.result
    virtual_s = result.end_ns / 1e9
    factor = virtual_s / max(recorded.elapsed_s, 1e-9)
    sources = recorded.run.loads_from().items()
    loads = [f"{count} from {place.replace('_', ' ')}" for place, count in sources if count]
    return (
        f"{virtual_s:.0f} s in {recorded.elapsed_s:.1f} s ({factor:.0f} x real time),"
        f" {result.steps} steps of the controller; loads: {', '.join(loads) or 'none'}"
    )


def _reported(
    choice: PoolChoice, recorded: Sequence[_Recorded], rule: SloRule, words: str
) -> list[ReportedRun]:
    """All runs against one SLO: a multiple of the mean is that of the whole pool serving all the
    time where that was run, else of the first run."""
    timings = [item.run.timings() for item in recorded]
    base = next((i for i, item in enumerate(recorded) if item.system.fixed_percent == 100), 0)
    try:
        slo = rule.resolve(timings[base])
    except SloError:
        slo = None  # nothing ended well in the run that it refers to
    return [
        ReportedRun(
            name=item.system.name,
            report=RunReport(
                choice.load_name,
                list(read_record(item.path)),
                summarize(of_run, slo or rule),
                item.run.started_ns,
                words,
            ),
            slo=slo,
            cluster=choice.cluster_name,
            device_dollars_per_hour=_device_dollars(choice.cluster),
        )
        for item, of_run in zip(recorded, timings, strict=True)
    ]


def _device_dollars(cluster: NamedTopology) -> float | None:
    """What a device costs in an hour, where the price of every host is known."""
    price = microdollars_per_hour(cluster)
    return None if price is None else price / _MICRODOLLARS / len(cluster.topology.devices)


def _figures(
    choice: PoolChoice, recorded: Sequence[_Recorded], reported: Sequence[ReportedRun], seed: int
) -> dict[str, object]:
    """One strategy's figures by name, or a list of all strategies' under `runs`."""
    common = {"seed": seed, "clipped": choice.clipped}
    figures = [
        {**of_run, "loads_from": item.run.loads_from()}
        for of_run, item in zip(as_json(reported), recorded, strict=True)
    ]
    if len(figures) == 1:
        return {**figures[0], **common}
    return {"trace": choice.load_name, "cluster": choice.cluster_name, **common, "runs": figures}


_GBIT_BYTES = 125_000_000
_NS_PER_S = 1_000_000_000
_SWEEP = re.compile(r"bandwidth=(\d+(?:\.\d+)?(?:,\d+(?:\.\d+)?)*)")
MET_PERMILLE = 990
"""A row meets the SLO when so many requests do."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One run. `gbit_per_s` is None where the whole pool serves all the time."""

    gbit_per_s: float | None
    load_ns: int
    summary: RunSummary
    device_s: float

    @property
    def violations(self) -> float:
        """Share of the requests that missed the SLO."""
        return 1 - (self.summary.slo_attainment or 0)

    @property
    def is_met(self) -> bool:
        return self.summary.slo_met * 1000 >= self.summary.requests * MET_PERMILLE


def parse_sweep(text: str) -> tuple[float, ...]:
    """Gbit/s in "bandwidth=10,25,100", rising. Raises UserError."""
    found = _SWEEP.fullmatch(text)
    rates = tuple(sorted({float(part) for part in found[1].split(",")})) if found else ()
    if not rates or rates[0] <= 0:
        raise UserError(f"--sweep {text}: write bandwidth=10,25,100 (Gbit/s, above 0)")
    return rates


def sweep(
    choice: PoolChoice, rates: Sequence[float], rule: SloRule, arguments: argparse.Namespace
) -> int:
    """Print the table, and write its rows where asked to. 0 when every request ended well.

    A multiple of the mean is that of the whole pool serving all the time.
    """
    sizes = {policy.spec.size_bytes for policy in choice.config(SYSTEMS["ideal"]).policies}
    if len(sizes) > 1:
        raise UserError("--sweep: the models have ranks of different sizes; take one of them")
    size = sizes.pop()
    full = _run(choice, SYSTEMS["fixed-full"], None, rule, arguments.seed)
    slo = full.summary.slo
    if slo is None:
        raise UserError("--sweep: no request ended well though the whole pool served")
    rows = [full]
    for rate in rates:
        load_ns = -(-size * _NS_PER_S // int(rate * _GBIT_BYTES))
        system = msgspec.structs.replace(SYSTEMS["fixed-delay"], load_ns=load_ns)
        rows.append(_run(choice, system, rate, slo, arguments.seed))
    print(f"SLO {slo}: a rank of {size / 1e9:.1f} GB loads at the NIC's rate and serves after that")
    print()
    print(_table(rows))
    if arguments.json is not None:
        figures = {
            "trace": choice.load_name,
            "cluster": choice.cluster_name,
            "seed": arguments.seed,
            "clipped": choice.clipped,
            "slo": str(slo),
            "rank_bytes": size,
            "rows": [_as_json(row) for row in rows],
        }
        write_json(arguments.json, figures)
    return 1 if any(row.summary.failed for row in rows) else 0


# -- helpers, in the order used -------------------------------------------------------------------


def _run(choice: PoolChoice, system: System, rate: float | None, rule: SloRule, seed: int) -> _Row:
    config = choice.config(system)
    run = run_pool(config, choice.loads, lead_ns(config), seed)
    load_ns = system.load_ns if rate is not None and system.load_ns is not None else 0
    return _Row(rate, load_ns, summarize(run.timings(), rule), run.device_ns() / _NS_PER_S)


def _table(rows: Sequence[_Row]) -> str:
    full_s = rows[0].device_s
    cells = []
    for row in rows:
        ttft, tbt = row.summary.ttft, row.summary.tbt
        cells.append(
            [
                "whole pool" if row.gbit_per_s is None else f"{row.gbit_per_s:g} Gbit/s",
                seconds(row.load_ns / _NS_PER_S),
                f"{100 * row.violations:.1f} %",
                seconds(ttft.mean_s if ttft else None),
                seconds(ttft.p99_s if ttft else None),
                seconds(tbt.mean_s if tbt else None),
                f"{100 * row.device_s / full_s:.0f} %" if full_s else "-",
                "meets it" if row.is_met else "misses it",
            ]
        )
    header = ["per NIC", "load", "violations", "TTFT mean", "p99", "TBT mean", "GPU time"]
    return table([*header, "stop-the-world"], cells)


def _as_json(row: _Row) -> dict[str, object]:
    """The figures of a row; one that could not be measured is absent."""
    ttft, tbt = row.summary.ttft, row.summary.tbt
    figures: dict[str, object | None] = {
        "gbit_per_s": row.gbit_per_s,
        "load_s": row.load_ns / _NS_PER_S,
        "requests": row.summary.requests,
        "failed": row.summary.failed,
        "violations": row.violations,
        "ttft_mean_s": ttft.mean_s if ttft else None,
        "ttft_p99_s": ttft.p99_s if ttft else None,
        "tbt_mean_s": tbt.mean_s if tbt else None,
        "device_seconds": row.device_s,
        "stop_the_world_meets_slo": row.is_met,
    }
    return {name: value for name, value in figures.items() if value is not None}
