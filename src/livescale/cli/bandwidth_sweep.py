"""`livescale simulate --sweep bandwidth=…`: from loading speed to SLO violations.

BlitzScale's Figure 3: instances serve nothing while they load ("stop the world"), and how long
that takes is the size of a rank over the bandwidth of its NIC. Where even that meets the SLO,
nobody needs to serve while loading.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from livescale.cli.errors import UserError
from livescale.cli.loads import write_json
from livescale.cli.pool_choices import PoolChoice
from livescale.report.summary import RunSummary, summarize
from livescale.report.terminal import seconds, table
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS, System
from livescale.slo import SloRule

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
