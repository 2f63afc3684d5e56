"""Small simulated runs, and runs by hand, that tests of reports share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache

import msgspec

from livescale.clusters.topology import Host
from livescale.config.slo import SloAbsolute
from livescale.latency.shapes import LLAMA_3_8B
from livescale.load.traces import TraceRow as Row
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.summary import summarize
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import AnyLine, RequestLine, TrafficLine
from livescale.values.types import Outcome

S = 1_000_000_000
STARTED_NS = 20 * S
SLO = SloAbsolute(2 * S, 100_000_000)


def played(
    rows: Sequence[Row] | dict[str, Sequence[Row]], config: SimConfig, seed: int = 1
) -> tuple[AnyLine, ...]:
    """The record of the load in a simulated pool: of its first model, or of the named ones."""
    file = io.BytesIO()
    simulate(rows, config, seed, file)
    decoder = msgspec.json.Decoder(AnyLine)
    return tuple(decoder.decode(line) for line in file.getvalue().splitlines())


@cache
def simulated(
    multicast: str = "auto", workers: int = 4, losses: int = 0, seed: int = 1
) -> tuple[AnyLine, ...]:
    """The record of a burst that makes the pool grow, with two hosts that keep copies; without
    lines of traffic, which tests add."""
    config = SimConfig.default(LLAMA_3_8B, workers=workers)
    hosts = tuple(Host(f"host-{n}", "leaf-0", 192 * 10**9) for n in range(2))
    controller = msgspec.structs.replace(
        config.controller, agents_expected=len(hosts), multicast=multicast
    )
    faults = FaultConfig(worker_losses=losses, until_ns=STARTED_NS + 6 * S)
    config = msgspec.structs.replace(config, controller=controller, hosts=hosts, faults=faults)
    rows = [Row(STARTED_NS + k * 40_000_000, 1500, 20) for k in range(100)]
    lines = played(rows, config, seed)
    return tuple(line for line in lines if not isinstance(line, TrafficLine))


def reported(
    name: str, lines: tuple[AnyLine, ...], started_ns: int = STARTED_NS, **more: str | float
) -> ReportedRun:
    """The run under that name, judged by SLO."""
    timings = [line.timing() for line in lines if isinstance(line, RequestLine)]
    summary, rule = summarize(timings, SLO), str(SLO)
    return ReportedRun(name, "a burst", lines, summary, started_ns, rule, SLO, **more)  # type: ignore[arg-type]


def requests(count: int, model: str = "m", tokens: int = 3) -> tuple[RequestLine, ...]:
    """So many requests, a millisecond from one to the next."""
    return tuple(
        RequestLine(
            request=f"{model}-{number}",
            model=model,
            prompt_tokens=10,
            output_tokens_max=tokens,
            queued_ns=STARTED_NS + number * 1_000_000,
            finished_ns=STARTED_NS + number * 1_000_000 + tokens * 5_000_000,
            outcome=Outcome.FINISHED,
            attempts=1,
            token_ns=tuple(
                STARTED_NS + number * 1_000_000 + (k + 1) * 5_000_000 for k in range(tokens)
            ),
        )
        for number in range(count)
    )
