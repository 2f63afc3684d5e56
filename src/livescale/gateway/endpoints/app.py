"""The endpoints: from an HTTP request to the generations it asks for, and the small GETs.

No sockets (see `server.py`) and no generation (see `streaming.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from livescale import __version__
from livescale.config.slo import SloAbsolute
from livescale.gateway.contract import answers, schema
from livescale.gateway.contract.admission import estimated_prompts, refusals_answered
from livescale.gateway.contract.backend import Backend, GenerateRequest, ModelCard, ModelStatus
from livescale.gateway.contract.errors import (
    ErrorAnswers,
    unavailable,
)
from livescale.gateway.contract.keys import KeyGate, KeyRing
from livescale.gateway.contract.limits import Limits
from livescale.gateway.endpoints import tokenize
from livescale.gateway.endpoints.admin import (
    AdministeredModels,
    Administration,
    RemovedModel,
    changes_schema,
    new_model_schema,
)
from livescale.gateway.endpoints.embeddings import OUTPUT_TOKENS, EmbeddingReply, read_embeddings
from livescale.gateway.endpoints.endpoints import Application, Endpoint, routes_of
from livescale.gateway.http.bodies import Bodies
from livescale.gateway.http.envelope import Envelope
from livescale.gateway.http.pages import PageGate
from livescale.gateway.metrics.kept_counts import Siblings
from livescale.gateway.metrics.metrics import UNKNOWN_MODEL, Metrics
from livescale.gateway.metrics.metrics_page import CONTENT_TYPE, MetricsPage
from livescale.gateway.metrics.totals import Totals
from livescale.gateway.requests.arrivals import TurnEnd
from livescale.gateway.requests.choices import ChoiceOrder
from livescale.gateway.requests.prompts import (
    Prompt,
    check_chat,
    check_fits,
    raw_prompts,
    read_chat,
    read_prompts,
)
from livescale.gateway.requests.replies import ChatReply, CompletionReply, Reply, ReplyHead
from livescale.gateway.requests.sampling import Asked, read_asked
from livescale.gateway.requests.served import ServedModel, ServedModels
from livescale.gateway.requests.streaming import AnswerTerms, Generation
from livescale.gateway.text.text import estimated_messages

COMPLETION_OUTPUT_TOKENS = 16
"""Tokens of a completion that names no maximum: OpenAI's default."""


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Request ids are `{request_prefix}-{n}`. `is_local`: only programs of this machine reach the
    server: then models can be administered where there are no keys at all. Web pages of
    `page_origins` may use it (see `pages.py`)."""

    request_prefix: str
    slo: SloAbsolute | None = None
    has_vllm_metrics: bool = False
    is_local: bool = False
    page_origins: Sequence[str] = ()


def create_app(
    backend: Backend,
    options: AppOptions,
    *,
    limits: Limits | None = None,
    keys: KeyRing | None = None,
    siblings: Siblings | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> Starlette:
    """The OpenAI-compatible application over `backend`.

    Without `keys` (see `keys.py`) every client is served. Figures are those of its `siblings`, too.
    Requests arrive and take their time by `now_s`, the clock of the event loop's timers. Reads the
    tokenizers of all models; raises ValueError naming the file that is missing, broken or
    recommends what cannot be sampled.
    """
    slo, page_origins = options.slo, options.page_origins
    limits = limits or Limits()
    keys = keys or KeyRing()
    earlier = siblings.earlier().models if siblings is not None else ()
    metrics = Metrics((card.name for card in backend.models()), slo, earlier)
    totals = Totals(metrics, backend, siblings)
    page = MetricsPage(totals, has_slo=slo is not None, has_vllm_names=options.has_vllm_metrics)
    served = ServedModels(backend, metrics)
    bodies = Bodies(limits, served.prompt_tokens_max, served.text_chars_max, keys)
    gateway = _Gateway(backend, limits, metrics, page, served, bodies, now_s)
    admin = Administration(
        backend=backend,
        served=served,
        totals=totals,
        has_slo=slo is not None,
        read_body=bodies.read,
        is_local=options.is_local,
        keys=keys,
    )
    endpoints = [*gateway.endpoints(), *_administration(admin)]
    app = Application(
        routes=routes_of(endpoints, keys),
        middleware=[
            Middleware(Envelope, request_prefix=options.request_prefix, now_s=now_s),
            *([Middleware(PageGate, origins=page_origins)] if page_origins else []),
            Middleware(KeyGate, keys=keys),
            Middleware(ErrorAnswers),
        ],
        lifespan=lambda _app: _working(served),
    )
    app.router.redirect_slashes = False  # a wrong path is a 404, in OpenAI's shape
    return app


@asynccontextmanager
async def _working(served: ServedModels) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.to_thread(served.work.renderers.close)


def _administration(admin: Administration) -> list[Endpoint]:
    all_models, one = "/admin/models", "/admin/models/{model:path}"
    return [
        Endpoint("GET", all_models, admin.list_models, AdministeredModels),
        Endpoint(
            method="POST",
            path=all_models,
            handler=admin.add_model,
            answer=ModelStatus,
            status=201,
            body=new_model_schema(),
            errors=(400, 409, 503),
        ),
        Endpoint("GET", one, admin.show_model, ModelStatus, errors=(404,)),
        Endpoint(
            method="PATCH",
            path=one,
            handler=admin.change_model,
            answer=ModelStatus,
            body=changes_schema(),
            errors=(400, 404, 409, 503),
        ),
        Endpoint(
            method="DELETE",
            path=one,
            handler=admin.remove_model,
            answer=RemovedModel,
            status=202,
            errors=(404, 415, 503),
        ),
    ]


async def show_version(request: Request) -> Response:
    """GET /version"""
    return answers.json_answer(answers.Version(__version__))


async def is_alive(request: Request) -> Response:
    """GET /live: 200 as long as the process answers at all."""
    return answers.json_answer(answers.Healthy())


@dataclass(slots=True, eq=False)
class _Gateway:
    """The endpoints of one application."""

    _backend: Backend
    _limits: Limits
    _metrics: Metrics
    _page: MetricsPage
    _served: ServedModels
    _bodies: Bodies
    _now_s: Callable[[], float]
    _turn_end: TurnEnd = field(default_factory=TurnEnd)

    def endpoints(self) -> list[Endpoint]:
        """Everything but the administration."""
        generating, reading = (400, 404, 503, 504), (400, 404, 503)
        texts = tokenize.Tokenization(self._served, self._bodies.reading)
        return [
            Endpoint(
                method="POST",
                path="/v1/completions",
                handler=self.completions,
                answer=answers.Completion,
                body=schema.CompletionBody,
                errors=generating,
            ),
            Endpoint(
                method="POST",
                path="/v1/chat/completions",
                handler=self.chat_completions,
                answer=answers.ChatCompletion,
                body=schema.ChatBody,
                errors=generating,
            ),
            Endpoint(
                method="POST",
                path="/v1/embeddings",
                handler=self.embeddings,
                answer=answers.EmbeddingList,
                body=schema.EmbeddingBody,
                errors=generating,
            ),
            Endpoint("GET", "/v1/models", self.list_models, answers.ModelList),
            Endpoint(
                "GET", "/v1/models/{model:path}", self.show_model, answers.ModelEntry, errors=(404,)
            ),
            Endpoint(
                method="POST",
                path="/tokenize",
                handler=texts.tokenize,
                answer=tokenize.TokenizeAnswer,
                body=tokenize.TokenizeBody,
                errors=reading,
            ),
            Endpoint(
                method="POST",
                path="/detokenize",
                handler=texts.detokenize,
                answer=tokenize.DetokenizeAnswer,
                body=tokenize.DetokenizeBody,
                errors=reading,
            ),
            Endpoint("GET", "/version", show_version, answers.Version),
            Endpoint("GET", "/live", is_alive, answers.Healthy),
            Endpoint("GET", "/ping", self.health, answers.Healthy, errors=(503,)),
            Endpoint("POST", "/ping", self.health, answers.Healthy, errors=(503,)),
            Endpoint("GET", "/health", self.health, answers.Healthy, errors=(503,)),
            Endpoint("GET", "/metrics", self.show_metrics, None),
        ]

    async def completions(self, request: Request) -> Generation:
        """POST /v1/completions"""
        with self._metrics.counting_rejections(UNKNOWN_MODEL) as refused:
            async with self._bodies.reading(request) as raw_body:
                body = schema.decode_body(raw_body, schema.CompletionBody)
                model = self._served.get(body.model)
                card, codec = model.card, model.codec
                refused.model = card.name
                raw = raw_prompts(body.prompt)
                asked = read_asked(card, codec.vocabulary, body, len(raw))
                for prompt in raw:
                    check_fits(card, codec, prompt, "prompt")
                estimates = estimated_prompts(raw, card.model_tokens_max) * asked.choices
                with self._admitted(request, card.name, estimates):
                    prompts = await read_prompts(
                        codec, raw, body.add_special_tokens is not False, bool(body.echo)
                    )
                orders = _orders(request, model, asked, prompts, COMPLETION_OUTPUT_TOKENS, "prompt")
        head = _reply_head(_front("cmpl", request, card.name), asked, prompts, body)
        return self._generation(request, CompletionReply(head), orders, bool(body.stream))

    async def chat_completions(self, request: Request) -> Generation:
        """POST /v1/chat/completions"""
        with self._metrics.counting_rejections(UNKNOWN_MODEL) as refused:
            async with self._bodies.reading(request) as raw_body:
                body = schema.decode_body(raw_body, schema.ChatBody)
                model = self._served.get(body.model)
                card, codec = model.card, model.codec
                refused.model = card.name
                asked = read_asked(card, codec.vocabulary, body, 1)
                check_chat(body)
                estimate = min(estimated_messages(body.messages), card.model_tokens_max)
                with self._admitted(request, card.name, [estimate] * asked.choices):
                    prompts = [await read_chat(card, codec, body)]
                # As OpenAI and vLLM: a chat answer may take all that the limit leaves.
                orders = _orders(request, model, asked, prompts, card.model_tokens_max, "messages")
        head = _reply_head(_front("chatcmpl", request, card.name), asked, prompts, body)
        return self._generation(request, ChatReply(head), orders, bool(body.stream))

    async def embeddings(self, request: Request) -> Generation:
        """POST /v1/embeddings"""
        with self._metrics.counting_rejections(UNKNOWN_MODEL) as refused:
            async with self._bodies.reading(request) as raw_body:
                body = schema.decode_body(raw_body, schema.EmbeddingBody)
                model = self._served.get(body.model)
                card, codec = model.card, model.codec
                refused.model = card.name
                raw = raw_prompts(body.input, "input")
                asked = read_embeddings(card, body, len(raw))
                for prompt in raw:
                    check_fits(card, codec, prompt, "input")
                estimates = estimated_prompts(raw, card.model_tokens_max)
                with self._admitted(request, card.name, estimates):
                    is_framed = body.add_special_tokens is not False
                    prompts = await read_prompts(codec, raw, is_framed, param="input")
                orders = _orders(request, model, asked, prompts, OUTPUT_TOKENS, "input")
        head = ReplyHead(_front("embd", request, card.name), _ids(prompts), asked.choices)
        reply = EmbeddingReply(head, is_base64=body.encoding_format == "base64")
        return self._generation(request, reply, orders, is_streamed=False)

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models"""
        return answers.json_answer(
            answers.ModelList([_entry(card) for card in self._served.cards()])
        )

    async def show_model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        return answers.json_answer(_entry(self._served.get(request.path_params["model"]).card))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when requests are accepted, else 503."""
        if not self._backend.is_ready():
            raise unavailable("Not ready", code="not_ready")
        return answers.json_answer(answers.Healthy())

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(await self._page.text(), headers={"content-type": CONTENT_TYPE})

    # -- helpers, in the order used ---------------------------------------------------------

    @contextmanager
    def _admitted(self, request: Request, model: str, prompts: list[int]) -> Iterator[None]:
        """Places are held for prompts of about so many tokens while they are tokenized.

        Raises ApiError instead: 503 when there is no room, 404 when the model has just gone.
        """
        with (
            refusals_answered(),
            self._backend.admit(model, len(prompts), sum(prompts), request.state.client),
        ):
            yield

    def _generation(
        self, request: Request, reply: Reply, orders: Sequence[ChoiceOrder], is_streamed: bool
    ) -> Generation:
        return Generation(
            backend=self._backend,
            orders=orders,
            reply=reply,
            metrics=self._metrics,
            turn_end=self._turn_end,
            terms=AnswerTerms(
                is_streamed, request.state.arrived_s, self._limits.request_timeout_s, self._now_s
            ),
        )


def _orders(
    request: Request,
    model: ServedModel,
    asked: Asked,
    prompts: Sequence[Prompt],
    tokens_default: int,
    param: str,
) -> list[ChoiceOrder]:
    """`asked.choices` generations of each prompt, numbered prompt after prompt as OpenAI does.

    A request with one generation gives it its own id, else ids have the choice's number behind.
    Raises ApiError (400) if a prompt and its output do not fit the model.
    """
    total, state = len(prompts) * asked.choices, request.state
    orders = []
    for index in range(total):
        prompt = prompts[index // asked.choices]
        generate = GenerateRequest(
            request=state.request if total == 1 else f"{state.request}.{index}",
            model=model.card.name,
            prompt_ids=prompt.ids,
            sampling=asked.of(model.card, len(prompt.ids), tokens_default, index, param),
            client_request_id=state.client_request_id,
            arrived_ns=round(state.arrived_s * 1e9),
            client=state.client,
        )
        orders.append(ChoiceOrder(index, generate, asked.rules, model.codec, prompt.echo))
    return orders


def _front(kind: str, request: Request, model: str) -> dict[str, Any]:
    id = f"{kind}-{request.state.request}"
    return {"id": id, "created": int(time.time()), "model": model}


def _ids(prompts: Sequence[Prompt]) -> tuple[tuple[int, ...], ...]:
    return tuple(prompt.ids for prompt in prompts)


def _reply_head(
    front: dict[str, Any], asked: Asked, prompts: Sequence[Prompt], body: schema.GenerationBody
) -> ReplyHead:
    options = body.stream_options or schema.StreamOptions()
    return ReplyHead(
        front=front,
        prompts=_ids(prompts),
        choices=asked.choices,
        wants_usage=bool(options.include_usage),
        wants_usage_always=bool(options.continuous_usage_stats),
        wants_token_ids=bool(body.return_token_ids),
    )


def _entry(card: ModelCard) -> answers.ModelEntry:
    return answers.ModelEntry(card.name, card.created_s, card.model_tokens_max, root=card.name)
