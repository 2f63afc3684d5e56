"""`livescale bench gateway|sim|scaling|fidelity|soak|attacks`: their flags."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

import msgspec

from livescale.cli.loads import add_load_arguments, choose_load
from livescale.clusters.files import find_cluster, read_topology
from livescale.common.errors import UserError
from livescale.lab.bench.attacks.attacks import AttacksBenchOptions, run_attacks
from livescale.lab.bench.live.live import KINDS
from livescale.lab.bench.pools.fidelity import (
    FidelityOptions,
    FidelityPool,
    FidelityReport,
    cpu_pool,
    run_fidelity,
    timed_pool,
)
from livescale.lab.bench.pools.fidelity_profile import BURSTS
from livescale.lab.bench.pools.gateway_load import GatewayBenchOptions, run_gateway
from livescale.lab.bench.pools.scaling import NamedLoad, ScalingOptions, run_scaling
from livescale.lab.bench.pools.sim_bench import SimBenchOptions, run_sim_bench
from livescale.lab.bench.soak.faults import FAULT_KINDS
from livescale.lab.bench.soak.run import SoakOptions, run_soak
from livescale.lab.commands.bench import bench_flags
from livescale.lab.commands.bench.bench_flags import Bench, at_least, finish, options_of, say
from livescale.lab.commands.pool_choices import parse_model
from livescale.load.arrivals import named_trace
from livescale.load.traces import window
from livescale.values.units import NS_PER_S

# -- gateway --------------------------------------------------------------------------------------


def _add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, GatewayBenchOptions()
    add("--streams", type=int, default=defaults.streams, help="Concurrent streams.")
    add("--stalled", type=int, default=defaults.stalled, help="Further streams that never read.")
    add("--workers", type=int, default=defaults.workers, help="Timed workers.")
    add("--gateways", type=int, default=defaults.gateways, help="Gateways behind one port.")
    add("--step-ms", type=int, default=defaults.step_ms, help="Step time.")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="Tokens of each prompt.")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="Tokens of each output.")
    add(
        "--seconds",
        type=float,
        default=defaults.seconds,
        help="Duration of the measurement in seconds.",
    )
    add("--ramp-seconds", type=float, default=defaults.ramp_s, help="Time to connect all streams.")
    add("--seed", type=int, default=defaults.seed, help="Seed of the prompts.")


def _gateway(arguments: argparse.Namespace) -> int:
    """Measure the latency that the gateway adds to a token under many streams.

    0 when every stream got tokens until the end.
    """
    at_least(arguments, 1, "streams", "workers", "step_ms", "prompt_tokens", "output_tokens")
    at_least(arguments, 1, "gateways")
    at_least(arguments, 0, "stalled")
    if arguments.seconds <= 0 or arguments.ramp_seconds < 0:
        raise UserError("--seconds must be positive and --ramp-seconds not negative")
    options = options_of(GatewayBenchOptions, arguments, ramp_s=arguments.ramp_seconds)
    report = run_gateway(options, say)
    return finish(report, arguments, is_good=report.seen["streams_held"] == options.streams)


# -- sim ------------------------------------------------------------------------------------------

_SIM_TRACE = "azureconv_1270_8min"
_SIM_GENERATED = "gamma:rate=7,cv=1,seconds=480,input=1024,output=192"


def _add_sim_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace=None, seconds=480, divide_lengths=1)
    parser.add_argument("--model", default="qwen2.5-72b", help="Model preset.")
    parser.add_argument("--tp", type=int, default=4, help="Ranks of an instance.")
    words = "Seconds of the load in the sweep."
    parser.add_argument("--sweep-seconds", type=int, default=30, help=words)
    words = "Numbers of hosts of eight accelerators in the sweep, ascending."
    parser.add_argument("--hosts", default="4,16,64,128", help=words)


def _sim(arguments: argparse.Namespace) -> int:
    """Measure the speed of the simulator by pool size, with and without coalescing."""
    try:
        hosts = tuple(int(count) for count in arguments.hosts.split(","))
    except ValueError as error:
        raise UserError(f"--hosts {arguments.hosts!r}: write numbers as '4,16,64'") from error
    if min(hosts) < 1 or list(hosts) != sorted(hosts) or arguments.sweep_seconds < 1:
        raise UserError("--hosts must ascend from 1 on, and --sweep-seconds be positive")
    if arguments.trace is None:
        arguments.trace = _SIM_TRACE if "LIVESCALE_DATA" in os.environ else _SIM_GENERATED
    options = SimBenchOptions(
        rows=choose_load(arguments).rows,
        preset=arguments.model,
        tp_size=arguments.tp,
        seconds=arguments.sweep_seconds,
        hosts=hosts,
        seed=arguments.seed,
    )
    bench_flags.write_figures(run_sim_bench(options, say), arguments)
    return 0


# -- scaling --------------------------------------------------------------------------------------

_SCALING_TRACE = "azurecode_1320_5min"
_SCALING_GENERATED = "burst"
_SCALING_SECONDS = 60


def _add_scaling_arguments(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, words: str, metavar: str) -> None:
        parser.add_argument(flag, nargs="+", action="extend", metavar=metavar, help=words)

    words = f"Files or names of traces (default: a minute of {_SCALING_TRACE}, or burst)."
    add("--trace", words, "TRACE")
    words = "Model presets and ranks (default: llama-3-8b with the fewest ranks)."
    add("--model", words, "PRESET[,tp=N]")
    add("--cluster", "Names or files of clusters (default: blitzscale-b).", "CLUSTER")
    words = "Loads as shares of the pool's capacity (default: 0.25)."
    add("--part", words, "PART")
    words = f"Seconds of each trace (default: all, or {_SCALING_SECONDS} of the default trace)."
    parser.add_argument("--seconds", type=int, metavar="N", help=words)
    words = "Capacity of the pool in requests per second (default: measured)."
    parser.add_argument("--capacity", type=float, metavar="RATE", help=words)
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")


def _scaling(arguments: argparse.Namespace) -> int:
    """Compare scaling systems and fixed pools at shares of the pool's capacity.

    Requests that failed are in the figures, and not in the exit status.
    """
    if arguments.seconds is not None and arguments.seconds < 1:
        raise UserError("--seconds must be at least 1")
    if arguments.capacity is not None and not 0 < arguments.capacity < math.inf:
        raise UserError("--capacity must be positive")
    models = arguments.model or ["llama-3-8b"]
    clusters = arguments.cluster or ["blitzscale-b"]
    options = ScalingOptions(
        traces=_scaling_traces(arguments),
        models=[
            msgspec.structs.replace(parse_model(text), name=text) for text in dict.fromkeys(models)
        ],
        clusters=[(name, read_topology(find_cluster(name))) for name in dict.fromkeys(clusters)],
        parts=_parts(arguments.part or ["0.25"]),
        requests_per_s=arguments.capacity,
        fewest_ranks=[text for text in models if ",tp=" not in text],
        seed=arguments.seed,
    )
    return finish(run_scaling(options, say), arguments)


def _scaling_traces(arguments: argparse.Namespace) -> list[NamedLoad]:
    """Raises TraceError."""
    data, names, seconds_ = os.environ.get("LIVESCALE_DATA"), arguments.trace, arguments.seconds
    if names is None:
        names = [_SCALING_TRACE if data else _SCALING_GENERATED]
        seconds_ = seconds_ or _SCALING_SECONDS
    found = []
    for name in dict.fromkeys(names):
        rows = named_trace(name, Path(data) if data else None, arguments.seed).rows
        kept = rows if seconds_ is None else window(rows, 0, seconds_ * NS_PER_S)
        if rows and not kept:
            raise UserError(f"trace {name} has no request in its first {seconds_} s")
        found.append(NamedLoad(name, kept))
    return found


def _parts(texts: list[str]) -> list[float]:
    """The numbers of ["0.08,0.25", "0.5"], each once. Raises UserError."""
    words = [word for text in texts for word in text.split(",")]
    try:
        return list(dict.fromkeys(float(word) for word in words))
    except ValueError as error:
        raise UserError(f"--part {' '.join(texts)}: write numbers such as 0.08,0.25") from error


# -- fidelity -------------------------------------------------------------------------------------

_FIDELITY_CPU_WORKERS = 2


def _add_fidelity_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace=None, seconds=30, divide_lengths=2)
    add = parser.add_argument
    add(
        "--workers",
        default="timed,cpu",
        metavar="KIND,…",
        help="Devices of the workers: timed, cpu or both.",
    )
    add("--count", type=int, default=8, help="Timed workers. Runs on cpu use two.")
    add("--runs", type=int, default=5, help="Runs of the pool and of the simulator.")
    words = "Load in percent of the simulated capacity."
    add("--load-percent", type=int, default=60, help=words)
    add("--load-seconds", type=float, default=0.7, help="Duration of a parameter load in seconds.")
    add("--bursts", type=int, default=BURSTS, help="Bursts of the calibration.")
    words = "Duration of the engine profile for cpu workers, in seconds."
    add("--profile-seconds", type=float, default=20.0, help=words)
    add(
        "--report",
        type=Path,
        metavar="DIR",
        help="Write records and a page of each device into this folder.",
    )


def _fidelity(arguments: argparse.Namespace) -> int:
    """Compare a real pool with the simulator on the same load.

    0 when timed workers behaved as simulated, in the figures that have to be right.

    The first kind's figures stand at the top, those of another under its name.
    """
    kinds = bench_flags.kinds_of_workers(arguments.workers, KINDS)
    if arguments.count < 2 or arguments.runs < 1 or arguments.bursts < 1:
        raise UserError("--count must be at least 2, --runs and --bursts at least 1")
    if not 1 <= arguments.load_percent <= 100:
        raise UserError("--load-percent must be 1 to 100")
    if arguments.load_seconds <= 0 or arguments.profile_seconds <= 0:
        raise UserError("--load-seconds and --profile-seconds must be positive")
    load = choose_load(arguments)
    options = options_of(FidelityOptions, arguments, trace=load.name, rows=load.rows)
    reports = [_compare(kind, arguments, options) for kind in kinds]
    figures = reports[0].as_json()
    figures |= {report.pool.kind: report.as_json() for report in reports[1:]}
    bench_flags.write_figures(figures, arguments)
    return 0 if all(report.is_good for report in reports if report.pool.kind == "timed") else 1


def _compare(kind: str, arguments: argparse.Namespace, options: FidelityOptions) -> FidelityReport:
    with tempfile.TemporaryDirectory(prefix="livescale-fidelity-") as name:
        scratch = Path(name)
        pool = _fidelity_pool(kind, scratch, arguments)
        say(f"{pool.config.workers} {kind} workers: calibrating …")
        report = run_fidelity(pool, options, scratch, say)
    print(f"\n{report.text()}\n", flush=True)
    return report


def _fidelity_pool(kind: str, scratch: Path, arguments: argparse.Namespace) -> FidelityPool:
    load_s = arguments.load_seconds
    if kind == "timed":
        return timed_pool(scratch, arguments.count, load_s)
    return cpu_pool(scratch, _FIDELITY_CPU_WORKERS, load_s, arguments.profile_seconds, say)


# -- soak -----------------------------------------------------------------------------------------


def _add_soak_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, SoakOptions()
    words = "Number of requests (default: %(default)s, about 20 minutes)."
    add("--requests", type=int, default=defaults.requests, metavar="N", help=words)
    add("--seed", type=int, default=defaults.seed, help="Seed of the load and of the faults.")
    add("--rate", type=float, default=defaults.rate, help="Mean requests per second.")
    add(
        "--device", choices=("cpu", "timed"), default=defaults.device, help="Device of the workers."
    )
    add(
        "--faults",
        default=",".join(defaults.faults),
        metavar="KIND,…",
        help="Kinds of faults, or none.",
    )
    words = "Mean time between two faults."
    add("--fault-every-s", type=float, default=defaults.fault_every_s, metavar="S", help=words)
    words = "Setting lost_after_ms of the pool (default: its default)."
    add("--lost-after-ms", type=int, metavar="MS", help=words)


def _soak(arguments: argparse.Namespace) -> int:
    """Run a real pool under load and faults, and check every answer.

    0 when nothing was lost, hung or wrong and every fault healed in time.
    """
    names = () if arguments.faults == "none" else arguments.faults.split(",")
    faults = bench_flags.chosen(names, "--faults", tuple(FAULT_KINDS))
    at_least(arguments, 1, "requests")
    if arguments.rate <= 0 or arguments.fault_every_s <= 0:
        raise UserError("--rate and --fault-every-s must be positive")
    report = run_soak(options_of(SoakOptions, arguments, faults=faults), say)
    return finish(report, arguments, is_good=report.is_good)


# -- attacks --------------------------------------------------------------------------------------


def _add_attacks_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, AttacksBenchOptions()
    words = "Attack, by its name or a part of the name (default: all)."
    add("--attack", action="append", default=[], metavar="NAME", help=words)
    words = "Windows without and with each attack."
    add("--rounds", type=int, default=defaults.rounds, metavar="N", help=words)
    add(
        "--seconds",
        type=float,
        default=defaults.seconds,
        metavar="S",
        help="Length of a window in seconds.",
    )
    words = "Hostile requests per second."
    add("--attack-rate", type=float, default=defaults.attack_rate, metavar="N", help=words)
    words = "Largest number of open hostile connections."
    add("--connections", type=int, default=defaults.connections, metavar="N", help=words)
    words = "Requests per second of the light client."
    add("--light-rate", type=float, default=defaults.light_rate, metavar="N", help=words)
    words = "Prompt tokens of the light client."
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, metavar="N", help=words)
    add("--seed", type=int, default=defaults.seed, help="Seed of the light client's prompts.")
    words = "Streams during poison prompts and broken models."
    add("--streams", type=int, default=defaults.streams, metavar="N", help=words)
    add(
        "--poison-prompts",
        type=int,
        default=defaults.poison_prompts,
        metavar="N",
        help="Number of poison prompts.",
    )
    words = "Largest number of broken models, published and configured."
    add("--broken-models", type=int, default=defaults.broken_models, metavar="N", help=words)


def _attacks(arguments: argparse.Namespace) -> int:
    """Measure the effect of attacks on a light client. Then measure the effect of poison prompts
    and broken models on streams.

    0 when every attack stayed within its bounds.
    """
    for name in ("rounds", "seconds", "attack_rate", "connections", "light_rate", "prompt_tokens"):
        if getattr(arguments, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive")
    at_least(arguments, 1, "streams", "poison_prompts", "broken_models")
    options = options_of(AttacksBenchOptions, arguments, attacks=tuple(arguments.attack))
    report = run_attacks(options, say)
    return finish(report, arguments, is_good=report.is_good)


BENCHES = {
    "gateway": Bench(_add_gateway_arguments, _gateway),
    "sim": Bench(_add_sim_arguments, _sim),
    "scaling": Bench(_add_scaling_arguments, _scaling),
    "fidelity": Bench(_add_fidelity_arguments, _fidelity),
    "soak": Bench(_add_soak_arguments, _soak),
    "attacks": Bench(_add_attacks_arguments, _attacks),
}
