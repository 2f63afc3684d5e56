"""The words of the wire: a fixed header before every payload, and strict decoders.

Formats only: no sockets, no state. A header never makes a receiver allocate much: payloads of
chunks go into place, and all others have a bound.
"""

from __future__ import annotations

import enum
import struct

import xxhash

from livescale.common.proofs import NONCE_BYTES, PROOF_BYTES
from livescale.values.chunks import CHUNK_RANGES_MAX, ChunkRange
from livescale.values.types import Manifest, Value, WorkerRef

MAGIC = b"LScl"
VERSION = 7
CHUNK_BYTES_MAX = 16 << 20
PARCEL_BYTES_MAX = 16 << 20
PROBE_BYTES_MAX = 64 << 20
REASON_BYTES_MAX = 512
COPY_ID_BYTES = 16

# magic, version, kind, flags, plan, worker, incarnation, layer, chunk, payload bytes
_HEADER = struct.Struct(">4sBBHQIQIII")
_UNPROVED = 1
_CHECK = struct.Struct(">I")
HEADER_BYTES = _HEADER.size + _CHECK.size
# copy, chunk bytes, must the layers be verified, number of ranges
_WANT = struct.Struct(f">{COPY_ID_BYTES}sIBH")
_RANGE = struct.Struct(">III")
_RANGES_BYTES_MAX = CHUNK_RANGES_MAX * _RANGE.size


class FrameError(Exception):
    """Bytes on a connection are not what the protocol allows."""


class FrameKind(enum.IntEnum):
    """HELLO opens a connection (`greeting.py`); the other kinds come in any order after that."""

    HELLO = 1
    WANT = 2  # the sender wants chunks of a copy, for one of its plans
    CHUNK = 3  # one of them
    REFUSE = 4  # no more chunks come for the plan, and why
    STOP = 5  # the sender wants no more: of these chunks, or (no ranges) of all the plan's
    PARCEL = 6  # a message for the user of the data plane
    PROBE = 7  # the sender wants `chunk` bytes to nowhere
    PROBED = 8  # some of them
    HOLD = 9  # the sender wants no chunks for `chunk` microseconds: parcels come to it


_PAYLOAD_BYTES = {
    FrameKind.HELLO: (min(NONCE_BYTES, PROOF_BYTES), NONCE_BYTES + PROOF_BYTES),
    FrameKind.WANT: (_WANT.size + _RANGE.size, _WANT.size + _RANGES_BYTES_MAX),
    FrameKind.CHUNK: (1, CHUNK_BYTES_MAX),
    FrameKind.REFUSE: (0, REASON_BYTES_MAX),
    FrameKind.STOP: (0, _RANGES_BYTES_MAX),
    FrameKind.PARCEL: (0, PARCEL_BYTES_MAX),
    FrameKind.PROBE: (0, 0),
    FrameKind.PROBED: (1, CHUNK_BYTES_MAX),
    FrameKind.HOLD: (0, 0),
}


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(Value, frozen=True):
    """A header. `payload_bytes` follow it on the wire.

    `plan` is that of who wants the chunks. `chunk` counts through the model. `is_unproved` says of
    a CHUNK that its layer came over a network, and that its content hash has not been compared yet.
    """

    kind: FrameKind
    sender: WorkerRef
    plan: int = 0
    layer: int = 0
    chunk: int = 0
    payload_bytes: int = 0
    is_unproved: bool = False

    def encode(self) -> bytes:
        """The HEADER_BYTES of this frame. Raises FrameError if a field does not fit."""
        try:
            place = self.plan, self.layer, self.chunk
            return encode_header(
                self.kind, self.sender, place, self.payload_bytes, self.is_unproved
            )
        except struct.error as error:
            raise FrameError(f"{self} does not fit a header: {error}") from None


def encode_header(
    kind: FrameKind,
    sender: WorkerRef,
    place: tuple[int, int, int],
    payload_bytes: int,
    is_unproved: bool,
) -> bytes:
    """A header without its Frame, for chunks, which are many; `place` is (plan, layer, chunk).
    Raises struct.error."""
    plan, layer, chunk = place
    head = (MAGIC, VERSION, kind, is_unproved, plan, sender.worker, sender.incarnation)
    header = _HEADER.pack(*head, layer, chunk, payload_bytes)
    return header + _CHECK.pack(xxhash.xxh32_intdigest(header))


class WantedChunks(Value, frozen=True):
    """Payload of WANT. `is_verified_only`: chunks of layers whose checksum has agreed, no others
    (what was corrupt is asked for again this way, so that a holder that passed it on is not blamed
    for what it received)."""

    copy: bytes
    chunk_bytes: int
    ranges: tuple[ChunkRange, ...]
    is_verified_only: bool = False

    def encode(self) -> bytes:
        head = _WANT.pack(self.copy, self.chunk_bytes, self.is_verified_only, len(self.ranges))
        return head + encode_ranges(self.ranges)


def decode_header(header: bytes) -> Frame:
    """The frame whose header this is.

    Raises FrameError for a wrong size, magic, version, checksum, kind, or a payload that the kind
    does not allow. Never raises anything else, whatever the bytes.
    """
    if len(header) != HEADER_BYTES:
        raise FrameError(f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    fields = _HEADER.unpack_from(header)
    magic, version, number, flags, plan, worker, incarnation, layer, chunk, size = fields
    if magic != MAGIC:
        raise FrameError(f"bad magic {magic!r}")
    if version != VERSION:
        raise FrameError(f"protocol version {version}, this side speaks {VERSION}")
    if _CHECK.unpack_from(header, _HEADER.size)[0] != xxhash.xxh32_intdigest(
        header[: _HEADER.size]
    ):
        raise FrameError("the checksum of a header does not agree")
    kind = _KINDS.get(number)
    if kind is None:
        raise FrameError(f"unknown frame kind {number}")
    if flags not in ((0, _UNPROVED) if kind is FrameKind.CHUNK else (0,)):
        raise FrameError(f"reserved bits are set in a {kind.name} frame")
    least, most = _PAYLOAD_BYTES[kind]
    if not least <= size <= most:
        raise FrameError(f"a {kind.name} frame with {size} bytes of payload, not {least}-{most}")
    sender = WorkerRef(worker, incarnation)
    return Frame(kind, sender, plan, layer, chunk, size, flags == _UNPROVED)


def decode_wanted(payload: bytes) -> WantedChunks:
    """The payload of a WANT. Raises FrameError, whatever the bytes."""
    if len(payload) < _WANT.size:
        raise FrameError(f"{len(payload)} bytes are no wanted chunks")
    copy, chunk_bytes, verified, count = _WANT.unpack_from(payload)
    if not 1 <= chunk_bytes <= CHUNK_BYTES_MAX or verified > 1 or count < 1:
        raise FrameError(f"{count} ranges of chunks of {chunk_bytes} bytes cannot be wanted")
    ranges = decode_ranges(payload[_WANT.size :])
    if len(ranges) != count:
        raise FrameError(f"{len(ranges)} ranges are wanted where {count} were announced")
    return WantedChunks(copy, chunk_bytes, ranges, bool(verified))


def encode_ranges(ranges: tuple[ChunkRange, ...]) -> bytes:
    return b"".join(_RANGE.pack(r.start, r.stop, r.step) for r in ranges)


def decode_ranges(payload: bytes) -> tuple[ChunkRange, ...]:
    """Raises FrameError, whatever the bytes."""
    if len(payload) % _RANGE.size or len(payload) > _RANGES_BYTES_MAX:
        raise FrameError(f"{len(payload)} bytes are no list of ranges")
    try:
        return tuple(ChunkRange(*fields) for fields in _RANGE.iter_unpack(payload))
    except ValueError as error:
        raise FrameError(str(error)) from None


def refusal(sender: WorkerRef, plan: int, reason: str) -> bytes:
    """A whole REFUSE frame; a long reason is cut."""
    text = reason.encode()[:REASON_BYTES_MAX]
    frame = Frame(FrameKind.REFUSE, sender, plan, payload_bytes=len(text))
    return frame.encode() + text


def copy_id(manifest: Manifest) -> bytes:
    """What a copy is asked for by: models of one shape and other weights are different copies
    (`Manifest.id` is that of the shape)."""
    parts = [manifest.model, manifest.id]
    parts += [f"{e.offset_bytes} {e.size_bytes} {e.checksum}" for e in manifest.layers]
    return bytes(xxhash.xxh3_128_digest("\n".join(parts).encode()))
