"""At least how many tokens a text has, from its length alone: sound, and without tokenizing.

A text of n characters has at least n / longest tokens, where `longest` is the most characters that
one token of the vocabulary stands for. That holds where no part of the tokenizer drops text or
makes one token of any amount of it; parts that are not known to be so make the bound 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

COMPOSED_CHARS_MAX = 4
"""Characters that Unicode's composition (NFC, NFKC) makes one of, at most."""
_WHITESPACE = bytes(byte for byte in range(128) if chr(byte).isspace())
_WIDE_WHITESPACE = tuple(
    char for char in map(chr, (*range(0x80, 0x3001), 0xFEFF)) if char.isspace() or char == "\ufeff"
)
_BYTES = 256


class TextBounds:
    """What is known of one tokenizer. `is_known` is False where a text can have any length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        normalizers = list(parts_of(tokenizer.normalizer, "normalizers"))
        pre_tokenizers = list(parts_of(tokenizer.pre_tokenizer, "pretokenizers"))
        shrinkages = [_shrinkage(part) for part in normalizers]
        kinds = [part["type"] for part in (*normalizers, *pre_tokenizers)]
        self.is_known = (
            None not in shrinkages
            and all(_keeps_text(part) for part in pre_tokenizers)
            and _covers_all(tokenizer, "ByteLevel" in kinds)
        )
        self._drops_whitespace = any(kind in _SPACE_DROPPING for kind in kinds) or any(
            token.lstrip or token.rstrip for token in added
        )
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._token_chars = max(map(len, vocabulary), default=1)
        for shrinkage in shrinkages:
            self._token_chars *= shrinkage or 1

    def least_tokens(self, text: str, enough: int) -> int:
        """A number that the text's tokens do not fall below, found without tokenizing. Exact work
        is done only where the text's length alone would make it `enough`."""
        least = len(text) // self._token_chars if self.is_known else 0
        if least >= enough and self._drops_whitespace:
            least = _chars_without_whitespace(text) // self._token_chars
        return least

    def chars_max(self, tokens: int) -> int | None:
        """Every text of fewer tokens has at most so many characters (None: any number)."""
        if not self.is_known or self._drops_whitespace:
            return None
        return tokens * self._token_chars - 1

    def __repr__(self) -> str:
        known = f"{self._token_chars} characters a token" if self.is_known else "any length"
        return f"<TextBounds {known}>"


_SPACE_DROPPING = ("Strip", "Whitespace", "WhitespaceSplit")


def parts_of(component: Any, children: str) -> Iterator[dict[str, Any]]:
    """What a tokenizer's component is made of, as JSON, its state: the only way to see that.
    `children` is the key of a sequence's parts."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), children)


def _flat(state: dict[str, Any], children: str) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for part in state[children]:
            yield from _flat(part, children)
    else:
        yield state


def _shrinkage(normalizer: dict[str, Any]) -> int | None:
    """Characters that become one at most (whitespace apart); None: any number."""
    match normalizer["type"]:
        case "NFC" | "NFKC":
            return COMPOSED_CHARS_MAX
        case "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel" | "Strip":
            return 1
        case "Replace":
            pattern = normalizer["pattern"].get("String")
            if not pattern or not normalizer["content"]:
                return None
            return -(-len(pattern) // len(normalizer["content"]))
        case _:
            return None


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    """Nothing but whitespace is lost."""
    kind = pre_tokenizer["type"]
    if kind in ("Split", "Punctuation"):
        return str(pre_tokenizer["behavior"]).lower() != "removed"
    return kind in (
        *("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"),
        *("Whitespace", "WhitespaceSplit"),
    )


def _covers_all(tokenizer: Tokenizer, is_byte_level: bool) -> bool:
    """No text is left out for want of a token, and none becomes one unknown token as a whole."""
    model = tokenizer.model
    if type(model).__name__ != "BPE":
        return False
    if is_byte_level and _has_all(tokenizer, iter(ByteLevel.alphabet())):
        return True
    if model.byte_fallback and _has_all(tokenizer, (f"<0x{byte:02X}>" for byte in range(_BYTES))):
        return True
    # An unknown character is then a token of its own.
    return model.unk_token is not None and not model.fuse_unk and not is_byte_level


def _has_all(tokenizer: Tokenizer, tokens: Iterator[str]) -> bool:
    return all(tokenizer.token_to_id(token) is not None for token in tokens)


def _chars_without_whitespace(text: str) -> int:
    if text.isascii():
        return len(text.encode().translate(None, _WHITESPACE))
    narrow = sum(text.count(chr(byte)) for byte in _WHITESPACE)
    return len(text) - narrow - sum(map(text.count, _WIDE_WHITESPACE))
