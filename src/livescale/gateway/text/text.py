"""Text to token ids and back, as a stream. Knows tokenizers; must not know HTTP bodies.

Long texts are tokenized off the event loop: other streams' tokens must not wait for them. How much
text is worked on at once is bounded (`TextWork`): tokenizing takes a hundred times its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tokenizers import Tokenizer

from livescale.gateway.contract.admission import estimated_tokens
from livescale.gateway.contract.errors import invalid
from livescale.gateway.contract.pacing import ByteBudget
from livescale.gateway.contract.schema import Message
from livescale.gateway.text.chat import ChatTemplate
from livescale.gateway.text.detokenizing import Detokenizer, Detokenizers
from livescale.gateway.text.rendering import Renderers
from livescale.gateway.text.spelling import TokenSpelling
from livescale.gateway.text.text_bounds import TextBounds
from livescale.gateway.text.tokenizer_files import MODEL_FILE, TokenizerFiles, read_json

OFF_LOOP_CHARS = 4096
"""Texts above this length are tokenized in a thread (about 1 ms of work at 3 MB/s)."""

OFF_LOOP_TOKENS = 4096
"""Lists of ids above this length are decoded in a thread."""

LONG_CHARS = 64 * 1024
"""Texts above this length wait for one another, not with shorter ones."""

WORK_CHARS_MAX = 512 * 1024
"""Characters of texts that are tokenized at once, of long ones and of shorter ones each."""


class TextWork:
    """What one gateway works on texts with: who renders, and how much is tokenized at once.

    Lives on its event loop.
    """

    def __init__(self) -> None:
        self.renderers = Renderers()
        self._shorter = ByteBudget(WORK_CHARS_MAX)
        self._long = ByteBudget(WORK_CHARS_MAX)

    def holding(self, chars: int) -> AbstractAsyncContextManager[None]:
        """Wait until so many characters may be worked on, and hold them meanwhile."""
        return (self._long if chars > LONG_CHARS else self._shorter).holding(chars)


class TextCodec:
    """A model's tokenizer and chat template.

    `vocabulary` is the number of ids it may be given, `spelling` how single ones are written,
    `bounds` how many tokens a text has at least.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        vocabulary: int,
        work: TextWork,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._work = work
        #: a template that takes long holds up its own model's chats only
        self._rendering = ByteBudget(1)
        self._detokenizers = Detokenizers(tokenizer)
        self.bounds = TextBounds(tokenizer)
        self.vocabulary = vocabulary
        self.spelling = TokenSpelling(tokenizer)

    @classmethod
    def load(cls, directory: Path, work: TextWork | None = None) -> TextCodec:
        """Read the tokenizer's files, and try the chat template.

        Raises ValueError naming the file, two files that contradict each other, or what is wrong
        with the template.
        """
        work = work or TextWork()
        files = TokenizerFiles.read(directory)
        # The model may know more ids than its tokenizer.
        vocabulary = read_json(directory / MODEL_FILE).get("vocab_size")
        if not isinstance(vocabulary, int):
            vocabulary = files.tokenizer.get_vocab_size(with_added_tokens=True)
        template = ChatTemplate.of(files)
        if template is not None:
            try:
                template.try_out(work.renderers)
            except ValueError as error:
                raise ValueError(f"the chat template of {directory} fails: {error}") from error
        return cls(files.tokenizer, template, vocabulary, work)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Roles whose messages' contents the chat template leaves out."""
        return () if self._template is None else self._template.left_out

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a plain prompt, with the special tokens the tokenizer puts around one."""
        [ids] = await self.encode_all([text], add_special_tokens)
        return ids

    async def encode_all(
        self, texts: list[str], add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """Ids of several prompts, in their order."""
        chars = sum(map(len, texts))
        if chars <= OFF_LOOP_CHARS:
            return self._encode(texts, add_special_tokens)
        async with self._work.holding(chars):
            return await asyncio.to_thread(self._encode, texts, add_special_tokens)

    async def render_chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
    ) -> str:
        """The text of the messages. Raises ApiError (400) without or by the template.

        It has its special tokens.
        """
        template, renderers = self._template, self._work.renderers
        if template is None:
            raise invalid(
                "This model has no chat template. Use /v1/completions", "model", "no_chat_template"
            )
        async with self._rendering.holding(1):
            return await template.render(
                renderers,
                messages,
                add_generation_prompt,
                continue_final_message,
                reasoning_effort,
            )

    async def decode(self, ids: list[int]) -> str:
        """The text of the ids, special tokens included."""
        if len(ids) <= OFF_LOOP_TOKENS:
            return self._decode(ids)
        async with self._work.holding(len(ids)):
            return await asyncio.to_thread(self._decode, ids)

    def token_strings(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entry of each id (None: the model has the id, the tokenizer not)."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def decoder(self, skips_special_tokens: bool = True) -> Detokenizer:
        """A decoder for one request's generated tokens."""
        return self._detokenizers.make(skips_special_tokens)

    def __repr__(self) -> str:
        template = "with" if self._template else "without"
        return f"<TextCodec {self.vocabulary} ids, {template} chat template>"

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        # Unlike `encode`, the batch call releases the interpreter lock, and it is 3x as fast.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        # The batch call releases the interpreter lock.
        [text] = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return text


def estimated_messages(messages: list[Message]) -> int:
    """About how many tokens the rendered messages have."""
    return sum(estimated_tokens(text) for message in messages for text in _texts(message))


def _texts(message: Message) -> list[str]:
    """All that may be long, whether or not the template reads it."""
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [part.text or "" for part in content]
    return [*parts, message.reasoning or "", message.reasoning_content or ""]
