"""`livescale bench WHAT`: figures as ratios taken in one run; a table, and JSON with `--json`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from livescale.bench.coldstart import ColdStartOptions, run_coldstart
from livescale.bench.engine_report import EngineReport
from livescale.bench.engines import EngineBenchOptions, check_vllm_python, run_engines
from livescale.bench.errors import BenchError
from livescale.bench.gateway_load import GatewayBenchOptions, run_gateway
from livescale.bench.machine import describe_run
from livescale.bench.made_models import DTYPES, parse_shape
from livescale.bench.plan_bench import SIZES, run_plan
from livescale.cli import (
    attacks_bench,
    fidelity_bench,
    live_bench,
    profile_bench,
    sim_bench,
    soak_bench,
    transfer_benches,
)
from livescale.cli.errors import UserError
from livescale.cli.loads import write_json
from livescale.engine.errors import ModelError
from livescale.settings import ConfigError
from livescale.testbed.errors import TestbedError

_ENGINES = ("livescale", "transformers_generate", "transformers_cb", "vllm_cpu")
_PACKAGES = ("livescale", "torch", "transformers", "numpy", "uvloop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    words = "tokens per second of our engine and of others, over the same prompts"
    _add_engine_arguments(benches.add_parser("engine", help=words, description=words))
    words = "what the gateway adds to every token under many concurrent streams"
    _add_gateway_arguments(benches.add_parser("gateway", help=words, description=words))
    words = "from nothing, and from a warm worker, to the first token"
    _add_coldstart_arguments(benches.add_parser("coldstart", help=words, description=words))
    transfer_benches.add_parsers(benches)
    words = "how long multicast planning takes, and how good its plans are"
    _add_plan_arguments(benches.add_parser("plan", help=words, description=words))
    words = "how long single Runs take on this machine, as a profile for simulations"
    profile_bench.add_arguments(benches.add_parser("profile", help=words, description=words))
    words = "how fast the simulator is, by size of the pool, with and without coalescing"
    sim_bench.add_arguments(benches.add_parser("sim", help=words, description=words))
    words = "one load on a real pool and in the simulator, figure by figure"
    fidelity_bench.add_arguments(benches.add_parser("fidelity", help=words, description=words))
    words = "what an instance is worth while it loads, by live order, beside the simulator"
    live_bench.add_arguments(benches.add_parser("live", help=words, description=words))
    words = "a real pool under load and faults: nothing lost, nothing hangs, no wrong token"
    soak_bench.add_arguments(benches.add_parser("soak", help=words, description=words))
    words = "a light client alone and beside each attack: what the attack costs others"
    attacks_bench.add_arguments(benches.add_parser("attacks", help=words, description=words))


def run(arguments: argparse.Namespace) -> int:
    """0 when the figures could be taken."""
    try:
        return _BENCHES[arguments.bench](arguments)
    except (BenchError, ConfigError, ModelError, TestbedError) as error:
        raise UserError(str(error)) from error


def _say(line: str) -> None:
    print(line, flush=True)


def _write(path: Path | None, figures: dict[str, object]) -> None:
    if path is not None:
        write_json(path, {**figures, **describe_run(_PACKAGES)})


# -- engine ---------------------------------------------------------------------------------------


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", action="append", metavar="HxL", help="hidden size x layers (default: 512x8)")
    add("--hidden", type=int, help="one shape, with --layers: hidden size")
    add("--layers", type=int, help="one shape, with --hidden: decoder layers")
    add("--heads", type=int, help="attention heads (default: hidden size / 64)")
    add("--kv-heads", type=int, help="KV heads (default: heads / 4)")
    add("--intermediate", type=int, help="width of the MLP (default: 8/3 of the hidden size)")
    add("--dtype", action="append", choices=DTYPES, help="of weights (default: bfloat16)")
    add("--vocabulary", type=int, default=8192, help="token ids")
    add("--prompt-tokens", type=int, default=64, help="length of every prompt")
    add("--output-tokens", type=int, default=64, help="length of every output")
    add("--concurrency", default="1,8,32", metavar="N,…", help="requests in flight")
    add("--repetitions", type=int, default=3, help="counted rounds of each kind")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    add("--run-tokens-max", type=int, default=512, help="token budget of our engine's Runs")
    add("--block-tokens", type=int, default=16, help="tokens of a KV block of our engine")
    add("--weights-layout", choices=("packed", "plain"), default="packed", help="of our engine")
    add("--engines", default=",".join(_ENGINES[:3]), metavar="NAME,…", help="besides vLLM")
    add("--vllm-python", type=Path, help="an interpreter that has vLLM's CPU build: adds vllm_cpu")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--json", type=Path, help="write the figures to this file")


def _engine(arguments: argparse.Namespace) -> int:
    options = _engine_options(arguments)
    if options.vllm_python is not None:
        check_vllm_python(options.vllm_python)
    report: EngineReport = run_engines(options, _say)
    print()
    print(report.text())
    _write(arguments.json, report.as_json())
    return 0


def _engine_options(arguments: argparse.Namespace) -> EngineBenchOptions:
    texts = arguments.shape or []
    if arguments.hidden is not None or arguments.layers is not None:
        if texts or arguments.hidden is None or arguments.layers is None:
            raise UserError("--hidden and --layers go together, and without --shape")
        texts = [f"{arguments.hidden}x{arguments.layers}"]
    sizes = (arguments.heads, arguments.kv_heads, arguments.intermediate)
    shapes = tuple(parse_shape(text, *sizes) for text in texts or ["512x8"])
    for shape in shapes:
        shape.preset(arguments.vocabulary)  # a shape that cannot be built is refused at once
    for name in ("prompt_tokens", "output_tokens", "repetitions", "threads"):
        _at_least(arguments, name, 1)
    for name in ("run_tokens_max", "block_tokens"):
        _at_least(arguments, name, 1)
    return EngineBenchOptions(
        shapes=shapes,
        dtypes=tuple(arguments.dtype or ["bfloat16"]),
        engines=_engines(arguments),
        in_flight=_in_flight(arguments.concurrency),
        vocabulary=arguments.vocabulary,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        run_tokens_max=arguments.run_tokens_max,
        block_tokens=arguments.block_tokens,
        weights_layout=arguments.weights_layout,
        seed=arguments.seed,
        vllm_python=arguments.vllm_python,
    )


def _engines(arguments: argparse.Namespace) -> tuple[str, ...]:
    chosen = arguments.engines.split(",")
    for name in chosen:
        if name not in _ENGINES:
            raise UserError(f"--engines: unknown {name!r}, there are {', '.join(_ENGINES)}")
    if arguments.vllm_python is not None:
        chosen.append("vllm_cpu")
    elif "vllm_cpu" in chosen:
        raise UserError("--engines: vllm_cpu needs --vllm-python, an interpreter that has vLLM")
    return tuple(name for name in _ENGINES if name in chosen)


def _in_flight(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise UserError(f"--concurrency {text!r} must be positive numbers, such as 1,8,32")
    return tuple(sorted({int(number) for number in numbers}))


# -- gateway --------------------------------------------------------------------------------------


def _add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    defaults = GatewayBenchOptions()
    add("--streams", type=int, default=defaults.streams, help="concurrent streams")
    add("--stalled", type=int, default=defaults.stalled, help="streams more that never read")
    add("--workers", type=int, default=defaults.workers, help="timed workers")
    add("--step-ms", type=int, default=defaults.step_ms, help="time that a Run takes")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="length of prompts")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="length of outputs")
    add("--seconds", type=float, default=defaults.seconds, help="how long is measured")
    add("--ramp-seconds", type=float, default=defaults.ramp_s, help="time to connect all streams")
    add("--seed", type=int, default=defaults.seed, help="of the prompts")
    add("--json", type=Path, help="write the figures to this file")


def _gateway(arguments: argparse.Namespace) -> int:
    """0 when every stream got tokens until the end."""
    for name in ("streams", "workers", "step_ms", "prompt_tokens", "output_tokens"):
        _at_least(arguments, name, 1)
    _at_least(arguments, "stalled", 0)
    if arguments.seconds <= 0 or arguments.ramp_seconds < 0:
        raise UserError("--seconds must be positive and --ramp-seconds not negative")
    options = GatewayBenchOptions(
        streams=arguments.streams,
        stalled=arguments.stalled,
        workers=arguments.workers,
        step_ms=arguments.step_ms,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        seconds=arguments.seconds,
        ramp_s=arguments.ramp_seconds,
        seed=arguments.seed,
    )
    report = run_gateway(options, _say)
    print()
    print(report.text())
    _write(arguments.json, report.as_json())
    return 0 if report.seen["streams_held"] == options.streams else 1


def _at_least(arguments: argparse.Namespace, name: str, least: int) -> None:
    if getattr(arguments, name) < least:
        raise UserError(f"--{name.replace('_', '-')} must be at least {least}")


# -- coldstart ------------------------------------------------------------------------------------


def _add_coldstart_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="512x8", metavar="HxL", help="hidden size x layers")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    add("--vocabulary", type=int, default=8192, help="token ids")
    add("--prompt-tokens", type=int, default=64, help="length of the prompt")
    add("--repetitions", type=int, default=3, help="starts of each kind")
    add("--threads", type=int, default=1, help="compute threads")
    add("--vllm-python", type=Path, help="an interpreter that has vLLM's CPU build: its start, too")
    add("--json", type=Path, help="write the figures to this file")


def _coldstart(arguments: argparse.Namespace) -> int:
    for name in ("prompt_tokens", "repetitions", "threads"):
        _at_least(arguments, name, 1)
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    if arguments.vllm_python is not None:
        check_vllm_python(arguments.vllm_python)
    options = ColdStartOptions(
        shape=shape,
        dtype=arguments.dtype,
        vocabulary=arguments.vocabulary,
        prompt_tokens=arguments.prompt_tokens,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        vllm_python=arguments.vllm_python,
    )
    report = run_coldstart(options, _say)
    print()
    print(report.text())
    _write(arguments.json, report.as_json())
    return 0


# -- plan -----------------------------------------------------------------------------------------


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "devices of the clusters (default: 64 to 4,096)"
    add("--devices", action="append", type=int, metavar="N", help=words)
    add("--repetitions", type=int, default=20, help="plans of each kind")
    add("--json", type=Path, help="write the figures to this file")


def _plan(arguments: argparse.Namespace) -> int:
    _at_least(arguments, "repetitions", 1)
    sizes = tuple(arguments.devices or SIZES)
    if not all(2 <= size <= 1 << 16 for size in sizes):
        raise UserError("--devices must be 2 to 65536")
    report = run_plan(sizes, arguments.repetitions, _say)
    print()
    print(report.text())
    _write(arguments.json, report.as_json())
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    _write(arguments.json, profile_bench.run(arguments))
    return 0


def _sim(arguments: argparse.Namespace) -> int:
    _write(arguments.json, sim_bench.run(arguments))
    return 0


def _fidelity(arguments: argparse.Namespace) -> int:
    """0 when timed workers behaved as simulated, in the figures that have to be right."""
    figures, is_good = fidelity_bench.run(arguments)
    _write(arguments.json, figures)
    return 0 if is_good else 1


def _live(arguments: argparse.Namespace) -> int:
    """0 when every token was right."""
    figures = live_bench.run(arguments)
    _write(arguments.json, figures)
    return 0 if figures["token_mismatches"] == 0 else 1


def _soak(arguments: argparse.Namespace) -> int:
    """0 when nothing was lost, hung or wrong and every fault healed in time."""
    figures, is_good = soak_bench.run(arguments)
    _write(arguments.json, figures)
    return 0 if is_good else 1


def _attacks(arguments: argparse.Namespace) -> int:
    """0 when every attack stayed within its bounds."""
    figures, is_good = attacks_bench.run(arguments)
    _write(arguments.json, figures)
    return 0 if is_good else 1


_BENCHES = {
    "engine": _engine,
    "gateway": _gateway,
    "coldstart": _coldstart,
    **transfer_benches.BENCHES,
    "plan": _plan,
    "profile": _profile,
    "sim": _sim,
    "fidelity": _fidelity,
    "live": _live,
    "soak": _soak,
    "attacks": _attacks,
}
