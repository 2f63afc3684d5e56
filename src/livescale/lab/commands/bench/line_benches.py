"""`livescale bench stages|teams|variation|live`: their flags."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from livescale.common.errors import UserError
from livescale.common.settings import amount_of_bytes
from livescale.lab.bench.lines.live_lambda import LambdaOptions, LambdaReport, run_lambda
from livescale.lab.bench.lines.stage_scene import StageScene
from livescale.lab.bench.lines.stages import StagesOptions, run_stages
from livescale.lab.bench.lines.teams import STRATEGIES, TeamsOptions, run_teams
from livescale.lab.bench.lines.variation import VariationOptions, run_variation
from livescale.lab.bench.live.live import KINDS, ORDERS, LinkedOptions, LiveBenchOptions, run_live
from livescale.lab.bench.live.live_report import LiveReport
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    check_folder,
    chosen,
    finish,
    flags_of,
    kinds_of_workers,
    options_of,
    say,
    whole_numbers,
    within,
)

# -- stages ---------------------------------------------------------------------------------------


def _add_stages_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = StagesOptions()
    of_scene, flag = flags_of(parser, defaults.scene), flags_of(parser, defaults)
    of_scene("stages", "Stages of the model.")
    of_scene("run_ms", "Step time of a stage. The slow stage takes 1.5 times as long.")
    of_scene("requests", "Requests of a run.")
    flag("plays", "Runs of each policy, each with other arrivals.")
    flag("seed", "Seed of the arrivals.")
    flag("folder", "Folder of the run records.", type=Path, metavar="DIR")


def _stages(arguments: argparse.Namespace) -> int:
    """Compare stages that scale separately with whole pipelines, real and simulated.

    0 when every token was right.
    """
    at_least(arguments, 1, "plays")
    at_least(arguments, 50, "requests")
    within(arguments, 2, 16, "stages")
    within(arguments, 5, 1000, "run_ms")
    scene = options_of(StageScene, arguments)
    report = run_stages(options_of(StagesOptions, arguments, scene=scene), say)
    return finish(report, arguments, is_good=report.token_mismatches == 0)


# -- teams ----------------------------------------------------------------------------------------


def _add_teams_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, TeamsOptions()
    flag = flags_of(parser, defaults)
    words = "Team settings to compare (default: all). The first is the main result."
    add("--teams", default=",".join(defaults.strategies), metavar="NAME,…", help=words)
    flag("plays", "Runs of each setting. The result is the median.")
    words = "Duration of a load."
    add("--load-seconds", type=float, default=defaults.load_s, metavar="S", help=words)
    flag("run_ms", "Step time of a prompt.")
    flag("output_tokens", "Output tokens of each request.")
    flag("folder", "Folder of the run records.", type=Path, metavar="DIR")


def _teams(arguments: argparse.Namespace) -> int:
    """Measure gain and cost of teams of loading instances, beside the simulator.

    0 when every token was right.
    """
    at_least(arguments, 1, "plays")
    within(arguments, 1, 120, "load_seconds")
    within(arguments, 10, 10_000, "run_ms")
    within(arguments, 1, 256, "output_tokens")
    names = tuple(dict.fromkeys(chosen(arguments.teams.split(","), "--teams", STRATEGIES)))
    options = options_of(TeamsOptions, arguments, strategies=names, load_s=arguments.load_seconds)
    report = run_teams(options, say)
    return finish(report, arguments, is_good=report.token_mismatches == 0)


# -- variation ------------------------------------------------------------------------------------


def _add_variation_arguments(parser: argparse.ArgumentParser) -> None:
    flag = flags_of(parser, VariationOptions())
    flag("lines", "Simulated lines of each kind.")
    flag("requests", "Requests of a line.")
    words = "Train weights on simulated lines, write them to this file, and test them."
    flag("train", words, type=Path, metavar="FILE")
    flag("training_lines", "Simulated lines for training.")
    flag("training_requests", "Requests of a training line.")
    flag("training_steps", "Training steps.")
    flag("seed", "Random seed.")


def _variation(arguments: argparse.Namespace) -> int:
    """Compare predictions of burstiness along stages, by formulas and by attention.

    A report, not a test: the exit status is 0.
    """
    at_least(arguments, 1, "lines", "training_lines", "training_steps")
    at_least(arguments, 100, "requests", "training_requests")
    at_least(arguments, 0, "seed")
    check_folder(arguments.train, "--train")
    report = run_variation(options_of(VariationOptions, arguments), say)
    return finish(report, arguments, ("livescale", "numpy", "numba"))


# -- live -----------------------------------------------------------------------------------------

_RATIOS = "2,6,12"
_PLAYS = {"timed": 3, "cpu": 5}
_PROMPT_TOKENS, _PROMPT_TOKENS_MAX = 256, 2048
_LAMBDA = "lambda"
_LAMBDA_PLAYS = 1
_QUICK_LAYERS, _QUICK_BATCHES, _QUICK_LAYER_NS, _QUICK_CPU_TOKENS = 4, 4, 8_000_000, 256
_QUICK_LOAD_S, _QUICK_RUN_MS = 4.0, 100


def _add_live_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "Devices of the workers: timed, cpu, or both (default)."
    add("--workers", metavar="KIND,…", help=words)
    words = f"Ratios of load time to compute time of a layer (default: {_RATIOS})."
    add("--ratios", metavar="N,…", help=words)
    words = f"Runs of each order (default: 3 timed, 5 cpu, 1 for {_LAMBDA})."
    add("--plays", type=int, metavar="N", help=words)
    words = (
        f"Live orders to compare: {', '.join(ORDERS)}. {_LAMBDA} loads eight workers along a chain"
        " with ZigZag, by the binomial pipeline with teams, and by both."
    )
    add("--order", metavar="NAME,…", help=words)
    words = f"Run {_QUICK_LAYERS} layers, {_QUICK_BATCHES} batches, ratio 6, once for each order."
    add("--quick", action="store_true", help=words)
    words = "Play the demo's burst on links of this rate, for example 20MB/s."
    add("--link", metavar="RATE", help=words)
    words = "Prompt tokens of a request with --link (default: 256)."
    add("--prompt", type=int, metavar="TOKENS", help=words)


def _live(arguments: argparse.Namespace) -> int:
    """Measure the work of loading instances by live order, beside the simulator.

    0 when every token was right.
    """
    report = _report(arguments)
    return finish(report, arguments, is_good=report.token_mismatches == 0)


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
    if arguments.plays is not None:
        at_least(arguments, 1, "plays")
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


BENCHES = {
    "stages": Bench(_add_stages_arguments, _stages),
    "teams": Bench(_add_teams_arguments, _teams),
    "variation": Bench(_add_variation_arguments, _variation),
    "live": Bench(_add_live_arguments, _live),
}
