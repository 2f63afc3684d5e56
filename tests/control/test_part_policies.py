"""What decode instances a model needs when its prefill instances are to be more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.policy.load_snapshot import LoadSnapshot
from livescale.control.policy.part_policies import PartPolicies
from livescale.values.scaling_policies import Bounds, SloAim
from livescale.values.types import LayerSpan, Part, Role

PLACES = 64
RATE = 10_000
"""Prompt tokens per second of a prefill instance."""
FULL = 900 * RATE // 1000
"""Tokens of a second at the upper bound of one instance."""
PREFILL, DECODE = (Part("m", LayerSpan(0, 34), role) for role in (Role.PREFILL, Role.DECODE))


def needs(prefill_instances: int, tokens: int, decoding: int) -> tuple[int, int, str]:
    """Prefill and decode instances that are needed at least, and why the latter, when so many
    tokens came in the last second and so many requests decode."""
    common = {"window_ns": 1_000_000_000, "kv_blocks": None, "places": PLACES}
    loads = {
        PREFILL: LoadSnapshot(
            instances=prefill_instances,
            window_tokens=tokens,
            queued_prefill_tokens=0,
            kv_blocks_used=0,
            prefill_tokens_per_s=RATE,
            **common,
        ),
        DECODE: LoadSnapshot(
            instances=1,
            window_tokens=0,
            queued_prefill_tokens=0,
            kv_blocks_used=0,
            prefill_tokens_per_s=RATE,
            requests=decoding,
            **common,
        ),
    }
    found = PartPolicies(Bounds()).suggest(loads)
    return found[PREFILL].at_least, found[DECODE].at_least, found[DECODE].reason


@pytest.mark.parametrize(("decoding", "decode"), [(76, 2), (90, 3), (10, 1), (0, 0)])
def test_decode_grows_with_the_load_that_comes_and_not_with_instances(
    decoding: int, decode: int
) -> None:
    """A fourth prefill instance brings a third more requests. 76 requests have two instances of
    55 (85 % of their places), and so do 102; 90 have two, and 120 need three."""
    assert needs(3, 4 * FULL, decoding)[:2] == (4, decode)


def test_without_growth_of_prefill_decode_has_its_own_need() -> None:
    assert needs(4, 4 * FULL, 90)[:2] == (4, 2)
    assert needs(3, 4 * FULL, 90)[2] == "prefill_grows"


@given(instances=st.integers(1, 20), tokens=st.integers(0, 400_000), decoding=st.integers(0, 600))
def test_growth_is_never_below_the_own_need_nor_beyond_that_of_twice_the_load(
    instances: int, tokens: int, decoding: int
) -> None:
    _, decode, _ = needs(instances, tokens, decoding)
    # Prefill that has more than enough does not grow.
    own, twice = (needs(1000, tokens, load)[1] for load in (decoding, 2 * decoding))
    assert own <= decode <= twice


def test_decode_that_was_needed_lately_stays_for_a_while() -> None:
    """With an aim for the first token a number falls as slowly as prefill's: bursts come again."""
    policies = PartPolicies(SloAim(floor_decay_ns=1000))

    def floor(now_ns: int, decoding: int) -> int:
        load = LoadSnapshot(
            instances=1,
            window_tokens=0,
            window_ns=1_000_000_000,
            queued_prefill_tokens=0,
            kv_blocks_used=0,
            prefill_tokens_per_s=RATE,
            kv_blocks=None,
            places=PLACES,
            now_ns=now_ns,
        )
        decode = replace(load, requests=decoding)
        return policies.suggest({PREFILL: load, DECODE: decode})[DECODE].floor

    assert [floor(0, 200), floor(1, 0), floor(500, 0), floor(1001, 0)] == [4, 4, 2, 0]
    assert policies.deadlines_ns(2000) == []
