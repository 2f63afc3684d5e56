"""Errors for clients, in OpenAI's shape. What is wrong is decided elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

QUOTED_CHARS_MAX = 200
"""Longest piece of a client's input that an error message repeats."""


class ErrorDetail(msgspec.Struct):
    """What is wrong: a sentence, the kind, the field and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every error's body."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than success: HTTP status and OpenAI's error fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.detail = ErrorDetail(message, kind, param, code)
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body `{"error": {...}}`."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")

    def __repr__(self) -> str:
        return f"<ApiError {self.status} {self.detail.message}>"


def quoted(text: str) -> str:
    """The text in quotes, cut to a length that fits a message."""
    return f"'{cut(text)}'"


def cut(text: str) -> str:
    """At most the text's beginning, where it may repeat what a client sent."""
    return text if len(text) <= QUOTED_CHARS_MAX else text[:QUOTED_CHARS_MAX] + "…"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def context_length_exceeded(message: str, param: str | None = None) -> ApiError:
    """400: the model's limit is smaller than what is asked; the message has both numbers."""
    return invalid(message, param, code="context_length_exceeded")


def model_not_found(name: str, available: Iterable[str] | None = None) -> ApiError:
    """404: no such model; the message lists those that are served, where they are given."""
    message = f"The model {quoted(name)} does not exist"
    if available is not None:
        listed = ", ".join(f"'{model}'" for model in available) or "none"
        message += f". Available models: {listed}"
    return ApiError(404, message, param="model", code="model_not_found")


def model_exists(name: str) -> ApiError:
    """409: a model of that name is there already."""
    message = (
        f"The pool has a model named {quoted(name)} already. Remove it first, or give another name"
    )
    return ApiError(409, message, param="name", code="model_exists")


def admin_closed(reason: str) -> ApiError:
    """403: models cannot be administered like this."""
    return ApiError(403, reason, code="admin_closed")


def wrong_media_type() -> ApiError:
    """415: only a script or a program can ask for JSON; a form of a foreign web page cannot."""
    return ApiError(
        415, "Send the header 'Content-Type: application/json'", code="unsupported_media_type"
    )


def request_too_slow(receive_timeout_s: float) -> ApiError:
    """408: the request was not here after the time that a client has to send it."""
    message = f"The request was incomplete after {receive_timeout_s:g} s"
    # The rest of the body is still on its way: the connection is of no use any more.
    return ApiError(408, message, code="request_incomplete", headers={"Connection": "close"})


def body_too_large(body_bytes_max: int) -> ApiError:
    """413: the request body is larger than the bound."""
    message = f"The request body exceeds {body_bytes_max} bytes"
    return ApiError(413, message, code="request_too_large")


def come_back(message: str, retry_after_s: float, code: str = "queue_full") -> ApiError:
    """503 with Retry-After. `code` is why: the pool takes no more requests for now (queue_full),
    no instance took the request in the time that one may wait (queue_timeout), or the model cannot
    be loaded now (load_failed)."""
    headers = {
        # This one counts whole seconds; 0 would invite clients to spin.
        "Retry-After": str(max(1, math.ceil(retry_after_s))),
        # Not a standard, but OpenAI's clients prefer it.
        "retry-after-ms": str(max(1, math.ceil(1000 * retry_after_s))),
    }
    return ApiError(503, message, code=code, headers=headers)


def unavailable(message: str, code: str = "unavailable") -> ApiError:
    """503: nothing is wrong with the request, but it cannot be served now."""
    return ApiError(503, message, code=code)


def stopping() -> ApiError:
    """The server stops and the request did not finish in the time that was left."""
    return unavailable("The server is stopping", code="server_stopping")


def internal_error() -> ApiError:
    """500: a bug. The log has the story, the client gets no internals."""
    message = "The server had an internal error"
    return ApiError(500, message, code="internal_error")


class ErrorAnswers:
    """An ASGI middleware that answers with the ApiErrors that are raised inside, and in the same
    shape with what Starlette raises for a wrong path or method. What raises has sent nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except HTTPException as error:
            await _in_our_shape(error, scope).response()(scope, receive, send)


def _in_our_shape(error: HTTPException, scope: Scope) -> ApiError:
    where = f"{scope['method']} {quoted(scope['path'])}"
    messages = {404: f"{where} does not exist", 405: f"{where} is not allowed"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(
        error.status_code,
        messages.get(error.status_code, error.detail),
        code=codes.get(error.status_code),
        headers=error.headers,
    )
