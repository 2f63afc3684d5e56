"""The run record: JSON lines with everything that went into and came out of a controller.

Both worlds write it, `livescale replay` feeds it to a fresh controller. A record may hold several
starts of a pool, and each of these several lives of its controller; each life begins with a
RunLine. Times are nanoseconds of the world's monotonic clock, ids are unique within one start of a
pool. How a record is divided into files stands in `record_parts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import zstandard

from livescale.config.slo import RequestTiming, SloAbsolute
from livescale.control.state.config import ControllerConfig
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.telemetry.record.record_file import create_record
from livescale.telemetry.record.record_parts import RecordError, parts_of, whole_lines
from livescale.values.types import InstanceId, Outcome, PlanId, RequestId, Role, WorkerRef

RECORD_VERSION = 6


class Line(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """Base of all lines; `kind` tells them apart."""


class RunLine(Line, frozen=True, tag="run"):
    """A controller's life begins. `world` is "real" or "sim"; `settings` is for readers.

    `start` names the start of the pool whose controller it is. With `is_continued` a further part
    of the record begins and the life of the part before goes on: `config` has the models of that
    time, and the StepLine that follows shows the members and what they hold as though they had
    joined just then. It was never given to a controller.
    """

    version: int
    world: str
    config: ControllerConfig
    settings: dict[str, object] = {}
    start: str = ""
    is_continued: bool = False


class StepLine(Line, frozen=True, tag="step"):
    """One `Controller.step`; `done_ns` is when its commands were out (not part of a replay)."""

    now_ns: int
    events: tuple[AnyEvent, ...]
    commands: tuple[AnyCommand, ...]
    done_ns: int


class RequestLine(Line, frozen=True, tag="request"):
    """One request's times. `scheduled_ns` and `sent_ns` are the client's, where one is known.

    `arrived_ns` is when the gateway had its HTTP head, `queued_ns` when it was read, tokenized and
    accepted, `first_dispatched_ns` and `dispatched_ns` when its first and its last attempt were
    sent to a worker, `token_ns` when each token reached the gateway.
    """

    request: RequestId
    model: str
    prompt_tokens: int
    output_tokens_max: int
    queued_ns: int
    finished_ns: int
    outcome: Outcome
    attempts: int
    arrived_ns: int | None = None
    first_dispatched_ns: int | None = None
    dispatched_ns: int | None = None
    token_ns: tuple[int, ...] = ()
    scheduled_ns: int | None = None
    sent_ns: int | None = None
    client_request: str | None = None
    worker: WorkerRef | None = None
    slo_met: bool | None = None
    error: str | None = None

    @property
    def due_ns(self) -> int:
        """When the client meant to send it, or, where the record does not know, when it arrived."""
        if self.scheduled_ns is not None:
            return self.scheduled_ns
        return self.queued_ns if self.arrived_ns is None else self.arrived_ns

    def timing(self) -> RequestTiming:
        """As an SLO judges it; where no client tells, it was sent when it was due."""
        return RequestTiming(
            request=self.request,
            scheduled_ns=self.due_ns,
            sent_ns=self.due_ns if self.sent_ns is None else self.sent_ns,
            token_ns=self.token_ns,
            finished_ns=self.finished_ns,
            ok=self.outcome is Outcome.FINISHED,
            model=self.model,
        )


class LoadPhases(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of a new instance on its way from the order to the instance's first token.

    `pairing` says how it worked while it loaded, and why: from `live_ns` on it took requests, and
    at `first_help_ns` another instance took the first batch over from it.
    """

    instance: InstanceId
    worker: WorkerRef
    upstream: str
    rank: int = 0
    first_byte_ns: int | None = None
    first_layer_ns: int | None = None
    loaded_ns: int | None = None
    first_token_ns: int | None = None
    failed: str | None = None
    pairing: str = ""
    live_ns: int | None = None
    first_help_ns: int | None = None


class ScaleLine(Line, frozen=True, tag="scale"):
    """One scaling decision and what became of it. Scale-downs have `released_ns` per instance.
    Numbers are those of the instances with the `role`.

    `strategy` and `routes` are the plan's; `amendments` say which receivers got other senders on
    the way. A model that had no instance was woken by the request `woken_by`, which had arrived
    at `asked_ns`.
    """

    model: str
    from_instances: int
    to_instances: int
    reason: str
    values: dict[str, int]
    decided_ns: int
    planned_ns: int
    plan: PlanId | None = None
    bytes_per_target: int = 0
    strategy: str = ""
    routes: tuple[str, ...] = ()
    predicted_ns: int | None = None
    loads: tuple[LoadPhases, ...] = ()
    released_ns: dict[InstanceId, int] = {}
    amendments: tuple[str, ...] = ()
    woken_by: RequestId | None = None
    asked_ns: int | None = None
    role: Role = Role.UNIFIED


class TrafficLine(Line, frozen=True, tag="traffic"):
    """Parameters that links have carried by now, in bytes by kind of link ("nic", "spine", …).

    Each byte counts once per link that it crossed; of the two ends of a hop, the sender's NIC and
    the sender's leaf count.
    """

    now_ns: int
    carried_bytes: dict[str, int]


AnyLine = RunLine | StepLine | RequestLine | ScaleLine | TrafficLine
Decoded = TypeVar("Decoded")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


def encode_line(line: AnyLine) -> bytes:
    """One line of a record, newline included. The same value gives the same bytes."""
    return _encoder.encode(line) + b"\n"


def read_record(path: Path) -> Iterator[AnyLine]:
    """All lines of a record, over all its parts. RecordError names the line that cannot be read.

    An unfinished last line (the writer was killed) is left out, and so is what a further part
    repeats for those who read it alone, if the part before was read.
    """
    parts = parts_of(path)
    if not parts:
        raise RecordError(f"{path}: No such file or directory")
    before: tuple[int, str] | None = None
    for number, file in parts:
        start = before[1] if before is not None and before[0] == number - 1 else None
        is_opening = False
        for line in decoded_lines(file, _decoder):
            if is_opening and isinstance(line, StepLine):
                is_opening = False
                continue
            is_opening = False
            if isinstance(line, RunLine):
                is_opening = line.is_continued and line.start == start
                start = line.start
            if not is_opening:
                yield line
        before = (number, start) if start is not None else None


def starts_of(lines: Iterable[AnyLine]) -> list[list[AnyLine]]:
    """The lines of each start of a pool, in order: ids and times of two starts do not compare."""
    starts: list[list[AnyLine]] = []
    name: str | None = None
    for line in lines:
        if not starts or (isinstance(line, RunLine) and name not in (None, line.start)):
            starts.append([])
        if isinstance(line, RunLine):
            name = line.start
        starts[-1].append(line)
    return starts


def with_client_times(
    lines: Iterable[AnyLine], timings: Sequence[RequestTiming], slo: SloAbsolute | None
) -> list[AnyLine]:
    """The record with what only the client knows: when each request was due, sent, and well.

    Requests are joined by id; lines of requests that the client does not know stay as they are.
    """
    by_request = {timing.request: timing for timing in timings}
    joined: list[AnyLine] = []
    for line in lines:
        timing = by_request.get(line.request) if isinstance(line, RequestLine) else None
        if timing is not None:
            line = msgspec.structs.replace(
                line,
                scheduled_ns=timing.scheduled_ns,
                sent_ns=timing.sent_ns,
                slo_met=slo.is_met(timing) if slo is not None else None,
            )
        joined.append(line)
    return joined


def write_record(path: Path, lines: Iterable[AnyLine]) -> None:
    """Write a whole record at once, as one part. Parts that were there are replaced."""
    with create_record(path) as file:
        for line in lines:
            file.write(encode_line(line))


class Sink(Protocol):
    """Takes bytes: an open file, or a record file that writes later."""

    def write(self, data: bytes, /) -> object: ...


def decoded_lines(
    path: Path, decoder: msgspec.json.Decoder[Decoded], kind: str = "run record"
) -> Iterator[Decoded]:
    """The whole lines of one file. RecordError names the first that is of no such record."""
    number = 0
    try:
        for text in whole_lines(path):
            number += 1
            yield decoder.decode(text)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except zstandard.ZstdError as error:
        raise RecordError(f"{path}: not a compressed {kind}, or damaged: {error}") from error
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path}:{number}: not a line of a {kind}: {error}") from error
