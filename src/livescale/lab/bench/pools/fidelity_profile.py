"""What a simulation knows of a real pool: delays and rates, measured on it just before.

A calibration is a short run of its own: requests that are alone in the pool, then bursts that make
it grow. Everything is taken from its record and from the client's times; nothing is fitted to the
runs that are compared later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from livescale.config.pool import PoolConfig
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.pools.fidelity_figures import loads_of
from livescale.lab.bench.pools.fidelity_runs import ClientDelays, PlayedRun
from livescale.latency.models import OverheadLatency
from livescale.latency.roofline import RooflineLatency
from livescale.latency.table import TableLatency
from livescale.latency.work import LinearLatency, RunWork
from livescale.load.traces import TraceRow
from livescale.runtime.models.catalog import live_limits
from livescale.sim.base.config import SimConfig
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import LoadPhases, RequestLine, ScaleLine, StepLine
from livescale.values.types import Value, WorkerRef
from livescale.values.units import NS_PER_MS, NS_PER_S

Bare = LinearLatency | RooflineLatency | TableLatency

_LONE_PER_BURST, _LONE_PROMPT_TOKENS, _LONE_OUTPUT_TOKENS = 7, 64, 8
_PAUSE_NS = 50_000_000
_BURST_GAP_NS = 5 * NS_PER_S
BURSTS = 3
"""Of a calibration, where no flag says otherwise."""
_BURST_OUTPUT_TOKENS = 8


class PoolProfile(Value, frozen=True):
    """A pool as it was measured. Times are medians.

    `message_delay_ns` is half of the way from the gateway to the controller and back, with all
    that both do on it, for a request that finds none before it; the way to a worker is taken to
    be as long. A Run takes `run_overhead_ns`, and `token_overhead_ns` per token, longer than
    `latency` says: decodes of one sequence and Runs that are full show it. `step_gap_ns` lies
    between two steps of a busy controller. A receiver that has its order waits `load_setup_ns`, and
    then bytes come at `load_bytes_per_s`.
    """

    latency: Bare
    message_delay_ns: int
    run_overhead_ns: int
    token_overhead_ns: int
    step_gap_ns: int
    load_setup_ns: int
    load_bytes_per_s: int
    client: ClientDelays
    kv_blocks: int
    calibration_loads: int

    def as_json(self) -> dict[str, object]:
        figures = msgspec.to_builtins(self)
        assert isinstance(figures, dict)
        return figures

    def text(self) -> str:
        """For people."""
        return (
            f"profile   message {self.message_delay_ns / 1e6:.2f} ms, Run"
            f" +{self.run_overhead_ns / 1e6:.2f} ms +{self.token_overhead_ns / 1e3:.1f} us/token,"
            f" step gap {self.step_gap_ns / 1e6:.2f} ms,"
            f" client +{(median(self.client.intake_ns) + self.client.delivery_ns) / 1e6:.2f} ms\n"
            f"          a load begins after {self.load_setup_ns / 1e6:.1f} ms and gets"
            f" {self.load_bytes_per_s / 1e6:.2f} MB/s ({self.calibration_loads} loads);"
            f" {self.kv_blocks} KV blocks"
        )


def calibration_rows(latency: Bare, config: PoolConfig, bursts: int) -> list[TraceRow]:
    """Lone requests, seven for every burst, then bursts of so many prompts that the pool grows to
    all its workers."""
    lone = RunWork(((_LONE_PROMPT_TOKENS, 0),), sampled=1)
    decode = RunWork((), 1, _LONE_PROMPT_TOKENS + _LONE_OUTPUT_TOKENS, 1)
    alone_ns = latency.run_ns(lone) + _LONE_OUTPUT_TOKENS * latency.run_ns(decode) + _PAUSE_NS
    lone_count = bursts * _LONE_PER_BURST
    rows = [
        TraceRow(number * alone_ns, _LONE_PROMPT_TOKENS, _LONE_OUTPUT_TOKENS)
        for number in range(lone_count)
    ]
    # As full as Runs get: prompts of two such requests fill one.
    prompt_ns = latency.run_ns(RunWork(((2 * _LONE_PROMPT_TOKENS, 0),), sampled=2)) // 2
    backlog_ns = config.prefill_queue_upper_ms * NS_PER_MS
    count = -(-2 * config.workers * backlog_ns // prompt_ns)
    for burst in range(bursts):
        at_ns = lone_count * alone_ns + burst * _BURST_GAP_NS
        rows += [TraceRow(at_ns, _LONE_PROMPT_TOKENS, _BURST_OUTPUT_TOKENS)] * count
    return rows


def measure_profile(run: PlayedRun, latency: Bare, config: PoolConfig, bursts: int) -> PoolProfile:
    """The profile of the pool that played `calibration_rows`. Raises BenchError when it never
    grew."""
    lines = {line.request: line for line in run.lines if isinstance(line, RequestLine)}
    timings = run.timings[: bursts * _LONE_PER_BURST]
    alone = [(timing, lines.pop(timing.request)) for timing in timings]
    overhead_ns, token_overhead_ns = _run_overheads_ns(
        alone=[line for _, line in alone],
        bursts=list(lines.values()),
        latency=latency,
        run_tokens_max=config.run_tokens_max,
    )
    asked_ns = [line.dispatched_ns - line.queued_ns for _, line in alone if line.dispatched_ns]
    delay_ns = _median(asked_ns) // 2
    rates = list(_rates(run))
    if not rates:
        raise BenchError("the pool did not grow while it was calibrated")
    rate = _median(rates)
    layer_ns = _layer_bytes(run)[0] * NS_PER_S // rate
    setup_ns = _median(list(_first_layers_ns(run))) - layer_ns
    return PoolProfile(
        latency=latency,
        message_delay_ns=delay_ns,
        run_overhead_ns=overhead_ns,
        token_overhead_ns=token_overhead_ns,
        step_gap_ns=_step_gap_ns(run, config.step_gap_us * 1000),
        load_setup_ns=max(0, setup_ns - 2 * delay_ns),
        load_bytes_per_s=rate,
        client=ClientDelays(
            tuple(sorted(line.queued_ns - timing.scheduled_ns for timing, line in alone)),
            _spacing_ns(list(lines.values())),
            _median([timing.token_ns[0] - line.token_ns[0] for timing, line in alone]),
        ),
        kv_blocks=read_history(run.lines).measured[0].kv_blocks,
        calibration_loads=len(rates),
    )


def simulated_pool(run: PlayedRun, config: PoolConfig, profile: PoolProfile) -> SimConfig:
    """The world of that very pool: the controller's configuration is the one in its record,
    devices and delays are the profile's. The rate of prefills is left to be measured, as in every
    real run: it is that of the first prompt, and each load has another one."""
    rate = profile.load_bytes_per_s
    wait_s = config.queue_timeout_s
    return SimConfig(
        controller=run.controller,
        devices=tuple(
            msgspec.structs.replace(device, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate)
            for device in run.devices
        ),
        latency={
            "": OverheadLatency(profile.latency, profile.run_overhead_ns, profile.token_overhead_ns)
        },
        kv_blocks=profile.kv_blocks,
        block_tokens=config.block_tokens,
        run_tokens_max=config.run_tokens_max,
        oldest_prompt_percent=config.oldest_prompt_percent,
        growth_tokens=config.growth_tokens,
        queue_requests_max=config.queue_requests_max,
        queue_prompt_tokens_max=config.queue_prompt_tokens_max,
        queue_timeout_ns=wait_s * NS_PER_S if wait_s is not None else None,
        step_gap_ns=profile.step_gap_ns,
        message_delay_ns=profile.message_delay_ns,
        group_setup_ns=profile.load_setup_ns,
        live=live_limits(config),
        resident_bytes=config.resident_bytes,
        stall_ns=config.stall_ms * NS_PER_MS,
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _first_layers_ns(run: PlayedRun) -> Iterator[int]:
    """From the decision to the first layer, of loads that come from what was whole. One that
    follows another load waits for that one's chunks, too: the simulator does so by itself."""
    for event, load in _calibration_loads(run):
        followed = {str(other.worker) for other in event.loads}
        if load.first_layer_ns is not None and load.upstream not in followed:
            yield load.first_layer_ns - event.decided_ns


def _rates(run: PlayedRun) -> Iterator[int]:
    """Of each load the bytes per second from its first layer on: what came before that waited for
    the first byte."""
    rest_bytes = sum(_layer_bytes(run)[1:])
    for _, load in _calibration_loads(run):
        if load.first_layer_ns is not None and load.loaded_ns is not None:
            yield rest_bytes * NS_PER_S // max(1, load.loaded_ns - load.first_layer_ns)


def _calibration_loads(run: PlayedRun) -> Iterable[tuple[ScaleLine, LoadPhases]]:
    return loads_of(run.reported("calibration", "5x-mean"))


def _layer_bytes(run: PlayedRun) -> tuple[int, ...]:
    return run.controller.models[0].spec.layer_bytes


def _run_overheads_ns(
    alone: Sequence[RequestLine], bursts: Sequence[RequestLine], latency: Bare, run_tokens_max: int
) -> tuple[int, int]:
    """What Runs take beyond the model: each, and per token."""
    context = _LONE_PROMPT_TOKENS + _LONE_OUTPUT_TOKENS // 2
    decode_ns = latency.run_ns(RunWork((), 1, context, 1))
    gap_ns = _median([b - a for line in alone for a, b in pairwise(line.token_ns)])
    prompts = run_tokens_max // _LONE_PROMPT_TOKENS
    full_ns = latency.run_ns(RunWork(((_LONE_PROMPT_TOKENS, 0),) * prompts, sampled=prompts))
    times: dict[WorkerRef | None, list[int]] = {}
    for line in bursts:
        times.setdefault(line.worker, []).extend(line.token_ns)
    gaps = [b - a for came in times.values() for a, b in pairwise(sorted(came))]
    # In a burst most Runs are full: the median of those that may be is that of full ones.
    full = [gap for gap in gaps if full_ns * 3 // 4 <= gap <= full_ns * 3]
    base_ns = max(0, gap_ns - decode_ns)
    more_ns = max(0, _median(full) - full_ns - base_ns) if full else 0
    return base_ns, more_ns // (prompts * _LONE_PROMPT_TOKENS)


def _spacing_ns(bursts: Sequence[RequestLine]) -> int:
    """Between requests that were sent at once."""
    queued = sorted(line.queued_ns for line in bursts)
    return _median([b - a for a, b in pairwise(queued) if b - a < _BURST_GAP_NS // 2])


def _median(values: Sequence[int]) -> int:
    return round(median(values))


def _step_gap_ns(run: PlayedRun, configured_ns: int) -> int:
    """Of steps that were put off because the one before was too close; as configured if there are
    none."""
    times = [line.now_ns for line in run.lines if isinstance(line, StepLine)]
    gaps = [b - a for a, b in pairwise(times) if configured_ns <= b - a < 2 * configured_ns]
    return _median(gaps) if gaps else configured_ns
