"""The words of the wire: a fixed header before every payload, and its strict decoder.

Formats only: no sockets, no state of a stream. A header never makes anybody allocate: payloads
of chunks go into place, and all other payloads have a small bound.
"""

from __future__ import annotations

import enum
import struct

from livescale.types import LayerEntry, Value, WorkerRef

MAGIC = b"LScl"
VERSION = 1
CHUNK_BYTES_MAX = 16 << 20
REASON_BYTES_MAX = 512

# magic, version, kind, zero, plan, worker, incarnation, layer, offset in the layer, payload bytes
_HEADER = struct.Struct(">4sBBHQIIIQI")
HEADER_BYTES = _HEADER.size


class FrameError(Exception):
    """Bytes on a connection are not what the protocol allows."""


class FrameKind(enum.IntEnum):
    """HELLO opens a connection; BEGIN, CHUNK… and END carry a plan; ABORT ends one early."""

    HELLO = 1
    BEGIN = 2
    CHUNK = 3
    END = 4
    ABORT = 5


_PAYLOAD_BYTES_MAX = {
    FrameKind.HELLO: 0,
    FrameKind.BEGIN: 0,
    FrameKind.CHUNK: CHUNK_BYTES_MAX,
    FrameKind.END: 0,
    FrameKind.ABORT: REASON_BYTES_MAX,
}


class Frame(Value, frozen=True):
    """A header. `payload_bytes` follow it on the wire.

    `layer` and `offset_bytes` place a chunk; in ABORT, `layer` says how far the sender came.
    """

    kind: FrameKind
    sender: WorkerRef
    plan: int = 0
    layer: int = 0
    offset_bytes: int = 0
    payload_bytes: int = 0

    def encode(self) -> bytes:
        """The HEADER_BYTES of this frame. Raises FrameError if a field does not fit."""
        try:
            return _HEADER.pack(
                MAGIC,
                VERSION,
                self.kind,
                0,
                self.plan,
                self.sender.worker,
                self.sender.incarnation,
                self.layer,
                self.offset_bytes,
                self.payload_bytes,
            )
        except struct.error as error:
            raise FrameError(f"{self} does not fit a header: {error}") from None


def decode_header(header: bytes) -> Frame:
    """The frame whose header this is.

    Raises FrameError for a wrong size, magic, version, kind, or a payload that the kind does not
    allow. Never raises anything else, whatever the bytes.
    """
    if len(header) != HEADER_BYTES:
        raise FrameError(f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    fields = _HEADER.unpack(header)
    magic, version, number, zero, plan, worker, incarnation, layer, offset, payload = fields
    if magic != MAGIC:
        raise FrameError(f"bad magic {magic!r}")
    if version != VERSION:
        raise FrameError(f"protocol version {version}, this side speaks {VERSION}")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise FrameError(f"unknown frame kind {number}") from None
    if zero != 0:
        raise FrameError(f"reserved bits are set in a {kind.name} frame")
    if payload > _PAYLOAD_BYTES_MAX[kind] or (kind is FrameKind.CHUNK and payload == 0):
        raise FrameError(
            f"a {kind.name} frame with {payload} bytes of payload, "
            f"{_PAYLOAD_BYTES_MAX[kind]} are allowed"
        )
    return Frame(kind, WorkerRef(worker, incarnation), plan, layer, offset, payload)


def check_chunk(frame: Frame, entry: LayerEntry, expected_offset_bytes: int) -> None:
    """The chunk continues `entry` at the expected offset and ends inside it, else FrameError."""
    if frame.layer != entry.layer or frame.offset_bytes != expected_offset_bytes:
        raise FrameError(
            f"chunk at layer {frame.layer} offset {frame.offset_bytes} where "
            f"layer {entry.layer} offset {expected_offset_bytes} was expected"
        )
    if frame.offset_bytes + frame.payload_bytes > entry.size_bytes:
        raise FrameError(
            f"chunk of {frame.payload_bytes} bytes at offset {frame.offset_bytes} leaves "
            f"layer {entry.layer} of {entry.size_bytes} bytes"
        )
