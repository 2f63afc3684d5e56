import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.transfer.frames import (
    CHUNK_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    REASON_BYTES_MAX,
    Frame,
    FrameError,
    FrameKind,
    check_chunk,
    decode_header,
)
from livescale.types import LayerEntry, WorkerRef

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
REFS = st.builds(WorkerRef, U32, U32)
OTHERS = st.sampled_from([FrameKind.HELLO, FrameKind.BEGIN, FrameKind.END])
FRAMES = st.one_of(
    st.builds(Frame, OTHERS, REFS, U64, U32, U64, st.just(0)),
    st.builds(
        Frame, st.just(FrameKind.CHUNK), REFS, U64, U32, U64, st.integers(1, CHUNK_BYTES_MAX)
    ),
    st.builds(
        Frame, st.just(FrameKind.ABORT), REFS, U64, U32, U64, st.integers(0, REASON_BYTES_MAX)
    ),
)


@given(FRAMES)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    header = frame.encode()
    assert len(header) == HEADER_BYTES
    assert decode_header(header) == frame


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused_and_nothing_else_is_raised(garbage: bytes) -> None:
    try:
        frame = decode_header(garbage)
    except FrameError:
        return
    assert frame.encode() == garbage


@given(FRAMES, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_wrong_byte_is_refused_or_gives_another_valid_frame(
    frame: Frame, at: int, flip: int
) -> None:
    header = bytearray(frame.encode())
    header[at] ^= flip
    try:
        other = decode_header(bytes(header))
    except FrameError:
        return
    assert other != frame
    assert other.encode() == header
    assert other.payload_bytes <= CHUNK_BYTES_MAX
    assert at >= len(MAGIC) + 1


@pytest.mark.parametrize(
    ("frame", "story"),
    [
        (Frame(FrameKind.CHUNK, WorkerRef(1), 1, 0, 0, CHUNK_BYTES_MAX + 1), "CHUNK"),
        (Frame(FrameKind.CHUNK, WorkerRef(1), 1, 0, 0, 0), "CHUNK"),
        (Frame(FrameKind.HELLO, WorkerRef(1), payload_bytes=1), "HELLO"),
        (Frame(FrameKind.ABORT, WorkerRef(1), payload_bytes=REASON_BYTES_MAX + 1), "ABORT"),
    ],
)
def test_a_payload_that_the_kind_does_not_allow_is_refused(frame: Frame, story: str) -> None:
    with pytest.raises(FrameError, match=story):
        decode_header(frame.encode())


@pytest.mark.parametrize("field", ["plan", "layer", "offset_bytes"])
def test_a_field_that_does_not_fit_is_not_sent(field: str) -> None:
    with pytest.raises(FrameError, match="does not fit"):
        Frame(FrameKind.END, WorkerRef(0), **{field: -1}).encode()


def test_another_version_is_refused_by_number() -> None:
    header = bytearray(Frame(FrameKind.HELLO, WorkerRef(0)).encode())
    struct.pack_into("B", header, len(MAGIC), 9)
    with pytest.raises(FrameError, match="version 9"):
        decode_header(bytes(header))


@given(size=st.integers(0, 50), expected=st.integers(0, 60), frame=FRAMES)
def test_a_chunk_is_accepted_only_where_it_continues_its_layer(
    size: int, expected: int, frame: Frame
) -> None:
    entry = LayerEntry(3, 0, size, (), "", "")
    is_right = (
        frame.layer == 3
        and frame.offset_bytes == expected
        and expected + frame.payload_bytes <= size
    )
    try:
        check_chunk(frame, entry, expected)
    except FrameError:
        assert not is_right
    else:
        assert is_right


def test_the_last_chunk_may_end_with_the_layer_but_not_behind_it() -> None:
    entry = LayerEntry(1, 0, 10, (), "", "")
    check_chunk(Frame(FrameKind.CHUNK, WorkerRef(0), 1, 1, 4, 6), entry, 4)
    with pytest.raises(FrameError, match="leaves layer 1 of 10 bytes"):
        check_chunk(Frame(FrameKind.CHUNK, WorkerRef(0), 1, 1, 4, 7), entry, 4)
    with pytest.raises(FrameError, match="offset 4 was expected"):
        check_chunk(Frame(FrameKind.CHUNK, WorkerRef(0), 1, 1, 5, 1), entry, 4)
