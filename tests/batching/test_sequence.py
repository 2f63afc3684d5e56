"""Keys of KV blocks: equal exactly when everything up to the block's end is equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.run import SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import SamplingParams

BLOCK_TOKENS = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "a"])


def keys(prompt: list[int], generated: list[int], salt: str) -> list[bytes]:
    spec = SequenceSpec("r", 1, prompt, SamplingParams(99), tuple(generated), cache_salt=salt)
    sequence = SequenceState.of(spec, 1, BLOCK_TOKENS)
    return [sequence.key(block) for block in range(sequence.known_tokens // BLOCK_TOKENS)]


@given(one=TOKENS, other=TOKENS, one_salt=SALTS, other_salt=SALTS)
def test_keys_are_equal_when_all_that_comes_before_is(
    one: list[int], other: list[int], one_salt: str, other_salt: str
) -> None:
    pairs = zip(keys(one, [], one_salt), keys(other, [], other_salt), strict=False)
    for block, (mine, theirs) in enumerate(pairs):
        stop = (block + 1) * BLOCK_TOKENS
        assert (mine == theirs) == (one[:stop] == other[:stop] and one_salt == other_salt)


@given(tokens=st.lists(st.integers(0, 1 << 17), min_size=2, max_size=14), data=st.data())
def test_it_does_not_matter_who_wrote_a_token(tokens: list[int], data: st.DataObject) -> None:
    split = data.draw(st.integers(1, len(tokens)))
    assert keys(tokens, [], "") == keys(tokens[:split], tokens[split:], "")


def test_keys_are_those_of_every_process_and_kind_of_sequence() -> None:
    spec = SequenceSpec("r", 1, range(7), SamplingParams(9))
    key = SequenceState.of(spec, 1, BLOCK_TOKENS).key(1)
    assert key == keys(list(range(7)), [], "")[1]
    assert key.hex().startswith("19d0a22c98568351")


@given(known=st.integers(1, 30), computed=st.integers(0, 29))
def test_the_last_token_is_never_taken_from_others(known: int, computed: int) -> None:
    computed = min(computed, known - 1)
    sequence = SequenceState.of(SequenceSpec("r", 1, range(known), SamplingParams(9)), 1, 3)
    sequence.computed = computed
    taken = len(list(sequence.reusable_keys()))
    assert taken * 3 < known <= (taken + 1) * 3
    has_next = (computed // 3 + 1) * 3 < known
    assert sequence.next_key() == (sequence.key(computed // 3) if has_next else None)


@given(prompt=TOKENS, generated=TOKENS, bounds=st.tuples(st.integers(0, 28), st.integers(0, 28)))
def test_token_ids_are_a_slice_of_all(
    prompt: list[int], generated: list[int], bounds: tuple[int, int]
) -> None:
    spec = SequenceSpec("r", 1, prompt, SamplingParams(99), tuple(generated))
    start, stop = sorted(bounds)
    token_ids = SequenceState.of(spec, 1, 3).token_ids(start, stop)
    assert token_ids == tuple([*prompt, *generated][start:stop])
