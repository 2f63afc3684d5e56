"""One load played against a pool, real or simulated, and the record that came of it.

The real pool is a whole one, with all its processes and sockets; the client is ours. What is
measured of a run lives in `fidelity_figures.py`, what a simulation knows in
`fidelity_profile.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np

from livescale.clusters.topology import Device
from livescale.config.pool import PoolConfig
from livescale.config.slo import RequestTiming, parse_slo, percentile
from livescale.control.state.config import ControllerConfig
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import gauge_comes_to
from livescale.lab.bench.base.pool_play import Acts, play_pool
from livescale.lab.client.replayer import lateness_ns
from livescale.load.traces import TraceRow
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.summary import summarize
from livescale.runtime.supervisor.supervisor import Pool
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.telemetry.record.record import (
    AnyLine,
    RequestLine,
    RunLine,
    read_record,
    with_client_times,
    write_record,
)
from livescale.telemetry.record.record_file import create_record
from livescale.values.types import Outcome
from livescale.values.units import NS_PER_S

# The first instance of a simulated pool has come to rest by then.
_SETTLED_NS = 2 * NS_PER_S
# The pool is given that long to come back to its least size behind a load.
_SHRINK_S = 20.0
_PACE_SIZE, _PACE_PRODUCTS = 256, 101


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """A load that was played: the record (with the client's times), and when the load began.

    `timings` are the client's. `devices` are the pool's by worker number.
    """

    name: str
    lines: Sequence[AnyLine]
    timings: Sequence[RequestTiming]
    started_ns: int
    devices: tuple[Device, ...]

    @property
    def controller(self) -> ControllerConfig:
        """The configuration that the controller started with."""
        return next(line.config for line in self.lines if isinstance(line, RunLine))

    def reported(self, trace: str, slo: str) -> ReportedRun:
        """As reports want it: judged by its own mean where the SLO is a multiple of that."""
        figures = summarize(self.timings, parse_slo(slo))
        return ReportedRun(self.name, trace, self.lines, figures, self.started_ns, slo, figures.slo)


@dataclass(frozen=True, slots=True)
class ClientDelays:
    """What a client and HTTP add. From the moment a request is due until it is in the gateway's
    queue (`intake_ns`, as it was seen several times), and from a token there to the client.
    Requests that are due together come into the queue `spacing_ns` apart."""

    intake_ns: tuple[int, ...]
    spacing_ns: int
    delivery_ns: int


@dataclass(frozen=True, slots=True)
class Strain:
    """Whether the machine itself was a bottleneck while a load was played.

    `cores_used` are the pool's and the client's, `others_share` is the part of the machine's CPU
    time that went elsewhere, `late_p99_ns` how far the client fell behind its own schedule.
    `pace_ns` is what a fixed computation took before the run and after it: virtual machines share
    their cores with others that cannot be seen.
    """

    cores: int
    cores_used: float
    others_share: float
    late_p99_ns: int | None
    pace_ns: tuple[int, int]


def play_real(
    config: PoolConfig, rows: Sequence[TraceRow], name: str, seed: int
) -> tuple[PlayedRun, Strain]:
    """Start a pool, play the load, wait until it is small again and stop it.

    The configuration names a record. Raises BenchError when a request fails.
    """
    assert config.record is not None, "the record is what this is about"
    # A run of its own, also in the folder of an earlier one.
    write_record(Path(config.record), [])
    pool = Pool(config)
    before_ns = _pace_ns()
    least = pool.config.models[0].min_replicas

    async def until_small(_: httpx.AsyncClient) -> None:
        """Scale-downs belong to the run: let them end."""
        await gauge_comes_to(pool, "livescale_instances", lambda count: count <= least, _SHRINK_S)

    model = pool.models[0].spec.name
    played = asyncio.run(play_pool(pool, model, rows, Acts(end=until_small), seed))
    results = played.results
    strain = Strain(
        cores=len(os.sched_getaffinity(0)),
        cores_used=played.cores_used,
        others_share=played.others_share,
        late_p99_ns=lateness_ns(results, 99),
        pace_ns=(before_ns, _pace_ns()),
    )
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise BenchError(f"{name}: {len(failed)} requests failed, the first one: {failed[0]}")
    timings = [result.timing() for result in results]
    lines = with_client_times(read_record(Path(config.record)), timings, None)
    write_record(Path(config.record), lines)
    started_ns = results[0].scheduled_ns - rows[0].arrival_ns
    return PlayedRun(name, lines, timings, started_ns, tuple(played.devices)), strain


def play_simulated(
    world: SimConfig,
    rows: Sequence[TraceRow],
    name: str,
    client: ClientDelays,
    seed: int,
    record: Path,
) -> PlayedRun:
    """Play the load in the simulator, its record to this file. Raises BenchError when a request
    fails.

    It begins when the pool has come to rest. The seed draws how late each request is, from what
    was seen of a client: that is how real runs of the same load differ, too.
    """
    model = world.controller.models[0].spec.name
    rng = random.Random(seed)
    started_ns = lead_ns(world) + _SETTLED_NS
    arriving: list[TraceRow] = []
    free_ns = 0
    for row in rows:
        free_ns = max(row.arrival_ns + rng.choice(client.intake_ns), free_ns + client.spacing_ns)
        arriving.append(msgspec.structs.replace(row, arrival_ns=free_ns))
    with create_record(record) as file:
        run = run_pool(world, {model: arriving}, started_ns, seed, file)
    if run.failed:
        raise BenchError(f"{name}: {run.failed} requests failed in the simulator")
    by_request = {line.request: line for line in run.result.requests}
    timings = [
        _as_client(by_request[f"{model}-{number}"], started_ns + row.arrival_ns, client.delivery_ns)
        for number, row in enumerate(rows)
    ]
    lines = with_client_times(read_record(record), timings, None)
    write_record(record, lines)
    return PlayedRun(name, lines, timings, started_ns, world.devices)


# -- helpers, in the order used -------------------------------------------------------------------


def _pace_ns() -> int:
    """The median time of a small matrix product."""
    matrix = np.ones((_PACE_SIZE, _PACE_SIZE), np.float32)
    times_ns = []
    for _ in range(_PACE_PRODUCTS):
        began_ns = time.perf_counter_ns()
        matrix @ matrix
        times_ns.append(time.perf_counter_ns() - began_ns)
    return percentile(times_ns, 50)


def _as_client(line: RequestLine, scheduled_ns: int, delivery_ns: int) -> RequestTiming:
    """What a client would have seen that wanted to send it then."""
    return RequestTiming(
        request=line.request,
        scheduled_ns=scheduled_ns,
        sent_ns=scheduled_ns,
        token_ns=tuple(token_ns + delivery_ns for token_ns in line.token_ns),
        finished_ns=line.finished_ns + delivery_ns,
        ok=line.outcome is Outcome.FINISHED,
    )
