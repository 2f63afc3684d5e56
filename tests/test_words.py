"""What `tests/words.py` finds in a text."""

from __future__ import annotations

import pytest

import words


def found(text: str) -> list[str]:
    return words.problems("text", list(words.sentences("here", text)))


def test_short_sentences_pass() -> None:
    assert found("The controller starts a worker. The worker registers.") == []


def test_a_long_sentence_is_found() -> None:
    long = " ".join(["word"] * (words.LONGEST + 1))
    problem = found(f"Short it is. {long}.")[0]
    assert problem.startswith(f"here: {words.LONGEST + 1} words: word word")


def test_the_average_counts() -> None:
    text = " ".join(["word"] * (words.AVERAGE_MAX + 1)) + "."
    assert found(text) == [
        f"text: {words.AVERAGE_MAX + 1:.1f} words a sentence, {words.AVERAGE_MAX} at most"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The head is lost.",
        "Each member of the pool ends.",
        "Of an earlier life of it.",
        "Nobody waits for it.",
        "The lease X is none of a pool.",
    ],
)
def test_words_of_our_own_are_found(text: str) -> None:
    (problem,) = found(text)
    assert problem.startswith("here: say “")


@pytest.mark.parametrize("text", ["The head node is lost.", "Run livescale cluster member NAME."])
def test_terms_of_the_field_and_names_of_commands_pass(text: str) -> None:
    assert found(text) == []


def test_help_texts_and_messages_are_collected() -> None:
    helps = [one.text for one in words.help_texts()]
    assert any(text.startswith("A standby takes over this long") for text in helps)
    assert any("not a valid lease file" in one.text for one in words.messages())
