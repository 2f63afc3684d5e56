"""`livescale testbed ACTION`: emulated hosts on this machine while a command or a pool runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
from pathlib import Path

from livescale.cli.serve_display import ServeDisplay
from livescale.cli.serve_run import serve
from livescale.common.errors import UserError
from livescale.config.reading import TESTBED_VARIABLE, load_config
from livescale.lab.commands import hosts_demo
from livescale.lab.testbed import commands
from livescale.lab.testbed.bed import CONTROL, Testbed
from livescale.lab.testbed.spec import NetworkSpec, parse_rate
from livescale.runtime.layout.pool_layout import layout_of

_OUTSIDE = "outside"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    words = "Build a testbed, run a command (default: wait for Ctrl-C), and remove the testbed."
    run_it = actions.add_parser("run", help=words, description=words)
    add_network_arguments(run_it)
    run_it.add_argument(
        "--at", default=_OUTSIDE, help='Place of the command: "h0", …, "control" or "outside".'
    )
    run_it.add_argument("argv", nargs="*", metavar="-- COMMAND", help="Command to run.")
    words = "Run a pool on the hosts of a testbed, with the HTTP API at the address of `serve`."
    pool = actions.add_parser("serve", help=words, description=words)
    add_network_arguments(pool)
    pool.add_argument("models", nargs="*", metavar="MODEL", help="Folder of a model.")
    pool.add_argument("-c", "--config", type=Path, help="Configuration file (YAML).")
    words = "Run a command on a host of a testbed."
    execute = actions.add_parser("exec", help=words, description=words)
    execute.add_argument(
        "--testbed",
        help=f"Name of the testbed (default: ${TESTBED_VARIABLE}, or the only testbed).",
    )
    execute.add_argument("host", help='Host: "h0", "h1", … or "control".')
    execute.add_argument("argv", nargs="+", metavar="-- COMMAND", help="Command to run.")
    words = "Run a demo of a pool on several hosts, with a lost host and a host that leaves."
    hosts_demo.add_arguments(actions.add_parser("demo", help=words, description=words))
    for action, words in (
        ("status", "List the testbeds of this node."),
        ("clean", "Remove testbeds without processes."),
    ):
        actions.add_parser(action, help=words, description=words)


def add_network_arguments(parser: argparse.ArgumentParser, hosts: int = 2) -> None:
    """The flags of `network_spec`."""
    add = parser.add_argument
    add("--hosts", type=int, default=hosts, help="Number of emulated hosts.")
    add("--link", default="1gbit", metavar="RATE", help="Rate of every link, each direction.")
    add("--devices-per-host", type=int, default=1, help="Devices of a host, each with a link.")
    add("--leaves", type=int, default=1, help="Number of leaf switches.")
    add("--spine", metavar="RATE", help="Rate of a leaf's link to the spine (default: --link).")


def network_spec(arguments: argparse.Namespace) -> NetworkSpec:
    """Raises TestbedError for what cannot be built."""
    return NetworkSpec(
        arguments.hosts,
        parse_rate(arguments.link),
        arguments.devices_per_host,
        arguments.leaves,
        None if arguments.spine is None else parse_rate(arguments.spine),
    )


def run(arguments: argparse.Namespace) -> int:
    """The command's exit status; 0 where there was none."""
    return _ACTIONS[arguments.action](arguments)


def _run(arguments: argparse.Namespace) -> int:
    spec = network_spec(arguments)
    # A process that is asked to end removes its testbed first.
    signal.signal(signal.SIGTERM, hosts_demo.leave)
    with Testbed(spec) as testbed:
        words = [] if arguments.at == _OUTSIDE else testbed.inside(arguments.at)
        _print_hosts(testbed)
        if not arguments.argv:
            print("The testbed exists until Ctrl-C.", flush=True)
            while True:
                signal.pause()
        return _run_command([*words, *arguments.argv], testbed.name)


def _run_command(words: list[str], testbed: str) -> int:
    try:
        process = subprocess.Popen(words, env={**os.environ, TESTBED_VARIABLE: testbed})
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}") from error
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The command got it, too, and decides what it means.
            continue


def _serve(arguments: argparse.Namespace) -> int:
    spec = network_spec(arguments)
    workers = spec.hosts * spec.devices_per_host
    config = load_config(arguments.config, arguments.models, os.environ, {"workers": str(workers)})
    with Testbed(spec) as testbed, ServeDisplay(config.log_level) as display:
        _print_hosts(testbed)
        layout = layout_of(testbed.topology(), config, testbed)
        return asyncio.run(serve(config, display, layout))


def _print_hosts(testbed: Testbed) -> None:
    print(f"{testbed.name}: {CONTROL} {testbed.control_address}")
    for host in testbed.hosts:
        devices = " ".join(link.address for link in host.devices)
        print(
            f"  {host.name} on {host.leaf}: devices {devices}, host {host.nic.address},"
            f" control {host.control_address}",
            flush=True,
        )


def _exec(arguments: argparse.Namespace) -> int:
    commands.check_machine()
    testbed = _chosen(arguments.testbed or os.environ.get(TESTBED_VARIABLE))
    if arguments.host not in testbed.places:
        raise UserError(f"{arguments.host!r} is not in {testbed.name}: {' '.join(testbed.places)}")
    words = [*commands.inside(testbed.namespace(arguments.host)), *arguments.argv]
    return _run_command(words, testbed.name)


def _chosen(name: str | None) -> commands.ExistingTestbed:
    there = commands.existing_testbeds()
    found = [testbed for testbed in there if name in (None, testbed.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(testbed.name for testbed in there) or "none"
    if name is not None:
        raise UserError(f"there is no testbed {name}; there are: {names}")
    raise UserError(f"which testbed? Say --testbed; there are: {names}")


def _status(arguments: argparse.Namespace) -> int:
    commands.check_machine()
    for testbed in commands.existing_testbeds():
        owner = "left behind" if testbed.owner is None else f"of process {testbed.owner}"
        print(f"{testbed.name}: {owner}")
        for place in testbed.places:
            inhabitants = len(commands.processes(testbed.namespace(place)))
            print(f"  {place}: {inhabitants} processes")
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    commands.check_machine()
    for name in commands.remove_leftovers():
        print(f"removed {name}")
    return 0


_ACTIONS = {
    "run": _run,
    "serve": _serve,
    "demo": hosts_demo.run,
    "exec": _exec,
    "status": _status,
    "clean": _clean,
}
