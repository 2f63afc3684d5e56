"""`livescale capacity`: the smallest pool that keeps an SLO, for every system, and its price."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from livescale.cli.loads import add_load_arguments, write_json
from livescale.common.errors import UserError
from livescale.lab.commands.pool_choices import (
    PoolChoice,
    add_pool_arguments,
    choose,
    choose_system,
    choose_systems,
)
from livescale.report.run.terminal import seconds, table
from livescale.report.run.where_time_went import (
    device_figures,
    device_text,
    slow_figures,
    slow_text,
)
from livescale.sim.pools.capacity import (
    CapacityError,
    PercentileBound,
    PoolSearch,
    is_within,
    parse_bounds,
    percentiles,
    smallest_pool,
)
from livescale.sim.pools.configs import dollars_per_hour, first_devices, first_hosts
from livescale.sim.pools.runs import PoolRun, lead_ns, run_with_history
from livescale.sim.pools.systems import System
from livescale.telemetry.history.device_time import DeviceTime, device_time
from livescale.telemetry.history.reading import History
from livescale.telemetry.history.waiting import SLOWEST_PERCENT, SlowRequests, slow_requests
from livescale.values.units import NS_PER_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace=None, seconds=300, divide_lengths=1)
    add_pool_arguments(parser, strategy="livescale,serverlessllm,fixed-full")
    add = parser.add_argument
    add("--json", type=Path, help="Write the figures to this file (JSON).")
    words = "SLO as percentiles, for example ttft_p99=450ms,tbt_p99=150ms."
    add("--slo", required=True, metavar="BOUNDS", help=words)
    words = "Step of the pool size (default: hosts, or devices in a cluster of one host)."
    add("--by", choices=("hosts", "devices"), help=words)


def run(arguments: argparse.Namespace) -> int:
    """0 when some pool keeps the SLO."""
    try:
        bounds = parse_bounds(arguments.slo)
    except CapacityError as error:
        raise UserError(f"--slo: {error}") from error
    systems = choose_systems(arguments)
    choice = choose(arguments)
    unit = arguments.by or ("hosts" if _hosts(choice) > 1 else "devices")
    print(choice.describe())
    answers = [_search(choice, system, unit, bounds, arguments) for system in systems]
    print()
    print(_table(answers, bounds, unit))
    print()
    print(_verdict(answers, arguments.slo, unit))
    if arguments.json is not None:
        write_json(arguments.json, _figures(choice, answers, unit, arguments))
    return 0 if any(answer.search.answer is not None for answer in answers) else 1


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trial:
    """One simulated pool: its devices and price, and what came of the load."""

    devices: int
    dollars_per_hour: float | None
    device_s: float
    failed: int
    measured: dict[str, int | None]
    spent: DeviceTime
    slow: SlowRequests

    @property
    def spare_s(self) -> float:
        """How long released devices kept parameters."""
        return self.spent.spare_ns / NS_PER_S


@dataclass(slots=True)
class _Answer:
    """What was found for one system: trials by pool size, or why a size could not be tried."""

    system: System
    trials: dict[int, _Trial] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    search: PoolSearch = field(default_factory=lambda: PoolSearch(0))

    @property
    def trial(self) -> _Trial | None:
        """The smallest pool that will do."""
        return None if self.search.answer is None else self.trials[self.search.answer]


def _hosts(choice: PoolChoice) -> int:
    return len(dict.fromkeys(d.host for d in choice.cluster.topology.devices.values()))


def _search(
    choice: PoolChoice,
    system: System,
    unit: str,
    bounds: Sequence[PercentileBound],
    arguments: argparse.Namespace,
) -> _Answer:
    answer = _Answer(system)
    by_hosts = unit == "hosts"
    largest = _hosts(choice) if by_hosts else len(choice.cluster.topology.devices)

    def will_do(size: int) -> bool:
        part = (first_hosts if by_hosts else first_devices)(choice.cluster, size)
        pool = replace(choice, cluster=part)
        try:
            run_, history = _play(pool, system, arguments)
        except UserError as error:
            if size == largest:
                raise
            answer.refused[size] = str(error)
            print(f"{system.name}: {_count(size, unit)}: {error}")
            return False
        trial = answer.trials[size] = _Trial(
            devices=len(part.topology.devices),
            dollars_per_hour=dollars_per_hour(part),
            device_s=run_.device_ns() / NS_PER_S,
            failed=run_.failed,
            measured=percentiles(run_, bounds),
            spent=device_time(history, run_.started_ns, run_.ended_ns),
            slow=slow_requests(history),
        )
        does = is_within(run_, bounds)
        told = ", ".join(f"{name} {_time(ns)}" for name, ns in trial.measured.items())
        verdict = "keeps the SLO" if does else "does not"
        print(f"{system.name}: {_count(size, unit)}: {told}: {verdict}")
        return does

    answer.search = smallest_pool(largest, will_do)
    return answer


def _play(
    pool: PoolChoice, system: System, arguments: argparse.Namespace
) -> tuple[PoolRun, History]:
    """The system's run; where it is to be like another one, that runs before."""
    histories: list[History] = []

    def play(system: System) -> PoolRun:
        config = pool.config(system)
        run_, history = run_with_history(config, pool.loads, lead_ns(config), arguments.seed)
        histories.append(history)
        return run_

    if system.fixed_like is None:
        run_ = play(system)
    else:
        like = play(choose_system(system.fixed_like, arguments))
        _, run_ = pool.play_equal(system, like, play)
    return run_, histories[-1]


def _count(size: int, unit: str) -> str:
    return f"{size} {unit if size != 1 else unit.removesuffix('s')}"


def _time(measured_ns: int | None) -> str:
    return seconds(None if measured_ns is None else measured_ns / NS_PER_S)


def _table(answers: Sequence[_Answer], bounds: Sequence[PercentileBound], unit: str) -> str:
    rows: list[list[object]] = []
    for answer in answers:
        trial = answer.trial
        if trial is None:
            rows.append([answer.system.name, "none", *["-"] * (len(bounds) + 4)])
            continue
        rows.append(
            [
                answer.system.name,
                _count(answer.search.answer or 0, unit),
                trial.devices,
                _price(trial.dollars_per_hour),
                *(_time(trial.measured[str(bound)]) for bound in bounds),
                f"{trial.device_s:,.0f} s",
                f"{trial.spare_s:,.0f} s",
            ]
        )
    header = ["strategy", "smallest pool", "devices", "price"]
    return table([*header, *map(str, bounds), "GPU time", "spares"], rows)


def _price(dollars_per_hour: float | None) -> str:
    return "-" if dollars_per_hour is None else f"${dollars_per_hour:,.2f}/h"


def _verdict(answers: Sequence[_Answer], slo: str, unit: str) -> str:
    """The smallest of all, and doubts about it."""
    found = [answer for answer in answers if answer.search.answer is not None]
    if not found:
        largest = answers[0].search.largest
        return f"answer: not even {_count(largest, unit)} keep {slo}: take a larger cluster"
    # Of equal pools, the one that leaves most to others.
    best = min(found, key=lambda a: (a.search.answer, a.trial.device_s if a.trial else 0))
    assert best.trial is not None
    facts = [f"{best.trial.devices} devices"] if unit == "hosts" else []
    if best.trial.dollars_per_hour is not None:
        facts.append(_price(best.trial.dollars_per_hour))
    pool = _count(best.search.answer or 0, unit) + (f" ({', '.join(facts)})" if facts else "")
    lines = [
        f"answer: {pool} with {best.system.name} keep {slo};"
        f" {best.trial.device_s:,.0f} s of GPU time were used"
    ]
    lines.append(f"its devices: {device_text(best.trial.spent)}")
    if best.trial.slow.requests:
        lines.append(f"its slowest {SLOWEST_PERCENT} %: {slow_text(best.trial.slow)}")
    lines += [
        f"note: {answer.system.name}: a larger pool was worse than a smaller one near the answer"
        for answer in found
        if not answer.search.is_monotone
    ]
    return "\n".join(lines)


def _figures(
    choice: PoolChoice, answers: Sequence[_Answer], unit: str, arguments: argparse.Namespace
) -> dict[str, object]:
    return {
        **choice.figures(arguments.seed),
        "slo": arguments.slo,
        "unit": unit,
        "strategies": [_of_system(answer) for answer in answers],
    }


def _of_system(answer: _Answer) -> dict[str, object]:
    """Figures of one system; what is not known is absent."""
    trial = answer.trial
    figures: dict[str, object | None] = {
        "strategy": answer.system.name,
        "smallest": answer.search.answer,
        "is_monotone": answer.search.is_monotone,
        "tried": [_of_size(answer, size, does) for size, does in answer.search.tried.items()],
    }
    if trial is not None:
        figures |= {
            "devices": trial.devices,
            "dollars_per_hour": trial.dollars_per_hour,
            "device_seconds": trial.device_s,
            "spare_s": trial.spare_s,
        }
    return {name: value for name, value in figures.items() if value is not None}


def _of_size(answer: _Answer, size: int, does: bool) -> dict[str, object]:
    figures: dict[str, object] = {"size": size, "within": does}
    trial = answer.trials.get(size)
    if trial is None:
        return {**figures, "refused": answer.refused[size]}
    measured = trial.measured.items()
    figures |= device_figures(trial.spent) | slow_figures(trial.slow)
    figures |= {f"{name}_s": ns / NS_PER_S for name, ns in measured if ns is not None}
    return {
        **figures,
        "failed": trial.failed,
        "device_seconds": trial.device_s,
        "spare_s": trial.spare_s,
    }
