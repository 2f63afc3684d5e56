"""`livescale bench load|mesh|multicast`: their flags. What they measure stands in `bench/`."""

import argparse
from pathlib import Path

from livescale.bench.load_bench import LoadBenchOptions, run_load
from livescale.bench.mesh import run_mesh
from livescale.bench.multicast import MulticastBenchOptions, run_multicast
from livescale.cli import bench_flags
from livescale.cli.errors import UserError
from livescale.cli.testbed import add_network_arguments, network_spec
from livescale.control.multicast.planner import STRATEGIES
from livescale.settings import amount_of_bytes

# Storage, the planner's other strategy, crosses no emulated link.
_MULTICAST = ("chain", *(name for name in STRATEGIES if name not in ("chain", "storage")))
_WORKERS_MAX = 256
_PACKAGES = ("livescale", "torch", "safetensors", "xxhash", "numpy")


def _bytes(text: str, flag: str) -> int:
    size = amount_of_bytes(text, flag)
    if size < 1:
        raise UserError(f"{flag} must be at least 1 byte")
    return size


# -- load -----------------------------------------------------------------------------------------


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a model's directory (default: a made one)")
    add("--size", default="1GiB", help="about the size of the made model")
    add("--repetitions", type=int, default=3, help="counted loads of each kind")
    add("--warm-only", action="store_true", help="leave out loads from storage")
    add("--peer-python", type=Path, help="an interpreter that has loaders to compare with")


def _load(arguments: argparse.Namespace) -> int:
    bench_flags.at_least(arguments, 1, "repetitions")
    options = bench_flags.options_of(
        LoadBenchOptions,
        arguments,
        directory=arguments.model,
        size_bytes=_bytes(arguments.size, "--size"),
        is_cold=not arguments.warm_only,
    )
    bench_flags.finish(run_load(options, bench_flags.say), arguments, _PACKAGES)
    return 0


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


def _multicast(arguments: argparse.Namespace) -> int:
    network = network_spec(arguments)
    if network.hosts < 2:
        raise UserError("--hosts must be at least 2: one sends, others receive")
    bench_flags.at_least(arguments, 1, "repetitions", "layers")
    options = bench_flags.options_of(
        MulticastBenchOptions,
        arguments,
        network=network,
        strategies=bench_flags.chosen(arguments.strategies.split(","), "--strategies", _MULTICAST),
        receiver_hosts=_receiver_hosts(arguments.receivers, network.hosts - 1),
        size_bytes=_bytes(arguments.size, "--size"),
        chunk_bytes=_bytes(arguments.chunk, "--chunk"),
        has_gloo=not arguments.no_gloo,
        is_both_ways=network.devices_per_host == 1,
    )
    bench_flags.finish(run_multicast(options, bench_flags.say), arguments, _PACKAGES)
    return 0


def _receiver_hosts(text: str | None, most: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(1, most + 1))
    wanted = f"numbers from 1 to {most}, such as 1,{most}"
    return tuple(sorted(set(bench_flags.whole_numbers(text, "--receivers", wanted, 1, most))))


# -- mesh -----------------------------------------------------------------------------------------


def _add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", default="4,8,16,32", metavar="N,…", help="sizes of the mesh")
    add("--eager-peers-max", type=int, default=32, help="connections a worker opens by itself")


def _mesh(arguments: argparse.Namespace) -> int:
    bench_flags.at_least(arguments, 0, "eager_peers_max")
    wanted = f"numbers from 2 to {_WORKERS_MAX}"
    workers = bench_flags.whole_numbers(arguments.workers, "--workers", wanted, 2, _WORKERS_MAX)
    bench_flags.finish(
        run_mesh(workers, arguments.eager_peers_max, bench_flags.say), arguments, _PACKAGES
    )
    return 0


BENCHES = {
    "load": bench_flags.Bench(
        "from safetensors files to host memory, by our reader and by libraries",
        _add_load_arguments,
        _load,
    ),
    "multicast": bench_flags.Bench(
        "every multicast strategy on emulated links, beside gloo and a TCP stream (root)",
        _add_multicast_arguments,
        _multicast,
    ),
    "mesh": bench_flags.Bench(
        "connections, memory and set-up time of the mesh of data planes",
        _add_mesh_arguments,
        _mesh,
    ),
}
