"""The same prompts through LiveScale with one vLLM worker and through plain `vllm serve`, in turns.

Each server has started before any round counts, and one works at a time. A round keeps a number of
requests in flight until all are answered; no prompt comes twice. The first round of each kind warms
up, and its tokens are compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from livescale.config.slo import percentile
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.made_models import make_bench_model, pool_config
from livescale.lab.bench.engines.engine_report import spread
from livescale.lab.bench.engines.engines import random_prompts
from livescale.lab.bench.engines.vllm_options import BLOCK_TOKENS, VllmBenchOptions, vllm_settings
from livescale.lab.bench.engines.vllm_plain import PlainServer
from livescale.report.run.terminal import table
from livescale.runtime.supervisor.supervisor import Pool

OURS, PLAIN, DEFAULTS = "livescale", "vllm serve", "vllm serve, its defaults"
_MODEL = "bench"
_REQUESTS_PER_STREAM = 4
_ALONE_REQUESTS, _ALONE_TOKENS_MAX = 24, 8
"""One after the other, for TTFT that no other request adds to: short answers, and more of them."""
_KV_BYTES = 256 << 20
_RUN_TOKENS_MAX = 512
_SEQUENCES_MAX = 64
_ROUND_S = 900.0


@dataclass(frozen=True, slots=True)
class _Server:
    """Where requests go, and whose CPU time is counted."""

    name: str
    host: str
    port: int
    pids: tuple[int, ...]


@dataclass(slots=True)
class ServingRow:
    """One server with one number of requests in flight: lists have an entry per counted round,
    `ttft_ns` one per request."""

    server: str
    in_flight: int
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    ttft_ns: list[int] = field(default_factory=list)
    cores_used: list[float] = field(default_factory=list)
    others_cpu: list[float] = field(default_factory=list)
    requests: int = 0
    lost: int = 0
    errors: list[str] = field(default_factory=list)
    #: of the round that did not count
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(self.tokens_per_s)

    @property
    def ttft_p50_ms(self) -> float:
        return percentile(self.ttft_ns, 50) / 1e6

    def as_json(self) -> dict[str, object]:
        return {
            "server": self.server,
            "concurrency": self.in_flight,
            "tokens_per_s": spread(self.tokens_per_s),
            "tokens_per_cpu_s": median(self.tokens_per_cpu_s),
            "cores_used": median(self.cores_used),
            "others_cpu_max": max(self.others_cpu),
            "ttft_ms": {"p50": self.ttft_p50_ms, "p99": percentile(self.ttft_ns, 99) / 1e6},
            "requests": self.requests,
            "lost": self.lost,
            "errors": self.errors[:3],
        }


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """All rows."""

    rows: tuple[ServingRow, ...]
    streams: int

    def row(self, server: str, in_flight: int) -> ServingRow | None:
        found = (r for r in self.rows if (r.server, r.in_flight) == (server, in_flight))
        return next(found, None)

    def ratio(self, to: str, in_flight: int) -> float | None:
        """Our median rate over another server's: of rounds that were played in turns."""
        ours, other = self.row(OURS, in_flight), self.row(to, in_flight)
        return None if ours is None or other is None else ours.rate / other.rate

    def mismatches(self) -> int:
        """Tokens of ours that are not plain vLLM's."""
        found = 0
        for in_flight in (1, self.streams):
            ours, plain = self.row(OURS, in_flight), self.row(PLAIN, in_flight)
            assert ours is not None, OURS
            assert plain is not None, PLAIN
            for own, right in zip(ours.token_ids, plain.token_ids, strict=True):
                found += _differ(own, right)
        return found

    def added_ttft_ms(self, in_flight: int) -> float:
        ours, plain = self.row(OURS, in_flight), self.row(PLAIN, in_flight)
        assert ours is not None, OURS
        assert plain is not None, PLAIN
        return ours.ttft_p50_ms - plain.ttft_p50_ms

    def figures(self) -> dict[str, object]:
        found: dict[str, object] = {
            "throughput_ratio_to_plain": self.ratio(PLAIN, self.streams),
            "added_ttft_ms": self.added_ttft_ms(1),
            "added_ttft_ms_under_load": self.added_ttft_ms(self.streams),
            "token_mismatches": self.mismatches(),
            "lost": sum(row.lost for row in self.rows if row.server == OURS),
        }
        to_defaults = self.ratio(DEFAULTS, self.streams)
        if to_defaults is not None:
            found["throughput_ratio_to_defaults"] = to_defaults
        return found

    def details(self) -> object:
        return {"streams": self.streams, "rows": [row.as_json() for row in self.rows]}

    def text(self) -> str:
        header = ("server", "in flight", "tokens/s", "ours/it", "per CPU-s", "TTFT ms", "others")
        rows = [
            (
                row.server,
                row.in_flight,
                row.rate,
                None if row.server == OURS else self.ratio(row.server, row.in_flight),
                median(row.tokens_per_cpu_s),
                row.ttft_p50_ms,
                f"{max(row.others_cpu):.0%}",
            )
            for row in self.rows
        ]
        figures = self.figures()
        return "\n".join(
            (
                table(header, rows),
                f"TTFT added {self.added_ttft_ms(1):+.2f} ms alone,"
                f" {self.added_ttft_ms(self.streams):+.2f} ms under load;"
                f" {figures['lost']} requests lost, {figures['token_mismatches']} tokens that are"
                " not plain vLLM's",
            )
        )


def measure_serving(
    options: VllmBenchOptions, scratch: Path, say: Callable[[str], None]
) -> ServingFigures:
    """Raises BenchError, and PoolFailed."""
    directory = scratch / _MODEL
    make_bench_model(directory, options.shape, options.vocabulary, options.dtype)
    return asyncio.run(_serve(options, scratch, directory, say))


# -- helpers, in the order used -------------------------------------------------------------------


async def _serve(
    options: VllmBenchOptions, scratch: Path, directory: Path, say: Callable[[str], None]
) -> ServingFigures:
    settings = vllm_settings(options) | {
        "arena_bytes": _arena_bytes(directory),
        "kv_bytes": _KV_BYTES,
        "run_tokens_max": _RUN_TOKENS_MAX,
        "sequences_max": _SEQUENCES_MAX,
        "dispatched_ahead_max": _SEQUENCES_MAX,
        "host_memory_bytes": 0,
    }
    config = pool_config(scratch, [{"path": str(directory), "name": _MODEL}], settings)
    with ExitStack() as stack:
        # They start beside one another; once they have, one works at a time.
        plain = [stack.enter_context(server) for server in _plain(options, directory)]
        load = stack.enter_context(bench_process("the load", "peers.completion_rounds"))
        load.ask({}, _ROUND_S)
        async with Pool(config) as pool:
            await pool.ready()
            for server in plain:
                await pool.or_failure(asyncio.to_thread(server.ready))
            address = urlsplit(pool.base_url)
            assert address.hostname is not None
            assert address.port is not None
            ours = _Server(OURS, address.hostname, address.port, tuple(pool.pids().values()))
            servers = [ours, *(_Server(s.name, s.host, s.port, s.pids) for s in plain)]
            say(f"  {', '.join(server.name for server in servers)} are ready")
            rounds = _Rounds(options, servers, load, say)
            return await pool.or_failure(asyncio.to_thread(rounds.play))


def _plain(options: VllmBenchOptions, directory: Path) -> list[PlainServer]:
    same = (
        *("--dtype", options.dtype, "--seed", "0", "--generation-config", "vllm"),
        *("--kv-cache-memory-bytes", str(_KV_BYTES), "--block-size", str(BLOCK_TOKENS)),
        *("--max-num-seqs", str(_SEQUENCES_MAX)),
        *("--max-num-batched-tokens", str(_RUN_TOKENS_MAX)),
        *("--enforce-eager", "--no-async-scheduling", "--enable-prefix-caching"),
        "--disable-log-stats",
    )
    arguments: list[tuple[str, tuple[str, ...], dict[str, str]]] = [(PLAIN, same, {})]
    if options.has_defaults:
        of_kv = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        arguments.append((DEFAULTS, ("--dtype", options.dtype), of_kv))
    return [
        PlainServer(name, options.vllm_python, directory, flags, options.threads, environ)
        for name, flags, environ in arguments
    ]


class _Rounds:
    """All rounds, over the same prompts."""

    def __init__(
        self,
        options: VllmBenchOptions,
        servers: Sequence[_Server],
        load: LineProcess,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._servers = servers
        self._load = load
        self._say = say

    def play(self) -> ServingFigures:
        streams = self._options.streams
        numbers = tuple(dict.fromkeys((1, streams)))
        rows = {(s.name, n): ServingRow(s.name, n) for n in numbers for s in self._servers}
        for repetition in range(self._options.repetitions + 1):
            for in_flight in numbers:
                prompts = self._prompts(repetition, in_flight)
                # Not always after the same one.
                first = repetition % len(self._servers)
                for server in [*self._servers[first:], *self._servers[:first]]:
                    row = rows[server.name, in_flight]
                    self._round(server, row, prompts, counts=repetition > 0)
            if repetition:
                self._say(f"  repetition {repetition} of {self._options.repetitions} is done")
        return ServingFigures(tuple(rows.values()), streams)

    def _round(
        self, server: _Server, row: ServingRow, prompts: list[list[int]], *, counts: bool
    ) -> None:
        tokens = self._options.output_tokens
        if row.in_flight == 1:
            tokens = min(tokens, _ALONE_TOKENS_MAX)
        job = {
            "host": server.host,
            "port": server.port,
            "model": _MODEL,
            "in_flight": row.in_flight,
            "output_tokens": tokens,
            "prompts": prompts,
            "patience_s": _ROUND_S / 2,
        }
        shares = CpuShares([*server.pids, self._load.pid])
        own = CpuShares(server.pids)
        answer = self._load.ask(job, _ROUND_S)
        row.requests += len(prompts)
        row.lost += sum(len(token_ids) != tokens for token_ids in answer["token_ids"])
        row.errors += answer["errors"]
        if counts:
            self._count(row, answer, own.cores_used(), shares.others())
        else:
            row.token_ids = answer["token_ids"]

    def _count(self, row: ServingRow, answer: dict[str, Any], cores: float, others: float) -> None:
        rate = sum(map(len, answer["token_ids"])) * 1_000_000_000 / answer["elapsed_ns"]
        row.tokens_per_s.append(rate)
        row.tokens_per_cpu_s.append(rate / max(cores, 1e-9))
        row.ttft_ns += answer["ttft_ns"]
        row.cores_used.append(cores)
        row.others_cpu.append(others)

    def _prompts(self, repetition: int, in_flight: int) -> list[list[int]]:
        options = self._options
        rng = random.Random(f"{options.seed} {repetition} {in_flight}")
        count = _ALONE_REQUESTS if in_flight == 1 else _REQUESTS_PER_STREAM * in_flight
        return random_prompts(rng, count, options.prompt_tokens, options.vocabulary)


def _differ(own: Sequence[int], right: Sequence[int]) -> int:
    """Tokens from the first one on that differs."""
    pairs = enumerate(zip(own, right, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(own), len(right)))
    return max(len(own), len(right)) - same


def _arena_bytes(directory: Path) -> int:
    size_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return size_bytes + size_bytes // 8
