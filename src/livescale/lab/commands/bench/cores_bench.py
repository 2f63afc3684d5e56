"""`livescale bench cores`: its flags."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from livescale.common.errors import UserError
from livescale.lab.bench.base.made_models import DTYPES, parse_shape
from livescale.lab.bench.engines.cores import CoresOptions, run_cores
from livescale.lab.commands.bench.bench_flags import Bench, at_least, finish, options_of, say


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, CoresOptions()
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="Write the fitted profile to this file, for cores_profile.",
    )
    add("--shape", default=str(defaults.shape), metavar="HxL", help="Hidden size x layers.")
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="Type of the weights.")
    add("--vocabulary", type=int, default=defaults.vocabulary, help="Number of token IDs.")
    add(
        "--prompt-tokens", type=int, default=defaults.prompt_tokens, help="Prompt tokens of a step."
    )
    add("--rounds", type=int, default=defaults.rounds, help="Steps with each number of cores.")
    add("--cores-max", type=int, default=0, help="Largest number of cores (default: 0, all cores).")


def _cores(arguments: argparse.Namespace) -> int:
    """Measure step times by number of CPU cores, as a profile for stages."""
    at_least(arguments, 1, "prompt_tokens", "rounds")
    at_least(arguments, 0, "cores_max")
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    file = arguments.out
    if file is not None and not os.access(file.absolute().parent, os.W_OK):
        raise UserError(f"--out {file}: its directory cannot be written to")
    report = run_cores(options_of(CoresOptions, arguments, shape=shape), say)
    return finish(report, arguments)


CORES = Bench(_add_arguments, _cores)
