"""`livescale bench receiving`: its flags."""

from __future__ import annotations

import argparse

from livescale.cli.loads import whole_bytes
from livescale.common.errors import UserError
from livescale.lab.bench.base.made_models import DTYPES, parse_shape
from livescale.lab.bench.transfer.receiving import ReceivingOptions, run_receiving
from livescale.lab.commands.bench.bench_flags import Bench, at_least, finish, options_of, say
from livescale.lab.testbed.spec import parse_rate
from livescale.transfer.formats.orders import ContentChecks

_WINDOW_S_MAX = 600.0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, ReceivingOptions()
    add(
        "--rates",
        default="1gbit,5gbit,10gbit",
        metavar="RATE,…",
        help="Rates of the sender's uplink.",
    )
    words = "Hidden size x layers of the model that computes."
    add("--shape", default=str(defaults.shape), metavar="HxL", help=words)
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="Type of its weights.")
    add("--vocabulary", type=int, default=defaults.vocabulary, help="Number of token IDs.")
    add(
        "--sequences",
        type=int,
        default=defaults.sequences,
        help="Sequences that decode in each step.",
    )
    add("--size", default="256MiB", help="Size of the model that is received.")
    add("--chunk", default="1MiB", help="Size of a chunk.")
    checks = [check.value for check in (ContentChecks.NETWORK, ContentChecks.NONE)]
    words = "Checks of received layers. network adds SHA-256."
    add("--content-checks", choices=checks, default=checks[0], help=words)
    add(
        "--window-s",
        type=float,
        default=defaults.window_s,
        help="Approximate length of a window in seconds.",
    )
    add("--rounds", type=int, default=defaults.rounds, help="Rounds of all windows.")


def _receiving(arguments: argparse.Namespace) -> int:
    """Measure how receiving parameters slows down computing, with threads and with a process."""
    at_least(arguments, 1, "sequences", "rounds")
    if not 0 < arguments.window_s <= _WINDOW_S_MAX:
        raise UserError(f"--window-s must be positive, and {_WINDOW_S_MAX:g} at most")
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    options = options_of(
        ReceivingOptions,
        arguments,
        rates=tuple(parse_rate(text) // 8 for text in arguments.rates.split(",")),
        shape=shape,
        size_bytes=whole_bytes(arguments.size, "--size"),
        chunk_bytes=whole_bytes(arguments.chunk, "--chunk"),
        content_checks=ContentChecks(arguments.content_checks),
    )
    return finish(run_receiving(options, say), arguments)


RECEIVING = Bench(_add_arguments, _receiving)
