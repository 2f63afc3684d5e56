"""`livescale bench variation`: its flags."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from livescale.common.errors import UserError
from livescale.lab.bench.lines.variation import VariationOptions, run_variation
from livescale.lab.commands.bench.bench_flags import Bench, at_least, finish, options_of, say


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, VariationOptions()
    add("--lines", type=int, default=defaults.lines, help="Simulated lines of each kind.")
    add("--requests", type=int, default=defaults.requests, help="Requests of a line.")
    words = "Train weights on simulated lines, write them to this file, and test them."
    add("--train", type=Path, metavar="FILE", help=words)
    words = "Simulated lines for training."
    add("--training-lines", type=int, default=defaults.training_lines, help=words)
    words = "Requests of a training line."
    add("--training-requests", type=int, default=defaults.training_requests, help=words)
    words = "Training steps."
    add("--training-steps", type=int, default=defaults.training_steps, help=words)
    add("--seed", type=int, default=defaults.seed, help="Random seed.")


def _variation(arguments: argparse.Namespace) -> int:
    """Compare predictions of burstiness along stages, by formulas and by attention.

    A report, not a test: the exit status is 0.
    """
    at_least(arguments, 1, "lines", "training_lines", "training_steps")
    at_least(arguments, 100, "requests", "training_requests")
    at_least(arguments, 0, "seed")
    file = arguments.train
    if file is not None and not os.access(file.absolute().parent, os.W_OK):
        raise UserError(f"--train {file}: its directory cannot be written to")
    report = run_variation(options_of(VariationOptions, arguments), say)
    return finish(report, arguments, ("livescale", "numpy", "numba"))


VARIATION = Bench(_add_arguments, _variation)
