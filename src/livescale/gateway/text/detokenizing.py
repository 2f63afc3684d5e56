"""Generated token ids to text, as they come. Prompts, and texts as a whole, are in `text.py`.

There are two decoders. That of the `tokenizers` package is right for every tokenizer. Where each
token stands for the same bytes wherever it is (byte-level ones), most tokens are looked up.
"""

from __future__ import annotations

import codecs
from array import array
from typing import Protocol

from tokenizers import Tokenizer, decoders

from livescale.gateway.text.spelling import byte_level_bytes
from livescale.gateway.text.text_bounds import parts_of

_PIECES_MAX = 64
"""Pieces of an answer that are kept apart: a string of a few characters takes 50 bytes more."""

REPLACEMENT = "\ufffd"

HELD_TOKENS_MAX = 8
"""Tokens whose text is held for later ones, and a character's more. All of them are decoded again
with each token."""

CHARACTER_BYTES_MAX = 4

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns a growing list of token ids into text, piece by piece, special tokens skipped or not.

    Pieces never end inside a character: bytes of an incomplete one are held until the rest comes.
    How long a token takes does not depend on how many came before it, whatever bytes they are.
    All pieces and the flush together are the text of all tokens, or, where later tokens change the
    text of earlier ones, what had left of it and all the rest.
    """

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; empty if the token does not end it."""

    def flush(self) -> str:
        """What is still held when no more tokens come: an incomplete character's replacement."""


class Detokenizers:
    """Those of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        #: by whether special tokens are skipped
        self._texts = {skips: TokenTexts(tokenizer, skips) for skips in (True, False)}

    def make(self, skips_special_tokens: bool) -> Detokenizer:
        """One for a request's generated tokens."""
        if self._is_byte_level:
            return ByteLevelDecoder(self._texts[skips_special_tokens])
        return TokenDecoder(self._tokenizer, skips_special_tokens)


class TokenTexts(dict[int, str | bytes]):
    """The text of each token that has been asked for; its bytes, if they are no whole characters.

    Of byte-level tokenizers. Shared by all answers of a model, so that it stays in the processor's
    cache.
    """

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens

    def __missing__(self, token_id: int) -> str | bytes:
        text: str | bytes = self._tokenizer.decode(
            [token_id], skip_special_tokens=self._skips_special_tokens
        )
        if REPLACEMENT in text:  # of a byte, or the token stands for the replacement itself
            token = self._tokenizer.id_to_token(token_id)
            assert token is not None, f"the tokenizer decodes {token_id}, but does not know it"
            text = byte_level_bytes(token)
        self[token_id] = text
        return text


class ByteLevelDecoder:
    """Detokenizer where each token is the same bytes wherever it stands: what comes behind whole
    characters does not depend on them. Nothing is kept but the bytes of an incomplete character.
    """

    __slots__ = ("_incomplete", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        #: has the bytes of an incomplete character, if there is one
        self._incomplete: codecs.IncrementalDecoder | None = None

    def push(self, token_id: int) -> str:
        text = self._texts[token_id]
        incomplete = self._incomplete
        if incomplete is None:
            if isinstance(text, str):
                return text
            self._incomplete = incomplete = _Utf8Decoder("replace")
        piece = incomplete.decode(text.encode() if isinstance(text, str) else text)
        held, _ = incomplete.getstate()
        if not held:
            self._incomplete = None
        return piece

    def flush(self) -> str:
        incomplete, self._incomplete = self._incomplete, None
        return "" if incomplete is None else incomplete.decode(b"", final=True)


class TokenDecoder:
    """Detokenizer of any tokenizer.

    Byte-fallback tokenizers decode a run of bytes as a whole: a broken byte turns all of them into
    replacements, those whose text has left, too. What has left stays, and what is held is decoded
    without it. Where more than HELD_TOKENS_MAX tokens are held, their bytes are broken, or stand
    for replacements themselves: those leave.
    """

    __slots__ = (
        "_anchor",
        "_broken",
        "_context",
        "_context_text",
        "_held",
        "_is_apart",
        "_pieces",
        "_skips_special_tokens",
        "_token_ids",
        "_tokenizer",
        "_window_text",
    )

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        #: the last tokens whose text has left: others are decoded behind them
        self._context: list[int] = []
        #: how much of the text of those and the held ones has left, and all of it
        self._context_text = self._window_text = ""
        #: the first tokens of a run of bytes that is broken for good
        self._anchor: list[int] = []
        #: tokens since the held ones were, perhaps, whole characters
        self._broken = 0
        self._token_ids = array("I")
        self._pieces: list[str] = []
        #: tokens at the end whose text has not left
        self._held = 0
        #: what has left is not the beginning of what the tokenizer makes of all tokens
        self._is_apart = False

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        self._held += 1
        text = self._text([*self._context, *self._held_ids()])
        if text == self._window_text and self._is_nothing(token_id):
            self._token_ids.pop()
            self._held -= 1
            return ""
        self._window_text = text
        if len(text) > len(self._context_text) and not text.endswith(REPLACEMENT):
            piece = self._leave_all(text)
        elif self._is_held_in_vain(text):
            piece = self._leave_replacements(text)
        else:
            return ""
        self._pieces.append(piece)
        if len(self._pieces) > _PIECES_MAX:
            self._pieces = ["".join(self._pieces)]
        return piece

    def flush(self) -> str:
        rest = self._rest() if self._held else ""
        self._held = 0
        return rest

    # -- helpers, in the order used ---------------------------------------------------------

    def _is_nothing(self, token_id: int) -> bool:
        """The token is skipped, or unknown to the tokenizer: it changes no text, now or later."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        # (A first word's space is no text alone, either, but it is not skipped.)
        shown: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return bool(shown) and not self._text([token_id])

    def _leave_all(self, text: str) -> str:
        """What leaves of the text of the context and the held tokens if all of it may."""
        held = self._held_ids()
        if text.startswith(self._context_text):
            piece = text[len(self._context_text) :]
            self._context = held
        else:  # the text that left is changed by what came behind it
            piece = self._rest()
            self._context = [*self._before(), *held]
        self._context_text = self._window_text = self._text(self._context)
        self._anchor = []
        self._held = self._broken = 0
        return piece

    def _is_held_in_vain(self, text: str) -> bool:
        """So many tokens are held that more will not make characters of them."""
        chars = len(text) - len(self._context_text)
        # Incomplete or broken bytes are a replacement each; those of a character are fewer.
        is_broken = chars >= self._held or not text.startswith(self._context_text)
        self._broken = self._broken + 1 if is_broken else 0
        # The first of them may be the beginning of a character yet.
        is_decided = not 0 < self._broken < CHARACTER_BYTES_MAX
        return self._held > HELD_TOKENS_MAX and is_decided

    def _leave_replacements(self, text: str) -> str:
        """As `_leave_all`, where the text ends with replacements."""
        kinds = {part["type"] for part in parts_of(self._tokenizer.decoder, "decoders")}
        start, held, anchor = len(self._context_text), self._held_ids(), self._anchor
        if "ByteFallback" in kinds or len(text) <= start:
            is_broken = self._broken > 0
            piece = self._leave_all(text)
            if is_broken:  # what comes next in this run is broken by its beginning
                self._anchor = self._context = anchor or held
                self._context_text = self._window_text = self._text(self._context)
            return piece
        # The last one may be the beginning of a character.
        self._context, self._held = held[:-1], 1
        self._window_text = self._text(held)
        self._context_text = self._window_text[:-1]
        return text[start:-1]

    def _rest(self) -> str:
        """The text behind what has left."""
        if not self._is_apart:
            sent, text = "".join(self._pieces), self._text(self._token_ids.tolist())
            if text.startswith(sent):
                return text[len(sent) :]
            # No later token changes that. (To decode all tokens again and again takes too long.)
            self._is_apart = True
        before, held = self._anchor or self._before(), self._held_ids()
        start, text = self._text(before), self._text([*before, *held])
        return text[len(start) :] if text.startswith(start) else self._text(held)

    def _before(self) -> list[int]:
        """Tokens to decode others behind: tokenizers take the space from the first word."""
        ids: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        return ids

    def _held_ids(self) -> list[int]:
        return self._token_ids[-self._held :].tolist()

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips_special_tokens
        )
        return text
