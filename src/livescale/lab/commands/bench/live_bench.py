"""`livescale bench live`: its flags."""

from __future__ import annotations

import argparse
import sys

from livescale.common.errors import UserError
from livescale.common.settings import amount_of_bytes
from livescale.lab.bench.lines.live_lambda import LambdaOptions, LambdaReport, run_lambda
from livescale.lab.bench.live.live import KINDS, ORDERS, LinkedOptions, LiveBenchOptions, run_live
from livescale.lab.bench.live.live_report import LiveReport
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    chosen,
    finish,
    kinds_of_workers,
    say,
    whole_numbers,
)

_RATIOS = "2,6,12"
_PLAYS = {"timed": 3, "cpu": 5}
_PROMPT_TOKENS, _PROMPT_TOKENS_MAX = 256, 2048
_LAMBDA = "lambda"
_LAMBDA_PLAYS = 1
_QUICK_LAYERS, _QUICK_BATCHES, _QUICK_LAYER_NS, _QUICK_CPU_TOKENS = 4, 4, 8_000_000, 256
_QUICK_LOAD_S, _QUICK_RUN_MS = 4.0, 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workers", metavar="KIND,…", help="Devices of the workers: timed, cpu, or both (default)."
    )
    words = f"Ratios of load time to compute time of a layer (default: {_RATIOS})."
    add("--ratios", metavar="N,…", help=words)
    words = f"Runs of each order (default: 3 timed, 5 cpu, 1 for {_LAMBDA})."
    add("--plays", type=int, metavar="N", help=words)
    words = (
        f"Live orders to compare: {', '.join(ORDERS)}. {_LAMBDA} loads eight workers along a chain"
    )
    words += " with ZigZag, by the binomial pipeline with teams, and by both."
    add("--order", metavar="NAME,…", help=words)
    words = f"Run {_QUICK_LAYERS} layers, {_QUICK_BATCHES} batches, ratio 6, once for each order."
    add("--quick", action="store_true", help=words)
    words = "Play the demo's burst on links of this rate, for example 20MB/s."
    add("--link", metavar="RATE", help=words)
    add(
        "--prompt",
        type=int,
        metavar="TOKENS",
        help="Prompt tokens of a request with --link (default: 256).",
    )


def _live(arguments: argparse.Namespace) -> int:
    """Measure the work of loading instances by live order, beside the simulator.

    0 when every token was right.
    """
    report = _report(arguments)
    return finish(report, arguments, is_good=report.token_mismatches == 0)


# -- helpers, in the order used -------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> LiveReport | LambdaReport:
    orders = _orders(arguments)
    if orders != (_LAMBDA,):
        return run_live(_live_options(arguments, orders), say)
    for flag in ("workers", "ratios", "link", "prompt"):
        if getattr(arguments, flag) is not None:
            raise UserError(f"--{flag} is not for --order {_LAMBDA}")
    plays = _LAMBDA_PLAYS if arguments.plays is None else arguments.plays
    options = LambdaOptions(plays)
    if arguments.quick:
        options = LambdaOptions(plays, _QUICK_LOAD_S, _QUICK_RUN_MS)
    return run_lambda(options, say)


def _orders(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.plays is not None and arguments.plays < 1:
        raise UserError("--plays must be at least 1")
    if arguments.order is None:
        return ORDERS
    names = dict.fromkeys(chosen(arguments.order.split(","), "--order", (*ORDERS, _LAMBDA)))
    if _LAMBDA in names and len(names) > 1:
        raise UserError(f"--order {_LAMBDA} stands alone")
    if arguments.link is not None:
        raise UserError("--order is not for --link")
    return tuple(names)


def _live_options(arguments: argparse.Namespace, orders: tuple[str, ...]) -> LiveBenchOptions:
    linked = _linked(arguments)
    kinds: tuple[str, ...] = KINDS[:1] if linked else KINDS
    if arguments.workers is not None:
        kinds = kinds_of_workers(arguments.workers, KINDS)
    wanted = "numbers from 2 on, such as 2,6,12"
    ratios = whole_numbers(arguments.ratios or _RATIOS, "--ratios", wanted, 2, sys.maxsize)
    if arguments.quick:
        return LiveBenchOptions(
            plays=dict.fromkeys(kinds, arguments.plays or 1),
            ratios=(6,),
            layers=_QUICK_LAYERS,
            batches=_QUICK_BATCHES,
            layer_ns=_QUICK_LAYER_NS,
            cpu_tokens=_QUICK_CPU_TOKENS,
            linked=linked,
            orders=orders,
        )
    plays = {kind: arguments.plays or _PLAYS[kind] for kind in kinds}
    return LiveBenchOptions(plays, tuple(sorted(set(ratios))), linked=linked, orders=orders)


def _linked(arguments: argparse.Namespace) -> LinkedOptions | None:
    if arguments.link is None:
        if arguments.prompt is not None:
            raise UserError("--prompt is for --link")
        return None
    rate = amount_of_bytes(arguments.link.removesuffix("/s"), "--link")
    prompt = _PROMPT_TOKENS if arguments.prompt is None else arguments.prompt
    if rate < 1 or not 2 <= prompt <= _PROMPT_TOKENS_MAX:
        raise UserError(f"--link must be positive, --prompt from 2 to {_PROMPT_TOKENS_MAX} tokens")
    return LinkedOptions(rate, prompt)


LIVE = Bench(_add_arguments, _live)
