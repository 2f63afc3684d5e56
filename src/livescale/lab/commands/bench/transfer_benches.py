"""`livescale bench multicast|mesh|plan|packing|receiving`: their flags."""

from __future__ import annotations

import argparse

from livescale.cli.loads import whole_bytes
from livescale.common.errors import UserError
from livescale.control.multicast.planner import STRATEGIES
from livescale.lab.bench.base.made_models import DTYPES
from livescale.lab.bench.transfer.mesh import run_mesh
from livescale.lab.bench.transfer.multicast import MulticastBenchOptions, run_multicast
from livescale.lab.bench.transfer.multicast_tls import run_multicast_tls
from livescale.lab.bench.transfer.packing import PackingOptions, run_packing
from livescale.lab.bench.transfer.packing_wire import LAYERS
from livescale.lab.bench.transfer.plan_bench import SIZES, run_plan
from livescale.lab.bench.transfer.receiving import ReceivingOptions, run_receiving
from livescale.lab.commands.bench.bench_flags import (
    TRANSFER_PACKAGES,
    Bench,
    at_least,
    chosen,
    finish,
    flags_of,
    options_of,
    positive,
    say,
    shape_of,
    whole_numbers,
)
from livescale.lab.commands.testbed import add_network_arguments, network_spec
from livescale.lab.testbed.spec import parse_rate
from livescale.transfer.formats.orders import ContentChecks

# Storage, the planner's other strategy, crosses no emulated link.
# In which order a host copy is read makes no difference to how long that takes.
_APART = ("chain", "storage", "host-k-way")
_MULTICAST = ("chain", *(name for name in STRATEGIES if name not in _APART))
_WORKERS_MAX = 256
_DAY_S = 86_400
_WINDOW_S_MAX = 600.0


# -- multicast ------------------------------------------------------------------------------------


def _add_multicast_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser, hosts=6)
    add = parser.add_argument
    add("--size", default="256MiB", help="Size of the model.")
    add("--layers", type=int, default=32, help="Layers of the model.")
    add("--chunk", default="512KiB", help="Size of a chunk.")
    words = "Multicast strategies, in this order (default: all)."
    add("--strategies", default=",".join(_MULTICAST), metavar="NAME,…", help=words)
    add("--receivers", metavar="N,…", help="Numbers of receivers (default: 1 to --hosts - 1).")
    words = "Transfers of each kind. The result is the median."
    add("--repetitions", type=int, default=3, help=words)
    add("--no-gloo", action="store_true", help="Skip torch.distributed.")
    words = "Compare modes of data_plane_tls with the first strategy and the most receivers."
    add("--tls", action="store_true", help=words)


def _multicast(arguments: argparse.Namespace) -> int:
    """Compare multicast strategies with gloo and a TCP stream on emulated links (root)."""
    network = network_spec(arguments)
    if network.hosts < 2:
        raise UserError("--hosts must be at least 2, a sender and a receiver")
    at_least(arguments, 1, "repetitions", "layers")
    options = options_of(
        MulticastBenchOptions,
        arguments,
        network=network,
        strategies=chosen(arguments.strategies.split(","), "--strategies", _MULTICAST),
        receiver_hosts=_receiver_hosts(arguments.receivers, network.hosts - 1),
        size_bytes=whole_bytes(arguments.size, "--size"),
        chunk_bytes=whole_bytes(arguments.chunk, "--chunk"),
        has_gloo=not arguments.no_gloo,
        is_both_ways=network.devices_per_host == 1 and not arguments.tls,
    )
    run = run_multicast_tls if arguments.tls else run_multicast
    return finish(run(options, say), arguments, TRANSFER_PACKAGES)


def _receiver_hosts(text: str | None, most: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(1, most + 1))
    wanted = f"numbers from 1 to {most}, such as 1,{most}"
    return tuple(sorted(set(whole_numbers(text, "--receivers", wanted, 1, most))))


# -- mesh -----------------------------------------------------------------------------------------


def _add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", default="4,8,16,32", metavar="N,…", help="Numbers of workers.")
    words = "Connections that a worker opens ahead of use."
    add("--eager-peers-max", type=int, default=32, help=words)


def _mesh(arguments: argparse.Namespace) -> int:
    """Measure connections, memory and set-up time of the data planes."""
    at_least(arguments, 0, "eager_peers_max")
    wanted = f"numbers from 2 to {_WORKERS_MAX}"
    workers = whole_numbers(arguments.workers, "--workers", wanted, 2, _WORKERS_MAX)
    return finish(run_mesh(workers, arguments.eager_peers_max, say), arguments, TRANSFER_PACKAGES)


# -- plan -----------------------------------------------------------------------------------------


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "Devices of a cluster (default: 64 to 4,096)."
    add("--devices", action="append", type=int, metavar="N", help=words)
    add("--repetitions", type=int, default=20, help="Plans of each kind.")


def _plan(arguments: argparse.Namespace) -> int:
    """Measure the time and the quality of multicast planning."""
    at_least(arguments, 1, "repetitions")
    sizes = tuple(arguments.devices or SIZES)
    if not all(2 <= size <= 1 << 16 for size in sizes):
        raise UserError("--devices must be 2 to 65536")
    return finish(run_plan(sizes, arguments.repetitions, say), arguments)


# -- packing --------------------------------------------------------------------------------------


def _add_packing_arguments(parser: argparse.ArgumentParser) -> None:
    flag = flags_of(parser, defaults := PackingOptions())
    words = f"Model of the tensors: {', '.join(LAYERS)} (default: {defaults.model})."
    flag("model", words, metavar="NAME")
    flag("layers", "Decoder layers of a block.")
    flag("seconds", "Duration of the measurement, at least two rounds.")
    flag("seed", "Seed of the bytes.")


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
    positive(arguments, "seconds", most=_DAY_S)
    options = options_of(PackingOptions, arguments)
    return finish(run_packing(options, say), arguments, ("livescale", "numpy", "xxhash"))


# -- receiving ------------------------------------------------------------------------------------


def _add_receiving_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, ReceivingOptions()
    flag = flags_of(parser, defaults)
    flag("rates", "Rates of the sender's uplink.", default="1gbit,5gbit,10gbit", metavar="RATE,…")
    shape = str(defaults.shape)
    flag("shape", "Hidden size x layers of the model that computes.", default=shape, metavar="HxL")
    flag("dtype", "Type of its weights.", choices=DTYPES)
    flag("vocabulary", "Number of token IDs.")
    flag("sequences", "Sequences that decode in each step.")
    add("--size", default="256MiB", help="Size of the model that is received.")
    add("--chunk", default="1MiB", help="Size of a chunk.")
    checks = [check.value for check in (ContentChecks.NETWORK, ContentChecks.NONE)]
    words = "Checks of received layers. network adds SHA-256."
    flag("content_checks", words, choices=checks, default=checks[0])
    flag("window_s", "Approximate length of a window in seconds.")
    flag("rounds", "Rounds of all windows.")


def _receiving(arguments: argparse.Namespace) -> int:
    """Measure how receiving parameters slows down computing, with threads and with a process."""
    at_least(arguments, 1, "sequences", "rounds")
    positive(arguments, "window_s", most=_WINDOW_S_MAX)
    options = options_of(
        ReceivingOptions,
        arguments,
        rates=tuple(parse_rate(text) // 8 for text in arguments.rates.split(",")),
        shape=shape_of(arguments),
        size_bytes=whole_bytes(arguments.size, "--size"),
        chunk_bytes=whole_bytes(arguments.chunk, "--chunk"),
        content_checks=ContentChecks(arguments.content_checks),
    )
    return finish(run_receiving(options, say), arguments)


BENCHES = {
    "multicast": Bench(_add_multicast_arguments, _multicast),
    "mesh": Bench(_add_mesh_arguments, _mesh),
    "plan": Bench(_add_plan_arguments, _plan),
    "packing": Bench(_add_packing_arguments, _packing),
    "receiving": Bench(_add_receiving_arguments, _receiving),
}
