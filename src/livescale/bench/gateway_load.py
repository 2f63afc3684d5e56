"""`bench gateway`: what the gateway adds to every token, with workers that only wait.

The pool is real (controller, gateway, worker processes, sockets), only its executors are timed: a
Run takes exactly `step_ns`, so whatever a stream sees beyond that was added on the way.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from livescale.bench.errors import BenchError
from livescale.bench.line_process import bench_process
from livescale.bench.made_models import gauge_comes_to, pool_config, target_of
from livescale.config.pool import PoolConfig
from livescale.engine.make import PRESETS, make_model
from livescale.runtime.supervisor import Pool

_MODEL = "timed"
_PRESET = "tiny"
_WAIT_S = 60.0
_BLOCK_TOKENS = 16
# Descriptors besides one per stream: wires, pipes, files.
_OTHER_DESCRIPTORS = 256
_LOAD_BUSY = 0.8


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """What is run."""

    streams: int = 1000
    stalled: int = 0
    workers: int = 4
    step_ms: int = 100
    prompt_tokens: int = 64
    output_tokens: int = 64
    seconds: float = 20.0
    ramp_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What was seen from outside and in the gateway's accounts. `seen` is the load's own report."""

    options: GatewayBenchOptions
    seen: dict[str, Any]

    @property
    def tokens(self) -> float:
        tokens: float = self.seen["events"] * self.seen["tokens_per_event"]
        return tokens

    def as_json(self) -> dict[str, object]:
        options, seen = self.options, self.seen
        step_ns = options.step_ms * 1_000_000
        figures: dict[str, object] = {
            "streams": options.streams,
            "streams_held": seen["streams_held"],
            "stalled": options.stalled,
            "workers": options.workers,
            "step_ms": options.step_ms,
            "seconds": seen["elapsed_s"],
            "requests_per_s": seen["requests"] / seen["elapsed_s"],
            "tokens_per_s": self.tokens / seen["elapsed_s"],
            "tokens_per_event": seen["tokens_per_event"],
            "gateway_cpu_us_per_token": seen["gateway_cpu_s"] * 1e6 / max(self.tokens, 1),
            "gateway_cpu_share": seen["gateway_cpu_s"] / seen["elapsed_s"],
            "load_cpu_share": seen["load_cpu_s"] / seen["elapsed_s"],
            "gateway_rss_before_bytes": seen["rss_before_bytes"],
            "gateway_rss_after_bytes": seen["rss_after_bytes"],
            "errors": seen["errors"],
        }
        for name, of in (("added_gap_ms", "gap_ns"), ("added_ttft_ms", "ttft_ns")):
            if of in seen:
                figures[name] = {at: (ns - step_ns) / 1e6 for at, ns in seen[of].items()}
        return figures

    def text(self) -> str:
        figures: dict[str, Any] = self.as_json()
        grown = figures["gateway_rss_after_bytes"] - figures["gateway_rss_before_bytes"]
        lines = [
            f"streams held     {figures['streams_held']} of {self.options.streams}"
            + (f", beside {self.options.stalled} that never read" if self.options.stalled else ""),
            f"requests         {figures['requests_per_s']:.1f} per second",
            f"tokens           {figures['tokens_per_s']:.0f} per second,"
            f" {figures['tokens_per_event']:.2f} per event",
            f"gap added        {_percentiles(figures, 'added_gap_ms')}"
            f" to a step of {self.options.step_ms} ms",
            f"TTFT added       {_percentiles(figures, 'added_ttft_ms')} to one step",
            f"gateway CPU      {figures['gateway_cpu_us_per_token']:.0f} us per token,"
            f" {figures['gateway_cpu_share']:.0%} of a core",
            f"gateway memory   {figures['gateway_rss_before_bytes'] / 1e6:.0f} MB before,"
            f" {grown / 1e6:+.0f} MB under load",
            f"load generator   {figures['load_cpu_share']:.0%} of a core",
        ]
        if figures["load_cpu_share"] > _LOAD_BUSY:
            lines.append("The load generator was nearly busy: added times are partly its own.")
        lines += [f"error            {error}" for error in figures["errors"]]
        return "\n".join(lines)


def run_gateway(options: GatewayBenchOptions, say: Callable[[str], None]) -> GatewayReport:
    """Start a pool, play the load, stop it. Raises BenchError when no stream got a token."""
    _allow_descriptors(options.streams + options.stalled + _OTHER_DESCRIPTORS)
    with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
        make_model(Path(scratch) / _MODEL, _PRESET)
        config = _config(Path(scratch), options)
        say(f"pool: {options.workers} timed workers, a Run takes {options.step_ms} ms; starting …")
        seen = asyncio.run(_play(config, options, say))
    if not seen["events"]:
        raise BenchError(f"no token came: {'; '.join(seen['errors']) or 'and no error'}")
    return GatewayReport(options, seen)


# -- helpers, in the order used -------------------------------------------------------------------


def _percentiles(figures: dict[str, Any], name: str) -> str:
    if name not in figures:
        return "not measured"
    return f"{figures[name]['p50']:.2f} ms (p50), {figures[name]['p99']:.2f} ms (p99)"


def _allow_descriptors(wanted: int) -> None:
    """Raise the limit on open files for this process and its children. Raises BenchError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchError(f"{wanted} open files are needed, the hard limit is {hard} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _config(scratch: Path, options: GatewayBenchOptions) -> PoolConfig:
    """Every stream fits at once, and all its prompt is one Run: a step has one length."""
    per_worker = -(-(options.streams + options.stalled) // options.workers)
    # The router may put more on one instance than on another.
    sequences_max = 2 * per_worker
    model_tokens_max = PRESETS[_PRESET].model_tokens_max
    blocks = sequences_max * -(-model_tokens_max // _BLOCK_TOKENS)
    model = {
        "path": str(scratch / _MODEL),
        "min_replicas": options.workers,
        "prefill_tokens_per_s": 1 << 30,
    }
    settings = {
        "port": 0,
        "device": "timed",
        "timed_run_us": options.step_ms * 1000,
        "timed_token_us": 0,
        "workers": options.workers,
        "arena_bytes": 8 << 20,
        # Counted, not allocated: 1 KiB per token is more than the model needs.
        "kv_bytes": blocks * _BLOCK_TOKENS * 1024,
        "block_tokens": _BLOCK_TOKENS,
        "sequences_max": sequences_max,
        "run_tokens_max": sequences_max * options.prompt_tokens,
        "dispatched_ahead_max": min(4096, sequences_max),
        "queue_requests_max": options.streams + options.stalled,
    }
    return pool_config(scratch, [model], settings)


async def _play(
    config: PoolConfig, options: GatewayBenchOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    serving = f'livescale_instances{{model="{_MODEL}",state="serving"}}'
    async with Pool(config) as pool:
        await pool.ready()
        if not await pool.or_failure(
            gauge_comes_to(pool, serving, lambda count: count == options.workers, _WAIT_S)
        ):
            raise BenchError(
                f"the pool did not grow to {options.workers} instances within {_WAIT_S:.0f} s"
            )
        say(f"ready: {options.streams} streams for {options.seconds:g} s …")
        return await pool.or_failure(asyncio.to_thread(_load, pool, options))


def _load(pool: Pool, options: GatewayBenchOptions) -> dict[str, Any]:
    job = {
        **asdict(options),
        **target_of(pool),
        "gateway_pid": pool.pids()["gateway"],
        # As long as the model allows: it is still generating when everything is over.
        "stalled_tokens": PRESETS[_PRESET].model_tokens_max - options.prompt_tokens,
    }
    with bench_process("the load generator", "peers.stream_load") as process:
        process.ask({}, _WAIT_S)
        return process.ask(job, options.seconds + options.ramp_s + 3 * _WAIT_S)
