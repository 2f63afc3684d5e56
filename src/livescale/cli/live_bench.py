"""`livescale bench live`: the flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.bench.live import KINDS, LinkedOptions, LiveBenchOptions, run_live
from livescale.cli.errors import UserError
from livescale.settings import amount_of_bytes

_PLAYS = {"timed": 3, "cpu": 5}
_PROMPT_TOKENS, _PROMPT_TOKENS_MAX = 256, 2048
_QUICK_LAYERS, _QUICK_BATCHES, _QUICK_LAYER_NS, _QUICK_CPU_TOKENS = 4, 4, 8_000_000, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", metavar="KIND,…", help="timed and cpu (default), or one")
    add("--ratios", default="2,6,12", metavar="N,…", help="load time over compute time of a layer")
    add("--plays", type=int, metavar="N", help="of each order (default: 3 timed, 5 cpu)")
    words = f"a glance: {_QUICK_LAYERS} layers, {_QUICK_BATCHES} batches, ratio 6, one play each"
    add("--quick", action="store_true", help=words)
    words = "the demo's burst on links of this rate instead, timed workers by default (20MB/s)"
    add("--link", metavar="RATE", help=words)
    add("--prompt", type=int, metavar="TOKENS", help="of a request there (default: 256)")
    add("--json", type=Path, help="write the figures to this file")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The figures; the table is printed."""
    report = run_live(_options(arguments), _say)
    print(f"\n{report.text()}", flush=True)
    return report.as_json()


# -- helpers, in the order used -------------------------------------------------------------------


def _options(arguments: argparse.Namespace) -> LiveBenchOptions:
    linked = _linked(arguments)
    kinds = [KINDS[0]] if linked else [*KINDS]
    if arguments.workers is not None:
        kinds = arguments.workers.split(",")
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(KINDS):
        raise UserError(f"--workers {arguments.workers!r}: write timed, cpu or both")
    if arguments.plays is not None and arguments.plays < 1:
        raise UserError("--plays must be at least 1")
    numbers = arguments.ratios.split(",")
    if not all(number.isdecimal() and int(number) > 1 for number in numbers):
        raise UserError(f"--ratios {arguments.ratios!r} must be numbers from 2 on, such as 2,6,12")
    if arguments.quick:
        return LiveBenchOptions(
            plays=dict.fromkeys(kinds, arguments.plays or 1),
            ratios=(6,),
            layers=_QUICK_LAYERS,
            batches=_QUICK_BATCHES,
            layer_ns=_QUICK_LAYER_NS,
            cpu_tokens=_QUICK_CPU_TOKENS,
            linked=linked,
        )
    return LiveBenchOptions(
        plays={kind: arguments.plays or _PLAYS[kind] for kind in kinds},
        ratios=tuple(sorted({int(number) for number in numbers})),
        linked=linked,
    )


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


def _say(line: str) -> None:
    print(line, flush=True)
