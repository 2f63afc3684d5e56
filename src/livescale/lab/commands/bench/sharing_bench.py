"""`livescale bench sharing`: its flags."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from livescale.clusters.files import NamedTopology
from livescale.common.errors import UserError
from livescale.config.slo import parse_slo
from livescale.lab.bench.pools.sharing import SHARING, SharedModel, SharingOptions, run_sharing
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    say,
    whole_numbers,
)
from livescale.lab.commands.pool_choices import a800_workers, pooled
from livescale.load.arrivals import named_trace
from livescale.load.traces import window
from livescale.load.workloads import read_workload
from livescale.sim.pools.limits import PooledModel
from livescale.values.units import NS_PER_S

_WINDOWS = (
    *("azurecode_0855_5min", "azurecode_1320_5min", "azureconv_1035_5min"),
    *("burstgpt2gpt4_5539015_5min", "mooncakeconv_0540_5min", "synth_burstgptlike_5min_s1"),
)
_GENERATED = "burst:seconds=60,peak=10,seed={}"
_PRESET = "llama-3-8b"
_DEVICES = (8, 12, 16, 24, 32, 64)
_PER_HOST = 8


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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
    words = "Systems to compare (default: all of these)."
    add("--systems", default=",".join(SHARING), metavar="NAME,…", help=words)
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

    options = SharingOptions(
        models=_models(arguments),
        cluster=cluster,
        devices=devices,
        systems=chosen(arguments.systems.split(","), "--systems", SHARING),
        seed=arguments.seed,
    )
    return finish(run_sharing(options, say), arguments)


def _models(arguments: argparse.Namespace) -> list[SharedModel]:
    data, seed = os.environ.get("LIVESCALE_DATA"), arguments.seed
    folder = Path(data) if data else None
    slo = parse_slo(arguments.slo)
    if arguments.workload is not None:
        workload = read_workload(arguments.workload, folder, seed)
        return [SharedModel(pooled(m), m.rows, m.slo or slo) for m in workload.models]
    found = []
    for number, name in enumerate(_WINDOWS):
        text = name if data else _GENERATED.format(seed + number)
        rows = named_trace(text, folder, seed).rows
        if arguments.seconds is not None:
            rows = window(rows, 0, arguments.seconds * NS_PER_S)
        model = name.removesuffix("_5min") if data else f"burst-{number}"
        found.append(SharedModel(PooledModel(model, _PRESET), rows, slo))
    return found


BENCHES = {"sharing": Bench(_add_arguments, _sharing)}
