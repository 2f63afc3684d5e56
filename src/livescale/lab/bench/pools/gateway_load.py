"""`bench gateway`: what the gateway adds to every token, with workers that only wait.

The pool is real (controller, gateway, worker processes, sockets), only its executors are timed: a
Run takes exactly `step_ns`, so whatever a stream sees beyond that was added on the way: by the
worker between two Runs, which is all that the mean gap of an answer has, because what delays one
token on its way is not in the gap behind; and by the gateway. In the same
run another process sends as many bytes to as many streams with nothing but `socket.send`: what the
system itself takes for a token.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from livescale.config.pool import PoolConfig
from livescale.engine.files.make import PRESETS, make_model
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import bench_process
from livescale.lab.bench.base.made_models import gauge_comes_to, pool_config, target_of
from livescale.runtime.supervisor.supervisor import Pool

_MODEL = "timed"
PRESET = "tiny"
_WAIT_S = 60.0
_BLOCK_TOKENS = 16
# Descriptors besides one per stream: wires, pipes, files.
_OTHER_DESCRIPTORS = 256
_LOAD_BUSY = 0.8
_SENDS_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """What is run."""

    streams: int = 1000
    stalled: int = 0
    workers: int = 4
    gateways: int = 1
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

    @property
    def cpu_us_per_token(self) -> float:
        used_s: float = self.seen["gateway_cpu_s"]
        return used_s * 1e6 / max(self.tokens, 1)

    @property
    def send_cpu_us(self) -> float:
        """Of one `socket.send`, in the same run."""
        used_s: float = self.seen["send_cpu_s"]
        sends: int = self.seen["sends"]
        return used_s * 1e6 / sends

    def as_json(self) -> dict[str, object]:
        options, seen = self.options, self.seen
        step_ns = options.step_ms * 1_000_000
        figures: dict[str, object] = {
            "streams": options.streams,
            "streams_held": seen["streams_held"],
            "stalled": options.stalled,
            "workers": options.workers,
            "gateways": options.gateways,
            "step_ms": options.step_ms,
            "seconds": seen["elapsed_s"],
            "requests_per_s": seen["requests"] / seen["elapsed_s"],
            "tokens_per_s": self.tokens / seen["elapsed_s"],
            "tokens_per_event": seen["tokens_per_event"],
            "gateway_cpu_us_per_token": self.cpu_us_per_token,
            "send_cpu_us": self.send_cpu_us,
            "gateway_cpu_in_sends": self.cpu_us_per_token / self.send_cpu_us,
            "gateway_cpu_share": seen["gateway_cpu_s"] / seen["elapsed_s"],
            "load_cpu_share": seen["load_cpu_s"] / seen["elapsed_s"],
            "gateway_rss_before_bytes": seen["rss_before_bytes"],
            "gateway_rss_after_bytes": seen["rss_after_bytes"],
            "gateway_bytes_per_stream": (seen["rss_after_bytes"] - seen["rss_before_bytes"])
            / (options.streams + options.stalled),
            "errors": seen["errors"],
            **_share_figures(seen),
        }
        for name, of in (
            ("added_gap_ms", "gap_ns"),
            ("added_mean_gap_ms", "steps_ns"),
            ("added_ttft_ms", "ttft_ns"),
        ):
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
            f"  mean of answers {_percentiles(figures, 'added_mean_gap_ms')}:"
            " what a worker needs between two Runs",
            f"TTFT added       {_percentiles(figures, 'added_ttft_ms')} to one step",
            f"gateway CPU      {figures['gateway_cpu_us_per_token']:.1f} us per token,"
            f" {figures['gateway_cpu_share']:.0%} of a core",
            f"a plain send     {figures['send_cpu_us']:.1f} us of CPU; a token takes the gateway"
            f" {figures['gateway_cpu_in_sends']:.1f} times as much",
            f"gateway memory   {figures['gateway_rss_before_bytes'] / 1e6:.0f} MB before,"
            f" {grown / 1e6:+.0f} MB under load,"
            f" {figures['gateway_bytes_per_stream'] / 1e3:.0f} kB a stream",
            *_share_lines(figures),
            f"load generator   {figures['load_cpu_share']:.0%} of a core",
        ]
        if figures["load_cpu_share"] > _LOAD_BUSY:
            lines.append("The load generator was nearly busy: added times are partly its own.")
        lines += [f"error            {error}" for error in figures["errors"]]
        return "\n".join(lines)


def run_gateway(options: GatewayBenchOptions, say: Callable[[str], None]) -> GatewayReport:
    """Start a pool, play the load, stop it. Raises BenchError when no stream got a token, or none
    an answer to its end."""
    allow_descriptors(options.streams + options.stalled + _OTHER_DESCRIPTORS)
    with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
        make_model(Path(scratch) / _MODEL, PRESET)
        config = _config(Path(scratch), options)
        say(f"pool: {options.workers} timed workers, a Run takes {options.step_ms} ms; starting …")
        seen = asyncio.run(_play(config, options, say))
    if not seen["events"]:
        raise BenchError(f"no token came: {'; '.join(seen['errors']) or 'and no error'}")
    if not seen["tokens_per_event"]:
        raise BenchError(
            "no answer ended, so that tokens are not known: give more --seconds, or fewer"
            " --output-tokens"
        )
    return GatewayReport(options, seen)


def allow_descriptors(wanted: int) -> None:
    """Raise the limit on open files for this process and its children. Raises BenchError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchError(f"{wanted} open files are needed, the hard limit is {hard} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def timed_pool(directory: Path, options: GatewayBenchOptions) -> tuple[dict[str, object], ...]:
    """Keys of the model in this directory, and settings of its pool: every stream fits at once, and
    all its prompt is one Run, so a step has one length."""
    per_worker = -(-(options.streams + options.stalled) // options.workers)
    # The router may put more on one instance than on another.
    sequences_max = 2 * per_worker
    model_tokens_max = PRESETS[PRESET].model_tokens_max
    blocks = sequences_max * -(-model_tokens_max // _BLOCK_TOKENS)
    model: dict[str, object] = {
        "path": str(directory),
        "min_replicas": options.workers,
        "prefill_tokens_per_s": 1 << 30,
    }
    settings: dict[str, object] = {
        "device": "timed",
        "timed_run_us": options.step_ms * 1000,
        "timed_token_us": 0,
        "arena_bytes": 8 << 20,
        # Counted, not allocated: 1 KiB per token is more than the model needs.
        "kv_bytes": blocks * _BLOCK_TOKENS * 1024,
        "block_tokens": _BLOCK_TOKENS,
        "sequences_max": sequences_max,
        "run_tokens_max": sequences_max * options.prompt_tokens,
        "dispatched_ahead_max": min(4096, sequences_max),
        "queue_requests_max": options.streams + options.stalled,
    }
    return model, settings


# -- helpers, in the order used -------------------------------------------------------------------


def _percentiles(figures: dict[str, Any], name: str) -> str:
    if name not in figures:
        return "not measured"
    return f"{figures[name]['p50']:.2f} ms (p50), {figures[name]['p99']:.2f} ms (p99)"


def _share_figures(seen: Mapping[str, Any]) -> dict[str, object]:
    """From the load's own report; what is worst among streams tells whether one was forgotten."""
    return {
        "by_gateway": list(seen["by_gateway"].values()),
        "events_per_stream": seen["events_per_stream"],
        "worst_gap_ms": {at: ns / 1e6 for at, ns in seen["worst_gap_ns"].items()},
    }


def _share_lines(figures: Mapping[str, Any]) -> list[str]:
    """What `_share_figures` has, for people."""
    events, gaps = figures["events_per_stream"], figures["worst_gap_ms"]
    lines = [
        f"of a stream      {events['min']} to {events['max']} events; its longest gap"
        f" {gaps['p50']:.0f} ms in the median, {gaps['max']:.0f} ms at most"
    ]
    if len(figures["by_gateway"]) > 1:
        total = sum(share["events"] for share in figures["by_gateway"])
        shares = [
            f"{share['streams']} streams with {share['events'] / max(total, 1):.1%} of the events"
            for share in figures["by_gateway"]
        ]
        lines.append(f"of a gateway     {'; '.join(shares)}")
    return lines


def _config(scratch: Path, options: GatewayBenchOptions) -> PoolConfig:
    model, settings = timed_pool(scratch / _MODEL, options)
    return pool_config(scratch, [model], _flags(settings, options))


def _flags(settings: dict[str, object], options: GatewayBenchOptions) -> dict[str, object]:
    counts = {"workers": options.workers, "gateways": options.gateways}
    if options.gateways > 1:
        # Gateways divide the places among them, and not all get the same number of streams.
        counts["queue_requests_max"] = options.gateways * (options.streams + options.stalled)
    return {**settings, "port": 0, **counts}


async def _play(
    config: PoolConfig, options: GatewayBenchOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    serving = f'livescale_instances{{model="{_MODEL}",role="unified",state="serving"}}'
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
        "gateway_pids": [pid for name, pid in pool.pids().items() if name.startswith("gateway")],
        # As long as the model allows: it is still generating when everything is over.
        "stalled_tokens": PRESETS[PRESET].model_tokens_max - options.prompt_tokens,
    }
    with bench_process("the load generator", "peers.stream_load") as process:
        process.ask({}, _WAIT_S)
        seen = process.ask(job, options.seconds + options.ramp_s + 3 * _WAIT_S)
    return {**seen, **_plain_sends(options, max(1, round(seen["event_bytes"])))}


def _plain_sends(options: GatewayBenchOptions, event_bytes: int) -> dict[str, Any]:
    """What the events' bytes cost a process that does nothing but send them."""
    job = {
        "streams": options.streams,
        "workers": options.workers,
        "step_ms": options.step_ms,
        "seconds": min(options.seconds, _SENDS_S_MAX),
        "event_bytes": event_bytes,
    }
    with (
        bench_process("the plain sender", "peers.plain_sends") as sender,
        bench_process("its reader", "peers.plain_sends") as reader,
    ):
        sender.ask({"sends": True}, _WAIT_S)
        reader.ask({"sends": False}, _WAIT_S)
        address = sender.ask({}, _WAIT_S)
        reader.send({**address, "streams": options.streams})
        sent = sender.ask(job, options.seconds + _WAIT_S)
        reader.receive(_WAIT_S)
    return {"send_cpu_s": sent["cpu_s"], "sends": sent["sends"]}
