"""`livescale bench sim|scaling|pairs|controller|sharing`: their flags. All of it is simulated."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from livescale.cli.loads import add_load_arguments, choose_load, data_folder
from livescale.clusters.files import NamedTopology, find_cluster, read_topology
from livescale.common.errors import UserError
from livescale.config.slo import parse_slo
from livescale.lab.bench.pools.controller_steps import (
    WORKERS_MAX,
    ControllerOptions,
    run_controller,
)
from livescale.lab.bench.pools.pairs import PairsOptions, run_pairs
from livescale.lab.bench.pools.scaling import NamedLoad, ScalingOptions, run_scaling
from livescale.lab.bench.pools.sharing import (
    PLAIN,
    SHARING,
    SharedModel,
    SharingCase,
    SharingOptions,
    run_sharing,
)
from livescale.lab.bench.pools.sim_bench import SimBenchOptions, run_sim_bench
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    flags_of,
    options_of,
    positive,
    say,
    whole_numbers,
    write_figures,
)
from livescale.lab.commands.pool_choices import a800_workers, parse_model, pooled
from livescale.load.arrivals import GammaShape, named_trace
from livescale.load.peaks import Peaks
from livescale.load.traces import window
from livescale.load.workloads import read_workload
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.systems import find_system
from livescale.values.units import NS_PER_S

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
        arguments.trace = _SIM_TRACE if data_folder() else _SIM_GENERATED
    options = SimBenchOptions(
        rows=choose_load(arguments).rows,
        preset=arguments.model,
        tp_size=arguments.tp,
        seconds=arguments.sweep_seconds,
        hosts=hosts,
        seed=arguments.seed,
    )
    write_figures(run_sim_bench(options, say), arguments)
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
    if arguments.seconds is not None:
        at_least(arguments, 1, "seconds")
    if arguments.capacity is not None:
        positive(arguments, "capacity")
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
    data, names, seconds_ = data_folder(), arguments.trace, arguments.seconds
    if names is None:
        names = [_SCALING_TRACE if data else _SCALING_GENERATED]
        seconds_ = seconds_ or _SCALING_SECONDS
    found = []
    for name in dict.fromkeys(names):
        rows = named_trace(name, data, arguments.seed).rows
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


# -- pairs -----------------------------------------------------------------------------------------

_PAIRED = ("llama-3-8b", "mistral-24b,tp=2", "qwen2.5-72b,tp=4")
_LINK_GBIT_MAX, _REQUESTS_MAX, _GAP_MS_MAX = 3200, 1000, 10_000


def _add_pairs_arguments(parser: argparse.ArgumentParser) -> None:
    add, flag = parser.add_argument, flags_of(parser, PairsOptions(()))
    words = f"Model presets and ranks (default: {' '.join(_PAIRED)})."
    add("--model", nargs="+", action="extend", metavar="PRESET[,tp=N]", help=words)
    add("--link-gbit", default="10,25,50,100,400", metavar="N,…", help="Link rates.")
    add("--requests", default="24", metavar="N,…", help="Prompts of a burst.")
    add("--gap-ms", default="0", metavar="N,…", help="Time between two prompts.")
    flag("prompt_tokens", "Tokens of each prompt.")
    flag("output_tokens", "Tokens of each answer.")
    flag("instances", "Largest number of instances.")
    flag("seed", "Random seed.")


def _pairs(arguments: argparse.Namespace) -> int:
    """Compare live pairs with overlap and stop-the-world, by link rate and model.

    A report, not a test: the exit status is 0.
    """
    at_least(arguments, 2, "instances", "output_tokens")
    at_least(arguments, 1, "prompt_tokens")
    texts = arguments.model or _PAIRED
    models = [parse_model(text) for text in dict.fromkeys(texts)]
    if any(model.instances_max is not None for model in models):
        raise UserError("--model: --instances says how many there are, not max=N")
    options = options_of(
        PairsOptions,
        arguments,
        models=[
            msgspec.structs.replace(model, name=text, instances_max=arguments.instances)
            for model, text in zip(models, dict.fromkeys(texts), strict=True)
        ],
        links_gbit=_numbers(arguments.link_gbit, "--link-gbit", 1, _LINK_GBIT_MAX),
        requests=_numbers(arguments.requests, "--requests", 1, _REQUESTS_MAX),
        gaps_ms=_numbers(arguments.gap_ms, "--gap-ms", 0, _GAP_MS_MAX),
    )
    return finish(run_pairs(options, say), arguments)


def _numbers(text: str, flag: str, least: int, most: int) -> list[int]:
    """Each once. Raises UserError."""
    wanted = f"numbers from {least} to {most}, such as {max(least, 10)},{max(least, 25)}"
    return list(dict.fromkeys(whole_numbers(text, flag, wanted, least, most)))


# -- controller ------------------------------------------------------------------------------------

_SYSTEM = "livescale"


def _add_controller_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, ControllerOptions(find_system(_SYSTEM))
    flag, sizes = flags_of(parser, defaults), ",".join(map(str, defaults.workers))
    flag("workers", "Numbers of workers.", default=sizes, metavar="N,…")
    flag("workers_per_model", "Workers per model.")
    add("--system", default=_SYSTEM, help="System whose settings apply.")
    flag("rate", "Requests per second of each model.")
    flag("cv", "Coefficient of variation of interarrival times.")
    flag("seconds", "Duration of the load.")
    flag("replays", "Replays. The result is the shortest time of each step.")
    flag("seed", "Seed of the load.")


def _controller(arguments: argparse.Namespace) -> int:
    """Measure the time of a controller step by pool size.

    A report, not a test: the exit status is 0.
    """
    at_least(arguments, 1, "workers_per_model", "seconds", "replays")
    positive(arguments, "rate")
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


# -- sharing ---------------------------------------------------------------------------------------

_WINDOWS = (
    *("azurecode_0855_5min", "azurecode_1320_5min", "azureconv_1035_5min"),
    *("burstgpt2gpt4_5539015_5min", "mooncakeconv_0540_5min", "synth_burstgptlike_5min_s1"),
)
_GENERATED = "burst:seconds=60,peak=10,seed={}"
_PRESET = "llama-3-8b"
_DEVICES = (8, 12, 16, 24, 32, 64)
_PER_HOST = 8


def _add_sharing_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "Workload file of several models (default: six windows of traces as six models)."
    add("--workload", type=Path, metavar="FILE", help=words)
    words = "Numbers of devices of the shared pool, ascending."
    add("--devices", default=",".join(map(str, _DEVICES)), metavar="N,…", help=words)
    words = "Devices of a host."
    add("--per-host", type=int, default=_PER_HOST, metavar="N", help=words)
    add("--slo", default="5x-mean", help="SLO of models for which the workload has none.")
    words = "Seconds of each window (default: all of it)."
    add("--seconds", type=int, metavar="N", help=words)
    words = "Systems to compare, also others of livescale simulate, such as fixed:5 (each model)."
    add("--systems", default=",".join(SHARING), metavar="NAME,…", help=words)
    words = f"When peaks come, for every system: {', '.join(Peaks)} (default: see --priorities)."
    add("--peaks", metavar="WHEN,…", help=words)
    words = (
        "Priorities of models, for every system: off, on (a higher one for the first half of the"
        " models), or both. Default: off. Without --peaks and --priorities, every system plays the"
        " load as it is, and livescale plays all six combinations."
    )
    add("--priorities", metavar="off,on", help=words)
    add("--seed", type=int, default=0, help="Random seed.")


def _sharing(arguments: argparse.Namespace) -> int:
    """Compare models on pools of their own with the same models on one shared pool, in devices.

    Requests that failed are in the figures, and not in the exit status.
    """
    wanted = "ascending numbers, such as 8,12,16"
    devices = whole_numbers(arguments.devices, "--devices", wanted, 1, 4096)
    if devices != sorted(set(devices)):
        raise UserError(f"--devices {arguments.devices!r} must be {wanted}")
    at_least(arguments, 1, "per_host")
    if arguments.seconds is not None:
        at_least(arguments, 1, "seconds")
        if arguments.workload is not None:
            raise UserError("--workload says how long its load is. Remove --seconds")

    def cluster(count: int) -> NamedTopology:
        return a800_workers(count, hosts=-(-count // arguments.per_host))

    models, period_ns = _models(arguments)
    options = SharingOptions(
        models=models,
        cluster=cluster,
        devices=devices,
        plays=_plays(arguments),
        period_ns=period_ns,
        seed=arguments.seed,
    )
    return finish(run_sharing(options, say), arguments)


def _plays(arguments: argparse.Namespace) -> dict[str, list[SharingCase]]:
    """By system, the cases that it plays. Raises UserError."""
    systems = [find_system(name).name for name in arguments.systems.split(",")]
    every = [SharingCase(peaks, is_on) for peaks in Peaks for is_on in (False, True)]
    if arguments.peaks is None and arguments.priorities is None:
        return {name: every if name == _SYSTEM else [PLAIN] for name in systems}
    peaks = chosen((arguments.peaks or PLAIN.peaks).split(","), "--peaks", tuple(Peaks))
    on = chosen((arguments.priorities or "off").split(","), "--priorities", ("off", "on"))
    asked = {(Peaks(when), word == "on") for when in peaks for word in on}
    return {name: [case for case in every if case in asked] for name in systems}


def _models(arguments: argparse.Namespace) -> tuple[list[SharedModel], int]:
    """And the time in which all their requests arrive (ns)."""
    folder, seed = data_folder(), arguments.seed
    slo = parse_slo(arguments.slo)
    if arguments.workload is not None:
        workload = read_workload(arguments.workload, folder, seed)
        models = [SharedModel(pooled(m), m.rows, m.slo or slo) for m in workload.models]
        return models, workload.duration_ns
    found = []
    for number, name in enumerate(_WINDOWS):
        text = name if folder else _GENERATED.format(seed + number)
        rows = named_trace(text, folder, seed).rows
        if arguments.seconds is not None:
            rows = window(rows, 0, arguments.seconds * NS_PER_S)
        model = name.removesuffix("_5min") if folder else f"burst-{number}"
        found.append(SharedModel(PooledModel(model, _PRESET), rows, slo))
    last_ns = max((row.arrival_ns for shared in found for row in shared.rows), default=0)
    seconds_ = arguments.seconds or last_ns // NS_PER_S + 1
    return found, seconds_ * NS_PER_S


BENCHES = {
    "sim": Bench(_add_sim_arguments, _sim),
    "scaling": Bench(_add_scaling_arguments, _scaling),
    "pairs": Bench(_add_pairs_arguments, _pairs),
    "controller": Bench(_add_controller_arguments, _controller),
    "sharing": Bench(_add_sharing_arguments, _sharing),
}
