"""Records of live loads by hand: BlitzScale's worked example (Figure 15), and one without live."""

from __future__ import annotations

import msgspec
from reported_records import STARTED_NS, S

from livescale.latency.shapes import LLAMA_3_8B
from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, HoldingCompleted, LayerArrived, LiveStarted
from livescale.sim.base.config import SimConfig
from livescale.telemetry.record.record import (
    RECORD_VERSION,
    AnyLine,
    LoadPhases,
    RequestLine,
    RunLine,
    ScaleLine,
    StepLine,
)
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty, Partner
from livescale.values.types import FromStorage, FromWorker, HoldingId, LayerSpan, Outcome, WorkerRef

UNIT_NS = 100_000_000
LAYERS = 7
LOAD_UNITS = 6
"""Load time of a layer in units of its compute time."""
SPLITS = (1, 2, 2, 3, 4, 4, 5)
ENDS = (7, 12, 17, 21, 24, 27, 29)
"""Layers of each request that the loading instance runs, and when each ends, in units."""
SOURCE, TARGET = WorkerRef(0), WorkerRef(1)
SERVES, LOADS = HoldingId(1, SOURCE), HoldingId(2, TARGET)
"""Plans have the numbers of their instances."""
MODEL = LLAMA_3_8B.name


def step(at_ns: int, events: tuple[object, ...], commands: tuple[object, ...] = ()) -> StepLine:
    return StepLine(at_ns, events, commands, at_ns)  # type: ignore[arg-type]


def load(
    holding: HoldingId, live_order: str | None = None, gives_to: tuple[Partner, ...] = ()
) -> StartHolding:
    upstream = FromStorage() if holding == SERVES else FromWorker(SOURCE)
    feeds = (Feed(upstream, (ChunkRange(0, 1),)),)
    duty = Duty(holding.plan, (holding.member,), live_order=live_order, gives_to=gives_to)
    return StartHolding(holding, MODEL, LayerSpan(0, LAYERS + 2), feeds, 1, duty=duty)


def live_example(order: str = "zigzag") -> tuple[AnyLine, ...]:
    """Seven requests, a loading instance that runs SPLITS of their layers, and its source.

    The model has an embedding and a head besides its seven layers; they take no time.
    """
    t0 = STARTED_NS + S
    lines: list[AnyLine] = [*_begun(), step(t0, (), (load(LOADS, order, (Partner(1, SOURCE),)),))]
    steps: list[tuple[int, object]] = [(t0, LiveStarted(LOADS))]
    for number in range(LAYERS):
        at_ns = t0 + number * LOAD_UNITS * UNIT_NS
        work = min(number * LOAD_UNITS, sum(SPLITS))
        steps.append((at_ns, LayerArrived(LOADS, number + 1, number + 2, work)))
    begins = (SPLITS[0], *ENDS[:-1])
    for number, (begun, split) in enumerate(zip(begins, SPLITS, strict=True)):
        taken = BatchTaken(1, SOURCE, 2, ((f"r{number}", 1, 1),), split + 1, 64, 8192, 1000)
        steps.append((t0 + begun * UNIT_NS, taken))
    loaded_ns = t0 + 40 * UNIT_NS
    steps.append((loaded_ns, HoldingCompleted(LOADS, LLAMA_3_8B.size_bytes)))
    steps.sort(key=lambda entry: entry[0])
    lines += [step(at_ns, (event,)) for at_ns, event in steps]
    lines += [_request(f"r{n}", t0, t0 + end * UNIT_NS) for n, end in enumerate(ENDS)]
    lines.append(_scale(t0, loaded_ns, t0))
    return tuple(lines)


def waiting_example() -> tuple[AnyLine, ...]:
    """The same requests and the same load, which everybody waits for."""
    t0 = STARTED_NS + S
    lines: list[AnyLine] = [*_begun(), step(t0, (), (load(LOADS),))]
    for number in range(LAYERS):
        at_ns = t0 + number * LOAD_UNITS * UNIT_NS
        lines.append(step(at_ns, (LayerArrived(LOADS, number + 1, number + 2),)))
    loaded_ns = t0 + 40 * UNIT_NS
    lines.append(step(loaded_ns, (HoldingCompleted(LOADS, LLAMA_3_8B.size_bytes),)))
    lines += [_request(f"r{n}", t0, t0 + (n + 1) * LAYERS * UNIT_NS) for n in range(len(SPLITS))]
    lines.append(_scale(t0, loaded_ns))
    return tuple(lines)


def _begun() -> list[AnyLine]:
    """A pool whose first instance serves."""
    config = SimConfig.default(LLAMA_3_8B, workers=2).controller
    policy = config.models[0]
    sizes = (1, *[1 << 20] * LAYERS, 1)
    spec = msgspec.structs.replace(policy.spec, layer_bytes=sizes)
    config = msgspec.structs.replace(config, models=(msgspec.structs.replace(policy, spec=spec),))
    return [
        RunLine(RECORD_VERSION, "sim", config),
        step(S, (), (load(SERVES),)),
        step(2 * S, (HoldingCompleted(SERVES, LLAMA_3_8B.size_bytes),)),
    ]


def _request(name: str, queued_ns: int, first_ns: int) -> RequestLine:
    return RequestLine(
        request=name,
        model=MODEL,
        prompt_tokens=64,
        output_tokens_max=2,
        queued_ns=queued_ns,
        finished_ns=first_ns + UNIT_NS,
        outcome=Outcome.FINISHED,
        attempts=1,
        token_ns=(first_ns, first_ns + UNIT_NS),
        worker=SOURCE,
    )


def _scale(decided_ns: int, loaded_ns: int, live_ns: int | None = None) -> ScaleLine:
    phases = LoadPhases(
        2,
        TARGET,
        str(SOURCE),
        first_byte_ns=decided_ns,
        first_layer_ns=decided_ns,
        loaded_ns=loaded_ns,
        pairing="" if live_ns is None else "zigzag: helps instance 1",
        live_ns=live_ns,
        first_help_ns=None if live_ns is None else live_ns + SPLITS[0] * UNIT_NS,
    )
    return ScaleLine(
        MODEL, 1, 2, "prefill_queue", {}, decided_ns, decided_ns, strategy="chain", loads=(phases,)
    )
