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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from livescale.bench.engine_report import EngineReport, EngineRow, TokenCheck
from livescale.bench.errors import BenchError
from livescale.bench.line_process import LineProcess
from livescale.bench.machine import CpuShares
from livescale.bench.made_models import BenchShape, make_bench_model
from livescale.interpreter import SAFE_PATH, module_words

OURS = "livescale"
PEERS = Path(__file__).parent / "peers"

_REQUESTS_PER_STREAM = 4
_JUDGED_MAX = 8
_START_S = 600.0
_ROUND_S = 900.0
_KV_GIB = 1  # of vLLM: far more than the rounds need
# A token in bf16 may differ from fp32's; more than rounding explains is a wrong engine: twice the
# 0.1 standard deviations within which 99 % of the logits must stay.
_SHORTFALL_P99_STDS_MAX = 0.2


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
    weights_layout: str = "packed"
    seed: int = 0
    vllm_python: Path | None = None


def run_engines(options: EngineBenchOptions, say: Callable[[str], None]) -> EngineReport:
    """Play all rounds. Raises BenchError, also when our own tokens are wrong."""
    rows: list[EngineRow] = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
                directory = Path(scratch) / "model"
                make_bench_model(directory, shape, options.vocabulary, dtype)
                rows += _Contest(options, shape, dtype, directory, say).play()
    return EngineReport(tuple(rows), options.prompt_tokens, options.output_tokens, options.threads)


@dataclass(slots=True)
class _Contender:
    """An engine that is loaded, and what its counted rounds gave, per number in flight."""

    name: str
    process: LineProcess
    settings: str
    best: dict[int, str] = field(default_factory=dict)
    token_checks: list[TokenCheck] = field(default_factory=list)
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)
    ttft_ns: dict[int, list[int]] = field(default_factory=dict)
    others_cpu: dict[int, list[float]] = field(default_factory=dict)
    cores_used: dict[int, list[float]] = field(default_factory=dict)


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
            started = [(name, self._start(name, stack)) for name in self.options.engines]
            with ExitStack() as judging:
                judge = self._start("judge", judging)
                contenders = [self._ready(name, process) for name, process in started]
                judge.receive(_START_S)
                self._warm_up(contenders, judge)
            for repetition in range(1, self.options.repetitions + 1):
                for in_flight in self.options.in_flight:
                    prompts = self._prompts(repetition, in_flight)
                    for contender in contenders:
                        self._counted_round(contender, in_flight, prompts)
                self.say(f"  repetition {repetition} of {self.options.repetitions} is done")
            return list(self._rows(contenders))

    def _start(self, name: str, stack: ExitStack) -> LineProcess:
        words, environ = _command(name, self.options)
        process = stack.enter_context(LineProcess(name, words, environ))
        process.send(self._job())
        return process

    def _ready(self, name: str, process: LineProcess) -> _Contender:
        settings = process.receive(_START_S)["settings"]
        self.say(f"  {name} is ready: {settings}")
        return _Contender(name, process, settings)

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
            "packed_weights": options.weights_layout == "packed",
        }

    def _warm_up(self, contenders: list[_Contender], judge: LineProcess) -> None:
        """Play one round of each kind that does not count, and judge its tokens."""
        for in_flight in self.options.in_flight:
            prompts = self._prompts(0, in_flight)
            for contender in contenders:
                answer = self._ask(contender, in_flight, prompts)
                contender.best[in_flight] = answer.get("settings", contender.settings)
                judged = {
                    "prompts": prompts[:_JUDGED_MAX],
                    "token_ids": answer["token_ids"][:_JUDGED_MAX],
                }
                check = TokenCheck(**judge.ask(judged, _ROUND_S))
                contender.token_checks.append(check)
                if contender.name == OURS and not _is_right(check):
                    raise BenchError(
                        f"{self.shape} {self.dtype}: our own tokens are wrong ({check})"
                    )

    def _counted_round(
        self, contender: _Contender, in_flight: int, prompts: list[list[int]]
    ) -> None:
        shares = CpuShares([contender.process.pid])
        answer = self._ask(contender, in_flight, prompts)
        tokens = sum(len(token_ids) for token_ids in answer["token_ids"])
        rate = tokens * 1_000_000_000 / answer["elapsed_ns"]
        contender.tokens_per_s.setdefault(in_flight, []).append(rate)
        contender.ttft_ns.setdefault(in_flight, []).extend(answer["ttft_ns"])
        contender.others_cpu.setdefault(in_flight, []).append(shares.others())
        contender.cores_used.setdefault(in_flight, []).append(shares.cores_used())

    def _ask(
        self, contender: _Contender, in_flight: int, prompts: list[list[int]]
    ) -> dict[str, Any]:
        job = {
            "in_flight": in_flight,
            "output_tokens": self.options.output_tokens,
            "prompts": prompts,
        }
        answer = contender.process.ask(job, _ROUND_S)
        lengths = {len(token_ids) for token_ids in answer["token_ids"]}
        if lengths != {self.options.output_tokens}:
            raise BenchError(
                f"{contender.name} answered with {sorted(lengths)} tokens per request instead of"
                f" {self.options.output_tokens}"
            )
        return answer

    def _prompts(self, repetition: int, in_flight: int) -> list[list[int]]:
        """Fresh in every round, so that no prefix cache can help; the same for all engines."""
        options = self.options
        rng = random.Random(f"{options.seed} {repetition} {in_flight}")
        return [
            [rng.randrange(2, options.vocabulary) for _ in range(options.prompt_tokens)]
            for _ in range(_REQUESTS_PER_STREAM * in_flight)
        ]

    def _rows(self, contenders: list[_Contender]) -> Iterator[EngineRow]:
        for in_flight in self.options.in_flight:
            for contender in contenders:
                yield EngineRow(
                    engine=contender.name,
                    dtype=self.dtype,
                    hidden=self.shape.hidden,
                    layers=self.shape.layers,
                    in_flight=in_flight,
                    tokens_per_s=tuple(contender.tokens_per_s[in_flight]),
                    ttft_ns=tuple(contender.ttft_ns[in_flight]),
                    settings=contender.best[in_flight],
                    token_check=contender.token_checks[self.options.in_flight.index(in_flight)],
                    cores_used=median(contender.cores_used[in_flight]),
                    others_cpu_max=max(contender.others_cpu[in_flight]),
                )


def _is_right(check: TokenCheck) -> bool:
    if check.shortfall_p99_stds is not None:
        return check.shortfall_p99_stds <= _SHORTFALL_P99_STDS_MAX
    return check.wrong == 0


# -- how each engine is started -------------------------------------------------------------------

_MODULES = {
    OURS: "livescale_engine",
    "transformers_generate": "transformers_generate",
    "transformers_cb": "transformers_batching",
    "judge": "judge",
}


def check_vllm_python(python: Path) -> None:
    """BenchError unless the interpreter is there and has vLLM."""
    words = [str(python), "-c", "import importlib.metadata as m; print(m.version('vllm'))"]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **SAFE_PATH},
        )
    except OSError as error:
        raise BenchError(f"--vllm-python {python}: cannot be run: {error.strerror}") from error
    if done.returncode:
        raise BenchError(f"--vllm-python {python} has no vLLM installed")


def _command(name: str, options: EngineBenchOptions) -> tuple[list[str], dict[str, str]]:
    threads = str(options.threads)
    environ = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if name != "vllm_cpu":
        return module_words(f"livescale.bench.peers.{_MODULES[name]}"), environ
    words = [*isolation(), str(options.vllm_python), str(PEERS / "vllm_offline.py")]
    return words, {**environ, **vllm_environment()}


def vllm_environment() -> dict[str, str]:
    """What vLLM's CPU build needs, and what keeps it off the network and out of home."""
    return {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "livescale-bench-vllm-cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine in the process that steps it: on few cores faster than a process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def isolation() -> list[str]:
    """Words before a command that keep whatever it listens on inside a network of its own (root
    only; elsewhere VLLM_HOST_IP must do)."""
    is_root = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if not is_root or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return []
    return ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$0" "$@"']
