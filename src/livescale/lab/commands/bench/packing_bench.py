"""`livescale bench packing`: its flags."""

from __future__ import annotations

import argparse

from livescale.common.errors import UserError
from livescale.lab.bench.transfer.packing import PackingOptions, run_packing
from livescale.lab.bench.transfer.packing_wire import LAYERS
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    options_of,
    say,
)

_SECONDS_MAX = 86_400


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, PackingOptions()
    words = f"Model of the tensors: {', '.join(LAYERS)} (default: {defaults.model})."
    add("--model", default=defaults.model, metavar="NAME", help=words)
    words = "Decoder layers of a block."
    add("--layers", type=int, default=defaults.layers, help=words)
    words = "Duration of the measurement, at least two rounds."
    add("--seconds", type=float, default=defaults.seconds, help=words)
    add("--seed", type=int, default=defaults.seed, help="Seed of the bytes.")


def _packing(arguments: argparse.Namespace) -> int:
    """Compare ways to transfer a block of parameters between processes.

    A report, not a test: the exit status is 0.
    """
    chosen([arguments.model], "--model", tuple(LAYERS))
    at_least(arguments, 1, "layers")
    at_least(arguments, 0, "seed")
    most = LAYERS[arguments.model].decoder_layers
    if arguments.layers > most:
        raise UserError(f"--layers must be at most {most}: {arguments.model} has no more")
    if not 0 < arguments.seconds <= _SECONDS_MAX:
        raise UserError("--seconds must be positive, and a day at most")
    options = options_of(PackingOptions, arguments)
    return finish(run_packing(options, say), arguments, ("livescale", "numpy", "xxhash"))


PACKING = Bench(_add_arguments, _packing)
