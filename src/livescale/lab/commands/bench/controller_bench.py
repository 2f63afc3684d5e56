"""`livescale bench controller`: its flags."""

from __future__ import annotations

import argparse
import math

from livescale.common.errors import UserError
from livescale.lab.bench.pools.controller_steps import (
    WORKERS_MAX,
    ControllerOptions,
    run_controller,
)
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    finish,
    options_of,
    say,
    whole_numbers,
)
from livescale.load.arrivals import GammaShape
from livescale.sim.pools.systems import find_system

_SYSTEM = "livescale"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, ControllerOptions(find_system(_SYSTEM))
    sizes = ",".join(map(str, defaults.workers))
    add("--workers", default=sizes, metavar="N,…", help="Numbers of workers.")
    words = "Workers per model."
    add("--workers-per-model", type=int, default=defaults.workers_per_model, help=words)
    add("--system", default=_SYSTEM, help="System whose settings apply.")
    words = "Requests per second of each model."
    add("--rate", type=float, default=defaults.rate, help=words)
    words = "Coefficient of variation of interarrival times."
    add("--cv", type=float, default=defaults.cv, help=words)
    add("--seconds", type=int, default=defaults.seconds, help="Duration of the load.")
    words = "Replays. The result is the shortest time of each step."
    add("--replays", type=int, default=defaults.replays, help=words)
    add("--seed", type=int, default=defaults.seed, help="Seed of the load.")


def _controller(arguments: argparse.Namespace) -> int:
    """Measure the time of a controller step by pool size.

    A report, not a test: the exit status is 0.
    """
    at_least(arguments, 1, "workers_per_model", "seconds", "replays")
    if not 0 < arguments.rate < math.inf:
        raise UserError("--rate must be positive")
    try:
        GammaShape(cv=arguments.cv)
    except ValueError as error:
        raise UserError(f"--cv: {error}") from error
    least = arguments.workers_per_model
    wanted = f"numbers from {least} (one model's workers) to {WORKERS_MAX}, such as 64,256"
    workers = whole_numbers(arguments.workers, "--workers", wanted, least, WORKERS_MAX)
    options = options_of(
        ControllerOptions, arguments, system=find_system(arguments.system), workers=workers
    )
    return finish(run_controller(options, say), arguments)


CONTROLLER = Bench(_add_arguments, _controller)
