"""The table of endpoints: routes and their description for clients are both made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path, what it takes and what it answers.

    `answer` None: text. `body` is a type, or a JSON schema. `errors` are the statuses besides those
    that any request can get. `is_streamed`: the answer comes as events where the body asks so.
    The handler's docstring is what the description says.
    """

    method: str
    path: str
    handler: Handler
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | dict[str, Any] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()
    is_streamed: bool = False


def routes_of(
    endpoints: Sequence[Endpoint],
    describe: Callable[[Sequence[Endpoint]], dict[str, Any]],
) -> list[Route]:
    """A route for each path, and one for the description of all of them: GET /openapi.json."""

    async def show_description(request: Request) -> Response:
        # Made anew each time: which paths ask for a key can change.
        return Response(msgspec.json.encode(describe(endpoints)), media_type="application/json")

    paths = dict.fromkeys(endpoint.path for endpoint in endpoints)
    return [
        *(_route(path, [e for e in endpoints if e.path == path]) for path in paths),
        Route("/openapi.json", show_description, methods=["GET"]),
    ]


def _route(path: str, endpoints: Sequence[Endpoint]) -> Route:
    handlers = {endpoint.method: endpoint.handler for endpoint in endpoints}
    if "GET" in handlers:
        handlers["HEAD"] = handlers["GET"]

    async def answer(request: Request) -> Response:
        return await handlers[request.method](request)

    return Route(path, answer, methods=list(handlers))
