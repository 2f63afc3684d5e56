"""`livescale bench hosts|wires`: their flags."""

from __future__ import annotations

import argparse

from livescale.common.errors import UserError
from livescale.lab.bench.hosts.hosts import HostsBenchOptions, run_hosts
from livescale.lab.bench.hosts.simulated_hosts import HOSTS_MAX
from livescale.lab.bench.hosts.wires import WiresBenchOptions, run_wires
from livescale.lab.commands.bench.bench_flags import Bench, at_least, finish, options_of, say

_REAL_MAX = 256


def _add_hosts_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, HostsBenchOptions()
    words = "Hosts as processes of this node, with a timed worker each."
    add("--real", type=int, default=defaults.real, metavar="N", help=words)
    words = "Simulated hosts of eight accelerators."
    add("--simulated", type=int, default=defaults.simulated, metavar="N", help=words)
    words = "Time limit for hosts to join."
    add("--patience-s", type=float, default=defaults.patience_s, metavar="S", help=words)


def _hosts(arguments: argparse.Namespace) -> int:
    """Measure the time for many hosts to join a pool at once.

    0 when all of them joined.
    """
    at_least(arguments, 0, "real", "simulated")
    if arguments.real > _REAL_MAX or arguments.simulated > HOSTS_MAX:
        raise UserError(f"--real is at most {_REAL_MAX}, --simulated at most {HOSTS_MAX}")
    if not arguments.real and not arguments.simulated:
        raise UserError("--real or --simulated must be at least 1")
    if arguments.patience_s <= 0:
        raise UserError("--patience-s must be positive")
    return finish(run_hosts(options_of(HostsBenchOptions, arguments), say), arguments)


def _add_wires_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, WiresBenchOptions()
    add("--streams", type=int, default=defaults.streams, help="Concurrent streams.")
    words = "Requests of each stream in a round."
    add("--requests", type=int, default=defaults.requests, metavar="N", help=words)
    add("--output-tokens", type=int, default=defaults.output_tokens, help="Tokens of each output.")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="Tokens of each prompt.")
    add("--workers", type=int, default=defaults.workers, help="Timed workers of the host.")
    add("--step-ms", type=int, default=defaults.step_ms, help="Step time.")
    words = "Measured rounds of both kinds, an even number."
    add("--rounds", type=int, default=defaults.rounds, metavar="N", help=words)
    add("--ramp-s", type=float, default=defaults.ramp_s, help="Time to connect all streams.")


def _wires(arguments: argparse.Namespace) -> int:
    """Measure the CPU cost of TLS between gateway and workers under many streams.

    0 when every request was answered.
    """
    names = ("streams", "requests", "output_tokens", "prompt_tokens", "workers", "step_ms")
    at_least(arguments, 1, *names)
    if arguments.rounds < 4 or arguments.rounds % 2:
        raise UserError("--rounds must be even, and at least 4: pools take turns in beginning")
    at_least(arguments, 0, "ramp_s")
    return finish(run_wires(options_of(WiresBenchOptions, arguments), say), arguments)


WIRES = Bench(_add_wires_arguments, _wires)
HOSTS = Bench(_add_hosts_arguments, _hosts)
