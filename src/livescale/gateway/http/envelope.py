"""What every HTTP request gets, whatever its path: ids, and an answer in OpenAI's shape.

Endpoints live in `app.py`. This wraps them as an ASGI middleware.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from livescale.gateway.contract.errors import internal_error, stopping
from livescale.gateway.contract.keys import client_at

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = REQUEST_ID_HEADER.encode()

PROBES = ("/health", "/ping", "/live", "/metrics")
"""Paths that monitoring asks for all the time."""

_SANE_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


class Envelope:
    """Gives each request an id and an arrival time, echoes X-Request-Id, answers for bugs.

    Each answer that is an error is a line in the log, at level info, with both ids; answers to
    probes, which come all the time, are not.

    Sets in `scope["state"]`: `request` (unique: prefix and number), `client_request_id` (str or
    None), `arrived_s` (by `now_s`) and `client`, by its address (see `keys.py`).
    """

    def __init__(
        self, app: ASGIApp, request_prefix: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._now_s = now_s
        self._prefix = request_prefix
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = f"{self._prefix}-{next(self._numbers)}"
        client_request_id = sane_request_id(_first(scope["headers"], _REQUEST_ID))
        state = scope.setdefault("state", {})
        state["request"] = request
        state["client_request_id"] = client_request_id
        state["arrived_s"] = self._now_s()
        state["client"] = client_at(scope.get("client"))
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                answered_id = (client_request_id or request).encode("latin-1")
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, answered_id)]
                is_probe = scope["path"] in PROBES and scope["method"] in ("GET", "HEAD")
                if message["status"] >= 400 and not is_probe:
                    log.info(
                        "request %s (client's id %r): %s %.200r answered with %d",
                        request,
                        client_request_id,
                        scope["method"],
                        scope["path"],
                        message["status"],
                    )
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # no client is left to answer
        except asyncio.CancelledError:
            # The server stops (see `server.serve`) and the client still waits.
            if has_started:
                raise
            await stopping().response()(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s (%s %s) failed", request, scope["method"], scope["path"])
            if has_started:
                raise
            await internal_error().response()(scope, receive, send_with_id)


def _first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def sane_request_id(value: str | None) -> str | None:
    """The client's id if it is 1 to 128 printable ASCII characters, else None."""
    return value if value is not None and _SANE_REQUEST_ID.fullmatch(value) else None
