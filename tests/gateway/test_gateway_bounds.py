"""What bounds a request before it is understood, against slow and plain ways of counting."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_values import json_values
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from effort import examples
from livescale.gateway.contract.pacing import ByteBudget, ReadPacer
from livescale.gateway.http.bodies import StructureCount
from livescale.gateway.text.text_bounds import TextBounds
from virtual_loop import run

# -- structure ------------------------------------------------------------------------------------

tricky = st.text(st.sampled_from('[]{},:"\\/\né ') | st.characters(), max_size=30)
values = st.recursive(
    json_values | tricky,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(tricky, children, max_size=4),
    max_leaves=20,
)


def counted(value: object) -> tuple[int, int, int]:
    """Openings, keys and commas of a value."""
    if isinstance(value, list | dict):
        inner = list(value.values()) if isinstance(value, dict) else value
        parts = [counted(entry) for entry in inner]
        openings, keys, commas = (sum(part[place] for part in parts) for place in range(3))
        own_keys = len(value) if isinstance(value, dict) else 0
        return openings + 1, keys + own_keys, commas + max(0, len(value) - 1)
    return 0, 0, 0


@given(value=values, is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_structure_is_counted_however_the_text_is_cut(
    value: object, is_ascii: bool, cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    count = StructureCount()
    for start, stop in itertools.pairwise(places):
        count.feed(text[start:stop])
    assert (count.openings, count.keys, count.commas) == counted(value)
    assert count.string_chars <= max(map(len, strings_of(value)), default=0)


def strings_of(value: object) -> Iterator[str]:
    """All strings of a value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    if isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from strings_of(entry)


@given(text=st.text(st.sampled_from("aé\u65e5\U0001f600"), min_size=9), parts=st.integers(2, 9))
def test_a_string_in_several_parts_is_measured(text: str, parts: int) -> None:
    whole = f'{{"x":[1,"{text}'.encode()
    # The string begins in the first part: its quote is the ninth byte.
    bound = 9 + len(text.encode()) // parts
    count = StructureCount()
    for start in (0, bound):
        count.feed(whole[start : bound if start == 0 else None])
    assert count.string_chars == len(text)


# -- a budget of bytes ----------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 15), max_size=30), seed=st.integers(0, 99))
def test_a_budget_is_never_exceeded_and_everybody_gets_a_turn(sizes: list[int], seed: int) -> None:
    total, held, order = 10, 0, []
    dice = random.Random(seed)

    async def work(number: int, size: int, budget: ByteBudget) -> None:
        nonlocal held
        async with budget.holding(size):
            order.append(number)
            held += min(size, total)
            assert held <= total
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            held -= min(size, total)

    async def main() -> None:
        budget = ByteBudget(total)
        tasks = [asyncio.create_task(work(n, size, budget)) for n, size in enumerate(sizes)]
        leaving = [task for task in tasks if dice.random() < 0.2]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with budget.holding(total):  # nothing is lost
            pass
        stayed = [n for n, task in enumerate(tasks) if task not in leaving]
        assert [n for n in order if n in stayed] == stayed

    asyncio.run(main())


# -- turns at reading -----------------------------------------------------------------------------


@given(readers=st.integers(1, 5), refused=st.integers(0, 5), turns=st.integers(1, 3))
@settings(max_examples=10)
def test_all_who_read_share_a_rate_and_the_refused_come_last(
    readers: int, refused: int, turns: int
) -> None:
    part_bytes, bytes_per_s = 1000, 1_000_000
    order: list[tuple[int, int]] = []

    def read(pacer: ReadPacer, number: int, turn: int, is_over: asyncio.Event) -> None:
        def resume() -> None:
            order.append((turn, number))
            if turn + 1 < turns:
                read(pacer, number, turn + 1, is_over)
            elif len(order) == turns * (readers + refused):
                is_over.set()

        pacer.wait(part_bytes, resume, is_refused=number >= readers)

    async def main() -> float:
        pacer, is_over = ReadPacer(bytes_per_s), asyncio.Event()
        begin_s = asyncio.get_running_loop().time()
        for number in range(readers + refused):
            read(pacer, number, 0, is_over)
        await is_over.wait()
        return asyncio.get_running_loop().time() - begin_s

    took_s = run(main())
    everybody = list(itertools.product(range(turns), range(readers)))
    assert order[: len(everybody)] == everybody
    paced_s = (readers + refused) * turns * part_bytes / bytes_per_s
    # The first parts are read at once; a turn lasts at least as long as one part takes.
    assert 0.999999 * paced_s <= took_s <= 2.000001 * paced_s


# -- text -----------------------------------------------------------------------------------------

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a a a a  b  b", "ééé 日本語"] * 3


def byte_level(normalizer: object = None, pre: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre is None)
    tokenizer.pre_tokenizer = level if pre is None else pre_tokenizers.Sequence([pre, level])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_greedy_token() -> Tokenizer:
    """A special token that takes all spaces around it with it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    return tokenizer


def byte_fallback(is_complete: bool = True) -> Tokenizer:
    """As SentencePiece models are converted: no pre-tokenizer, spaces are a visible character."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256 if is_complete else 100))]
    tokens += ["▁", *"abcdefghij", "ab", "▁▁", "▁▁▁▁", "▁a"]
    merges = [("a", "b"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a")]
    model = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


KNOWN = {
    "byte-level": byte_level(),
    "composed": byte_level(normalizers.NFC()),
    "compatible": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "stripped": byte_level(normalizers.Strip()),
    "shortened": byte_level(normalizers.Replace("aaa", "b")),
    "words": byte_level(pre=pre_tokenizers.Whitespace()),
    "split": byte_level(pre=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "greedy": with_greedy_token(),
    "fallback": byte_fallback(),
}
UNKNOWN = {
    "removed": byte_level(pre=pre_tokenizers.Split(" ", "removed")),
    "emptied": byte_level(normalizers.Replace("a", "")),
    "pattern": byte_level(normalizers.Replace(Regex("a+"), "b")),
    "accents": byte_level(normalizers.StripAccents()),
    "unknown characters": byte_fallback(is_complete=False),
    "words of any length": Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
}
repeated = st.builds(
    lambda pieces: "".join(piece * count for piece, count in pieces),
    st.lists(
        st.tuples(
            st.sampled_from([" ", "a", "the", "\u0301", "e\u0301", "ᾯ", "Å", "ﬃ", "日", "\u3000"])
            | st.sampled_from(["<|end|>", "\n", "\u2126", "한", "\u1112\u1161\u11ab", "🦊", "<s>"])
            | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.integers(0, 200),
        ),
        max_size=6,
    ),
)


@pytest.mark.parametrize("kind", KNOWN)
@given(text=repeated)
@settings(max_examples=examples(40))
def test_no_text_has_fewer_tokens_than_its_length_tells(kind: str, text: str) -> None:
    """So that a text that would fit is never refused for its length."""
    tokenizer = KNOWN[kind]
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    bounds = TextBounds(tokenizer)
    for enough in (1, tokens, tokens + 1, 10**9):
        least = bounds.least_tokens(text, enough)
        assert least < enough or least <= tokens


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_far_too_long_is_known_to_be(kind: str) -> None:
    """Texts of words: 200 characters a token are more than any of these has."""
    bounds = TextBounds(KNOWN[kind])
    assert bounds.is_known
    assert bounds.least_tokens("word" * 50_000, 1000) >= 1000


@pytest.mark.parametrize("kind", UNKNOWN)
def test_where_text_may_vanish_nothing_is_said(kind: str) -> None:
    bounds = TextBounds(UNKNOWN[kind])
    assert bounds.least_tokens("a" * 1_000_000, 10) == 0
