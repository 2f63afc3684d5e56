"""`livescale bench load|mesh|multicast`: their flags. What they measure stands in `bench/`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from livescale.bench.load_bench import LoadBenchOptions, run_load
from livescale.bench.machine import describe_run
from livescale.bench.mesh import run_mesh
from livescale.bench.multicast import MulticastBenchOptions, run_multicast
from livescale.cli.errors import UserError
from livescale.cli.loads import write_json
from livescale.cli.testbed import add_network_arguments, network_spec
from livescale.control.multicast.planner import STRATEGIES
from livescale.settings import amount_of_bytes

# Storage, the planner's other strategy, crosses no emulated link.
_MULTICAST = ("chain", *(name for name in STRATEGIES if name not in ("chain", "storage")))
_WORKERS_MAX = 256
_PACKAGES = ("livescale", "torch", "safetensors", "xxhash", "numpy")


def add_parsers(benches: Any) -> None:
    """Add them to the subparsers of `bench`."""
    words = "from safetensors files to host memory, by our reader and by libraries"
    _add_load_arguments(benches.add_parser("load", help=words, description=words))
    words = "every multicast strategy on emulated links, beside gloo and a TCP stream (root)"
    _add_multicast_arguments(benches.add_parser("multicast", help=words, description=words))
    words = "connections, memory and set-up time of the mesh of data planes"
    _add_mesh_arguments(benches.add_parser("mesh", help=words, description=words))


def _finish(report: Any, path: Path | None) -> int:
    print()
    print(report.text())
    if path is not None:
        write_json(path, {**report.as_json(), **describe_run(_PACKAGES)})
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _bytes(text: str, flag: str) -> int:
    size = amount_of_bytes(text, flag)
    if size < 1:
        raise UserError(f"{flag} must be at least 1 byte")
    return size


def _at_least(value: int, flag: str, least: int) -> None:
    if value < least:
        raise UserError(f"{flag} must be at least {least}")


# -- load -----------------------------------------------------------------------------------------


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a model's directory (default: a made one)")
    add("--size", default="1GiB", help="about the size of the made model")
    add("--repetitions", type=int, default=3, help="counted loads of each kind")
    add("--warm-only", action="store_true", help="leave out loads from storage")
    add("--peer-python", type=Path, help="an interpreter that has loaders to compare with")
    add("--json", type=Path, help="write the figures to this file")


def _load(arguments: argparse.Namespace) -> int:
    _at_least(arguments.repetitions, "--repetitions", 1)
    options = LoadBenchOptions(
        directory=arguments.model,
        size_bytes=_bytes(arguments.size, "--size"),
        repetitions=arguments.repetitions,
        is_cold=not arguments.warm_only,
        peer_python=arguments.peer_python,
    )
    return _finish(run_load(options, _say), arguments.json)


# -- multicast ------------------------------------------------------------------------------------


def _add_multicast_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser, hosts=6)
    add = parser.add_argument
    add("--size", default="256MiB", help="of the model")
    add("--layers", type=int, default=32, help="of the model")
    add("--chunk", default="512KiB", help="bytes of a chunk")
    add("--strategies", default=",".join(_MULTICAST), metavar="NAME,…", help="in this order")
    add("--receivers", metavar="N,…", help="hosts that receive (default: 1 to all but the first)")
    add("--repetitions", type=int, default=3, help="transfers of each kind; the median counts")
    add("--no-gloo", action="store_true", help="leave out torch.distributed")
    add("--json", type=Path, help="write the figures to this file")


def _multicast(arguments: argparse.Namespace) -> int:
    network = network_spec(arguments)
    if network.hosts < 2:
        raise UserError("--hosts must be at least 2: one sends, others receive")
    for name in ("repetitions", "layers"):
        _at_least(getattr(arguments, name), f"--{name}", 1)
    strategies = tuple(arguments.strategies.split(","))
    for strategy in strategies:
        if strategy not in _MULTICAST:
            known = ", ".join(_MULTICAST)
            raise UserError(f"--strategies: unknown {strategy!r}, there are {known}")
    options = MulticastBenchOptions(
        network=network,
        strategies=strategies,
        receiver_hosts=_receiver_hosts(arguments.receivers, network.hosts - 1),
        size_bytes=_bytes(arguments.size, "--size"),
        layers=arguments.layers,
        chunk_bytes=_bytes(arguments.chunk, "--chunk"),
        repetitions=arguments.repetitions,
        has_gloo=not arguments.no_gloo,
        is_both_ways=network.devices_per_host == 1,
    )
    return _finish(run_multicast(options, _say), arguments.json)


def _receiver_hosts(text: str | None, most: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(1, most + 1))
    numbers = text.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= most for number in numbers):
        raise UserError(f"--receivers {text!r} must be numbers from 1 to {most}, such as 1,{most}")
    return tuple(sorted({int(number) for number in numbers}))


# -- mesh -----------------------------------------------------------------------------------------


def _add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", default="4,8,16,32", metavar="N,…", help="sizes of the mesh")
    add("--eager-peers-max", type=int, default=32, help="connections a worker opens by itself")
    add("--json", type=Path, help="write the figures to this file")


def _mesh(arguments: argparse.Namespace) -> int:
    _at_least(arguments.eager_peers_max, "--eager-peers-max", 0)
    numbers = arguments.workers.split(",")
    if not all(number.isdecimal() and 2 <= int(number) <= _WORKERS_MAX for number in numbers):
        raise UserError(f"--workers {arguments.workers!r} must be numbers from 2 to {_WORKERS_MAX}")
    workers = [int(number) for number in numbers]
    return _finish(run_mesh(workers, arguments.eager_peers_max, _say), arguments.json)


BENCHES: dict[str, Callable[[argparse.Namespace], int]] = {
    "load": _load,
    "mesh": _mesh,
    "multicast": _multicast,
}
"""What runs each of them; the exit status."""
