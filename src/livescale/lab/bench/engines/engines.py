"""`bench engine`: the same prompts through several engines, in one run, taking turns.

Every engine has a process of its own and stays loaded; one works at a time. A round keeps a number
of requests in flight until four times as many are done. The first round of each kind is not
counted: it warms up, and its tokens are judged.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from livescale.common.interpreter import SAFE_PATH
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process, thread_environment
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.engines.engine_report import OURS, EngineReport, EngineRow, TokenCheck

PEERS = Path(__file__).parents[1] / "peers" / "engines"
PEERS_PATH = {"PYTHONPATH": str(PEERS.parent)}
"""Where a peer finds `line_server` under an interpreter that has no livescale."""


_REQUESTS_PER_STREAM = 4
_JUDGED_MAX = 8
_START_S = 600.0
_ROUND_S = 900.0
_KV_GIB = 1  # of vLLM: far more than the rounds need


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    """What is run. `engines` are names of `contenders`; the first is ours."""

    shapes: tuple[BenchShape, ...]
    dtypes: tuple[str, ...]
    engines: tuple[str, ...]
    in_flight: tuple[int, ...] = (1, 8, 32)
    vocabulary: int = 8192
    prompt_tokens: int = 64
    output_tokens: int = 64
    repetitions: int = 3
    threads: int = 2
    run_tokens_max: int = 512
    block_tokens: int = 16
    weights_layout: str = "auto"
    instructions: str = "native"
    seed: int = 0
    vllm_python: Path | None = None


def run_engines(options: EngineBenchOptions, say: Callable[[str], None]) -> EngineReport:
    """Play all rounds. Raises BenchError, also when our own tokens are wrong."""
    rows: list[EngineRow] = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            with made_model(shape, options.vocabulary, dtype) as directory:
                rows += _Contest(options, shape, dtype, directory, say).play()
    return EngineReport(
        tuple(rows),
        options.prompt_tokens,
        options.output_tokens,
        options.threads,
        options.instructions,
    )


@dataclass(slots=True)
class _Contest:
    """One shape and dtype: every engine loaded once, then round after round."""

    options: EngineBenchOptions
    shape: BenchShape
    dtype: str
    directory: Path
    say: Callable[[str], None]

    def play(self) -> list[EngineRow]:
        with ExitStack() as stack:
            # They load beside each other; once loaded, one works at a time. The judge is gone by
            # the time that rounds count.
            engines = {name: self._start(name, stack) for name in self.options.engines}
            with ExitStack() as judging:
                judge = self._start("judge", judging)
                settings = {name: self._settings(process) for name, process in engines.items()}
                judge.receive(_START_S)
                rows = list(self._warm_up(engines, settings, judge))
            for repetition in range(1, self.options.repetitions + 1):
                for in_flight in self.options.in_flight:
                    prompts = self._prompts(repetition, in_flight)
                    for row in rows:
                        if row.in_flight == in_flight:
                            self._counted_round(engines[row.engine], row, prompts)
                self.say(f"  repetition {repetition} of {self.options.repetitions} is done")
            for row in rows:
                if row.engine == OURS:
                    prompts = self._prompts(0, row.in_flight)
                    answer = self._ask(engines[OURS], row.in_flight, prompts, is_timed=True)
                    row.outside_share = answer.get("outside_share")
            return rows

    def _start(self, name: str, stack: ExitStack) -> LineProcess:
        process = stack.enter_context(_engine(name, self.options))
        process.send(self._job())
        return process

    def _settings(self, process: LineProcess) -> str:
        """Of an engine, when it is loaded."""
        settings: str = process.receive(_START_S)["settings"]
        self.say(f"  {process.name} is ready: {settings}")
        return settings

    def _job(self) -> dict[str, object]:
        options = self.options
        return {
            "directory": str(self.directory),
            "dtype": self.dtype,
            "threads": options.threads,
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.output_tokens,
            "in_flight_max": max(options.in_flight),
            "run_tokens_max": options.run_tokens_max,
            "block_tokens": options.block_tokens,
            "weights_layout": options.weights_layout,
            "instructions": options.instructions,
        }

    def _warm_up(
        self, engines: dict[str, LineProcess], settings: dict[str, str], judge: LineProcess
    ) -> Iterator[EngineRow]:
        """Play one round of each kind that does not count, and judge its tokens; the rows to be
        filled in."""
        for in_flight in self.options.in_flight:
            prompts = self._prompts(0, in_flight)
            for name, process in engines.items():
                answer = self._ask(process, in_flight, prompts)
                judged = {
                    "prompts": prompts[:_JUDGED_MAX],
                    "token_ids": answer["token_ids"][:_JUDGED_MAX],
                }
                check = TokenCheck(**judge.ask(judged, _ROUND_S))
                if name == OURS and not check.is_right:
                    raise BenchError(
                        f"{self.shape} {self.dtype}: our own tokens are wrong ({check})"
                    )
                yield EngineRow(
                    engine=name,
                    dtype=self.dtype,
                    hidden=self.shape.hidden,
                    layers=self.shape.layers,
                    in_flight=in_flight,
                    settings=answer.get("settings", settings[name]),
                    token_check=check,
                )

    def _counted_round(
        self, process: LineProcess, row: EngineRow, prompts: list[list[int]]
    ) -> None:
        shares = CpuShares([process.pid])
        answer = self._ask(process, row.in_flight, prompts)
        tokens = sum(len(token_ids) for token_ids in answer["token_ids"])
        row.tokens_per_s.append(tokens * 1_000_000_000 / answer["elapsed_ns"])
        row.ttft_ns += answer["ttft_ns"]
        row.others_cpu.append(shares.others())
        row.cores_used.append(shares.cores_used())

    def _ask(
        self,
        process: LineProcess,
        in_flight: int,
        prompts: list[list[int]],
        is_timed: bool = False,
    ) -> dict[str, Any]:
        job = {
            "is_timed": is_timed,
            "in_flight": in_flight,
            "output_tokens": self.options.output_tokens,
            "prompts": prompts,
        }
        answer = process.ask(job, _ROUND_S)
        lengths = {len(token_ids) for token_ids in answer["token_ids"]}
        if lengths != {self.options.output_tokens}:
            raise BenchError(
                f"{process.name} answered with {sorted(lengths)} tokens per request instead of"
                f" {self.options.output_tokens}"
            )
        return answer

    def _prompts(self, repetition: int, in_flight: int) -> list[list[int]]:
        """Fresh in every round, so that no prefix cache can help; the same for all engines."""
        options = self.options
        rng = random.Random(f"{options.seed} {repetition} {in_flight}")
        count = _REQUESTS_PER_STREAM * in_flight
        return random_prompts(rng, count, options.prompt_tokens, options.vocabulary)


def random_prompts(rng: random.Random, count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """So many, each of so many ids."""
    return [[rng.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(count)]


# -- how each engine is started -------------------------------------------------------------------

_MODULES = {
    OURS: "livescale_engine",
    "transformers_generate": "transformers_generate",
    "transformers_cb": "transformers_batching",
    "judge": "judge",
}


def package_version(flag: str, python: Path, package: str) -> str | None:
    """Of what an interpreter has installed (None: nothing). Raises BenchError, which names the
    flag, when it cannot be run."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **SAFE_PATH},
        )
    except OSError as error:
        raise BenchError(f"{flag} {python}: cannot be run: {error.strerror}") from error
    return None if done.returncode else done.stdout.strip()


def has_package(flag: str, python: Path, package: str) -> bool:
    """Whether an interpreter has the package installed. Raises BenchError, which names the flag,
    when it cannot be run."""
    return package_version(flag, python, package) is not None


def check_vllm_python(python: Path) -> None:
    """BenchError unless the interpreter is there and has vLLM."""
    if not has_package("--vllm-python", python, "vllm"):
        raise BenchError(f"--vllm-python {python} has no vLLM installed")


INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
    },
}
"""Environments in which libraries compute with these instructions alone. vLLM, which asks torch
what the CPU has, is answered so as well (`peers/engines/vllm_offline.py`)."""


def _engine(name: str, options: EngineBenchOptions) -> LineProcess:
    limits = INSTRUCTIONS[options.instructions]
    if name == "vllm_cpu":
        assert options.vllm_python is not None, "it was checked"
        return vllm_process(name, options.vllm_python, options.threads, limits)
    environ = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **limits}
    return bench_process(
        name, f"peers.engines.{_MODULES[name]}", threads=options.threads, environ=environ
    )


def vllm_process(
    name: str, python: Path, threads: int, limits: Mapping[str, str] = INSTRUCTIONS["native"]
) -> LineProcess:
    """vLLM's CPU build with what it needs, and what keeps it off the network and out of home."""
    # What vLLM compiles is of these instructions.
    cache = "livescale-bench-vllm-cache" + limits.get("ATEN_CPU_CAPABILITY", "")
    environ = {
        **limits,
        **thread_environment(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / cache),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine in the process that steps it: on few cores faster than a process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **PEERS_PATH,
    }
    return LineProcess(name, [*_isolation(), str(python), str(PEERS / "vllm_offline.py")], environ)


def _isolation() -> list[str]:
    """Words before a command that keep whatever it listens on inside a network of its own (root
    only; elsewhere VLLM_HOST_IP must do)."""
    is_root = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if not is_root or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return []
    return ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$0" "$@"']
