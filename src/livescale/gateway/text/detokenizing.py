"""Generated token ids to text, as they come. Prompts, and texts as a whole, are in `text.py`.

There are two decoders. `TokenDecoder` is right for every tokenizer. Where each token stands for the
same bytes wherever it is (byte-level ones), `ByteLevelDecoder` looks most tokens up.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer, decoders

from livescale.gateway.text.spelling import byte_level_bytes, fallback_byte

REPLACEMENT = "\ufffd"

HELD_TOKENS_MAX = 8
"""Tokens whose text is held for later ones."""

WINDOW_TOKENS_MAX = 4
"""Tokens whose text has left that are decoded again with the next one, which may depend on them."""

CHARACTER_BYTES_MAX = 4

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns a growing list of token ids into text, piece by piece, special tokens skipped or not.

    Pieces never end inside a character: bytes of an incomplete one are held until the rest comes.
    How long a token takes does not depend on how many came before it, whatever bytes they are.
    All pieces and the flush together are the text of all tokens. Where later tokens change the text
    of earlier ones, what has left stays.
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
    """Detokenizer of any tokenizer: what a token adds to the text of those before it.

    Byte-fallback tokenizers decode a run of bytes as a whole, which takes long where it is long: a
    broken byte turns all of them into replacements. So their bytes are counted here.
    """

    __slots__ = (
        "_bytes",
        "_held",
        "_is_broken",
        "_owed",
        "_sent_chars",
        "_skips_special_tokens",
        "_text",
        "_tokenizer",
        "_window",
    )

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        #: the last tokens, their text, and how much of that has left
        self._window: list[int] = []
        self._text = ""
        self._sent_chars = 0
        #: tokens in a row whose text may end inside a character
        self._held = 0
        #: of a run of bytes: has those of an incomplete character
        self._bytes = _Utf8Decoder()
        #: bytes less characters of the replacements that it ends with, which have left
        self._owed = 0
        self._is_broken = False

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # unknown to the tokenizer: no text
            return ""
        byte = fallback_byte(token)
        if byte is not None and (text := self._decoded([token_id])) != token:
            piece = self._text[self._sent_chars :]
            if not self._window and not text:  # the space that begins an answer is taken away
                self._owed = 1
            else:
                piece += self._push_byte(byte)
            self._window, self._text, self._sent_chars, self._held = [token_id], text, len(text), 0
            return piece
        window = [*self._window, token_id]
        text = self._decoded(window)
        if text == self._text and self._is_skipped(token_id):
            return ""
        self._window, self._text = window, text
        return self._end_run() + self._leave()

    def flush(self) -> str:
        rest, self._sent_chars = self._text[self._sent_chars :], len(self._text)
        return self._end_run() + rest

    # -- helpers, in the order used ---------------------------------------------------------

    def _push_byte(self, byte: bytes) -> str:
        """What leaves with the next byte of a run."""
        if self._is_broken:
            return REPLACEMENT
        try:
            character = self._bytes.decode(byte)
        except UnicodeDecodeError:
            self._is_broken = True
            return REPLACEMENT * (self._owed + self._incomplete_bytes() + 1)
        if character:
            is_replacement = character == REPLACEMENT
            self._owed = self._owed + len(REPLACEMENT.encode()) - 1 if is_replacement else 0
        return character

    def _end_run(self) -> str:
        """What leaves of a run of bytes when no more come: incomplete characters break it, too."""
        held = 0 if self._is_broken else self._incomplete_bytes()
        rest = REPLACEMENT * (self._owed + held) if held else ""
        self._bytes.reset()
        self._owed, self._is_broken = 0, False
        return rest

    def _incomplete_bytes(self) -> int:
        return len(self._bytes.getstate()[0])

    def _is_skipped(self, token_id: int) -> bool:
        """The token changes no text, now or later."""
        # (A first word's space is no text alone, either, but it is not skipped.)
        shown: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return bool(shown) and not self._decoded([token_id])

    def _leave(self) -> str:
        """What leaves of the window's text. Its last character is held as long as it may be the
        beginning of another one, but not all that stands before it."""
        text, sent_chars = self._text, self._sent_chars
        self._held = self._held + 1 if text.endswith(REPLACEMENT) else 0
        if 0 < self._held <= HELD_TOKENS_MAX:
            return ""
        held_chars = min(self._held, 1)
        piece = text[sent_chars : len(text) - held_chars]
        if len(self._window) > WINDOW_TOKENS_MAX:
            self._window = self._window[-CHARACTER_BYTES_MAX if held_chars else -1 :]
            self._text = self._decoded(self._window)
        self._sent_chars = len(self._text) - held_chars
        return piece

    def _decoded(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips_special_tokens
        )
        return text
