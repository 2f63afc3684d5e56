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
    words = f"Model presets and ranks (default: {' '.join(_MODELS)})."
    add("--model", nargs="+", action="extend", metavar="PRESET[,tp=N]", help=words)
    add("--link-gbit", default="10,25,50,100,400", metavar="N,…", help="Link rates.")
    add("--requests", default="24", metavar="N,…", help="Prompts of a burst.")
    add("--gap-ms", default="0", metavar="N,…", help="Time between two prompts.")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="Tokens of each prompt.")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="Tokens of each answer.")
    add("--instances", type=int, default=defaults.instances, help="Largest number of instances.")
    add("--seed", type=int, default=defaults.seed, help="Random seed.")


def _pairs(arguments: argparse.Namespace) -> int:
    """Compare live pairs with overlap and stop-the-world, by link rate and model.

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
