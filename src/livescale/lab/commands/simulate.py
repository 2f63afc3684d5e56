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
from typing import Any

import msgspec

from livescale.cli.loads import add_load_arguments, write_json, writing
from livescale.clusters.files import NamedTopology
from livescale.common.errors import UserError
from livescale.config.slo import SloAbsolute, SloError, SloRule, parse_slo
from livescale.lab.commands.pool_choices import (
    PoolChoice,
    add_pool_arguments,
    check_amount,
    choose,
    choose_system,
    choose_systems,
)
from livescale.report.comparison import comparison_table
from livescale.report.html import write_html_report
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.summary import summarize
from livescale.report.run.terminal import seconds, table
from livescale.report.run_report import run_text
from livescale.sim.pools.configs import dollars_per_hour
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool, run_with_history
from livescale.sim.pools.systems import SYSTEMS, System
from livescale.telemetry.history.device_time import device_time
from livescale.telemetry.record.record import read_record
from livescale.telemetry.record.record_file import create_record
from livescale.values.units import GBIT_BYTES, NS_PER_S

_MODELS_TOLD = 8
"""With more models a run is printed in sums: its text would have lines for each of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace="TRACE", seconds=300, divide_lengths=1)
    add_pool_arguments(parser, strategy="livescale")
    add = parser.add_argument
    add("--json", type=Path, help="Write the figures to this file (JSON).")
    add("--slo", default="5x-mean", help="SLO: '5x-mean' (default) or 'ttft=450ms,tbt=150ms'.")
    words = "Write a run record of each system and an HTML page into this folder."
    add("--report", type=Path, metavar="DIR", help=words)
    words = "Write the run record of a single system to this file."
    add("--record", type=Path, metavar="FILE", help=words)
    words = "Compare load bandwidths in Gbit/s instead of systems."
    add("--sweep", metavar="bandwidth=10,25,…", help=words)


def run(arguments: argparse.Namespace) -> int:
    """0 when every request ended well."""
    general = parse_slo(arguments.slo)
    systems = choose_systems(arguments)
    rates = parse_sweep(arguments.sweep) if arguments.sweep is not None else ()
    if rates and (arguments.strategy or arguments.report or arguments.record):
        raise UserError("--sweep has runs of its own: no --strategy, --report or --record with it")
    if arguments.record is not None and len(systems) > 1:
        raise UserError("--record holds one strategy's run: with several, use --report DIR")
    if arguments.record is not None and arguments.report is not None:
        raise UserError("--report DIR holds the record, too. Remove --record")
    choice = choose(arguments)
    slo = choice.slo(general)
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
    recorded = _record_all(choice, systems, folder, arguments)
    reported = _reported(choice, recorded, slo, arguments.slo)
    print()
    is_single = len(reported) == 1 and len(choice.models) <= _MODELS_TOLD
    print(run_text(reported[0]) if is_single else comparison_table(reported))
    if arguments.record is not None:
        print(f"record    {arguments.record}")
    if arguments.report is not None:
        page = folder / "report.html"
        with writing(page):
            write_html_report(page, reported, f"{choice.load_name} on {choice.cluster_name}")
        print(f"report    {page}, with a record of each run beside it")
    if arguments.json is not None:
        write_json(arguments.json, _figures(choice, recorded, reported, arguments.seed))
    return 1 if any(item.run.failed for item in recorded) else 0


def _record_all(
    choice: PoolChoice, systems: Sequence[System], folder: Path, arguments: argparse.Namespace
) -> list[_Recorded]:
    """In their order. Fixed pools that are like another system are run last."""
    # As in a real pool, the first instances are there before the load begins: for every system
    # at the same time, so that times of their records can be compared.
    full = SYSTEMS["fixed-full"]
    configs = {s.name: choice.config(full if s.fixed_like else s) for s in systems}
    start_ns = max(map(lead_ns, configs.values()))
    recorded: dict[str, _Recorded] = {}

    def like(system: System) -> PoolRun:
        """What the system is to be like, which was not asked for by itself."""
        other = choose_system(system.fixed_like or "", arguments)
        return run_pool(choice.config(other), choice.loads, start_ns, arguments.seed)

    def play(system: System) -> PoolRun:
        """Its record is that of the last size that was tried."""
        path = arguments.record or folder / f"{system.file_name}.jsonl"
        config = configs[system.name] if system.fixed_devices is None else choice.config(system)
        started_s = time.monotonic()
        with writing(path), create_record(path) as file:
            run = run_pool(config, choice.loads, start_ns, arguments.seed, file)
        recorded[system.name] = _Recorded(system, run, path, time.monotonic() - started_s)
        return run

    for system in sorted(systems, key=lambda system: system.fixed_like is not None):
        if system.fixed_like is None:
            play(system)
        else:
            other = recorded.get(system.fixed_like)
            choice.play_equal(system, other.run if other else like(system), play)
        found = recorded[system.name]
        print(f"{system.name}: {found.system.sentence}: {_speed(found)}")
    return [recorded[system.name] for system in systems]


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
            trace=choice.load_name,
            lines=list(read_record(item.path)),
            summary=summarize(of_run, slo or rule),
            started_ns=item.run.started_ns,
            slo_rule=words,
            slo=slo,
            cluster=choice.cluster_name,
            device_dollars_per_hour=_device_dollars(choice.cluster),
        )
        for item, of_run in zip(recorded, timings, strict=True)
    ]


def _device_dollars(cluster: NamedTopology) -> float | None:
    """What a device costs in an hour, where the price of every host is known."""
    price = dollars_per_hour(cluster)
    return None if price is None else price / len(cluster.topology.devices)


def _figures(
    choice: PoolChoice, recorded: Sequence[_Recorded], reported: Sequence[ReportedRun], seed: int
) -> dict[str, object]:
    """One strategy's figures by name, or a list of all strategies' under `runs`."""
    figures = [
        {**run.figures, "loads_from": item.run.loads_from()}
        for run, item in zip(reported, recorded, strict=True)
    ]
    if len(figures) == 1:
        return {**figures[0], "seed": seed, "clipped": choice.clipped}
    return {**choice.figures(seed), "runs": figures}


_SWEEP = re.compile(r"bandwidth=(\d+(?:\.\d+)?(?:,\d+(?:\.\d+)?)*)")
MET_PERMILLE = 990
"""A row meets the SLO when so many requests do."""


def parse_sweep(text: str) -> tuple[float, ...]:
    """Gbit/s in "bandwidth=10,25,100", rising. Raises UserError."""
    found = _SWEEP.fullmatch(text)
    rates = tuple(sorted({float(part) for part in found[1].split(",")})) if found else ()
    if not rates or rates[0] <= 0:
        raise UserError(f"--sweep {text}: write bandwidth=10,25,100 (Gbit/s, above 0)")
    for rate in rates:
        check_amount(rate, "--sweep: a bandwidth")
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
    slo, full = _run(choice, SYSTEMS["fixed-full"], None, rule, arguments.seed)
    if slo is None:
        raise UserError("--sweep: no request ended well though the whole pool served")
    rows = [full]
    for rate in rates:
        load_ns = -(-size * NS_PER_S // int(rate * GBIT_BYTES))
        system = msgspec.structs.replace(SYSTEMS["fixed-delay"], load_ns=load_ns)
        rows.append(_run(choice, system, rate, slo, arguments.seed)[1])
    print(f"SLO {slo}: a rank of {size / 1e9:.1f} GB loads at the NIC's rate and serves after that")
    print()
    print(_table(rows))
    if arguments.json is not None:
        figures = {
            **choice.figures(arguments.seed),
            "slo": str(slo),
            "rank_bytes": size,
            "rows": [{k: v for k, v in row.items() if v is not None} for row in rows],
        }
        write_json(arguments.json, figures)
    return 1 if any(row["failed"] for row in rows) else 0


# -- helpers, in the order used -------------------------------------------------------------------


def _run(
    choice: PoolChoice, system: System, rate: float | None, rule: SloRule, seed: int
) -> tuple[SloAbsolute | None, dict[str, Any]]:
    """What the rule came to, and one row's figures (None: not measured). `rate` is in Gbit/s, None
    where the whole pool serves all the time."""
    config = choice.config(system)
    run, history = run_with_history(config, choice.loads, lead_ns(config), seed)
    spent = device_time(history, run.started_ns, run.ended_ns)
    load_ns = system.load_ns if rate is not None and system.load_ns is not None else 0
    summary = summarize(run.timings(), rule)
    latencies = summary.latencies()
    return summary.slo, {
        "gbit_per_s": rate,
        "load_s": load_ns / NS_PER_S,
        "requests": summary.requests,
        "failed": summary.failed,
        "violations": 1 - (summary.slo_attainment or 0),
        "ttft_mean_s": latencies["ttft_mean_s"],
        "ttft_p99_s": latencies["ttft_p99_s"],
        "tbt_mean_s": latencies["tbt_mean_s"],
        "device_seconds": run.device_ns() / NS_PER_S,
        "spare_seconds": spent.spare_ns / NS_PER_S,
        "stop_the_world_meets_slo": summary.slo_met * 1000 >= summary.requests * MET_PERMILLE,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    full_s = rows[0]["device_seconds"]
    cells = [
        [
            "whole pool" if row["gbit_per_s"] is None else f"{row['gbit_per_s']:g} Gbit/s",
            seconds(row["load_s"]),
            f"{100 * row['violations']:.1f} %",
            seconds(row["ttft_mean_s"]),
            seconds(row["ttft_p99_s"]),
            seconds(row["tbt_mean_s"]),
            *(
                f"{100 * row[held] / full_s:.0f} %" if full_s else "-"
                for held in ("device_seconds", "spare_seconds")
            ),
            "meets it" if row["stop_the_world_meets_slo"] else "misses it",
        ]
        for row in rows
    ]
    header = ["per NIC", "load", "violations", "TTFT mean", "p99", "TBT mean", "GPU time", "spare"]
    return table([*header, "stop-the-world"], cells)
