"""Parcels of a live pair: messages with the rows and KV that come along, as bytes.

A message whose bytes do not fit into one parcel goes in parts, one behind the other. Nothing that
comes is trusted: it is decoded strictly, and its sizes must be those that were to be expected. What
messages mean is decided in `batching`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from livescale.batching.contract.live_messages import Carrying, Handover, LiveMessage
from livescale.batching.contract.visit_messages import Visited
from livescale.batching.runs.run import BatchKey
from livescale.runtime.member_process.run_answers import Besides
from livescale.values.types import Value

PART_BYTES = 4 << 20
"""Bytes of rows or KV in one parcel, at most."""
HEAD_BYTES_MAX = 8 << 20
"""Of a message without them: the token ids of a batch, mostly."""

_NO_BATCH = BatchKey(0, 0)
_LENGTH = struct.Struct(">I")


class ParcelError(ValueError):
    """The peer sent what no message of a live pair is."""


class Letter(Value, frozen=True, tag=True):
    """A message, or its first part: `size_bytes` of rows or KV belong to it.

    A Handover tells the gateway that asked for each request ("": none wants it any more). With a
    Visited goes what the Run gave `besides` tokens.
    """

    message: LiveMessage
    gateways: tuple[str, ...] = ()
    size_bytes: int = 0
    besides: Besides | None = None


class FurtherPart(Value, frozen=True, tag=True):
    """More bytes of the last Letter, which was about this batch; parts are numbered from 1."""

    batch: BatchKey
    part: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Letter | FurtherPart] = msgspec.msgpack.Decoder(
    Letter | FurtherPart
)


def pack(letter: Letter, content: Sequence[memoryview] = ()) -> list[bytes]:
    """The parcels that carry the letter, in order. Raises ParcelError when it is too long."""
    joined = b"".join(content)
    assert len(joined) == letter.size_bytes, f"{len(joined)} bytes of {letter.size_bytes}"
    view = memoryview(joined)
    parcels = [_parcel(letter, view[:PART_BYTES])]
    for part, first in enumerate(range(PART_BYTES, len(joined), PART_BYTES), 1):
        assert isinstance(letter.message, Carrying | Visited)
        head = FurtherPart(letter.message.key, part)
        parcels.append(_parcel(head, view[first : first + PART_BYTES]))
    return parcels


def _parcel(head: Letter | FurtherPart, content: memoryview) -> bytes:
    encoded = _encoder.encode(head)
    if len(encoded) > HEAD_BYTES_MAX:
        raise ParcelError(f"a message of {len(encoded)} bytes is above {HEAD_BYTES_MAX}")
    return b"".join((_LENGTH.pack(len(encoded)), encoded, content))


def _unpack(parcel: bytes) -> tuple[Letter | FurtherPart, memoryview]:
    if len(parcel) < _LENGTH.size:
        raise ParcelError(f"a parcel of {len(parcel)} bytes")
    (length,) = _LENGTH.unpack_from(parcel)
    stop = _LENGTH.size + length
    if length > HEAD_BYTES_MAX or stop > len(parcel):
        raise ParcelError(f"a message of {length} bytes in a parcel of {len(parcel)}")
    view = memoryview(parcel)
    try:
        return _decoder.decode(view[_LENGTH.size : stop]), view[stop:]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ParcelError(f"not a message of a live pair: {error}") from None


@dataclass(slots=True)
class _Opened:
    """A letter of which parts are missing. Without `keeps` they are counted, not kept."""

    letter: Letter
    batch: BatchKey
    keeps: bool
    content: bytearray
    came_bytes: int = 0
    parts: int = 0


class Assembler:
    """Puts the parts of one peer's letters together: one at a time, as the peer sends them.

    `expected` says how many bytes a message brings; None for one whose bytes are not wanted: they
    are not kept, and its content is empty.
    """

    def __init__(self, expected: Callable[[Letter], int | None]) -> None:
        self._expected = expected
        self._opened: _Opened | None = None

    def take(self, parcel: bytes) -> tuple[Letter, bytearray] | None:
        """The letter that is complete with this parcel, if one is. Raises ParcelError."""
        head, content = _unpack(parcel)
        if isinstance(head, Letter):
            self._open(head)
        opened = self._opened
        if opened is None or (isinstance(head, FurtherPart) and head.batch != opened.batch):
            raise ParcelError("a part of a message that did not begin")
        if isinstance(head, FurtherPart) and head.part != opened.parts:
            raise ParcelError(f"part {head.part} comes after {opened.parts} parts")
        self._add(opened, content)
        if opened.came_bytes < opened.letter.size_bytes:
            return None
        self._opened = None
        return opened.letter, opened.content

    def _open(self, letter: Letter) -> None:
        if self._opened is not None:
            raise ParcelError("a message begins inside another one")
        message = letter.message
        carries = isinstance(message, Carrying | Visited)
        batch = message.key if isinstance(message, Carrying | Visited) else _NO_BATCH
        wanted_bytes = self._expected(letter) if carries else 0
        if wanted_bytes is not None and letter.size_bytes != wanted_bytes:
            raise ParcelError(
                f"{type(message).__name__} with {letter.size_bytes} bytes, not {wanted_bytes}"
            )
        if isinstance(message, Handover) and len(letter.gateways) != len(message.requests):
            raise ParcelError(f"{len(letter.gateways)} gateways of {len(message.requests)}")
        self._opened = _Opened(letter, batch, wanted_bytes is not None, bytearray())

    def _add(self, opened: _Opened, content: memoryview) -> None:
        left_bytes = opened.letter.size_bytes - opened.came_bytes
        if len(content) != min(max(left_bytes, 0), PART_BYTES):
            raise ParcelError(f"a part of {len(content)} bytes where {left_bytes} are missing")
        if opened.keeps:
            opened.content += content
        opened.came_bytes += len(content)
        opened.parts += 1
