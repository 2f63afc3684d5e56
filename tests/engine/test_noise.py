"""Noise is what its definition says, looks random, and choices are as frequent as they should."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from sampling_reference import reference_uniforms, segment

from effort import mostly_long
from livescale.engine.sampling.sampling import choose_tokens, noise_bits, noise_key, race
from livescale.values.types import SamplingParams

SEEDS = [0, 1, 2**31, 2**63 - 1]


def bits_at(seed: int, position: int, vocabulary: int) -> np.ndarray:
    ids = torch.arange(vocabulary, dtype=torch.int32)
    return noise_bits([noise_key(seed, position)], ids)[0].numpy().view(np.uint32)


def is_likely(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Pearson's chi-square is within 5 standard deviations of its mean."""
    assert wanted.min() >= 5, "too few draws for the test"
    degrees = wanted.size - 1
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    return abs(statistic - degrees) < 5 * math.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [1, 2, 131_072])
def test_noise_is_what_integers_give(seed: int, position: int) -> None:
    bits = bits_at(seed, position, 500).astype(np.uint64)
    # The sign bit of int32 is the last one of the uniform number.
    found = ((bits % 2**31) * 2 + (bits >> 31) + 0.5) / 2.0**32
    assert found.tolist() == reference_uniforms(seed, position, 500)


def test_noise_never_changes() -> None:
    """A seed is a promise: these bits are the first release's."""
    assert bits_at(42, 7, 3).tolist() == [3158720432, 392554744, 1394297801]
    assert bits_at(43, 7, 1).tolist() == [1732329653]


def test_a_choice_of_tokens_does_not_change_their_noise() -> None:
    keys = [noise_key(5, 1), noise_key(5, 2)]
    everything = noise_bits(keys, torch.arange(9000, dtype=torch.int32))
    some = torch.tensor([[8999, 0, 17], [3, 4, 5]], dtype=torch.int32)
    assert torch.equal(noise_bits(keys, some), everything.gather(1, some.long()))


def test_bits_of_a_position_differ_and_are_even() -> None:
    bits = bits_at(7, 100, 200_000)
    assert len(np.unique(bits)) == 200_000
    for shift in (0, 8, 16, 23):  # bytes of the number and its last bits
        counts = np.bincount((bits >> shift) & 0xFF, minlength=256)
        assert is_likely(counts, np.full(256, 200_000 / 256))


@pytest.mark.parametrize("token_id", [0, 1, 151_935])
@pytest.mark.parametrize("is_seed", [True, False])
def test_bits_of_a_token_are_even_over_seeds_and_positions(token_id: int, is_seed: bool) -> None:
    keys = [noise_key(i, 3) if is_seed else noise_key(3, i) for i in range(50_000)]
    bits = noise_bits(keys, torch.tensor([token_id, token_id + 1], dtype=torch.int32)).numpy()
    cells = (bits.view(np.uint32) >> 24 & 0x78) >> 3  # 16 classes of the uniform number
    for column in range(2):
        assert is_likely(np.bincount(cells[:, column], minlength=16), np.full(16, 50_000 / 16))
    # One token beside the next one, and one seed or position beside the next one.
    for pairs in (cells[:, 0] * 16 + cells[:, 1], cells[:-1, 0] * 16 + cells[1:, 0]):
        assert is_likely(np.bincount(pairs, minlength=256), np.full(256, len(pairs) / 256))


def test_every_input_bit_moves_half_of_the_noise() -> None:
    seed, position = 0x123456789ABCDEF, 4321
    base = bits_at(seed, position, 4096)
    flips = [(seed ^ 1 << bit, position) for bit in range(64)]
    flips += [(seed, position ^ 1 << bit) for bit in range(20)]
    for flipped in flips:
        moved = np.bitwise_count(base ^ bits_at(*flipped, 4096)).mean()
        assert abs(moved - 16) < 0.25, flipped  # 5.6 standard deviations


# -- frequencies ----------------------------------------------------------------------------------

SHARES = {
    "skewed": torch.tensor([0.5, 0.25, 0.15, 0.06, 0.03, 0.009, 0.001]),
    "even": torch.full((20,), 0.05),
    "peaked": torch.tensor([0.001, 0.998, 0.001]),
    "long": torch.arange(11.0, 211) / 22_100,
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("varied", mostly_long(["seed", "position"], ["seed"]))
@pytest.mark.parametrize("is_listed", [True, False])
def test_choices_are_as_frequent_as_they_are_likely(
    shares: torch.Tensor, varied: str, is_listed: bool
) -> None:
    count = 30_000
    row = shares.log()
    sampling = SamplingParams(output_tokens_max=1, temperature=1.0, seed=11)
    if is_listed:  # among others that are never chosen
        row = torch.cat([row, torch.full((300,), -math.inf)])
        sampling = replace(sampling, top_k=len(shares))
    if varied == "seed":
        segments = [segment(replace(sampling, seed=seed)) for seed in range(count)]
    else:
        first = segment(sampling)
        segments = [replace(first, first_position=place) for place in range(count)]
    token_ids, _ = choose_tokens(row.expand(count, -1), segments)
    counts = np.bincount(token_ids, minlength=len(shares))
    assert is_likely(counts, shares.double().numpy() * count)


@pytest.mark.long
def test_temperature_flattens_and_cuts_leave_the_rest_in_proportion() -> None:
    count = 30_000
    shares = SHARES["skewed"]
    ways = {
        "temperature": ({"temperature": 2.0}, shares.sqrt()),
        "top_k": ({"top_k": 3}, shares.where(shares >= 0.15, 0)),
        "top_p": ({"top_p": 0.7}, shares.where(shares >= 0.25, 0)),
        "min_p": ({"min_p": 0.2}, shares.where(shares >= 0.15, 0)),
    }
    for name, (way, wanted) in ways.items():
        sampling = SamplingParams(output_tokens_max=1, **{"temperature": 1.0, **way})
        segments = [segment(replace(sampling, seed=seed)) for seed in range(count)]
        token_ids, _ = choose_tokens(shares.log().expand(count, -1), segments)
        counts = np.bincount(token_ids, minlength=len(shares))
        allowed = (wanted > 0).numpy()
        assert counts[~allowed].sum() == 0, name
        wanted = wanted[wanted > 0].double()
        assert is_likely(counts[allowed], (wanted / wanted.sum()).numpy() * count), name


def test_consecutive_choices_are_independent() -> None:
    count = 40_000
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    sampling = SamplingParams(output_tokens_max=1, temperature=1.0)
    chosen = []
    for position in (5, 6):
        segments = [segment(replace(sampling, seed=seed), range(position)) for seed in range(count)]
        chosen.append(np.array(choose_tokens(shares.log().expand(count, -1), segments)[0]))
    joint = np.bincount(chosen[0] * 4 + chosen[1], minlength=16)
    assert is_likely(joint, torch.outer(shares, shares).double().flatten().numpy() * count)
    neighbours = np.bincount(chosen[0][:-1] * 4 + chosen[0][1:], minlength=16)
    wanted = torch.outer(shares, shares).double().flatten().numpy() * (count - 1)
    assert is_likely(neighbours, wanted)


def test_the_chi_square_notices_what_is_wrong() -> None:
    """A bias of some percent is far outside, and so is an agreement that is too good."""
    wanted = np.full(10, 3000.0)
    assert is_likely(wanted + np.array([60, -60] * 5), wanted)
    assert not is_likely(wanted + np.array([200, -200] * 5), wanted)
    assert not is_likely(np.full(256, 3000), np.full(256, 3000.0))


def test_the_winner_is_the_first_by_exact_arrivals() -> None:
    """Equal weights: the smallest uniform number wins, however close the second is."""
    bits = torch.tensor([[9, 5, -(2**31) + 5, 6], [-1, -(2**31), 2**31 - 1, 4]])
    assert race(torch.zeros(2, 4), bits.int()).flatten().tolist() == [1, 1]
