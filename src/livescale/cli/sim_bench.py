"""`livescale bench sim`: the options, and where its load comes from."""

from __future__ import annotations

import argparse
import os

from livescale.bench.sim_bench import SimBenchOptions, run_sim_bench
from livescale.cli.errors import UserError
from livescale.cli.loads import add_load_arguments, choose_load
from livescale.sim.pools.capacity import CapacityError
from livescale.sim.pools.configs import PoolError
from livescale.traces import TraceError

_TRACE = "azureconv_1270_8min"
_GENERATED = "gamma:rate=7,cv=1,seconds=480,input=1024,output=192"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace=None, seconds=480, divide_lengths=1)
    parser.add_argument("--model", default="qwen2.5-72b", help="preset that the pools serve")
    parser.add_argument("--tp", type=int, default=4, help="ranks of an instance")
    words = "how much of the load the pools of the sweep get"
    parser.add_argument("--sweep-seconds", type=int, default=30, help=words)
    words = "hosts of eight accelerators in the sweep, ascending"
    parser.add_argument("--hosts", default="4,16,64,128", help=words)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The figures; the table is printed."""
    try:
        hosts = tuple(int(count) for count in arguments.hosts.split(","))
    except ValueError as error:
        raise UserError(f"--hosts {arguments.hosts!r}: write numbers as '4,16,64'") from error
    if min(hosts) < 1 or list(hosts) != sorted(hosts) or arguments.sweep_seconds < 1:
        raise UserError("--hosts must ascend from 1 on, and --sweep-seconds be positive")
    if arguments.trace is None:
        arguments.trace = _TRACE if "LIVESCALE_DATA" in os.environ else _GENERATED
    try:
        load = choose_load(arguments)
        options = SimBenchOptions(
            load.rows,
            arguments.model,
            arguments.tp,
            arguments.sweep_seconds,
            hosts,
            arguments.seed,
        )
        return run_sim_bench(options, lambda line: print(line, flush=True))
    except (TraceError, PoolError, CapacityError) as error:
        raise UserError(str(error)) from error
