"""What `simulate` and `capacity` share: which cluster, models, load and systems are asked for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from livescale.cli.loads import choose_load, data_folder
from livescale.clusters.files import NamedTopology, find_cluster, read_topology
from livescale.clusters.topology import Device, Host, Topology
from livescale.common.errors import UserError
from livescale.config.slo import SloAbsolute, SloMultipleOfMean, SloOfModels, SloRule
from livescale.control.multicast.planner import STRATEGIES
from livescale.load.traces import TraceRow, divide_lengths
from livescale.load.workloads import WorkloadModel, read_workload
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.capacity import CapacityError, measure_capacity, scale_loads
from livescale.sim.pools.configs import build_config, tokens_max
from livescale.sim.pools.equal_time import play_equal
from livescale.sim.pools.limits import PooledModel, PooledRoles, PoolError
from livescale.sim.pools.runs import PoolRun, fit_rows, token_weights
from livescale.sim.pools.systems import SYSTEMS, System, find_system
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    KeyStageCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.types import WorkerRef, agent_ref
from livescale.values.units import GBIT_BYTES, NS_PER_S

_DEVICE_LINK_GBIT = 128
_AMOUNTS = (1e-6, 1e9)
"""Least and largest number of Gbit/s, and of GB. The least is still some bytes."""
_PLACEMENTS: dict[str, Placement] = {
    "spread": SpreadCopies(),
    "cache": CacheCopies(),
    "all": AllCopies(),
    "key-stages": KeyStageCopies(),
    "none": NoCopies(),
}
_RATE_PER_S = re.compile(r"(\d+(?:\.\d+)?)/s")
_RATE_PART = re.compile(r"\d+(?:\.\d+)?")
_MODEL_KEYS = {"tp": "tp_size", "min": "instances_min", "max": "instances_max"}
_ROLE_KEYS = ("prefill", "decode", "split")
_FROM_TO = re.compile(r"(\d{1,6})(?:-(\d{1,6})?)?")
_SPLIT = re.compile(r"([1-9]\d{0,5})\+([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """What is to be run: rows by model name, arrivals counted from the load's start.

    `clipped` requests were longer than what an instance can serve. `slos` has the models that are
    judged by a rule of their own.
    """

    cluster_name: str
    cluster: NamedTopology
    models: tuple[PooledModel, ...]
    load_name: str
    loads: dict[str, list[TraceRow]]
    clipped: int = 0
    slos: dict[str, SloAbsolute | SloMultipleOfMean] = field(default_factory=dict)

    def slo(self, general: SloAbsolute | SloMultipleOfMean) -> SloRule:
        """By what all requests are judged, if the others are judged by the general rule."""
        return SloOfModels(general, self.slos) if self.slos else general

    def config(self, system: System) -> SimConfig:
        """The pool, run as that system. Raises UserError."""
        try:
            return build_config(self.cluster, self.models, system, token_weights(self.loads))
        except PoolError as error:
            raise UserError(f"{self.cluster_name}: {error}") from error

    def play_equal(
        self, system: System, compared: PoolRun, play: Callable[[System], PoolRun]
    ) -> tuple[System, PoolRun]:
        """The fixed pool of no less device time than the `compared` run (`equal_time`)."""
        devices = len(self.cluster.topology.devices)
        step = min(model.tp_size for model in self.models)
        return play_equal(system, compared, devices, step, play)

    def figures(self, seed: int) -> dict[str, object]:
        """What was asked for, for other programs."""
        names = {"trace": self.load_name, "cluster": self.cluster_name}
        return {**names, "seed": seed, "clipped": self.clipped}

    def describe(self) -> str:
        """The pool in a line."""
        devices = list(self.cluster.topology.devices.values())
        kinds = ", ".join(dict.fromkeys(device.kind for device in devices))
        named = [
            model.preset + (f" on {model.tp_size} ranks" if model.tp_size > 1 else "")
            for model in self.models
        ]
        counted = [f"{named.count(n)} x {n}" if named.count(n) > 1 else n for n in named]
        hosts = len(dict.fromkeys(device.host for device in devices))
        return (
            f"pool: {self.cluster_name}: {len(devices)} devices ({kinds}) on {hosts}"
            f" host{'s' if hosts > 1 else ''};"
            f" {', '.join(dict.fromkeys(counted))}"
        )


def add_pool_arguments(parser: argparse.ArgumentParser, strategy: str) -> None:
    """The flags of `choose`; `strategy` is the default."""
    add = parser.add_argument
    words = (
        "Cluster of LiveScale by name, or a topology file (default: A800 workers, see --workers)."
    )
    add("-c", "--cluster", metavar="CLUSTER", help=words)
    words = (
        "Model preset, ranks, and limits of instances (default: llama-3-8b). Separate prefill and"
    )
    words += " decode instances have limits of their own: prefill=1-7,decode=1-7."
    add("--model", metavar="PRESET[,tp=N][,min=N][,max=N]", help=words)
    words = "Workload file of several models, in place of a trace and --model."
    add("--workload", type=Path, metavar="FILE", help=words)
    words = f"Systems to compare: {', '.join(SYSTEMS)} (default: {strategy})."
    add("--strategy", "--strategies", dest="strategy", metavar="A,B", help=words)
    parser.set_defaults(default_strategy=strategy)
    words = "Mean request rate: N/s, or a share of the pool's capacity ('half', 0.8)."
    add("--rate", metavar="half|PART|N/s", help=words)
    add("--workers", type=int, default=8, help="Number of A800 workers without --cluster.")
    add("--link-gbit", type=float, default=100, help="Link rate without --cluster.")
    add("--storage-gbit", type=float, default=10, help="Storage rate without --cluster.")
    words = "Number of hosts with host memory without --cluster."
    add("--hosts", type=int, default=0, help=words)
    words = "Host memory of each host without --cluster."
    add("--host-memory-gb", type=float, default=192, help=words)
    words = "Multicast strategy. The flag overrides --strategy."
    add("--multicast", choices=STRATEGIES, help=words)
    words = "Placement of host copies. The flag overrides --strategy."
    add("--placement", choices=list(_PLACEMENTS), help=words)


def choose(arguments: argparse.Namespace) -> PoolChoice:
    """Cluster, models and load as asked for; prints what they are.

    Lengths that no instance could serve are clipped; their number is printed. Raises UserError.
    """
    name, cluster = _cluster(arguments)
    if arguments.workload is None:
        model = parse_model(arguments.model or "llama-3-8b")
        load = choose_load(arguments)
        choice = PoolChoice(name, cluster, (model,), load.name, {model.name: load.rows})
    else:
        choice = _many(arguments, name, cluster)
    choice = _clipped(choice)
    return _at_rate(choice, arguments.rate, arguments.seed)


def choose_systems(arguments: argparse.Namespace) -> tuple[System, ...]:
    """The systems by name, each once, with what the flags override. Raises UserError."""
    asked = arguments.default_strategy if arguments.strategy is None else arguments.strategy
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if not names:
        raise UserError("--strategy is empty. Name at least one system")
    return tuple(choose_system(name, arguments) for name in dict.fromkeys(names))


def choose_system(name: str, arguments: argparse.Namespace) -> System:
    """The system of that name with what the flags override. Raises UserError."""
    overrides: dict[str, object] = {}
    if arguments.multicast is not None:
        overrides["multicast"] = arguments.multicast
    if arguments.placement is not None:
        overrides["placement"] = _PLACEMENTS[arguments.placement]
    return msgspec.structs.replace(find_system(name), **overrides)


def parse_model(text: str) -> PooledModel:
    """A model as in "mistral-24b,tp=2,max=7", or, with prefill and decode instances,
    "mistral-24b,tp=2,prefill=1-7,decode=1-7,split=5+3". Raises UserError."""
    preset, *settings = text.split(",")
    model = PooledModel(preset, preset)
    roles: dict[str, object] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in _ROLE_KEYS and (of_role := _of_role(key, value)) is not None:
            roles |= of_role
        elif key in _MODEL_KEYS and value.isdecimal():
            model = msgspec.structs.replace(model, **{_MODEL_KEYS[key]: int(value)})
        else:
            known = [f"{name}=N" for name in _MODEL_KEYS]
            known += ["prefill=MIN-MAX", "decode=MIN-MAX", "split=P+D"]
            raise UserError(f"--model {text}: '{setting}' is not one of {', '.join(known)}")
    if not roles:
        return model
    if model.instances_min != 1 or model.instances_max is not None:
        raise UserError(f"--model {text}: roles replace min and max. Remove min and max")
    return msgspec.structs.replace(model, roles=msgspec.convert(roles, PooledRoles))


def a800_workers(
    workers: int,
    hosts: int,
    *,
    link_gbit: float = 100,
    storage_gbit: float = 10,
    host_memory_gb: float = 192,
) -> NamedTopology:
    """So many A800 workers, dealt among hosts with memory (0: each has a host without).

    Each device has the link to host memory that those of `blitzscale-a` have.
    """
    link, memory = int(link_gbit * GBIT_BYTES), int(host_memory_gb * 1e9)
    to_device = _DEVICE_LINK_GBIT * GBIT_BYTES
    agents = {
        agent_ref(n): Host(f"host-{n}", "leaf-0", memory, link, link, to_device)
        for n in range(hosts)
    }
    devices = {
        WorkerRef(n): Device("a800", f"host-{n % (hosts or workers)}", "leaf-0", 0, 0, link, link)
        for n in range(workers)
    }
    storage = int(storage_gbit * GBIT_BYTES)
    return NamedTopology(Topology(devices, agents, remote_storage_bytes_per_s=storage))


def check_amount(amount: float, flag: str) -> None:
    """A rate in Gbit/s or a memory in GB can be simulated. Raises UserError."""
    least, largest = _AMOUNTS
    if not least <= amount <= largest:  # "nan" is neither
        raise UserError(f"{flag} is {amount:g}. Give a number from {least:g} to {largest:g}")


def pooled(model: WorkloadModel) -> PooledModel:
    """A workload's model as a pool serves it."""
    roles = None
    if model.roles is not None:
        prefill, decode = model.roles.prefill, model.roles.decode
        roles = PooledRoles(
            prefill_min=prefill.min_replicas,
            prefill_max=prefill.max_replicas,
            decode_min=decode.min_replicas,
            decode_max=decode.max_replicas,
            split=model.split,
        )
    return PooledModel(
        name=model.name,
        preset=model.preset,
        tp_size=model.tp_size,
        instances_min=model.instances_min,
        instances_max=model.instances_max,
        idle_ns=model.idle_ns,
        priority=model.priority,
        roles=roles,
        # A multiple of the mean is known only when the run is over.
        slo=model.slo if isinstance(model.slo, SloAbsolute) else None,
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _of_role(key: str, value: str) -> dict[str, object] | None:
    """Fields of PooledRoles: of "prefill=1-7" (least and most), "prefill=1-" (as many as there is
    room for), "prefill=4" (so many), "split=5+3". None: that cannot be read."""
    if key == "split":
        split = _SPLIT.fullmatch(value)
        return None if split is None else {key: (int(split[1]), int(split[2]))}
    found = _FROM_TO.fullmatch(value)
    if found is None:
        return None
    most = None if value.endswith("-") else int(found[2] or found[1])
    return {f"{key}_min": int(found[1]), f"{key}_max": most}


def _cluster(arguments: argparse.Namespace) -> tuple[str, NamedTopology]:
    if arguments.cluster is not None:
        path = find_cluster(arguments.cluster)
        return path.stem, read_topology(path)
    if arguments.workers < 1 or arguments.hosts < 0:
        raise UserError("--workers must be at least 1, and --hosts must not be negative")
    check_amount(arguments.link_gbit, "--link-gbit")
    check_amount(arguments.storage_gbit, "--storage-gbit")
    check_amount(arguments.host_memory_gb, "--host-memory-gb")
    cluster = a800_workers(
        arguments.workers,
        arguments.hosts,
        link_gbit=arguments.link_gbit,
        storage_gbit=arguments.storage_gbit,
        host_memory_gb=arguments.host_memory_gb,
    )
    return f"{arguments.workers} A800 workers", cluster


def _many(arguments: argparse.Namespace, name: str, cluster: NamedTopology) -> PoolChoice:
    if any(given is not None for given in (arguments.trace, arguments.model, arguments.seconds)):
        problem = "--workload replaces a trace and --model, and has its own seconds"
        raise UserError(f"{problem}. Remove the trace, --model and --seconds")
    if arguments.divide_lengths < 1 or not 0 < arguments.factor <= 1000:
        raise UserError("--divide-lengths must be at least 1, --factor in (0, 1000]")
    workload = read_workload(arguments.workload, data_folder(), arguments.seed)
    models = tuple(pooled(model) for model in workload.models)
    loads = {model.name: list(model.rows) for model in workload.models}
    if arguments.factor != 1:
        loads = scale_loads(loads, arguments.factor, arguments.seed)
    loads = {model: divide_lengths(rows, arguments.divide_lengths) for model, rows in loads.items()}
    requests = sum(map(len, loads.values()))
    if not requests:
        raise UserError(f"workload {arguments.workload} has no request")
    print(
        f"workload: {arguments.workload}: {len(models)} models, {requests} requests in"
        f" {workload.duration_ns / NS_PER_S:g} s"
    )
    slos = {model.name: model.slo for model in workload.models if model.slo is not None}
    clipped = workload.clipped_requests
    return PoolChoice(name, cluster, models, arguments.workload.stem, loads, clipped, slos)


def _clipped(choice: PoolChoice) -> PoolChoice:
    """What no instance can serve is shortened."""
    config = choice.config(SYSTEMS["livescale"])
    clipped, loads = choice.clipped, {}
    for model, rows in choice.loads.items():
        loads[model], count = fit_rows(rows, tokens_max(config, model))
        clipped += count
    if clipped:
        requests = sum(map(len, loads.values()))
        print(f"  {clipped} of {requests} requests were too long for their model: clipped")
    return replace(choice, loads=loads, clipped=clipped)


def _at_rate(choice: PoolChoice, rate: str | None, seed: int) -> PoolChoice:
    """The load at the mean rate that was asked for."""
    if rate is None:
        return choice
    per_s = _RATE_PER_S.fullmatch(rate)
    part = "0.5" if rate == "half" else rate
    try:
        if per_s is not None:
            factor = float(per_s[1]) / _mean_rate(choice.loads)
            words = f"{rate} on average"
        elif _RATE_PART.fullmatch(part) and float(part) > 0:
            found = measure_capacity(choice.loads, choice.config(SYSTEMS["fixed-full"]), seed)
            factor = found.factor * float(part)
            words = (
                f"{part} of the whole pool's capacity, which is {found.requests_per_s:.2f}"
                f" requests/s ({found.simulations} simulations)"
            )
        else:
            raise UserError(f"--rate {rate}: write 'half', a part such as 0.8, or 6/s")
    except CapacityError as error:
        raise UserError(f"--rate {rate}: {error}") from error
    loads = scale_loads(choice.loads, factor, seed)
    if not any(loads.values()):
        raise UserError(f"--rate {rate}: no request is left of {choice.load_name}")
    print(f"rate: {words}: arrivals times {factor:.4g}, {_mean_rate(loads):.2f} requests/s")
    return replace(choice, loads=loads)


def _mean_rate(loads: Mapping[str, Sequence[TraceRow]]) -> float:
    """Requests per second up to the last arrival. Raises CapacityError for a single moment."""
    last_ns = max((rows[-1].arrival_ns for rows in loads.values() if rows), default=0)
    if not last_ns:
        raise CapacityError("a load of one moment has no rate")
    return sum(map(len, loads.values())) * NS_PER_S / last_ns
