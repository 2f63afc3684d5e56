"""The judge itself: it accepts what stock generation gives and finds what was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_instance import request
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from effort import examples
from livescale.engine.oracle import GreedyCheck, GreedyOracle


@pytest.fixture(scope="module")
def generated(models: Path) -> list[tuple[tuple[int, ...], list[int]]]:
    """(prompt, stock greedy output) of several lengths."""
    model = AutoModelForCausalLM.from_pretrained(models / "tiny")
    pairs = []
    for index, length in enumerate((1, 4, 30, 31, 90)):
        prompt = tuple(request(f"o{index}", length, 1).prompt_ids)
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=20,
            min_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
        pairs.append((prompt, output[0, length:].tolist()))
    return pairs


def test_stock_generation_is_right(
    oracles: dict[str, GreedyOracle],
    generated: list[tuple[tuple[int, ...], list[int]]],
) -> None:
    checks = oracles["tiny"].check_many(generated)
    assert checks == [GreedyCheck(tokens=20, wrong=(), near_ties=0)] * len(generated)
    assert oracles["tiny"].check(*generated[2]) == checks[2]


@given(data=st.data())
@settings(max_examples=examples(30))
def test_a_changed_token_is_found_where_it_is(
    oracles: dict[str, GreedyOracle],
    generated: list[tuple[tuple[int, ...], list[int]]],
    data: st.DataObject,
) -> None:
    prompt, output = data.draw(st.sampled_from(generated))
    place = data.draw(st.integers(0, len(output) - 1))
    other = data.draw(st.integers(0, 1023).filter(lambda token: token != output[place]))
    changed = [*output[:place], other, *output[place + 1 :]]
    verdict = oracles["tiny"].check(prompt, changed)
    assert verdict.wrong[0] == place
    assert not verdict.is_right


def test_verdicts_come_in_the_order_asked(
    oracles: dict[str, GreedyOracle], generated: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    wrong = [(prompt, [*output[:i], 0]) for i, (prompt, output) in enumerate(generated)]
    checks = oracles["tiny"].check_many(wrong[::-1])
    assert [check.tokens for check in checks] == [5, 4, 3, 2, 1]
    assert [check.wrong for check in checks] == [(4,), (3,), (2,), (1,), (0,)]


def test_nothing_to_judge(oracles: dict[str, GreedyOracle]) -> None:
    assert oracles["tiny"].check([1, 2], []) == GreedyCheck(0, (), 0)
    assert oracles["tiny"].check_many([]) == []
    with pytest.raises(ValueError, match="behind a prompt"):
        oracles["tiny"].check([], [1])
