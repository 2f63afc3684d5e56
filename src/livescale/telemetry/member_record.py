"""The record of a member: JSON lines with everything that went into one Member and came out of it.

Both worlds write it, one file per life of a member, and `livescale replay` feeds it to a fresh
Member. It holds the token ids of prompts and answers, because a replay needs them; of rows and KV
it holds sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from livescale.batching.runs.run import BatchKey, EngineAsk, Run
from livescale.member.effects import Effect, Execute
from livescale.member.inputs import MemberInput
from livescale.member.instance import ServingLimits
from livescale.member.member import Member
from livescale.telemetry.record.record import Line, Sink, decoded_lines
from livescale.telemetry.record.record_parts import RecordError
from livescale.values.types import LayerSpan, RequestId, WorkerRef

MEMBER_RECORD_VERSION = 9


class MemberLine(Line, frozen=True, tag="member", forbid_unknown_fields=True):
    """The first line: what the Member was made of."""

    version: int
    ref: WorkerRef
    memory_bytes: int
    address_bytes: int | None = None
    limits: ServingLimits | None = None


class MemberStepLine(Line, frozen=True, tag="step", forbid_unknown_fields=True):
    """One `Member.step`. `error` is what the step raised instead of returning its effects."""

    now_ns: int
    inputs: tuple[MemberInput, ...]
    effects: tuple[msgspec.Raw, ...]
    steps_max: int = 1
    error: str = ""


class ShortenLine(Line, frozen=True, tag="shorten", forbid_unknown_fields=True):
    """One `Member.shorten`: the Run in flight ends after so many of its steps."""

    steps: int


class ExecuteBrief(msgspec.Struct, frozen=True, tag="Execute"):
    """An Execute as it is recorded. Whole, a Run repeats block tables and sampling parameters of
    every request: of them the record has a digest.

    A segment is (request, attempt, first position, positions, samples). Of what an engine is asked
    there is what is (request, attempt) of the requests that it takes and forgets.
    """

    run: int
    span: LayerSpan
    steps: int
    segments: tuple[tuple[RequestId, int, int, int, bool], ...]
    batch: BatchKey | None
    merged: tuple[tuple[BatchKey, int], ...]
    report_due_ns: int
    digest: str
    taken: tuple[tuple[RequestId, int], ...] = ()
    forgotten: tuple[tuple[RequestId, int], ...] = ()


AnyMemberLine = MemberLine | MemberStepLine | ShortenLine


class _FirstLine(msgspec.Struct):
    """What the first lines of all versions have in common."""

    kind: str = ""
    version: int = 0


class RecordedMember(Member):
    """A Member that writes each of its steps to a sink, before its shell sees the effects."""

    def __init__(
        self,
        sink: Sink,
        ref: WorkerRef,
        memory_bytes: int,
        limits: ServingLimits | None = None,
        *,
        address_bytes: int | None = None,
    ) -> None:
        """`sink` must not block. The other arguments are those of a Member."""
        super().__init__(ref, memory_bytes, limits, address_bytes=address_bytes)
        self._sink = sink
        version = MEMBER_RECORD_VERSION
        self._write(MemberLine(version, ref, memory_bytes, address_bytes, limits))

    def step(self, now_ns: int, inputs: Sequence[MemberInput], steps_max: int = 1) -> list[Effect]:
        """As a Member's step. One that raises is recorded, too: it is the last."""
        line = MemberStepLine(now_ns, tuple(inputs), (), steps_max)
        try:
            effects = super().step(now_ns, inputs, steps_max)
            # At once: a Run refers to lists that grow when it is committed.
            encoded = tuple(msgspec.Raw(encode_effect(effect)) for effect in effects)
            line = msgspec.structs.replace(line, effects=encoded)
        except Exception as error:
            line = msgspec.structs.replace(line, error=error_text(error))
            raise
        finally:
            self._write(line)
        return effects

    def shorten(self, steps: int) -> Run:
        """As a Member's shorten."""
        self._write(ShortenLine(steps))
        return super().shorten(steps)

    def _write(self, line: AnyMemberLine) -> None:
        self._sink.write(_encoder.encode(line) + b"\n")


def encode_effect(effect: Effect) -> bytes:
    """The effect as it is recorded. The same value gives the same bytes."""
    if not isinstance(effect, Execute):
        return _encoder.encode(effect)
    run, asks = effect.run, effect.run.asks or EngineAsk()
    # Tokens known so far are left out: they follow from prompts and from results of Runs.
    digested = [(s.token_ids, s.block_table, s.sampling) for s in run.segments]
    return _encoder.encode(
        ExecuteBrief(
            run=run.id,
            span=run.span,
            steps=run.steps,
            segments=tuple(
                (s.request, s.attempt, s.first_position, s.token_count, s.samples)
                for s in run.segments
            ),
            batch=run.batch,
            merged=run.merged,
            report_due_ns=effect.report_due_ns,
            taken=tuple((spec.request, spec.attempt) for spec in asks.taken),
            forgotten=asks.forgotten,
            digest=xxhash.xxh3_64_hexdigest(_digest_encoder.encode(digested)),
        )
    )


def error_text(error: Exception) -> str:
    """What a step raised, as it is recorded."""
    return f"{type(error).__name__}: {error}"


def is_member_record(path: Path) -> bool:
    """The file begins as the record of a member does. Raises RecordError."""
    return path.is_file() and _first_line(path).kind == "member"


def read_member_record(path: Path) -> Iterator[AnyMemberLine]:
    """All lines of a member's record. RecordError names the line that cannot be read.

    An unfinished last line (the writer was killed) is left out.
    """
    first = _first_line(path)
    if first.kind != "member":
        raise RecordError(f"{path}: not the record of a worker or agent")
    if first.version != MEMBER_RECORD_VERSION:
        raise RecordError(
            f"{path}: version {first.version} of a worker's or agent's record."
            f" This program reads version {MEMBER_RECORD_VERSION}"
        )
    return decoded_lines(path, _decoder, "member's record")


def _first_line(path: Path) -> _FirstLine:
    return next(decoded_lines(path, _first_decoder, "record"), _FirstLine())


def _plain(value: object) -> object:
    """Token ids that are not real are ranges."""
    if isinstance(value, range):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is no value of a record")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_digest_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(AnyMemberLine)
_first_decoder = msgspec.json.Decoder(_FirstLine)
