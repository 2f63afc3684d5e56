"""POST /tokenize and /detokenize, with vLLM's bodies: what a model's tokenizer makes of a text.

No generation, no instance: these answer while nothing is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from livescale.gateway.contract.admission import AtMost
from livescale.gateway.contract.answers import json_answer
from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.errors import invalid
from livescale.gateway.contract.schema import ChatBody, MessageList, ReasoningEffort, decode_as
from livescale.gateway.requests.prompts import chat_ids, check_chat, check_fits, check_ids
from livescale.gateway.requests.served import ServedModel, ServedModels
from livescale.gateway.text.text import TextCodec

TOKENIZING_MAX = 64
"""Requests that are tokenized at once; more wait for nothing but processor time."""
RETRY_AFTER_S = 1.0
_NOTHING = (b"null", b"[]", b'""')
"""Values of what is not available that ask for nothing of it."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None
    # Known to vLLM, and not available here.
    chat_template: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str | None] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class Tokenization:
    """The two endpoints over the models' tokenizers."""

    def __init__(
        self,
        served: ServedModels,
        reading: Callable[[Request], AbstractAsyncContextManager[bytes]],
    ) -> None:
        self._served = served
        self._reading = reading
        self._busy = AtMost(TOKENIZING_MAX, "too many texts are being tokenized", RETRY_AFTER_S)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        async with self._reading(request) as raw:
            body = decode_as(raw, TokenizeBody)
            model = self._model(body.model)
            with self._busy.one_more():
                ids = await _ids(model.codec, model.card, body)
                answer = TokenizeAnswer(len(ids), model.card.model_tokens_max, ids)
                if body.return_token_strs:
                    answer.token_strs = await asyncio.to_thread(model.codec.token_strings, ids)
        return json_answer(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        async with self._reading(request) as raw:
            body = decode_as(raw, DetokenizeBody)
            model = self._model(body.model)
            if len(body.tokens) > model.card.model_tokens_max:
                check_fits(model.card, model.codec, body.tokens, "tokens")
            check_ids(body.tokens, model.codec.vocabulary, "tokens")
            with self._busy.one_more():
                return json_answer(DetokenizeAnswer(await model.codec.decode(body.tokens)))

    def _model(self, name: str | None) -> ServedModel:
        """The named model; the only one if none is named. Raises ApiError (400, 404)."""
        cards = self._served.cards()
        if name is None and len(cards) != 1:
            raise invalid("model is missing. Give one, because the pool has several", "model")
        return self._served.get(cards[0].name if name is None else name)


async def _ids(codec: TextCodec, card: ModelCard, body: TokenizeBody) -> tuple[int, ...]:
    """The ids of the prompt or the messages, also those that the model lacks: who asks wants to
    see what the tokenizer makes. Raises ApiError (400)."""
    for param in ("chat_template", "tools"):
        raw = getattr(body, param)
        if raw and bytes(memoryview(raw)[:8]) not in _NOTHING:
            raise invalid(f"{param} is not supported", param, code="unsupported_parameter")
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give exactly one of prompt and messages", "prompt")
    if body.prompt is not None:
        check_fits(card, codec, body.prompt, "prompt")
        return await codec.encode(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None
    chat = ChatBody(
        model=card.name,
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        reasoning_effort=body.reasoning_effort,
        add_special_tokens=body.add_special_tokens,
    )
    check_chat(chat)
    return await chat_ids(card, codec, chat)
