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
    words = "an interpreter that has vLLM and livescale, such as make vllm makes"
    add("--vllm-python", type=Path, required=True, metavar="PYTHON", help=words)
    words = f"what is measured, of {', '.join(PARTS)} (default: {','.join(defaults.parts)})"
    add("--parts", default=",".join(defaults.parts), metavar="NAME,…", help=words)
    words = "of the model that serves: hidden size x layers"
    add("--shape", default=str(defaults.shape), metavar="HxL", help=words)
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="of its weights")
    add("--vocabulary", type=int, default=defaults.vocabulary, help="its token ids")
    add("--streams", type=int, default=defaults.streams, help="requests in flight")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="of every prompt")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="of every answer")
    words = "counted rounds of each kind"
    add("--repetitions", type=int, default=defaults.repetitions, help=words)
    add("--threads", type=int, default=defaults.threads, help="of every engine")
    words = "leave out vllm serve as it is by default"
    add("--no-defaults", action="store_true", help=words)
    add("--loads", type=int, default=defaults.loads, help="counted loads, and bindings")
    words = "part link: about the size of the model"
    add("--link-size", default="1GiB", metavar="BYTES", help=words)
    words = "part link: the rate of the link, in Gbit/s"
    add("--link-gbit", type=float, default=1.0, metavar="RATE", help=words)
    add("--seed", type=int, default=defaults.seed, help="of the prompts")


def _vllm(arguments: argparse.Namespace) -> int:
    """What LiveScale adds to vLLM's throughput and TTFT, and how soon a kept engine has a model.

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
