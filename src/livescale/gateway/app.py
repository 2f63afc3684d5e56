"""The endpoints: from an HTTP request to a checked GenerateRequest, and the small GETs.

No sockets (see `server.py`) and no generation (see `streaming.py`).
"""

from __future__ import annotations

import time

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from livescale.gateway.backend import Backend, GenerateRequest, ModelCard
from livescale.gateway.envelope import Envelope
from livescale.gateway.errors import (
    ApiError,
    answer_api_error,
    answer_http_exception,
    body_too_large,
    context_length_exceeded,
    invalid,
    model_not_found,
    quoted,
    unavailable,
)
from livescale.gateway.metrics import CONTENT_TYPE, UNKNOWN_MODEL, Metrics
from livescale.gateway.replies import ChatReply, CompletionReply, Reply, ReplyHead
from livescale.gateway.schema import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    ModelEntry,
    ModelList,
    StreamOptions,
    decode_body,
)
from livescale.gateway.streaming import Generation
from livescale.gateway.text import TextCodec
from livescale.types import SamplingParams

BODY_BYTES_MAX = 8 * 1024 * 1024
COMPLETION_OUTPUT_TOKENS = 16
"""Tokens of a completion that names no maximum: OpenAI's default."""
CHAT_OUTPUT_TOKENS = 256
"""Tokens of a chat answer that names no maximum (if the model's limit leaves as many).

OpenAI and vLLM take all that the limit leaves. An instance reserves KV for every token that may
come, so clients who leave the maximum out would keep others from running.
"""


def create_app(
    backend: Backend, *, request_prefix: str, body_bytes_max: int = BODY_BYTES_MAX
) -> Starlette:
    """The OpenAI-compatible application over `backend`.

    Request ids are `{request_prefix}-{n}`. Reads the tokenizers of all models; raises ValueError
    naming the file that is missing or broken.
    """
    gateway = _Gateway(backend, body_bytes_max)
    app = Starlette(
        routes=[
            Route("/v1/completions", gateway.completions, methods=["POST"]),
            Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
            Route("/v1/models", gateway.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", gateway.show_model, methods=["GET"]),
            Route("/health", gateway.health, methods=["GET"]),
            Route("/metrics", gateway.show_metrics, methods=["GET"]),
        ],
        middleware=[Middleware(Envelope, request_prefix=request_prefix)],
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_exception},
    )
    app.router.redirect_slashes = False  # a wrong path is a 404, in OpenAI's shape
    return app


class _Gateway:
    """The endpoints of one application."""

    def __init__(self, backend: Backend, body_bytes_max: int) -> None:
        self._backend = backend
        self._body_bytes_max = body_bytes_max
        self._cards = {card.name: card for card in backend.models()}
        self._codecs = {name: TextCodec.load(card.directory) for name, card in self._cards.items()}
        self._metrics = Metrics(backend)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body, card = await self._body(request, CompletionBody)
        with self._metrics.counting_rejections(card.name):
            ids = await _completion_ids(self._codecs[card.name], body.prompt)
            sampling = _sampling(card, len(ids), body, COMPLETION_OUTPUT_TOKENS, "prompt")
        head = _reply_head(f"cmpl-{request.state.request}", card.name, ids, body)
        return self._generation(request, CompletionReply(head), body, sampling)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body, card = await self._body(request, ChatBody)
        with self._metrics.counting_rejections(card.name):
            if not body.messages:
                raise invalid("messages is empty", "messages")
            ids = await self._codecs[card.name].encode_chat(body.messages)
            sampling = _sampling(card, len(ids), body, CHAT_OUTPUT_TOKENS, "messages")
        head = _reply_head(f"chatcmpl-{request.state.request}", card.name, ids, body)
        return self._generation(request, ChatReply(head), body, sampling)

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models"""
        return _json(ModelList([_entry(card) for card in self._cards.values()]))

    async def show_model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        return _json(_entry(self._card(request.path_params["model"])))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when requests are accepted, else 503."""
        if not self._backend.is_ready():
            raise unavailable("Not ready", code="not_ready")
        return _json({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    # -- helpers, in the order used ---------------------------------------------------------

    async def _body(self, request: Request, body_type: type[Body]) -> tuple[Body, ModelCard]:
        with self._metrics.counting_rejections(UNKNOWN_MODEL):
            body = decode_body(await _read_body(request, self._body_bytes_max), body_type)
            return body, self._card(body.model)

    def _card(self, name: str) -> ModelCard:
        card = self._cards.get(name)
        if card is None:
            raise model_not_found(name, self._cards)
        return card

    def _generation(
        self, request: Request, reply: Reply, body: GenerationBody, sampling: SamplingParams
    ) -> Generation:
        state, head = request.state, reply.head
        return Generation(
            self._backend,
            GenerateRequest(
                state.request, head.model, head.prompt_ids, sampling, state.client_request_id
            ),
            reply,
            self._codecs[head.model].decoder(),
            self._metrics,
            state.arrived_s,
            is_streamed=bool(body.stream),
        )


async def _read_body(request: Request, body_bytes_max: int) -> bytes:
    """The whole body. Raises ApiError (413) before more than the bound is kept in memory."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > body_bytes_max:
        raise body_too_large(body_bytes_max)
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > body_bytes_max:
            raise body_too_large(body_bytes_max)
    return bytes(received)


async def _completion_ids(
    codec: TextCodec, prompt: str | list[int | str | list[int]]
) -> tuple[int, ...]:
    """The one prompt's ids. Raises ApiError (400) for several, none or foreign ids."""
    if isinstance(prompt, list) and any(not isinstance(entry, int) for entry in prompt):
        if len(prompt) != 1:
            raise invalid(f"One prompt per request is supported, got {len(prompt)}", "prompt")
        [only] = prompt
        assert not isinstance(only, int)
        return await _completion_ids(codec, list(only) if isinstance(only, list) else only)
    if isinstance(prompt, str):
        return await codec.encode(prompt) if prompt else ()
    ids = tuple(entry for entry in prompt if isinstance(entry, int))
    for token_id in ids:
        if not 0 <= token_id < codec.vocabulary:
            raise invalid(
                f"Token id {token_id} is not in the model's vocabulary (0 to"
                f" {codec.vocabulary - 1})",
                "prompt",
            )
    return ids


def _sampling(
    card: ModelCard, prompt_tokens: int, body: GenerationBody, tokens_default: int, param: str
) -> SamplingParams:
    """How to generate. Raises ApiError (400) if prompt and output do not fit the model."""
    limit = card.model_tokens_max
    if prompt_tokens == 0:
        raise invalid(f"{param} is empty", param)
    if prompt_tokens >= limit:
        raise context_length_exceeded(
            f"The prompt has {prompt_tokens} tokens; {quoted(card.name)} takes at most {limit},"
            " the generated ones included",
            param,
        )
    asked = body.output_tokens
    if asked is not None and prompt_tokens + asked > limit:
        raise context_length_exceeded(
            f"The prompt has {prompt_tokens} tokens and {asked} more are asked for, which makes"
            f" {prompt_tokens + asked}; {quoted(card.name)} takes at most {limit}",
            param,
        )
    is_ignoring_eos = bool(body.ignore_eos)
    return SamplingParams(
        output_tokens_max=asked or min(tokens_default, limit - prompt_tokens),
        stop_token_ids=() if is_ignoring_eos else card.eos_token_ids,
        ignore_eos=is_ignoring_eos,
    )


def _reply_head(id: str, model: str, ids: tuple[int, ...], body: GenerationBody) -> ReplyHead:
    options = body.stream_options or StreamOptions()
    return ReplyHead(
        id=id,
        created=int(time.time()),
        model=model,
        prompt_ids=ids,
        wants_usage=bool(options.include_usage),
        wants_usage_always=bool(options.continuous_usage_stats),
        wants_token_ids=bool(body.return_token_ids),
    )


def _entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(card.name, card.created_s, card.model_tokens_max)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
