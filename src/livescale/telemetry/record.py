"""The run record: one JSON-lines file with everything that went into and came out of a controller.

Both worlds write it, `livescale replay` feeds it to a fresh controller. A file may hold several
lives of a controller: each begins with a RunLine. Times are nanoseconds of the world's monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from livescale.control.config import ControllerConfig
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.types import InstanceId, Outcome, PlanId, RequestId, WorkerRef

RECORD_VERSION = 2


class RecordError(Exception):
    """A run record cannot be read: names the file and the line."""


class Line(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """Base of all lines; `kind` tells them apart."""


class RunLine(Line, frozen=True, tag="run"):
    """A controller's life begins. `world` is "real" or "sim"; `settings` is for readers."""

    version: int
    world: str
    config: ControllerConfig
    settings: dict[str, object] = {}


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


class TrafficLine(Line, frozen=True, tag="traffic"):
    """Parameters that links have carried by now, in bytes by kind of link ("nic", "spine", …).

    Each byte counts once per link that it crossed; of the two ends of a hop, the sender's NIC and
    the sender's leaf count.
    """

    now_ns: int
    carried_bytes: dict[str, int]


AnyLine = RunLine | StepLine | RequestLine | ScaleLine | TrafficLine

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


def encode_line(line: AnyLine) -> bytes:
    """One line of a record, newline included. The same value gives the same bytes."""
    return _encoder.encode(line) + b"\n"


def read_record(path: Path) -> Iterator[AnyLine]:
    """All lines of a record. RecordError names the line that cannot be read.

    An unfinished last line (the writer was killed) is left out.
    """
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    return
                yield _decode(path, number, text)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error


def write_record(path: Path, lines: Iterable[AnyLine]) -> None:
    """Write a whole record at once."""
    with path.open("wb") as file:
        for line in lines:
            file.write(encode_line(line))


def append_to_record(path: Path) -> IO[bytes]:
    """Open a record for a further life of the controller.

    An unfinished last line (the life before was killed) is cut off first. Close the file.
    """
    with path.open("ab+") as file:
        file.seek(0)
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
        file.truncate(end)
    return path.open("ab")


class RecordWriter:
    """Appends lines to an open file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def begin(
        self, world: str, config: ControllerConfig, settings: dict[str, object] | None = None
    ) -> None:
        self.write(RunLine(RECORD_VERSION, world, config, settings or {}))

    def step(
        self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand], done_ns: int
    ) -> None:
        self.write(StepLine(now_ns, tuple(events), tuple(commands), done_ns))

    def write(self, line: AnyLine) -> None:
        self._file.write(encode_line(line))


def _decode(path: Path, number: int, text: bytes) -> AnyLine:
    try:
        line: AnyLine = _decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path}:{number}: not a line of a run record: {error}") from error
    return line
