"""Generated token ids to text, as they come. Prompts, and texts as a whole, are in `text.py`.

There are two decoders. That of the `tokenizers` package is right for every tokenizer. Where each
token stands for the same bytes wherever it is (byte-level ones), most tokens are looked up.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream

_PIECES_MAX = 64
"""Pieces of an answer that are kept apart: a string of a few characters takes 50 bytes more."""

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns a growing list of token ids into text, piece by piece, special tokens skipped or not.

    Pieces never end inside a character: bytes of an incomplete one are held until the rest comes.
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


class TokenTexts(dict[int, str | None]):
    """The text of each token that has been asked for; None if its bytes are no whole characters.

    Shared by all answers of a model, so that it stays in the processor's cache.
    """

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.skips_special_tokens = skips_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text = self.of([token_id])
        # (A token may stand for the replacement itself. That one is not looked up, either.)
        self[token_id] = known = None if REPLACEMENT in text else text
        return known

    def of(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=self.skips_special_tokens)
        return text


class ByteLevelDecoder:
    """Detokenizer where each token is the same bytes wherever it stands: what comes behind whole
    characters does not depend on them. Nothing is kept of tokens whose text has left."""

    __slots__ = ("_held", "_stream", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        #: tokens whose text has not left, with what knows when it may
        self._held: list[int] | None = None
        self._stream: DecodeStream | None = None

    def push(self, token_id: int) -> str:
        texts = self._texts
        if self._stream is None:
            text = texts[token_id]
            if text is not None:
                return text
            self._held = []
            self._stream = DecodeStream(skip_special_tokens=texts.skips_special_tokens)
        assert self._held is not None
        self._held.append(token_id)
        piece: str | None = self._stream.step(texts.tokenizer, token_id)
        if piece is None:
            return ""
        self._held = self._stream = None
        return piece

    def flush(self) -> str:
        held, self._held, self._stream = self._held, None, None
        return "" if held is None else self._texts.of(held)


class TokenDecoder:
    """Detokenizer of any tokenizer.

    Byte-fallback tokenizers decode a run of bytes as a whole: a broken byte turns all of them into
    replacements, those whose text has left, too. What has left stays, and what is held is decoded
    without it.
    """

    __slots__ = (
        "_held",
        "_is_apart",
        "_pieces",
        "_skips_special_tokens",
        "_stream",
        "_token_ids",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skips_special_tokens)
        self._token_ids = array("I")
        self._pieces: list[str] = []
        #: tokens at the end whose text has not left
        self._held = 0
        #: what has left is not the beginning of what the tokenizer makes of all tokens
        self._is_apart = False

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        self._held += 1
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises bare Exceptions
            # The text that left is changed by what came behind it: the stream goes no further.
            piece = self._rest()
            before = self._before()
            self._stream = DecodeStream(
                ids=[*before, *self._held_ids()], skip_special_tokens=self._skips_special_tokens
            )
        if piece is None:
            return ""
        self._held = 0
        self._pieces.append(piece)
        if len(self._pieces) > _PIECES_MAX:
            self._pieces = ["".join(self._pieces)]
        return piece

    def flush(self) -> str:
        rest = self._rest() if self._held else ""
        self._held = 0
        return rest

    # -- helpers, in the order used ---------------------------------------------------------

    def _rest(self) -> str:
        """The text behind what has left."""
        if not self._is_apart:
            sent, text = "".join(self._pieces), self._text(self._token_ids.tolist())
            if text.startswith(sent):
                return text[len(sent) :]
            # No later token changes that. (To decode all tokens again and again takes too long.)
            self._is_apart = True
        before, held = self._before(), self._held_ids()
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
