"""`livescale bench gateway|fidelity|soak|attacks|hosts|wires`: their flags."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from livescale.cli.loads import add_load_arguments, choose_load
from livescale.common.errors import UserError
from livescale.lab.bench.attacks.attacks import AttacksBenchOptions, run_attacks
from livescale.lab.bench.hosts.hosts import HostsBenchOptions, run_hosts
from livescale.lab.bench.hosts.simulated_hosts import HOSTS_MAX
from livescale.lab.bench.hosts.wires import WiresBenchOptions, run_wires
from livescale.lab.bench.live.live import KINDS
from livescale.lab.bench.pools.fidelity import (
    FidelityOptions,
    FidelityPool,
    FidelityReport,
    cpu_pool,
    run_fidelity,
    timed_pool,
)
from livescale.lab.bench.pools.gateway_load import GatewayBenchOptions, run_gateway
from livescale.lab.bench.soak.faults import FAULT_KINDS
from livescale.lab.bench.soak.run import SoakOptions, run_soak
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    flags_of,
    kinds_of_workers,
    options_of,
    positive,
    say,
    within,
    write_figures,
)

# -- gateway --------------------------------------------------------------------------------------


def _add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    flag = flags_of(parser, defaults := GatewayBenchOptions())
    flag("streams", "Concurrent streams.")
    flag("stalled", "Further streams that never read.")
    flag("workers", "Timed workers.")
    flag("gateways", "Gateways behind one port.")
    flag("step_ms", "Step time.")
    flag("prompt_tokens", "Tokens of each prompt.")
    flag("output_tokens", "Tokens of each output.")
    flag("seconds", "Duration of the measurement in seconds.")
    words = "Time to connect all streams."
    parser.add_argument("--ramp-seconds", type=float, default=defaults.ramp_s, help=words)
    flag("seed", "Seed of the prompts.")


def _gateway(arguments: argparse.Namespace) -> int:
    """Measure the latency that the gateway adds to a token under many streams.

    0 when every stream got tokens until the end.
    """
    at_least(arguments, 1, "streams", "workers", "step_ms", "prompt_tokens", "output_tokens")
    at_least(arguments, 1, "gateways")
    at_least(arguments, 0, "stalled", "ramp_seconds")
    positive(arguments, "seconds")
    options = options_of(GatewayBenchOptions, arguments, ramp_s=arguments.ramp_seconds)
    report = run_gateway(options, say)
    return finish(report, arguments, is_good=report.seen["streams_held"] == options.streams)


# -- fidelity -------------------------------------------------------------------------------------

_FIDELITY_CPU_WORKERS = 2


def _add_fidelity_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace=None, seconds=30, divide_lengths=2)
    add, flag = parser.add_argument, flags_of(parser, FidelityOptions("", ()))
    words = "Devices of the workers: timed, cpu or both."
    add("--workers", default="timed,cpu", metavar="KIND,…", help=words)
    add("--count", type=int, default=8, help="Timed workers. Runs on cpu use two.")
    flag("runs", "Runs of the pool and of the simulator.")
    flag("load_percent", "Load in percent of the simulated capacity.")
    add("--load-seconds", type=float, default=0.7, help="Duration of a parameter load in seconds.")
    flag("bursts", "Bursts of the calibration.")
    words = "Duration of the engine profile for cpu workers, in seconds."
    add("--profile-seconds", type=float, default=20.0, help=words)
    words = "Write records and a page of each device into this folder."
    flag("report", words, type=Path, metavar="DIR")


def _fidelity(arguments: argparse.Namespace) -> int:
    """Compare a real pool with the simulator on the same load.

    0 when timed workers behaved as simulated, in the figures that have to be right.

    The first kind's figures stand at the top, those of another under its name.
    """
    kinds = kinds_of_workers(arguments.workers, KINDS)
    at_least(arguments, 2, "count")
    at_least(arguments, 1, "runs", "bursts")
    within(arguments, 1, 100, "load_percent")
    positive(arguments, "load_seconds", "profile_seconds")
    load = choose_load(arguments)
    options = options_of(FidelityOptions, arguments, trace=load.name, rows=load.rows)
    reports = [_compare(kind, arguments, options) for kind in kinds]
    figures = reports[0].as_json()
    figures |= {report.pool.kind: report.as_json() for report in reports[1:]}
    write_figures(figures, arguments)
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
    flag = flags_of(parser, defaults := SoakOptions())
    flag("requests", "Number of requests (default: %(default)s, about 20 minutes).")
    flag("seed", "Seed of the load and of the faults.")
    flag("rate", "Mean requests per second.")
    flag("device", "Device of the workers.", choices=("cpu", "timed"))
    kinds = ",".join(defaults.faults)
    flag("faults", "Kinds of faults, or none.", default=kinds, metavar="KIND,…")
    flag("fault_every_s", "Mean time between two faults.")
    words = "Setting lost_after_ms of the pool (default: its default)."
    flag("lost_after_ms", words, type=int, metavar="MS")


def _soak(arguments: argparse.Namespace) -> int:
    """Run a real pool under load and faults, and check every answer.

    0 when nothing was lost, hung or wrong and every fault healed in time.
    """
    names = () if arguments.faults == "none" else arguments.faults.split(",")
    faults = chosen(names, "--faults", tuple(FAULT_KINDS))
    at_least(arguments, 1, "requests")
    positive(arguments, "rate", "fault_every_s")
    report = run_soak(options_of(SoakOptions, arguments, faults=faults), say)
    return finish(report, arguments, is_good=report.is_good)


# -- attacks --------------------------------------------------------------------------------------


def _add_attacks_arguments(parser: argparse.ArgumentParser) -> None:
    add, flag = parser.add_argument, flags_of(parser, AttacksBenchOptions())
    words = "Attack, by its name or a part of the name (default: all)."
    add("--attack", action="append", default=[], metavar="NAME", help=words)
    flag("rounds", "Windows without and with each attack.")
    flag("seconds", "Length of a window in seconds.")
    flag("attack_rate", "Hostile requests per second.")
    flag("connections", "Largest number of open hostile connections.")
    flag("light_rate", "Requests per second of the light client.")
    flag("prompt_tokens", "Prompt tokens of the light client.")
    flag("seed", "Seed of the light client's prompts.")
    flag("streams", "Streams during poison prompts and broken models.")
    flag("poison_prompts", "Number of poison prompts.")
    flag("broken_models", "Largest number of broken models, published and configured.")


def _attacks(arguments: argparse.Namespace) -> int:
    """Measure the effect of attacks on a light client. Then measure the effect of poison prompts
    and broken models on streams.

    0 when every attack stayed within its bounds.
    """
    positive(arguments, "seconds", "attack_rate", "light_rate")
    at_least(arguments, 1, "rounds", "connections", "prompt_tokens")
    at_least(arguments, 1, "streams", "poison_prompts", "broken_models")
    options = options_of(AttacksBenchOptions, arguments, attacks=tuple(arguments.attack))
    report = run_attacks(options, say)
    return finish(report, arguments, is_good=report.is_good)


# -- hosts -----------------------------------------------------------------------------------------

_REAL_MAX = 256


def _add_hosts_arguments(parser: argparse.ArgumentParser) -> None:
    flag = flags_of(parser, HostsBenchOptions())
    flag("real", "Hosts as processes of this node, with a timed worker each.")
    flag("simulated", "Simulated hosts of eight accelerators.")
    flag("patience_s", "Time limit for hosts to join.")


def _hosts(arguments: argparse.Namespace) -> int:
    """Measure the time for many hosts to join a pool at once.

    0 when all of them joined.
    """
    within(arguments, 0, _REAL_MAX, "real")
    within(arguments, 0, HOSTS_MAX, "simulated")
    if not arguments.real and not arguments.simulated:
        raise UserError("--real or --simulated must be at least 1")
    positive(arguments, "patience_s")
    return finish(run_hosts(options_of(HostsBenchOptions, arguments), say), arguments)


# -- wires -----------------------------------------------------------------------------------------


def _add_wires_arguments(parser: argparse.ArgumentParser) -> None:
    flag = flags_of(parser, WiresBenchOptions())
    flag("streams", "Concurrent streams.")
    flag("requests", "Requests of each stream in a round.")
    flag("output_tokens", "Tokens of each output.")
    flag("prompt_tokens", "Tokens of each prompt.")
    flag("workers", "Timed workers of the host.")
    flag("step_ms", "Step time.")
    flag("rounds", "Measured rounds of both kinds, an even number.")
    flag("ramp_s", "Time to connect all streams.")


def _wires(arguments: argparse.Namespace) -> int:
    """Measure the CPU cost of TLS between gateway and workers under many streams.

    0 when every request was answered.
    """
    names = ("streams", "requests", "output_tokens", "prompt_tokens", "workers", "step_ms")
    at_least(arguments, 1, *names)
    if arguments.rounds < 4 or arguments.rounds % 2:
        raise UserError("--rounds must be even, and at least 4: pools take turns in beginning")
    at_least(arguments, 0, "ramp_s")
    return finish(run_wires(options_of(WiresBenchOptions, arguments), say), arguments)


BENCHES = {
    "gateway": Bench(_add_gateway_arguments, _gateway),
    "fidelity": Bench(_add_fidelity_arguments, _fidelity),
    "soak": Bench(_add_soak_arguments, _soak),
    "attacks": Bench(_add_attacks_arguments, _attacks),
    "hosts": Bench(_add_hosts_arguments, _hosts),
    "wires": Bench(_add_wires_arguments, _wires),
}
