"""The table of endpoints: routes, and an OpenAPI document of what they take and answer.

The document is made from the table and from the types that bodies are decoded into, so that there
is nothing to keep in step. Ranges that depend on the model are not in it.
"""

from __future__ import annotations

import http
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from livescale import __version__
from livescale.gateway.contract.answers import json_answer
from livescale.gateway.contract.errors import ErrorBody
from livescale.gateway.contract.keys import KeyRing
from livescale.gateway.contract.schema import (
    ECHOES,
    HARMLESS,
    EmbeddingBody,
    GenerationBody,
    Message,
)
from livescale.gateway.requests.sampling import RANGES

Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path, what it takes and what it answers.

    `answer` None: text. `body` is a type, or a JSON schema. `errors` are the statuses besides those
    that any request can get. Where the body is a GenerationBody the answer may come as events.
    The handler's docstring is the description.
    """

    method: str
    path: str
    handler: Handler
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | dict[str, Any] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()


def routes_of(endpoints: Sequence[Endpoint], keys: KeyRing) -> list[Route]:
    """A route for each path, and one for the description of all of them: GET /openapi.json."""

    async def show_description(request: Request) -> Response:
        # Made anew each time: which paths ask for a key can change.
        return json_answer(document(endpoints, keys))

    paths = dict.fromkeys(endpoint.path for endpoint in endpoints)
    return [
        *(_route(path, [e for e in endpoints if e.path == path]) for path in paths),
        Route("/openapi.json", show_description, methods=["GET"]),
    ]


def _route(path: str, endpoints: Sequence[Endpoint]) -> Route:
    handlers = {endpoint.method: endpoint.handler for endpoint in endpoints}
    if "GET" in handlers:
        handlers["HEAD"] = handlers["GET"]

    return Route(path, _Path(handlers), methods=list(handlers))


class _Path:
    """The ASGI application of one path. What Starlette would make of a function, without two calls
    and an object for each message of every answer."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handlers[scope["method"]](Request(scope, receive, send))
        await answer(scope, receive, send)


class Application(Starlette):
    """Starlette without its own answers to errors, which wrap each message of every answer:
    Envelope and ErrorAnswers are there for all of them."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self.router
        for layer, args, kwargs in reversed(self.user_middleware):
            app = layer(app, *args, **kwargs)
        return app


_BODY_ERRORS = (408, 413, 415)
"""Statuses of every request that has a body, and of none other."""
_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_KEY = "key"


def document(endpoints: Sequence[Endpoint], keys: KeyRing) -> dict[str, Any]:
    """The OpenAPI 3.1 document. It names where a key is needed now."""
    types: list[type[msgspec.Struct]] = [ErrorBody]
    for endpoint in endpoints:
        types += [
            kind
            for kind in (endpoint.body, endpoint.answer)
            if isinstance(kind, type) and kind not in types
        ]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    for kind in types:
        if issubclass(kind, GenerationBody):
            _add_ranges(schemas[kind.__name__]["properties"])
        if issubclass(kind, GenerationBody | EmbeddingBody):
            for name, values in HARMLESS.items():
                schemas[kind.__name__]["properties"].setdefault(name, _only(values))
    for name, values in ECHOES.items():
        schemas[Message.__name__]["properties"][name] = _only(values)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        operation = _operation(endpoint, path, needs_key=keys.needs_key(path))
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas}
    if any("security" in operation for path in paths.values() for operation in path.values()):
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "LiveScale", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(endpoint: Endpoint, path: str, *, needs_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": (endpoint.handler.__doc__ or "").strip().partition("\n")[0],
        "responses": _responses(endpoint, path, needs_key=needs_key),
    }
    if path != endpoint.path:
        name = path[path.index("{") + 1 : path.index("}")]
        operation["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        ]
    if endpoint.body is not None:
        schema = _schema(endpoint.body)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if needs_key:
        operation["security"] = [{_KEY: []}]
    return operation


def _responses(endpoint: Endpoint, path: str, *, needs_key: bool) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        content = {_JSON: {"schema": _schema(endpoint.answer)}}
    if isinstance(endpoint.body, type) and issubclass(endpoint.body, GenerationBody):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answer = {"description": http.HTTPStatus(endpoint.status).phrase, "content": content}
    errors = {431, *endpoint.errors}
    if needs_key:
        errors.add(401)
    if path.startswith("/admin"):
        errors.add(403)
    if endpoint.body is not None:
        errors |= {400, *_BODY_ERRORS}
    return {str(endpoint.status): answer, **{str(error): _error(error) for error in sorted(errors)}}


def _error(status: int) -> dict[str, Any]:
    phrase = http.HTTPStatus(status).phrase
    return {"description": phrase, "content": {_JSON: {"schema": _schema(ErrorBody)}}}


def _schema(kind: type[msgspec.Struct] | dict[str, Any]) -> dict[str, Any]:
    return kind if isinstance(kind, dict) else {"$ref": _REF.format(name=kind.__name__)}


def _add_ranges(properties: dict[str, Any]) -> None:
    """Of numbers, which are looked at only behind the types."""
    for name, allowed in RANGES.items():
        for shape in properties[name]["anyOf"]:
            if shape["type"] == "number":
                shape |= {"minimum": allowed.low, "maximum": allowed.high}


def _only(values: tuple[object, ...]) -> dict[str, Any]:
    """The shape of what is not available: these values are accepted."""
    return {"enum": [None, *values]}
