import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_world import write_model

from livescale.transfer.formats.frames import (
    CHUNK_BYTES_MAX,
    COPY_ID_BYTES,
    HEADER_BYTES,
    MAGIC,
    PARCEL_BYTES_MAX,
    REASON_BYTES_MAX,
    Frame,
    FrameError,
    FrameKind,
    WantedChunks,
    copy_id,
    decode_header,
    decode_ranges,
    decode_wanted,
    encode_ranges,
    refusal,
)
from livescale.transfer.memory.arena import Arena
from livescale.values.chunks import CHUNK_RANGES_MAX, ChunkRange
from livescale.values.types import WorkerRef

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
REFS = st.builds(WorkerRef, U32, U64)
PAYLOADS = {
    FrameKind.HELLO: (32, 64),
    FrameKind.CHUNK: (1, CHUNK_BYTES_MAX),
    FrameKind.REFUSE: (0, REASON_BYTES_MAX),
    FrameKind.PARCEL: (0, PARCEL_BYTES_MAX),
    FrameKind.PROBE: (0, 0),
    FrameKind.PROBED: (1, CHUNK_BYTES_MAX),
    FrameKind.HOLD: (0, 0),
}
FRAMES = st.sampled_from(list(PAYLOADS)).flatmap(
    lambda kind: st.builds(Frame, st.just(kind), REFS, U64, U32, U32, st.integers(*PAYLOADS[kind]))
)
RANGES = st.lists(
    st.builds(
        lambda start, size, step: ChunkRange(start, start + size, step),
        st.integers(0, 2**31),
        st.integers(1, 2**30),
        st.integers(1, 2**32 - 1),
    ),
    max_size=20,
).map(tuple)


@given(FRAMES)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    header = frame.encode()
    assert len(header) == HEADER_BYTES
    assert decode_header(header) == frame


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused_and_nothing_else_is_raised(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header(garbage)


@given(FRAMES, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_wrong_byte_is_refused(frame: Frame, at: int, flip: int) -> None:
    header = bytearray(frame.encode())
    header[at] ^= flip
    with pytest.raises(FrameError):
        decode_header(bytes(header))


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_payload_that_the_kind_does_not_allow_is_refused(kind: FrameKind) -> None:
    with pytest.raises(FrameError, match=kind.name):
        decode_header(Frame(kind, WorkerRef(1), payload_bytes=2**32 - 1).encode())


@pytest.mark.parametrize("field", ["plan", "layer", "chunk", "payload_bytes"])
def test_a_field_that_does_not_fit_is_not_sent(field: str) -> None:
    with pytest.raises(FrameError, match="does not fit"):
        Frame(FrameKind.CHUNK, WorkerRef(0), **{field: -1}).encode()


def test_another_version_is_refused_by_number() -> None:
    header = bytearray(Frame(FrameKind.PROBE, WorkerRef(0)).encode())
    struct.pack_into("B", header, len(MAGIC), 9)
    with pytest.raises(FrameError, match="version 9"):
        decode_header(bytes(header))


@given(RANGES)
def test_ranges_survive_the_wire(ranges: tuple[ChunkRange, ...]) -> None:
    assert decode_ranges(encode_ranges(ranges)) == ranges
    if ranges:
        wanted = WantedChunks(b"c" * COPY_ID_BYTES, 5, ranges, True)
        assert decode_wanted(wanted.encode()) == wanted


@given(st.binary(max_size=100))
def test_payloads_of_garbage_are_refused_and_nothing_else_is_raised(garbage: bytes) -> None:
    for decode in (decode_ranges, decode_wanted):
        try:
            decode(garbage)
        except FrameError:
            continue


@pytest.mark.parametrize(
    "wanted",
    [
        WantedChunks(b"", 0, (ChunkRange(0, 1),)),
        WantedChunks(b"", CHUNK_BYTES_MAX + 1, (ChunkRange(0, 1),)),
        WantedChunks(b"", 1, ()),
        WantedChunks(b"", 1, (ChunkRange(0, 1),) * (CHUNK_RANGES_MAX + 1)),
    ],
)
def test_what_nobody_may_want_is_refused(wanted: WantedChunks) -> None:
    with pytest.raises(FrameError):
        decode_wanted(wanted.encode())


def test_a_long_reason_is_cut() -> None:
    frame = decode_header(refusal(WorkerRef(0), 1, "x" * 1000)[:HEADER_BYTES])
    assert frame.payload_bytes == REASON_BYTES_MAX


def test_copies_are_told_apart_by_their_bytes() -> None:
    one, same, other = (write_model(Arena(1000), [300, 400], seed) for seed in (1, 1, 2))
    assert copy_id(one) == copy_id(same) != copy_id(other)
