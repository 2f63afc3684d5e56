"""`livescale join ADDRESS:PORT`: this machine's devices work for a pool that is served elsewhere,
until the pool ends or Ctrl-C: then the host leaves in order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import math
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from livescale.cli.serve_display import ServeDisplay
from livescale.common.addresses import family_of, parse_address
from livescale.common.errors import UserError
from livescale.common.help_format import add_setting
from livescale.common.settings import read_values
from livescale.config.pool import SETTINGS, WORKERS_MAX
from livescale.config.settings.removed import instead_of
from livescale.runtime.join.head_talk import HeadAccess, JoinError, way_to
from livescale.runtime.join.joined_host import JoinedAs, JoinedHost
from livescale.runtime.layout.worker_python import check_worker_python, gpus_of
from livescale.runtime.wire.doors import open_credentials
from livescale.runtime.wire.joining import NAME_CHARS_MAX
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.token import check_fingerprint, read_token

_DEFAULTS_ARE = (
    "The defaults are the pool's values. --tls-dir and --worker-python have the default none."
)
HEAD = "Control address of the head node (printed by `livescale serve`)."
#: settings of the pool that a host may have of its own
_OWN = (
    *("tls_dir", "worker_python", "device", "worker_threads", "timed_profile"),
    *("arena_bytes", "kv_bytes", "host_memory_bytes", "log_level"),
)
REMOVED = (
    *("weights_layout", "timed_run_us", "timed_token_us", "resident_bytes"),
    *("uplink_bytes_per_s", "downlink_bytes_per_s", "storage_bytes_per_s"),
)
_SETTINGS = tuple(setting for setting in SETTINGS if setting.name in _OWN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("head", metavar="ADDRESS:PORT", help=HEAD)
    add_joining(parser)
    add("--workers", type=int, default=1, help="Worker processes, one per device (default: 1).")
    words = "Rack (leaf switch) of this node, existing or new (default: see `racks` of the pool)."
    add("--rack", default="", metavar="NAME", help=words)
    reached = parser.add_mutually_exclusive_group()
    words = "Address of this node for other nodes (default: on the route to the head node)."
    reached.add_argument("--address", help=words)
    reached.add_argument("--interface", metavar="NAME", help="Network interface with that address.")
    words = (
        "Read model files from the same paths on this node (default: receive them from the pool)."
    )
    add("--same-files", action="store_true", help=words)
    group = parser.add_argument_group("settings of this node", _DEFAULTS_ARE)
    for setting in _SETTINGS:
        add_setting(group, setting)
    for name in REMOVED:
        flag, refuse = "--" + name.replace("_", "-"), functools.partial(_refuse_removed, name)
        parser.add_argument(flag, type=refuse, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_joining(parser: argparse.ArgumentParser) -> None:
    """Flags that `join` and `gateway` share."""
    add = parser.add_argument
    words = "File of the pool's secret, written by `livescale serve`."
    add("--token-file", type=Path, required=True, metavar="FILE", help=words)
    add("--name", default=socket.gethostname(), help="Name of this node in the pool.")
    words = "Time limit for reaching the head node, in seconds."
    add("--patience-s", type=_seconds, default=60.0, metavar="SECONDS", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the pool ends or SIGINT or SIGTERM; the first leaves in order, the second ends
    everything at once. Raises UserError."""
    try:
        head = parse_address(arguments.head, "the head's address", is_own=False)
        token = read_token(arguments.token_file)
        address = _own_address(arguments, head)
        given = {name: value for name, value in vars(arguments).items() if name in _OWN}
        settings = read_values(given, _SETTINGS, "flags: ", is_text=True)
        # Paths of the head mean nothing here.
        settings["tls_dir"] = tls_dir = own_path(settings.get("tls_dir"))
        settings["worker_python"] = python = own_path(settings.get("worker_python"))
        if python is not None:
            check_worker_python(python)
        tls = open_credentials(tls_dir)
        fingerprint = None if tls is None else tls.fingerprint
        check_fingerprint(arguments.token_file, token, fingerprint)
    except JoinError:
        raise
    except UserError as error:
        raise JoinError(str(error)) from error
    if not 0 <= arguments.workers <= WORKERS_MAX:
        raise JoinError(f"--workers is {arguments.workers}. Give a number from 0 to {WORKERS_MAX}")
    if len(arguments.rack) > NAME_CHARS_MAX or not arguments.rack.isprintable():
        raise JoinError(
            f"--rack is an invalid name. Give up to {NAME_CHARS_MAX} printable characters"
        )
    if settings.get("device") == "cuda":
        _check_gpus(arguments.workers, python)
    joined_as = JoinedAs(
        arguments.name,
        address,
        arguments.workers,
        _plain(settings),
        arguments.same_files,
        arguments.rack,
    )
    with ServeDisplay(str(settings.get("log_level", "warning"))) as display:
        access = HeadAccess(Address(*head), token.secret, tls, display.tell, arguments.patience_s)
        return asyncio.run(_join(access, joined_as))


def _refuse_removed(name: str, _value: str) -> None:
    raise argparse.ArgumentTypeError(f"no longer a setting. {instead_of(name)}")


async def _join(access: HeadAccess, joined_as: JoinedAs) -> int:
    host = JoinedHost(access, joined_as)
    when_interrupted(host.leave, host.kill, "leaving the pool")
    print(f"joining {access.head} as {joined_as.name} …", flush=True)
    await host.run()
    print("left")
    return 0


def when_interrupted(leave: Callable[[], None], kill: Callable[[], None], words: str) -> None:
    """At SIGINT or SIGTERM this side does what the `words` say, at the second one it ends."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        print(f"{words} (Ctrl-C again stops at once) …", flush=True)
        leave()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, kill)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)


# -- helpers, in the order used -------------------------------------------------------------------


def _seconds(text: str) -> float:
    """Of a flag: what is no number, or none that a clock reaches, is a usage error."""
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 <= seconds < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds, 0 or more")


def _check_gpus(workers: int, python: str | None) -> None:
    """Raises JoinError where there are fewer GPUs."""
    count = gpus_of(python)
    if count == 0:
        raise JoinError(
            "--device cuda is invalid: torch finds no GPU on this machine. Install a CUDA "
            "driver, or give another --device"
        )
    if workers > count:
        raise JoinError(f"--workers is {workers}, above the {count} GPUs of this machine")


def _own_address(arguments: argparse.Namespace, head: tuple[str, int]) -> str:
    """The address that others reach this machine at. Raises JoinError."""
    if arguments.interface is not None:
        return _address_of(arguments.interface)
    address: str | None = arguments.address
    if address is None:
        return way_to(head)
    try:
        parse_address(f"{address}:0", "--address")
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise JoinError(
            f"--address {address} is not assigned to a local interface: {error.strerror}"
        ) from error
    return address


def _address_of(interface: str) -> str:
    found = psutil.net_if_addrs()
    if interface not in found:
        names = ", ".join(sorted(found))
        raise JoinError(f"--interface {interface} is unknown. Interfaces of this machine: {names}")
    for entry in found[interface]:
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise JoinError(
        f"--interface {interface} has no IPv4 address. Give --address, or another interface"
    )


def own_path(value: object) -> str | None:
    """A path as it is whatever directory a process works in."""
    return None if value is None else os.path.abspath(str(value))


def _plain(settings: Mapping[str, object]) -> dict[str, str | int | None]:
    return {k: v for k, v in settings.items() if v is None or isinstance(v, str | int)}
