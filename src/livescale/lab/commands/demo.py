"""`livescale demo`: a burst meets a pool of three warm workers; watch it scale 1 -> 3 -> 1. Then a
burst of long prompts, with and without live scaling. Or, instead, prefill and decode on instances
of their own, which both scale."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from livescale.cli.loads import Load, add_load_arguments, choose_load, seconds_of, write_json
from livescale.common.errors import UserError
from livescale.common.settings import ENVIRONMENT_PREFIX
from livescale.config.model import RoleReplicas, RolesConfig
from livescale.config.pool import PoolConfig
from livescale.config.reading import add_flags, checked_model, given_flags, load_config
from livescale.config.slo import SloRule, parse_slo
from livescale.lab.commands.demo_run import DemoRun
from livescale.lab.commands.scenario import (
    SLO_MULTIPLE,
    Played,
    TokenChecks,
    make_model_once,
    measured_tokens_per_s,
    slo_alone,
    tokens_per_s,
)
from livescale.load.traces import TraceRow, clip, upscale
from livescale.report.comparison import comparison_table
from livescale.report.html import write_html_report
from livescale.report.run.live_loads import live_text, load_stories
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.terminal import seconds, table
from livescale.report.run_report import run_text
from livescale.values.units import NS_PER_S

# How long the pool may take to shrink again after the last request.
_SHRINK_S = 30.0
_SPLIT_SETTINGS: dict[str, object] = {"workers": 4, "hosts": 4, "sequences_max": 16}
"""Room for two more instances; and few places, so that decode is short of them, too."""
_SPLIT_TRACE = "gamma:rate=8,cv=3,seconds={},input=1536,output=640"
"""Bursts of requests with answers that are worth instances of their own."""
# Where lengths must be clipped, this part of the model's limit is for the output.
_OUTPUT_PART = 4
_BURST_PERCENT, _BURST_S = 150, 3
"""The burst of the demo's own trace is so much of what one instance computes, over so long: more
than that one serves in time, and little enough for all of them."""
_NEXT = "next      livescale serve path/to/model, and livescale top while it serves"
PARTS = ("scaling", "live")
_DEFAULTS = {
    "workers": "3; live 2",
    "port": "0",
    "placement": "spread, live part none",
    "record": "in --folder",
    "slo": f"{SLO_MULTIPLE}x alone",
    "scaling_policy": "slo, live part bounds",
    "queue_requests_max": "all requests",
}
"""Defaults of the demo, as `--help` shows them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "Folder of the model. The demo makes a missing model."
    add("--model", type=Path, default=Path("models/demo"), help=words)
    words = "Run one part: 1 -> 3 -> 1, or live scaling beside stop-the-world."
    add("--only", choices=PARTS, help=words)
    words = "Scale separate instances for prefill and decode, in place of both parts."
    add("--disaggregated", action="store_true", help=words)
    add_load_arguments(parser, trace=None, seconds=12, divide_lengths=16)
    words = "Duration of a load in the scaling part."
    add("--load-seconds", type=float, default=1.0, help=words)
    words = "Duration of a load in the live part."
    add("--live-load-seconds", type=float, default=5.0, help=words)
    add("--json", type=Path, help="Write the figures to this file (JSON).")
    words = "Folder of records, pictures and the page (default: runs/demo-DATE)."
    add("--folder", type=Path, help=words)
    add_flags(parser, _DEFAULTS)


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing failed, every token is right and the pool came back to its least size."""
    folder = arguments.folder or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    figures: dict[str, object] = {}
    goods = []
    if min(arguments.load_seconds, arguments.live_load_seconds) <= 0:
        raise UserError("--load-seconds and --live-load-seconds must be positive")
    if arguments.disaggregated and arguments.only == "live":
        raise UserError("--disaggregated does not support --only live. Remove one of them")
    make_model_once(arguments.model)
    if arguments.only != "live":
        scaled = _play_scaling(arguments, folder)
        print(f"\n{scaled.text}")
        figures |= scaled.figures
        goods.append(scaled.is_good)
    if arguments.only != "scaling" and not arguments.disaggregated:
        live = _play_live(arguments, folder)
        print(f"\n{live.text}")
        figures["live"] = live.figures
        goods.append(live.is_good)
    if arguments.json is not None:
        write_json(arguments.json, figures)
    return 0 if all(goods) else 1


class _Outcome(NamedTuple):
    """What came of a part: as text, as figures for other programs, and whether all was well."""

    text: str
    figures: dict[str, object]
    is_good: bool


# -- helpers, in the order used -------------------------------------------------------------------


def _play_scaling(arguments: argparse.Namespace, folder: Path) -> _Outcome:
    is_split: bool = arguments.disaggregated
    if is_split and arguments.trace is None:
        arguments.trace = _SPLIT_TRACE.format(seconds_of(arguments))
    load = choose_load(arguments)
    name = "disaggregated" if is_split else "scaling"
    chosen = {
        **(_SPLIT_SETTINGS if is_split else {"hosts": 3}),
        # Instances are to come because of the load, not ahead of it.
        "spares_ahead": "none",
        "queue_requests_max": len(load.rows) + 1,
        "record": str(folder / f"{name}.jsonl"),
    }
    config = _config(arguments, arguments.load_seconds, chosen)
    config = _with_roles(config) if is_split else config
    least = config.models[0].instances_min
    run = DemoRun(config)
    print(run.describe(), flush=True)
    load = _clipped(load, run.request_tokens_max)

    async def play() -> _Outcome:
        async with run.pool():
            await run.until_serving(_SHRINK_S)
            is_own = arguments.trace is None and arguments.factor == 1
            rows = await _fitting(run, load.rows, arguments.seed) if is_own else load.rows
            slo = await _slo(run, rows, arguments)
            print(f"ready: {run.base_url}/v1; replaying {seconds_of(arguments)} s", flush=True)
            played = await run.play(rows, seed=arguments.seed)
            await run.until_small(_SHRINK_S)
        found = played.reported(name, load.name, slo, str(slo))
        checks, record = run.check(played.results), played.record
        told = f"record    {record} (check it with: livescale replay {record})\n{_NEXT}"
        if is_split:
            page = folder / "report.html"
            write_html_report(page, [found], "Prefill and decode on their own instances")
            told += f"\nseen      {page}"
        return _Outcome(
            f"{run_text(found)}\n{checks.text()}\n{told}",
            {**found.as_json(), **checks.as_json(), "record": str(record)},
            found.summary.failed == checks.wrong == 0 and found.instances[-1][1] == least,
        )

    return asyncio.run(play())


def _config(
    arguments: argparse.Namespace, load_s: float, chosen: dict[str, object], **fixed: object
) -> PoolConfig:
    """What is `chosen` where the user did not choose, and links on which a load takes so long."""
    size_bytes = sum(file.stat().st_size for file in arguments.model.glob("*.safetensors"))
    rate = max(1 << 20, int(size_bytes / load_s))
    linked = {"port": 0, "uplink_bytes_per_s": rate, "downlink_bytes_per_s": rate, **chosen}
    values = {**given_flags(arguments), **fixed}
    return load_config(None, [str(arguments.model)], os.environ, values, linked)


def _with_roles(config: PoolConfig) -> PoolConfig:
    """Its model has an instance of each role at least. Raises ConfigError."""
    roles = RolesConfig(prefill=RoleReplicas(), decode=RoleReplicas())
    model = msgspec.structs.replace(config.models[0], roles=roles)
    return msgspec.structs.replace(config, models=(checked_model(model, config),))


async def _slo(run: DemoRun, rows: Sequence[TraceRow], arguments: argparse.Namespace) -> SloRule:
    """What the user chose; else so many times the TTFT of a mean prompt that nothing waits with:
    a bound that does not grow with the run's own delays. Raises UserError."""
    if "slo" in given_flags(arguments) or f"{ENVIRONMENT_PREFIX}SLO" in os.environ:
        return parse_slo(run.config.slo)
    record = Path(str(run.config.record))
    await _tokens_per_s(record)
    return slo_alone(rows, record)


async def _fitting(run: DemoRun, rows: Sequence[TraceRow], seed: int) -> Sequence[TraceRow]:
    """Fewer of the rows where their burst is more than the pool can serve: then one would see a
    queue, and nothing of scaling. Raises UserError."""
    most = _BURST_PERCENT * await _tokens_per_s(Path(str(run.config.record))) // 100
    factor = most / _peak_tokens_per_s(rows)
    if factor >= 1:
        return rows
    fewer = upscale(rows, factor, seed) or rows[:1]
    print(
        f"played: {len(fewer)} of the {len(rows)} requests, so that their burst is"
        f" {_BURST_PERCENT / 100:g} times what one instance computes (with --trace: all)",
        flush=True,
    )
    return fewer


def _peak_tokens_per_s(rows: Sequence[TraceRow]) -> float:
    """Of prompts that arrive within `_BURST_S`, from any second on."""
    by_second: Counter[int] = Counter()
    for row in rows:
        by_second[row.arrival_ns // NS_PER_S] += row.input_tokens
    spans = (range(start, start + _BURST_S) for start in by_second)
    return max(sum(by_second[second] for second in span) for span in spans) / _BURST_S


def _clipped(load: Load, request_tokens_max: int) -> Load:
    """Shorten requests that the model cannot take, and say how many."""
    output_max = request_tokens_max // _OUTPUT_PART
    rows, clipped = clip(load.rows, request_tokens_max - output_max, output_max)
    if clipped:
        print(f"{clipped} requests were longer than the model's limit and are clipped to it")
    return Load(load.name, rows)


_BASELINE = "stop-the-world"
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 4
"""Long prompts and short answers: what the burst asks for is prefill."""
_ARRIVAL_GAP_NS = 10_000_000
_WORK_PERCENT = 120
"""The burst is as much work as keeps one instance busy for this part of a load's time."""
_REQUESTS_MIN, _REQUESTS_MAX = 8, 240
_LOOKS, _LOOK_S = 50, 0.2
_LIVE_SETTINGS: dict[str, object] = {
    "workers": 2,
    "hosts": 2,
    "placement": "none",
    "queue_requests_max": _REQUESTS_MAX + 1,
    # The burst is to find a device without parameters.
    "spares_ahead": "none",
    # Short loads make small bursts: these, too, are to call for another instance.
    "scaling_policy": "bounds",
    "prefill_queue_upper_ms": 300,
    "prefill_queue_lower_ms": 100,
}
"""Two hosts without copies in their memory: the new instance loads over the capped link."""


def _play_live(arguments: argparse.Namespace, folder: Path) -> _Outcome:
    """Play the burst twice. Raises ConfigError, PoolFailed, UserError."""
    order = str(given_flags(arguments).get("live_order", "zigzag"))
    if order == _BASELINE:
        raise UserError(
            f"--live-order {_BASELINE} is the baseline of the demo. Choose zigzag or overlap"
        )
    rows: Sequence[TraceRow] = ()
    played: list[Played] = []
    slo: SloRule | None = None
    for name in (_BASELINE, order):
        record = str(folder / f"{name}.jsonl")
        load_s = arguments.live_load_seconds
        config = _config(arguments, load_s, _LIVE_SETTINGS, live_order=name, record=record)
        run = DemoRun(config)
        print(f"\n{name}", flush=True)
        print(run.describe(), flush=True)
        rows, one, slo = asyncio.run(_play_burst(run, rows, slo, arguments))
        played.append(one)
    checks = run.check([result for one in played for result in one.results])
    assert slo is not None
    return _judge(slo, (_BASELINE, order), played, checks, folder)


# -- helpers, in the order used -------------------------------------------------------------------


async def _play_burst(
    run: DemoRun, rows: Sequence[TraceRow], slo: SloRule | None, arguments: argparse.Namespace
) -> tuple[Sequence[TraceRow], Played, SloRule]:
    """The rows that were played, and their SLO. Both are made for the first run, by what the pool
    says that one instance can compute; each run waits until the pool knows that."""
    async with run.pool():
        prompt = min(PROMPT_TOKENS, run.request_tokens_max - OUTPUT_TOKENS)
        rate = await _tokens_per_s(Path(str(run.config.record)))
        rows = rows or _burst(prompt, prompt / rate, arguments.live_load_seconds)
        print(f"ready; {len(rows)} prompts of {prompt} tokens at once", flush=True)
        slo = slo or await _slo(run, rows, arguments)
        played = await run.play(rows, seed=arguments.seed)
        await run.until_loaded(3 * arguments.live_load_seconds)
        return rows, played, slo


async def _tokens_per_s(record: Path) -> int:
    """What the first instance measured, as soon as the record has it."""
    for _ in range(_LOOKS):
        if measured_tokens_per_s(record) is not None:
            break
        await asyncio.sleep(_LOOK_S)
    return tokens_per_s(record)


def _burst(prompt: int, prompt_s: float, load_s: float) -> list[TraceRow]:
    count = round(load_s * _WORK_PERCENT / 100 / prompt_s)
    count = min(max(count, _REQUESTS_MIN), _REQUESTS_MAX)
    return [TraceRow(n * _ARRIVAL_GAP_NS, prompt, OUTPUT_TOKENS) for n in range(count)]


def _judge(
    slo: SloRule,
    names: Sequence[str],
    played: Sequence[Played],
    checks: TokenChecks,
    folder: Path,
) -> _Outcome:
    """Both runs against one SLO, that of the first run."""
    # Only here: drawing takes a second to import.
    from livescale.report.pictures.live_picture import NothingToShow, live_picture

    runs: list[ReportedRun] = []
    for name, one in zip(names, played, strict=True):
        rule = (runs[0].slo if runs else None) or slo
        runs.append(one.reported(name, "a burst of long prompts", rule, str(slo)))
    write_html_report(folder / "report.html", runs, "One burst, with and without live scaling")
    try:
        title = "One burst, and a new instance that is waited for or helps at once"
        live_picture(folder / "live.svg", runs, title)
    except NothingToShow as error:
        print(f"no picture: {error}")
    figures: dict[str, object] = {"runs": [run.figures for run in runs], **checks.as_json()}
    first, second = (run.summary.ttft for run in runs)
    if first is not None and second is not None:
        figures["ttft_p50_ratio"] = second.p50_s / first.p50_s
        figures["ttft_p99_ratio"] = second.p99_s / first.p99_s
    text = "\n\n".join(
        [
            comparison_table(runs),
            live_text(runs[1].live_stories, runs[1].started_ns)
            or "no instance was live: the load was not worth it",
            _in_short(runs, checks),
            f"{checks.text()}\n"
            f"seen      {folder}/live.svg and {folder}/report.html, with the record"
            f" of each run beside them\n{_NEXT}",
        ]
    )
    is_good = checks.wrong == 0 and not any(run.summary.failed for run in runs)
    return _Outcome(text, figures, is_good)


def _in_short(runs: Sequence[ReportedRun], checks: TokenChecks) -> str:
    """What a new instance that helps at once changes, in four figures."""
    stories = [
        [story for story in load_stories(run.history) if story.end_ns > run.started_ns]
        for run in runs
    ]
    helped = [
        min((story.help_s for story in of_run if story.help_s is not None), default=None)
        for of_run in stories
    ]
    latencies = [run.summary.latencies() for run in runs]
    rows = [
        ("TTFT, mean", *(seconds(of_run["ttft_mean_s"]) for of_run in latencies)),
        ("TTFT, p99", *(seconds(of_run["ttft_p99_s"]) for of_run in latencies)),
        ("a new instance helps after", *map(seconds, helped)),
        ("wrong tokens, both runs", str(checks.wrong), ""),
    ]
    return table(["in short", *(run.name for run in runs)], rows)
