"""In which form a chat template takes what messages say: a string, or a list of parts.

A template tells by what comes out of it. What it is given in the other form it refuses, leaves out,
or prints as Python writes the list. No templates here: who asks renders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Content = str | list[dict[str, str]]
TemplateMessage = dict[str, Any]
"""A message as templates read it: role, content, and what else the client gave."""
Render = Callable[[list[TemplateMessage]], str | None]
"""Gives the text of messages, or None if the template refuses them."""

TRIALS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
)
"""Roles of chats that a template is tried with. One that it accepts is enough."""
_WORDS = ("Zyzzyva", "Quokka", "Axolotl")
"""What the messages of a trial say: words that no template has by itself."""
_SECOND = "Numbat"
"""And the second part of each, where a message has two."""


@dataclass(frozen=True, slots=True)
class ContentForms:
    """What a template takes.

    `several` are roles whose lists of parts it takes as they are; those of others are joined.
    `left_out` are roles whose messages' contents do not come out, of one message at least.
    """

    takes_strings: bool = True
    several: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    def of(self, role: str, content: str | Sequence[str]) -> Content:
        """A text, or the texts of parts, in a form that the template takes."""
        if not isinstance(content, str):
            if content and role in self.several:
                return _parts(content)
            content = "\n".join(content)
        return content if self.takes_strings else _parts([content])


def tried_forms(render: Render) -> ContentForms:
    """The forms of the template that renders. Strings, where it takes both as well."""
    strings = [render(_chat(roles, lambda word: word)) for roles in TRIALS]
    ones = [render(_chat(roles, lambda word: _parts([word]))) for roles in TRIALS]
    severals = [render(_chat(roles, lambda word: _parts([word, _SECOND]))) for roles in TRIALS]
    takes_strings = _words_out(strings) >= _words_out(ones)
    taken = strings if takes_strings else ones
    out = {role for role, is_out in _said(taken) if is_out}
    left_out = {role for role, is_out in _said(taken) if not is_out}
    # Templates print parts of roles that are not tried (tools) as Python writes them.
    several = out if all(map(_is_the_same, taken, severals)) else ()
    return ContentForms(takes_strings, frozenset(several), tuple(sorted(left_out)))


def _chat(roles: Sequence[str], content: Callable[[str], Content]) -> list[TemplateMessage]:
    return [
        {"role": role, "content": content(word)} for role, word in zip(roles, _WORDS, strict=False)
    ]


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _words_out(texts: list[str | None]) -> int:
    return sum(is_out for _, is_out in _said(texts))


def _said(texts: list[str | None]) -> Iterator[tuple[str, bool]]:
    """The role of each message that was rendered, and whether what it says came out."""
    for roles, text in zip(TRIALS, texts, strict=True):
        if text is not None:
            for role, word in zip(roles, _WORDS, strict=False):
                yield role, word in _without_lists(text, word)


def _without_lists(text: str, word: str) -> str:
    """The text without a part as Python or JSON writes it, which has the word, too."""
    for written in (f"'text': '{word}'", f'"text": "{word}"', f'"text":"{word}"'):
        text = text.replace(written, "")
    return text


def _is_the_same(text: str | None, of_several: str | None) -> bool:
    """Two parts give the text of one, and the second one's. (Templates put space around them.)"""
    if text is None:
        return True
    if of_several is None or _SECOND not in of_several:
        return False
    return "".join(of_several.replace(_SECOND, "").split()) == "".join(text.split())
