"""Text to token ids and back, as a stream. Knows tokenizers; must not know HTTP bodies.

Long texts are tokenized off the event loop: other streams' tokens must not wait for them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from livescale.gateway.chat import ChatTemplate
from livescale.gateway.errors import invalid
from livescale.gateway.schema import Message

OFF_LOOP_CHARS = 4096
"""Texts above this length are tokenized in a thread (about 1 ms of work at 3 MB/s)."""

REPLACEMENT = "\ufffd"


class TextCodec:
    """A model's tokenizer and chat template. `vocabulary` is the number of ids it may be given."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocabulary: int
    ) -> None:
        # A saved tokenizer may carry training settings that would cut or lengthen prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """Read tokenizer.json and what lies beside it. Raises ValueError naming the file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: a model needs a fast tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"{path} cannot be read: {error}") from error
        vocabulary = _configured_vocabulary(directory / "config.json")
        if vocabulary is None:
            vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        return cls(tokenizer, ChatTemplate.load(directory), vocabulary)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a plain prompt, with the special tokens the tokenizer puts around one."""
        if len(text) <= OFF_LOOP_CHARS:
            return self._encode(text, True)
        return await asyncio.to_thread(self._encode, text, True)

    async def encode_chat(self, messages: list[Message]) -> tuple[int, ...]:
        """Ids of the rendered messages. Raises ApiError (400) without or by the template."""
        template = self._template
        if template is None:
            raise invalid(
                "This model has no chat template: use /v1/completions", "model", "no_chat_template"
            )
        if sum(_chars(message) for message in messages) <= OFF_LOOP_CHARS:
            return self._encode(template.render(messages), False)
        return await asyncio.to_thread(
            lambda: self._encode(template.render(messages), False)  # special tokens are in the text
        )

    def decoder(self) -> TokenDecoder:
        """A decoder for one request's generated tokens."""
        return TokenDecoder(self._tokenizer)

    def __repr__(self) -> str:
        template = "with" if self._template else "without"
        return f"<TextCodec {self.vocabulary} ids, {template} chat template>"

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # Unlike `encode`, the batch call releases the interpreter lock, and it is 3x as fast.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encodings[0].ids)


class TokenDecoder:
    """Turns a growing list of token ids into text, piece by piece, special tokens skipped.

    Pieces never end inside a character: bytes of an incomplete one are held until the rest comes.
    All pieces and the flush together are the text of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._is_holding = False

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; empty if the token does not end it."""
        self._token_ids.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # Byte-fallback tokenizers decode a run of bytes as a whole, so a broken byte behind
            # text that has left changes that text; the stream then refuses to go on.
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self._stream.step(self._tokenizer, token_id)
        self._is_holding = piece is None
        if piece is None:
            return ""
        self._pieces.append(piece)
        return piece

    def flush(self) -> str:
        """What is still held when no more tokens come: an incomplete character's replacement."""
        if not self._is_holding:
            return ""
        self._is_holding = False
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        sent = "".join(self._pieces)
        return text[len(sent) :] if text.startswith(sent) else REPLACEMENT


def _chars(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(part.text or "") for part in message.content)
    return len(message.content or "")


def _configured_vocabulary(path: Path) -> int | None:
    """`vocab_size` of the model's configuration: it may know more ids than its tokenizer."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    value = config.get("vocab_size") if isinstance(config, dict) else None
    return value if isinstance(value, int) else None
