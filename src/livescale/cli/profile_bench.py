"""`livescale bench profile`: the flags, and what is printed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from livescale.bench.made_models import DTYPES, parse_shape
from livescale.bench.profile import ProfileOptions, run_profile
from livescale.bench.profile_points import CONTEXT_TOKENS_MIN, ProfileLimits
from livescale.cli.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the profile (CSV)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what computes")
    add("--model", type=Path, metavar="DIR", help="a model's directory (default: one is made)")
    add("--shape", default="512x8", metavar="HxL", help="of a made model: hidden size x layers")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of a made model's weights")
    add("--vocabulary", type=int, default=8192, help="of a made model: token ids")
    words = "compute threads (default: 1, as a worker has)"
    add("--threads", type=int, default=1, help=words)
    add("--seconds", type=float, default=60.0, help="how long is measured")
    add("--chunk-max", type=int, default=1024, help="tokens of the largest chunk of a prompt")
    add("--batch-max", type=int, default=32, help="decodes of the largest batch")
    add("--context-max", type=int, default=2048, help="tokens of the longest context")
    add("--json", type=Path, help="write the figures to this file")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The figures; the profile is written."""
    limits = ProfileLimits(arguments.chunk_max, arguments.batch_max, arguments.context_max)
    if limits.chunk_tokens_max < 1 or limits.decodes_max < 1 or arguments.threads < 1:
        raise UserError("--chunk-max, --batch-max and --threads must be at least 1")
    if limits.context_tokens_max < max(limits.chunk_tokens_max, 4 * CONTEXT_TOKENS_MIN):
        least = max(limits.chunk_tokens_max, 4 * CONTEXT_TOKENS_MIN)
        raise UserError(f"--context-max must be at least {least}")
    if not 0 < arguments.seconds <= 86_400:
        raise UserError("--seconds must be positive, and a day at most")
    if not os.access(arguments.out.absolute().parent, os.W_OK):
        raise UserError(f"--out {arguments.out}: its directory cannot be written to")
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    options = ProfileOptions(
        out=arguments.out,
        model=arguments.model,
        shape=shape,
        dtype=arguments.dtype,
        vocabulary=arguments.vocabulary,
        device=arguments.device,
        threads=arguments.threads,
        seconds=arguments.seconds,
        limits=limits,
    )
    report = run_profile(options, lambda line: print(line, flush=True))
    print()
    print(report.text())
    return report.as_json()
