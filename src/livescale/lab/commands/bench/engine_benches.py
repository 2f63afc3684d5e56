"""`livescale bench engine|coldstart|profile|cores|load|vllm`: their flags."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from livescale.cli.loads import whole_bytes
from livescale.common.errors import UserError
from livescale.engine.files.make import PRESETS
from livescale.lab.bench.base.made_models import DTYPES, BenchShape, parse_shape
from livescale.lab.bench.engines.coldstart import ColdStartOptions, run_coldstart
from livescale.lab.bench.engines.cores import CoresOptions, run_cores
from livescale.lab.bench.engines.engines import (
    INSTRUCTIONS,
    EngineBenchOptions,
    check_vllm_python,
    run_engines,
)
from livescale.lab.bench.engines.load_bench import LoadBenchOptions, run_load
from livescale.lab.bench.engines.profile import ProfileOptions, run_profile
from livescale.lab.bench.engines.profile_points import CONTEXT_TOKENS_MIN, ProfileLimits
from livescale.lab.bench.engines.vllm_bench import PARTS, run_vllm
from livescale.lab.bench.engines.vllm_options import VllmBenchOptions
from livescale.lab.commands.bench.bench_flags import (
    TRANSFER_PACKAGES,
    Bench,
    at_least,
    check_folder,
    chosen,
    finish,
    flags_of,
    options_of,
    positive,
    say,
    shape_of,
    whole_numbers,
)

_SHAPE = BenchShape(512, 8)
_ENGINES = ("livescale", "transformers_generate", "transformers_cb", "vllm_cpu")
_VLLM_TOKENS_MAX = PRESETS["small"].model_tokens_max
_BITS = 8
_DAY_S = 86_400


# -- engine ---------------------------------------------------------------------------------------


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    add, flag = parser.add_argument, flags_of(parser, EngineBenchOptions((), (), ()))
    add("--shape", action="append", metavar="HxL", help="Hidden size x layers (default: 512x8).")
    add("--hidden", type=int, help="Hidden size of one shape, with --layers.")
    add("--layers", type=int, help="Decoder layers of one shape, with --hidden.")
    add("--heads", type=int, help="Attention heads (default: hidden size / 64).")
    add("--kv-heads", type=int, help="KV heads (default: heads / 4).")
    add("--intermediate", type=int, help="Width of the MLP (default: 8/3 of the hidden size).")
    add("--dtype", action="append", choices=DTYPES, help="Type of the weights (default: bfloat16).")
    flag("vocabulary", "Number of token IDs.")
    flag("prompt_tokens", "Tokens of each prompt.")
    flag("output_tokens", "Tokens of each output.")
    add("--concurrency", default="1,8,32", metavar="N,…", help="Numbers of concurrent requests.")
    flag("repetitions", "Measured rounds of each kind.")
    flag("threads", "Threads of each engine (default: all CPU cores).", default=cores)
    flag("run_tokens_max", "Token budget of a step of LiveScale.")
    flag("block_tokens", "Tokens of a KV block of LiveScale.")
    layouts = ("auto", "packed", "compiled", "plain")
    flag("weights_layout", "Weights layout of LiveScale.", choices=layouts)
    words = "CPU instructions of the engines: all, or up to AVX2."
    flag("instructions", words, choices=tuple(INSTRUCTIONS))
    words = "Engines other than vLLM (default: all)."
    flag("engines", words, default=",".join(_ENGINES[:3]), metavar="NAME,…")
    flag("vllm_python", "Python interpreter with vLLM's CPU build (adds vllm_cpu).", type=Path)
    flag("seed", "Seed of the prompts.")


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
    shapes = tuple(parse_shape(text, *sizes) for text in texts or [str(_SHAPE)])
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
    flag = flags_of(parser, ColdStartOptions(_SHAPE))
    flag("shape", "Hidden size x layers.", default=str(_SHAPE), metavar="HxL")
    flag("dtype", "Type of the weights.", choices=DTYPES)
    flag("vocabulary", "Number of token IDs.")
    flag("prompt_tokens", "Tokens of the prompt.")
    flag("repetitions", "Starts of each kind.")
    flag("threads", "Compute threads.")
    flag("vllm_python", "Python interpreter with vLLM's CPU build (adds vLLM).", type=Path)


def _coldstart(arguments: argparse.Namespace) -> int:
    """Measure the time to the first token from a cold start and from a warm worker."""
    at_least(arguments, 1, "prompt_tokens", "repetitions", "threads")
    options = options_of(ColdStartOptions, arguments, shape=shape_of(arguments))
    if options.vllm_python is not None:
        check_vllm_python(options.vllm_python)
    return finish(run_coldstart(options, say), arguments)


# -- profile --------------------------------------------------------------------------------------


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ProfileOptions(Path())
    limits, flag = defaults.limits, flags_of(parser, defaults)
    words = "File of the profile (CSV)."
    flag("out", words, default=None, type=Path, required=True, metavar="FILE")
    flag("device", "Compute device.", choices=("cpu", "cuda"))
    flag("model", "Folder of a model (default: a generated model).", type=Path, metavar="DIR")
    shape = str(defaults.shape)
    flag("shape", "Hidden size x layers of a generated model.", default=shape, metavar="HxL")
    flag("dtype", "Type of a generated model's weights.", choices=DTYPES)
    flag("vocabulary", "Token IDs of a generated model.")
    flag("threads", "Compute threads (default: 1, like a worker).")
    flag("seconds", "Duration of the measurement in seconds.")
    add = parser.add_argument
    words = "Tokens of the largest prompt chunk."
    add("--chunk-max", type=int, default=limits.chunk_tokens_max, help=words)
    words = "Decodes of the largest batch."
    add("--batch-max", type=int, default=limits.decodes_max, help=words)
    words = "Tokens of the longest context."
    add("--context-max", type=int, default=limits.context_tokens_max, help=words)


def _profile(arguments: argparse.Namespace) -> int:
    """Measure step times on this node, as a profile for simulations."""
    at_least(arguments, 1, "chunk_max", "batch_max", "threads")
    at_least(arguments, max(arguments.chunk_max, 4 * CONTEXT_TOKENS_MIN), "context_max")
    positive(arguments, "seconds", most=_DAY_S)
    check_folder(arguments.out, "--out")
    limits = ProfileLimits(arguments.chunk_max, arguments.batch_max, arguments.context_max)
    options = options_of(ProfileOptions, arguments, shape=shape_of(arguments), limits=limits)
    return finish(run_profile(options, say), arguments)


# -- cores ----------------------------------------------------------------------------------------


def _add_cores_arguments(parser: argparse.ArgumentParser) -> None:
    flag = flags_of(parser, defaults := CoresOptions())
    words = "Write the fitted profile to this file, for cores_profile."
    flag("out", words, type=Path, metavar="FILE")
    flag("shape", "Hidden size x layers.", default=str(defaults.shape), metavar="HxL")
    flag("dtype", "Type of the weights.", choices=DTYPES)
    flag("vocabulary", "Number of token IDs.")
    flag("prompt_tokens", "Prompt tokens of a step.")
    flag("rounds", "Steps with each number of cores.")
    flag("cores_max", "Largest number of cores (default: 0, all cores).")


def _cores(arguments: argparse.Namespace) -> int:
    """Measure step times by number of CPU cores, as a profile for stages."""
    at_least(arguments, 1, "prompt_tokens", "rounds")
    at_least(arguments, 0, "cores_max")
    check_folder(arguments.out, "--out")
    options = options_of(CoresOptions, arguments, shape=shape_of(arguments))
    return finish(run_cores(options, say), arguments)


# -- load -----------------------------------------------------------------------------------------


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add, flag = parser.add_argument, flags_of(parser, LoadBenchOptions())
    add("--model", type=Path, metavar="DIR", help="Folder of a model (default: a generated model).")
    add("--size", default="1GiB", help="Approximate size of the generated model.")
    flag("repetitions", "Measured loads of each kind.")
    add("--warm-only", action="store_true", help="Skip loads from storage.")
    flag("peer_python", "Python interpreter with other loaders to compare.", type=Path)


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
    return finish(run_load(options, say), arguments, TRANSFER_PACKAGES)


# -- vllm -----------------------------------------------------------------------------------------


def _add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, VllmBenchOptions(Path(), _SHAPE)
    flag = flags_of(parser, defaults)
    words = "Python interpreter with vLLM and livescale (`make vllm` makes one)."
    flag("vllm_python", words, default=None, type=Path, required=True, metavar="PYTHON")
    parts = ",".join(defaults.parts)
    words = f"Parts to run: {', '.join(PARTS)} (default: {parts})."
    flag("parts", words, default=parts, metavar="NAME,…")
    flag("shape", "Hidden size x layers of the served model.", default=str(_SHAPE), metavar="HxL")
    flag("dtype", "Type of its weights.", choices=DTYPES)
    flag("vocabulary", "Number of token IDs.")
    flag("streams", "Concurrent requests.")
    flag("prompt_tokens", "Tokens of each prompt.")
    flag("output_tokens", "Tokens of each answer.")
    flag("repetitions", "Measured rounds of each kind.")
    flag("threads", "Threads of each engine.")
    words = "Skip `vllm serve` with default settings."
    add("--no-defaults", action="store_true", help=words)
    flag("loads", "Measured loads and bindings.")
    words = "Approximate model size in part link."
    add("--link-size", default="1GiB", metavar="BYTES", help=words)
    words = "Link rate in part link, in Gbit/s."
    add("--link-gbit", type=float, default=1.0, metavar="RATE", help=words)
    flag("seed", "Seed of the prompts.")


def _vllm(arguments: argparse.Namespace) -> int:
    """Measure the overhead of LiveScale on vLLM, and model switches of a resident engine.

    0 when nothing was lost and every token was that of plain vLLM.
    """
    at_least(arguments, 1, "prompt_tokens", "output_tokens", "repetitions", "threads", "loads")
    at_least(arguments, 2, "streams")
    if arguments.prompt_tokens + arguments.output_tokens > _VLLM_TOKENS_MAX:
        raise UserError(f"--prompt-tokens and --output-tokens must be {_VLLM_TOKENS_MAX} together")
    if not 0 < arguments.link_gbit <= 100:
        raise UserError("--link-gbit must be above 0, and 100 at most")
    options = options_of(
        VllmBenchOptions,
        arguments,
        shape=shape_of(arguments),
        parts=tuple(dict.fromkeys(chosen(arguments.parts.split(","), "--parts", tuple(PARTS)))),
        has_defaults=not arguments.no_defaults,
        link_size_bytes=whole_bytes(arguments.link_size, "--link-size"),
        link_bytes_per_s=int(arguments.link_gbit * 1e9) // _BITS,
    )
    report = run_vllm(options, say)
    return finish(report, arguments, is_good=report.is_right)


BENCHES = {
    "engine": Bench(_add_engine_arguments, _engine),
    "coldstart": Bench(_add_coldstart_arguments, _coldstart),
    "profile": Bench(_add_profile_arguments, _profile),
    "cores": Bench(_add_cores_arguments, _cores),
    "load": Bench(_add_load_arguments, _load),
    "vllm": Bench(_add_vllm_arguments, _vllm),
}
