"""`livescale bench vllm`: its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.cli.loads import whole_bytes
from livescale.common.errors import UserError
from livescale.engine.files.make import PRESETS
from livescale.lab.bench.base.made_models import DTYPES, parse_shape
from livescale.lab.bench.engines.vllm_bench import PARTS, run_vllm
from livescale.lab.bench.engines.vllm_options import VllmBenchOptions
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    options_of,
    say,
)

_TOKENS_MAX = PRESETS["small"].model_tokens_max
_BITS = 8


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    defaults = VllmBenchOptions(Path(), parse_shape("512x8", None, None, None))
    words = "Python interpreter with vLLM and livescale (`make vllm` makes one)."
    add("--vllm-python", type=Path, required=True, metavar="PYTHON", help=words)
    words = f"Parts to run: {', '.join(PARTS)} (default: {','.join(defaults.parts)})."
    add("--parts", default=",".join(defaults.parts), metavar="NAME,…", help=words)
    words = "Hidden size x layers of the served model."
    add("--shape", default=str(defaults.shape), metavar="HxL", help=words)
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="Type of its weights.")
    add("--vocabulary", type=int, default=defaults.vocabulary, help="Number of token IDs.")
    add("--streams", type=int, default=defaults.streams, help="Concurrent requests.")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="Tokens of each prompt.")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="Tokens of each answer.")
    words = "Measured rounds of each kind."
    add("--repetitions", type=int, default=defaults.repetitions, help=words)
    add("--threads", type=int, default=defaults.threads, help="Threads of each engine.")
    words = "Skip `vllm serve` with default settings."
    add("--no-defaults", action="store_true", help=words)
    add("--loads", type=int, default=defaults.loads, help="Measured loads and bindings.")
    words = "Approximate model size in part link."
    add("--link-size", default="1GiB", metavar="BYTES", help=words)
    words = "Link rate in part link, in Gbit/s."
    add("--link-gbit", type=float, default=1.0, metavar="RATE", help=words)
    add("--seed", type=int, default=defaults.seed, help="Seed of the prompts.")


def _vllm(arguments: argparse.Namespace) -> int:
    """Measure the overhead of LiveScale on vLLM, and model switches of a resident engine.

    0 when nothing was lost and every token was that of plain vLLM.
    """
    at_least(arguments, 1, "prompt_tokens", "output_tokens", "repetitions", "threads", "loads")
    at_least(arguments, 2, "streams")
    if arguments.prompt_tokens + arguments.output_tokens > _TOKENS_MAX:
        raise UserError(f"--prompt-tokens and --output-tokens must be {_TOKENS_MAX} together")
    if not 0 < arguments.link_gbit <= 100:
        raise UserError("--link-gbit must be above 0, and 100 at most")
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    options = options_of(
        VllmBenchOptions,
        arguments,
        shape=shape,
        parts=tuple(dict.fromkeys(chosen(arguments.parts.split(","), "--parts", tuple(PARTS)))),
        has_defaults=not arguments.no_defaults,
        link_size_bytes=whole_bytes(arguments.link_size, "--link-size"),
        link_bytes_per_s=int(arguments.link_gbit * 1e9) // _BITS,
    )
    report = run_vllm(options, say)
    return finish(report, arguments, is_good=report.is_right)


VLLM = Bench(_add_arguments, _vllm)
