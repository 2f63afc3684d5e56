"""`livescale bench WHAT`: figures as ratios taken in one run; a table, and JSON with `--json`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from livescale.cli.loads import whole_bytes
from livescale.common.errors import UserError
from livescale.control.multicast.planner import STRATEGIES
from livescale.lab.bench.base.made_models import DTYPES, parse_shape
from livescale.lab.bench.engines.coldstart import ColdStartOptions, run_coldstart
from livescale.lab.bench.engines.engines import (
    INSTRUCTIONS,
    EngineBenchOptions,
    check_vllm_python,
    run_engines,
)
from livescale.lab.bench.engines.load_bench import LoadBenchOptions, run_load
from livescale.lab.bench.engines.profile import ProfileOptions, run_profile
from livescale.lab.bench.engines.profile_points import CONTEXT_TOKENS_MIN, ProfileLimits
from livescale.lab.bench.transfer.mesh import run_mesh
from livescale.lab.bench.transfer.multicast import MulticastBenchOptions, run_multicast
from livescale.lab.bench.transfer.multicast_tls import run_multicast_tls
from livescale.lab.bench.transfer.plan_bench import SIZES, run_plan
from livescale.lab.commands.bench import (
    controller_bench,
    cores_bench,
    host_benches,
    kv_bench,
    live_bench,
    packing_bench,
    pair_bench,
    pool_benches,
    ray_bench,
    receiving_bench,
    sharing_bench,
    stage_bench,
    team_bench,
    variation_bench,
    vllm_bench,
)
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    options_of,
    say,
    whole_numbers,
)
from livescale.lab.commands.testbed import add_network_arguments, network_spec

# Storage, the planner's other strategy, crosses no emulated link.
# In which order a host copy is read makes no difference to how long that takes.
_APART = ("chain", "storage", "host-k-way")
_MULTICAST = ("chain", *(name for name in STRATEGIES if name not in _APART))
_WORKERS_MAX = 256
_TRANSFER_PACKAGES = ("livescale", "torch", "safetensors", "xxhash", "numpy")


# -- load -----------------------------------------------------------------------------------------


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Folder of a model (default: a generated model).")
    add("--size", default="1GiB", help="Approximate size of the generated model.")
    add("--repetitions", type=int, default=3, help="Measured loads of each kind.")
    add("--warm-only", action="store_true", help="Skip loads from storage.")
    add("--peer-python", type=Path, help="Python interpreter with other loaders to compare.")


def _load(arguments: argparse.Namespace) -> int:
    """Load safetensors files into host memory with LiveScale and with other libraries."""
    at_least(arguments, 1, "repetitions")
    options = options_of(
        LoadBenchOptions,
        arguments,
        directory=arguments.model,
        size_bytes=whole_bytes(arguments.size, "--size"),
        is_cold=not arguments.warm_only,
    )
    return finish(run_load(options, say), arguments, _TRANSFER_PACKAGES)


# -- multicast ------------------------------------------------------------------------------------


def _add_multicast_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser, hosts=6)
    add = parser.add_argument
    add("--size", default="256MiB", help="Size of the model.")
    add("--layers", type=int, default=32, help="Layers of the model.")
    add("--chunk", default="512KiB", help="Size of a chunk.")
    add(
        "--strategies",
        default=",".join(_MULTICAST),
        metavar="NAME,…",
        help="Multicast strategies, in this order (default: all).",
    )
    add("--receivers", metavar="N,…", help="Numbers of receivers (default: 1 to --hosts - 1).")
    add(
        "--repetitions",
        type=int,
        default=3,
        help="Transfers of each kind. The result is the median.",
    )
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
    if arguments.tls:
        return finish(run_multicast_tls(options, say), arguments, _TRANSFER_PACKAGES)
    return finish(run_multicast(options, say), arguments, _TRANSFER_PACKAGES)


def _receiver_hosts(text: str | None, most: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(1, most + 1))
    wanted = f"numbers from 1 to {most}, such as 1,{most}"
    return tuple(sorted(set(whole_numbers(text, "--receivers", wanted, 1, most))))


# -- mesh -----------------------------------------------------------------------------------------


def _add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", default="4,8,16,32", metavar="N,…", help="Numbers of workers.")
    add(
        "--eager-peers-max",
        type=int,
        default=32,
        help="Connections that a worker opens ahead of use.",
    )


def _mesh(arguments: argparse.Namespace) -> int:
    """Measure connections, memory and set-up time of the data planes."""
    at_least(arguments, 0, "eager_peers_max")
    wanted = f"numbers from 2 to {_WORKERS_MAX}"
    workers = whole_numbers(arguments.workers, "--workers", wanted, 2, _WORKERS_MAX)
    return finish(run_mesh(workers, arguments.eager_peers_max, say), arguments, _TRANSFER_PACKAGES)


_ENGINES = ("livescale", "transformers_generate", "transformers_cb", "vllm_cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, bench in _BENCHES.items():
        own = benches.add_parser(name, help=bench.help, description=bench.help)
        bench.add_arguments(own)
        own.add_argument("--json", type=Path, help="Write the figures to this file (JSON).")


def run(arguments: argparse.Namespace) -> int:
    """0 when the figures could be taken."""
    return _BENCHES[arguments.bench].run(arguments)


# -- engine ---------------------------------------------------------------------------------------


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", action="append", metavar="HxL", help="Hidden size x layers (default: 512x8).")
    add("--hidden", type=int, help="Hidden size of one shape, with --layers.")
    add("--layers", type=int, help="Decoder layers of one shape, with --hidden.")
    add("--heads", type=int, help="Attention heads (default: hidden size / 64).")
    add("--kv-heads", type=int, help="KV heads (default: heads / 4).")
    add("--intermediate", type=int, help="Width of the MLP (default: 8/3 of the hidden size).")
    add("--dtype", action="append", choices=DTYPES, help="Type of the weights (default: bfloat16).")
    add("--vocabulary", type=int, default=8192, help="Number of token IDs.")
    add("--prompt-tokens", type=int, default=64, help="Tokens of each prompt.")
    add("--output-tokens", type=int, default=64, help="Tokens of each output.")
    add("--concurrency", default="1,8,32", metavar="N,…", help="Numbers of concurrent requests.")
    add("--repetitions", type=int, default=3, help="Measured rounds of each kind.")
    add(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="Threads of each engine (default: all CPU cores).",
    )
    add("--run-tokens-max", type=int, default=512, help="Token budget of a step of LiveScale.")
    add("--block-tokens", type=int, default=16, help="Tokens of a KV block of LiveScale.")
    add(
        "--weights-layout",
        choices=("auto", "packed", "compiled", "plain"),
        default="auto",
        help="Weights layout of LiveScale.",
    )
    add(
        "--instructions",
        choices=tuple(INSTRUCTIONS),
        default="native",
        help="CPU instructions of the engines: all, or up to AVX2.",
    )
    add(
        "--engines",
        default=",".join(_ENGINES[:3]),
        metavar="NAME,…",
        help="Engines other than vLLM (default: all).",
    )
    add(
        "--vllm-python", type=Path, help="Python interpreter with vLLM's CPU build (adds vllm_cpu)."
    )
    add("--seed", type=int, default=0, help="Seed of the prompts.")


def _engine(arguments: argparse.Namespace) -> int:
    """Compare tokens per second of LiveScale and other engines on the same prompts."""
    options = _engine_options(arguments)
    if options.vllm_python is not None:
        check_vllm_python(options.vllm_python)
    return finish(run_engines(options, say), arguments)


def _engine_options(arguments: argparse.Namespace) -> EngineBenchOptions:
    texts = arguments.shape or []
    if arguments.hidden is not None or arguments.layers is not None:
        if texts or arguments.hidden is None or arguments.layers is None:
            raise UserError("--hidden and --layers need each other, and exclude --shape")
        texts = [f"{arguments.hidden}x{arguments.layers}"]
    sizes = (arguments.heads, arguments.kv_heads, arguments.intermediate)
    shapes = tuple(parse_shape(text, *sizes) for text in texts or ["512x8"])
    for shape in shapes:
        shape.preset(arguments.vocabulary)  # a shape that cannot be built is refused at once
    at_least(arguments, 1, "prompt_tokens", "output_tokens", "repetitions", "threads")
    at_least(arguments, 1, "run_tokens_max", "block_tokens")
    wanted = "positive numbers, such as 1,8,32"
    in_flight = whole_numbers(arguments.concurrency, "--concurrency", wanted, 1, sys.maxsize)
    return options_of(
        EngineBenchOptions,
        arguments,
        shapes=shapes,
        dtypes=tuple(arguments.dtype or ["bfloat16"]),
        engines=_engines(arguments),
        in_flight=tuple(sorted(set(in_flight))),
    )


def _engines(arguments: argparse.Namespace) -> tuple[str, ...]:
    names = chosen(arguments.engines.split(","), "--engines", _ENGINES)
    if arguments.vllm_python is not None:
        names += ("vllm_cpu",)
    elif "vllm_cpu" in names:
        raise UserError("--engines: vllm_cpu needs --vllm-python, an interpreter that has vLLM")
    return tuple(name for name in _ENGINES if name in names)


# -- coldstart ------------------------------------------------------------------------------------


def _add_coldstart_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="512x8", metavar="HxL", help="Hidden size x layers.")
    add("--dtype", choices=DTYPES, default="bfloat16", help="Type of the weights.")
    add("--vocabulary", type=int, default=8192, help="Number of token IDs.")
    add("--prompt-tokens", type=int, default=64, help="Tokens of the prompt.")
    add("--repetitions", type=int, default=3, help="Starts of each kind.")
    add("--threads", type=int, default=1, help="Compute threads.")
    add("--vllm-python", type=Path, help="Python interpreter with vLLM's CPU build (adds vLLM).")


def _coldstart(arguments: argparse.Namespace) -> int:
    """Measure the time to the first token from a cold start and from a warm worker."""
    at_least(arguments, 1, "prompt_tokens", "repetitions", "threads")
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    if arguments.vllm_python is not None:
        check_vllm_python(arguments.vllm_python)
    return finish(
        run_coldstart(options_of(ColdStartOptions, arguments, shape=shape), say), arguments
    )


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


# -- profile --------------------------------------------------------------------------------------


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="File of the profile (CSV).")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="Compute device.")
    add("--model", type=Path, metavar="DIR", help="Folder of a model (default: a generated model).")
    add(
        "--shape", default="512x8", metavar="HxL", help="Hidden size x layers of a generated model."
    )
    add("--dtype", choices=DTYPES, default="bfloat16", help="Type of a generated model's weights.")
    add("--vocabulary", type=int, default=8192, help="Token IDs of a generated model.")
    words = "Compute threads (default: 1, like a worker)."
    add("--threads", type=int, default=1, help=words)
    add("--seconds", type=float, default=60.0, help="Duration of the measurement in seconds.")
    add("--chunk-max", type=int, default=1024, help="Tokens of the largest prompt chunk.")
    add("--batch-max", type=int, default=32, help="Decodes of the largest batch.")
    add("--context-max", type=int, default=2048, help="Tokens of the longest context.")


def _profile(arguments: argparse.Namespace) -> int:
    """Measure step times on this node, as a profile for simulations."""
    limits = ProfileLimits(arguments.chunk_max, arguments.batch_max, arguments.context_max)
    if limits.chunk_tokens_max < 1 or limits.decodes_max < 1 or arguments.threads < 1:
        raise UserError("--chunk-max, --batch-max and --threads must be at least 1")
    least = max(limits.chunk_tokens_max, 4 * CONTEXT_TOKENS_MIN)
    if limits.context_tokens_max < least:
        raise UserError(f"--context-max must be at least {least}")
    if not 0 < arguments.seconds <= 86_400:
        raise UserError("--seconds must be positive, and a day at most")
    if not os.access(arguments.out.absolute().parent, os.W_OK):
        raise UserError(f"--out {arguments.out}: the folder is not writable")
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    options = options_of(ProfileOptions, arguments, shape=shape, limits=limits)
    return finish(run_profile(options, say), arguments)


_BENCHES = {
    "engine": Bench(_add_engine_arguments, _engine),
    "coldstart": Bench(_add_coldstart_arguments, _coldstart),
    "plan": Bench(_add_plan_arguments, _plan),
    "profile": Bench(_add_profile_arguments, _profile),
    "cores": cores_bench.CORES,
    "load": Bench(_add_load_arguments, _load),
    "multicast": Bench(_add_multicast_arguments, _multicast),
    "mesh": Bench(_add_mesh_arguments, _mesh),
    **pool_benches.BENCHES,
    **sharing_bench.BENCHES,
    "packing": packing_bench.PACKING,
    "receiving": receiving_bench.RECEIVING,
    "pairs": pair_bench.PAIRS,
    "kv": kv_bench.KV,
    "teams": team_bench.TEAMS,
    "stages": stage_bench.STAGES,
    "variation": variation_bench.VARIATION,
    "vllm": vllm_bench.VLLM,
    "live": live_bench.LIVE,
    "controller": controller_bench.CONTROLLER,
    "ray": ray_bench.RAY,
    "hosts": host_benches.HOSTS,
    "wires": host_benches.WIRES,
}
