"""How a single token is written: the text and the bytes of one id, for log probabilities.

The text of many tokens together is `text.py`'s: tokens may hold parts of characters.
"""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer

from livescale.gateway.text.text_bounds import parts_of

SPELLINGS_MAX = 32_768
"""Spellings kept per model (some 200 bytes each)."""

_ANCHORS = ("a", "▁a", "e", "A", "0")


class TokenSpelling:
    """Text and bytes of any token id of one tokenizer, special tokens shown.

    Byte-level tokenizers: the bytes are those that the token's characters stand for, so that the
    bytes of all tokens make up the text's bytes; incomplete characters are replaced in the text
    alone. Others: the text that the token adds behind a letter (a leading space is kept), and the
    one byte of a byte-fallback token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        kinds = {part["type"] for part in parts_of(tokenizer.decoder, "decoders")}
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._anchor = _anchor(tokenizer)
        self._anchor_text = self._decode(self._anchor)
        self.of = lru_cache(SPELLINGS_MAX)(self._spell)

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the model's vocabulary is larger than its tokenizer's
            return "", b""
        if self._is_byte_level:
            spelled = byte_level_bytes(token)
            return spelled.decode("utf-8", errors="replace"), spelled
        if self._has_byte_tokens and (byte := fallback_byte(token)) is not None:
            return byte.decode("utf-8", errors="replace"), byte
        text = self._decode([*self._anchor, token_id])
        if text.startswith(self._anchor_text):
            text = text[len(self._anchor_text) :]
        else:
            text = self._decode([token_id])
        return text, text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def __repr__(self) -> str:
        return f"<TokenSpelling {'byte-level' if self._is_byte_level else 'decoded'}>"


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """A letter's id: decoders treat a text's first token differently from all others."""
    ids = (tokenizer.token_to_id(token) for token in _ANCHORS)
    return [token_id for token_id in ids if token_id is not None][:1]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write every byte as a visible character: GPT-2's table, reversed."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """What the token stands for in a byte-level tokenizer."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token that is not spelled in the alphabet stands for itself
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """`<0xE2>` is the byte E2."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None
