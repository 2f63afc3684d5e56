"""`livescale top`: what the models of a running pool do now, and each of their stages, window by
window. Everything comes from /metrics and /admin/models.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from livescale.cli.pool_calls import add_pool_arguments, call_pool, metrics_page
from livescale.common.errors import UserError
from livescale.gateway.contract.backend import ModelStatus
from livescale.gateway.endpoints.admin import AdministeredModels
from livescale.report.run.terminal import table
from livescale.values.stages import stage_name

_SAMPLE = re.compile(r'^livescale_(\w+)\{model="([^"]*)"[^}]*\} (\S+)$')
_DAY_S = 86_400
_CLEAR = "\x1b[H\x1b[J"
_HEADER = ("model", "instances", "running", "waiting", "done/s", "tokens/s", "KV used")
_STAGE_HEADER = (
    *("stage", "replicas", "arrivals/s", "CV of gaps", "served/s", "waiting", "utilisation"),
    "last decision",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_arguments(parser)
    words = "Length of a window in seconds."
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help=words)
    words = "Number of windows (default: until Ctrl-C)."
    parser.add_argument("--windows", type=int, metavar="N", help=words)


def run(arguments: argparse.Namespace) -> int:
    """0 when all windows were shown. Raises UserError where there is no pool."""
    if not 0 < arguments.every <= _DAY_S:  # "nan" is neither
        problem = f"--every {arguments.every:g} is invalid"
        raise UserError(f"{problem}. Give a number of seconds above 0, up to {_DAY_S}")
    if arguments.windows is not None and arguments.windows < 1:
        raise UserError("--windows must be at least 1")
    before = _look(arguments)
    shown = itertools.count() if arguments.windows is None else range(arguments.windows)
    for _ in shown:
        time.sleep(arguments.every)
        now = _look(arguments)
        text = window_text(before, now)
        # On a terminal the next window takes the place of the last.
        print(f"{_CLEAR}{text}" if sys.stdout.isatty() else f"{text}\n", flush=True)
        before = now
    return 0


@dataclass(frozen=True, slots=True)
class Look:
    """The pool at one time, in seconds: sums of /metrics by family and model, and the models."""

    at_s: float
    sums: dict[tuple[str, str], float]
    models: tuple[ModelStatus, ...]

    def of(self, family: str, model: str) -> float:
        return self.sums.get((family, model), 0.0)


def metric_sums(page: str) -> dict[tuple[str, str], float]:
    """By family, without the product's prefix, and model: the sum of its samples."""
    sums: dict[tuple[str, str], float] = {}
    for line in page.splitlines():
        found = _SAMPLE.match(line)
        if found is not None:
            key = found[1], found[2]
            sums[key] = sums.get(key, 0.0) + float(found[3])
    return sums


def window_text(before: Look, now: Look) -> str:
    """What happened between two looks: a row for each model, and for each stage."""
    rows = [_row(model, before, now) for model in now.models]
    stages = [
        _stage_row(model, number, before, now)
        for model in now.models
        for number in range(len(model.instances_by_stage))
    ]
    parts = [table(_HEADER, rows), table(_STAGE_HEADER, stages) if stages else ""]
    return "\n\n".join(part for part in parts if part)


# -- helpers, in the order used -------------------------------------------------------------------


def _look(arguments: argparse.Namespace) -> Look:
    models = call_pool(arguments, AdministeredModels, "GET", "/admin/models").data
    page = metrics_page(arguments)
    return Look(time.monotonic(), metric_sums(page), tuple(models))


def _row(model: ModelStatus, before: Look, now: Look) -> Sequence[object]:
    name, took_s = model.name, now.at_s - before.at_s
    parts = [stage_name(name, n) for n in range(len(model.instances_by_stage))] or [name]
    blocks = sum(now.of("kv_blocks", part) for part in parts)
    used = sum(now.of("kv_cache_usage_perc", part) * now.of("kv_blocks", part) for part in parts)
    return (
        name,
        _counts(model.instances),
        int(now.of("num_requests_running", name)),
        int(now.of("num_requests_waiting", name)),
        _rise("request_success_total", name, before, now) / took_s,
        _rise("generation_tokens_total", name, before, now) / took_s,
        _percent(used / blocks if blocks else None),
    )


def _stage_row(model: ModelStatus, number: int, before: Look, now: Look) -> Sequence[object]:
    name, took_s = stage_name(model.name, number), now.at_s - before.at_s
    instances = model.instances_by_stage[number]
    came = _rise("stage_arrivals_total", name, before, now)
    busy_s = _rise("stage_busy_seconds_total", name, before, now)
    devices_s = _rise("device_seconds_total", name, before, now)
    decisions = model.decisions_by_stage
    return (
        name,
        _counts(instances),
        came / took_s,
        _gap_cv(name, came, before, now),
        _rise("stage_runs_total", name, before, now) / took_s,
        _rise("stage_wait_seconds_total", name, before, now) / took_s,
        _percent(busy_s / devices_s if devices_s else None),
        (decisions[number] if number < len(decisions) else "") or "-",
    )


def _gap_cv(name: str, came: float, before: Look, now: Look) -> float | None:
    gaps_s = _rise("stage_gap_seconds_total", name, before, now)
    squared = _rise("stage_gap_seconds_squared_total", name, before, now)
    if came < 2 or gaps_s <= 0:
        return None
    return math.sqrt(max(came * squared / gaps_s**2 - 1, 0.0))


def _rise(family: str, model: str, before: Look, now: Look) -> float:
    """Of a counter; one that began anew has risen from zero."""
    was, is_now = before.of(family, model), now.of(family, model)
    return is_now - was if is_now >= was else is_now


def _counts(instances: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {state}" for state, n in sorted(instances.items()) if n) or "none"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
