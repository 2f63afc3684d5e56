"""`livescale bench pairs`: its flags."""

from __future__ import annotations

import argparse

import msgspec

from livescale.common.errors import UserError
from livescale.lab.bench.pools.pairs import PairsOptions, run_pairs
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    finish,
    options_of,
    say,
    whole_numbers,
)
from livescale.lab.commands.pool_choices import parse_model

_MODELS = ("llama-3-8b", "mistral-24b,tp=2", "qwen2.5-72b,tp=4")
_LINK_GBIT_MAX, _REQUESTS_MAX, _GAP_MS_MAX = 3200, 1000, 10_000


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, PairsOptions(())
    words = f"presets and their ranks (default: {' '.join(_MODELS)})"
    add("--model", nargs="+", action="extend", metavar="PRESET[,tp=N]", help=words)
    add("--link-gbit", default="10,25,50,100,400", metavar="N,…", help="rates of all links")
    add("--requests", default="24", metavar="N,…", help="prompts of a burst")
    add("--gap-ms", default="0", metavar="N,…", help="time between two of them")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="length of prompts")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="length of answers")
    add("--instances", type=int, default=defaults.instances, help="room for so many")
    add("--seed", type=int, default=defaults.seed, help="of everything that is drawn")


def _pairs(arguments: argparse.Namespace) -> int:
    """Whether live pairs pay: bursts by links and models, beside overlap and stop-the-world.

    A report, not a test: the exit status is 0.
    """
    at_least(arguments, 2, "instances", "output_tokens")
    at_least(arguments, 1, "prompt_tokens")
    texts = arguments.model or _MODELS
    models = [parse_model(text) for text in dict.fromkeys(texts)]
    if any(model.instances_max is not None for model in models):
        raise UserError("--model: --instances says how many there are, not max=N")
    options = options_of(
        PairsOptions,
        arguments,
        models=[
            msgspec.structs.replace(model, name=text, instances_max=arguments.instances)
            for model, text in zip(models, dict.fromkeys(texts), strict=True)
        ],
        links_gbit=_numbers(arguments.link_gbit, "--link-gbit", 1, _LINK_GBIT_MAX),
        requests=_numbers(arguments.requests, "--requests", 1, _REQUESTS_MAX),
        gaps_ms=_numbers(arguments.gap_ms, "--gap-ms", 0, _GAP_MS_MAX),
    )
    return finish(run_pairs(options, say), arguments)


def _numbers(text: str, flag: str, least: int, most: int) -> list[int]:
    """Each once. Raises UserError."""
    wanted = f"numbers from {least} to {most}, such as {max(least, 10)},{max(least, 25)}"
    return list(dict.fromkeys(whole_numbers(text, flag, wanted, least, most)))


PAIRS = Bench(_add_arguments, _pairs)
