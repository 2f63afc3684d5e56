"""The endpoints: from an HTTP request to the generations it asks for, and the small GETs.

No sockets (see `server.py`) and no generation (see `streaming.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from livescale import __version__
from livescale.gateway.admin import Administration
from livescale.gateway.admission import estimated_prompts, refusals_answered
from livescale.gateway.answers import ModelEntry, ModelList
from livescale.gateway.backend import Backend, ModelCard
from livescale.gateway.choices import ChoiceOrder
from livescale.gateway.envelope import Envelope
from livescale.gateway.errors import (
    ApiError,
    answer_api_error,
    answer_http_exception,
    body_too_large,
    request_too_slow,
    unavailable,
)
from livescale.gateway.keys import KeyGate, KeyRing
from livescale.gateway.limits import Limits
from livescale.gateway.metrics import UNKNOWN_MODEL, Metrics
from livescale.gateway.metrics_page import CONTENT_TYPE, MetricsPage
from livescale.gateway.orders import choice_orders
from livescale.gateway.prompts import Prompt, check_chat, raw_prompts, read_chat, read_prompts
from livescale.gateway.replies import ChatReply, CompletionReply, Reply, ReplyHead
from livescale.gateway.sampling import Asked, read_asked
from livescale.gateway.schema import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    decode_body,
)
from livescale.gateway.served import ServedModel, ServedModels
from livescale.gateway.streaming import Generation
from livescale.gateway.text import estimated_messages
from livescale.gateway.tokenize import Tokenization
from livescale.slo import SloAbsolute

COMPLETION_OUTPUT_TOKENS = 16
"""Tokens of a completion that names no maximum: OpenAI's default."""


def create_app(
    backend: Backend,
    *,
    request_prefix: str,
    limits: Limits | None = None,
    keys: KeyRing | None = None,
    slo: SloAbsolute | None = None,
    has_vllm_metrics: bool = False,
    is_local: bool = False,
) -> Starlette:
    """The OpenAI-compatible application over `backend`.

    Request ids are `{request_prefix}-{n}`; without `keys` (see `keys.py`) everybody is served.
    `is_local` says that only programs of this machine reach the server: then models can be
    administered where there are no keys at all. Reads the tokenizers of all models; raises
    ValueError naming the file that is missing, broken or recommends what cannot be sampled.
    """
    limits = limits or Limits()
    keys = keys or KeyRing()
    metrics = Metrics((card.name for card in backend.models()), slo)
    page = MetricsPage(metrics, backend, has_vllm_metrics)
    served = ServedModels(backend, metrics)
    gateway = _Gateway(backend, limits, metrics, page, served)
    admin = Administration(
        *(backend, served, metrics, lambda request: _read_body(request, limits)),
        is_local=is_local,
        keys=keys,
    )
    app = Starlette(
        routes=[
            Route("/v1/completions", gateway.completions, methods=["POST"]),
            Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
            Route("/v1/models", gateway.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", gateway.show_model, methods=["GET"]),
            Route("/tokenize", gateway.tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", gateway.tokenization.detokenize, methods=["POST"]),
            Route("/admin/models", admin.list_models, methods=["GET"]),
            Route("/admin/models", admin.add_model, methods=["POST"]),
            Route("/admin/models/{model:path}", admin.show_model, methods=["GET"]),
            Route("/admin/models/{model:path}", admin.change_model, methods=["PATCH"]),
            Route("/admin/models/{model:path}", admin.remove_model, methods=["DELETE"]),
            Route("/version", show_version, methods=["GET"]),
            Route("/live", is_alive, methods=["GET"]),
            Route("/ping", gateway.health, methods=["GET", "POST"]),
            Route("/health", gateway.health, methods=["GET"]),
            Route("/metrics", gateway.show_metrics, methods=["GET"]),
        ],
        middleware=[
            Middleware(Envelope, request_prefix=request_prefix),
            Middleware(KeyGate, keys=keys),
        ],
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_exception},
    )
    app.router.redirect_slashes = False  # a wrong path is a 404, in OpenAI's shape
    return app


async def show_version(request: Request) -> Response:
    """GET /version"""
    return _json({"version": __version__})


async def is_alive(request: Request) -> Response:
    """GET /live: 200 as long as the process answers at all."""
    return _json({"status": "ok"})


class _Gateway:
    """The endpoints of one application."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        metrics: Metrics,
        page: MetricsPage,
        served: ServedModels,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._metrics = metrics
        self._page = page
        self._served = served
        self.tokenization = Tokenization(served, lambda request: _read_body(request, limits))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body, model = await self._body(request, CompletionBody)
        card, codec = model.card, model.codec
        with self._metrics.counting_rejections(card.name):
            raw = raw_prompts(body.prompt)
            asked = read_asked(card, codec.vocabulary, body, len(raw))
            with self._admitted(card.name, estimated_prompts(raw) * asked.choices):
                prompts = await read_prompts(
                    codec, raw, body.add_special_tokens is not False, bool(body.echo)
                )
            orders = choice_orders(
                *(asked, prompts, card, codec),
                request=request.state.request,
                client_request_id=request.state.client_request_id,
                arrived_s=request.state.arrived_s,
                tokens_default=COMPLETION_OUTPUT_TOKENS,
                param="prompt",
            )
        head = _reply_head(f"cmpl-{request.state.request}", card.name, asked, prompts, body)
        return self._generation(request, CompletionReply(head), orders, bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body, model = await self._body(request, ChatBody)
        card, codec = model.card, model.codec
        with self._metrics.counting_rejections(card.name):
            asked = read_asked(card, codec.vocabulary, body, 1)
            check_chat(body)
            with self._admitted(card.name, [estimated_messages(body.messages)] * asked.choices):
                prompts = [await read_chat(codec, body)]
            orders = choice_orders(
                *(asked, prompts, card, codec),
                request=request.state.request,
                client_request_id=request.state.client_request_id,
                arrived_s=request.state.arrived_s,
                # As OpenAI and vLLM: a chat answer may take all that the limit leaves.
                tokens_default=card.model_tokens_max,
                param="messages",
            )
        head = _reply_head(f"chatcmpl-{request.state.request}", card.name, asked, prompts, body)
        return self._generation(request, ChatReply(head), orders, bool(body.stream))

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models"""
        return _json(ModelList([_entry(card) for card in self._served.cards()]))

    async def show_model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        return _json(_entry(self._served.get(request.path_params["model"]).card))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when requests are accepted, else 503."""
        if not self._backend.is_ready():
            raise unavailable("Not ready", code="not_ready")
        return _json({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(await self._page.text(), headers={"content-type": CONTENT_TYPE})

    # -- helpers, in the order used ---------------------------------------------------------

    async def _body(self, request: Request, body_type: type[Body]) -> tuple[Body, ServedModel]:
        with self._metrics.counting_rejections(UNKNOWN_MODEL):
            body = decode_body(await _read_body(request, self._limits), body_type)
            return body, self._served.get(body.model)

    @contextmanager
    def _admitted(self, model: str, prompts: list[int]) -> Iterator[None]:
        """Places are held for prompts of about so many tokens while they are tokenized.

        Raises ApiError instead: 503 when there is no room, 404 when the model has just gone.
        """
        with (
            refusals_answered(),
            self._backend.admit(model, len(prompts), sum(prompts)),
        ):
            yield

    def _generation(
        self, request: Request, reply: Reply, orders: Sequence[ChoiceOrder], is_streamed: bool
    ) -> Generation:
        return Generation(
            self._backend,
            orders,
            reply,
            self._metrics,
            request.state.arrived_s,
            is_streamed,
            self._limits.request_timeout_s,
        )


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The whole body. Raises ApiError: 413 before more than the bound is kept in memory, 408."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes_max:
        raise body_too_large(limits.body_bytes_max)
    received = bytearray()
    try:
        async with asyncio.timeout(limits.receive_timeout_s):
            async for part in request.stream():
                received += part
                if len(received) > limits.body_bytes_max:
                    raise body_too_large(limits.body_bytes_max)
    except TimeoutError:
        raise request_too_slow(limits.receive_timeout_s) from None
    return bytes(received)


def _reply_head(
    id: str, model: str, asked: Asked, prompts: Sequence[Prompt], body: GenerationBody
) -> ReplyHead:
    options = body.stream_options or StreamOptions()
    return ReplyHead(
        id=id,
        created=int(time.time()),
        model=model,
        prompts=tuple(prompt.ids for prompt in prompts),
        choices=asked.choices,
        wants_usage=bool(options.include_usage),
        wants_usage_always=bool(options.continuous_usage_stats),
        wants_token_ids=bool(body.return_token_ids),
    )


def _entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(card.name, card.created_s, card.model_tokens_max)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
