"""Parcels of live pairs: what was packed comes out again, and nothing else does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    KvLayer,
    KvWanted,
    LiveMessage,
    Offer,
    Parted,
    Pull,
    Settled,
    Taken,
)
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.runtime.member_process.live_parcels import (
    PART_BYTES,
    Assembler,
    Letter,
    ParcelError,
    pack,
)
from livescale.values.types import SamplingParams

KEYS = st.builds(BatchKey, st.integers(0, 9), st.integers(0, 2**40))
IDS = st.lists(st.integers(0, 2**20), max_size=30)
SPECS = st.builds(
    SequenceSpec,
    st.text(max_size=8),
    st.integers(0, 99),
    IDS.map(tuple),
    st.builds(SamplingParams, st.integers(1, 99), seed=st.integers(0, 2**32)),
    IDS.map(tuple),
)
BARE = st.one_of(
    st.builds(Offer, st.integers(0, 9), KEYS, IDS.map(tuple), IDS.map(tuple)),
    st.builds(KvWanted, KEYS, st.integers(1, 99)),
    st.builds(Parted, st.integers(0, 9)),
    *(st.builds(kind, KEYS) for kind in (Pull, Gone, Declined, Taken, Settled)),
)


def put_together(parcels: list[bytes], size_bytes: int | None) -> tuple[Letter, bytearray]:
    assembler = Assembler(lambda _: size_bytes)
    came = [assembler.take(parcel) for parcel in parcels]
    assert came[:-1] == [None] * (len(came) - 1)
    assert came[-1] is not None
    return came[-1]


def content_of(size_bytes: int) -> list[memoryview]:
    """In two pieces."""
    content = random.Random(size_bytes).randbytes(size_bytes)
    return [memoryview(content[: size_bytes // 3]), memoryview(content[size_bytes // 3 :])]


@given(BARE)
def test_a_message_comes_as_it_was(message: LiveMessage) -> None:
    assert put_together(pack(Letter(message)), None) == (Letter(message), bytearray())


@given(KEYS, st.lists(SPECS, max_size=3), st.integers(0, 9), st.integers(0, 5000))
def test_rows_come_with_their_batch(
    key: BatchKey, specs: list[SequenceSpec], next_layer: int, size_bytes: int
) -> None:
    message = Handover(key, tuple(specs), next_layer)
    letter = Letter(message, tuple(f"g{n}" for n in range(len(specs))), size_bytes)
    sent = content_of(size_bytes)
    came, content = put_together(pack(letter, sent), size_bytes)
    assert content == b"".join(sent)
    assert (came.gateways, came.size_bytes) == (letter.gateways, size_bytes)
    assert isinstance(came.message, Handover)
    for spec, other in zip(specs, came.message.requests, strict=True):
        assert list(other.prompt_ids) == list(spec.prompt_ids)
        assert (other.request, other.attempt, other.sampling, other.generated_ids) == (
            *(spec.request, spec.attempt, spec.sampling, spec.generated_ids),
        )


@pytest.mark.parametrize("size_bytes", [PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES - 7])
def test_large_bytes_come_in_parts_and_those_nobody_wants_are_not_kept(size_bytes: int) -> None:
    letter = Letter(KvLayer(BatchKey(2, 1), 3), (), size_bytes)
    sent = content_of(size_bytes)
    parcels = pack(letter, sent)
    assert len(parcels) == -(-size_bytes // PART_BYTES)
    assert put_together(parcels, size_bytes) == (letter, b"".join(sent))
    assert put_together(parcels, None) == (letter, b"")
    broken = Assembler(lambda _: size_bytes)
    if len(parcels) > 1:
        broken.take(parcels[0])
        for parcel in (parcels[0], pack(Letter(Pull(BatchKey(1, 1))))[0]):
            with pytest.raises(ParcelError, match="inside another"):
                broken.take(parcel)
        with pytest.raises(ParcelError, match="did not begin"):
            Assembler(lambda _: size_bytes).take(parcels[1])
    if len(parcels) > 2:
        with pytest.raises(ParcelError, match="part 2 comes after 1"):
            broken.take(parcels[2])


@settings(max_examples=examples(300))
@given(st.randoms(use_true_random=False), st.integers(0, 400))
def test_what_is_damaged_is_refused_or_taken_for_another_message(
    rng: random.Random, size_bytes: int
) -> None:
    """Never anything else: a worker lives on whatever it is sent."""
    spec = SequenceSpec("r", 1, (5, 6, 7), SamplingParams(3))
    message = rng.choice(
        [Handover(BatchKey(2, 1), (spec,), 2), KvLayer(BatchKey(2, 1), 1), Pull(BatchKey(2, 1))]
    )
    gateways = ("g0",) if isinstance(message, Handover) else ()
    carried = 0 if isinstance(message, Pull) else size_bytes
    [parcel] = pack(Letter(message, gateways, carried), content_of(carried))
    damaged = bytearray(parcel)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(damaged) + 1)
        damaged[place : place + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
    assembler = Assembler(lambda _: size_bytes)
    try:
        came = assembler.take(bytes(damaged))
    except ParcelError:
        return
    if came is not None:
        letter, content = came
        assert len(content) in (0, letter.size_bytes)


@given(st.binary(max_size=64))
def test_noise_is_refused(parcel: bytes) -> None:
    with pytest.raises(ParcelError):
        Assembler(lambda _: None).take(parcel)


@pytest.mark.parametrize("wrong_bytes", [0, 9, 11, 1 << 40, -1])
def test_a_batch_with_other_bytes_than_it_needs_is_refused(wrong_bytes: int) -> None:
    parcel = bytearray(pack(Letter(KvLayer(BatchKey(2, 1), 1), (), 10), content_of(10))[0])
    if wrong_bytes == -1:
        parcel += b"x"
    with pytest.raises(ParcelError):
        Assembler(lambda _: wrong_bytes if wrong_bytes >= 0 else 10).take(bytes(parcel))
