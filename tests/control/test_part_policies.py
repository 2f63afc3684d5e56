"""What decode instances a model needs when its prefill instances are to be more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.policy.load_snapshot import LoadSnapshot, Suggestion
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


@pytest.mark.parametrize(
    ("tokens", "at_least", "at_most"),
    [(400, 1, 1), (401, 1, 2), (800, 1, 2), (801, 2, 3), (2000, 3, 5), (4000, 5, 10)],
)
def test_both_parts_have_links_for_the_kv_that_comes(
    tokens: int, at_least: int, at_most: int
) -> None:
    """Links of 1,000 tokens per second each: at most 800 permille of one are in use before another
    instance comes, and at least 400 before one goes. Compute is no bound here: 4,000 tokens are
    less than half of what a prefill instance does, and nothing decodes."""
    for part, found in suggested(tokens, kv_tokens_per_s=1000).items():
        assert (found.at_least, found.at_most) == (at_least, at_most), part
        # One instance has other reasons: it computes the prompts.
        assert (at_least == 1 and part is PREFILL) or found.reason == "kv_rate"


def test_links_that_are_not_known_or_wide_enough_decide_nothing() -> None:
    for rate, decode in ((None, 0), (100 * RATE, 1)):
        found = suggested(4 * FULL, kv_tokens_per_s=rate)
        assert (found[PREFILL].at_least, found[PREFILL].reason) == (4, "token_rate")
        assert found[DECODE].at_least == decode


def suggested(tokens: int, kv_tokens_per_s: int | None) -> dict[Part, Suggestion]:
    """Of ten instances each, when so many prompt tokens came in the last second, and nothing
    decodes."""
    load = LoadSnapshot(
        instances=10,
        window_tokens=tokens,
        window_ns=1_000_000_000,
        queued_prefill_tokens=0,
        kv_blocks_used=0,
        prefill_tokens_per_s=RATE,
        kv_blocks=None,
        places=PLACES,
        kv_tokens_per_s=kv_tokens_per_s,
    )
    return PartPolicies(Bounds()).suggest({PREFILL: load, DECODE: load})


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
