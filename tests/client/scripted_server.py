"""A server that speaks the completions protocol by script, on a free port of 127.0.0.1.

The first id of a prompt chooses what happens to the request (see `Script`). It runs in a thread
of its own, so that a client which blocks its own event loop is not helped by sharing it.
"""

from __future__ import annotations

import asyncio
import enum
import json
import socket
import threading
from collections.abc import AsyncIterator
from types import TracebackType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from slowness import patient

DONE = "data: [DONE]\n\n"


class Script(enum.IntEnum):
    NORMAL = 0
    UNAVAILABLE = 1
    ERROR_EVENT = 2
    DROPPED = 3
    HELD = 4
    """Gives one token, the rest when `release` is called or the expected requests have come."""
    SHORT = 5
    NO_DONE = 6
    WRONG_USAGE = 7
    NO_TOKEN_IDS = 8
    GARBAGE = 9
    PLAIN_502 = 10
    BUNDLED = 11
    """All tokens in one event."""


def event(body: object) -> str:
    return f"data: {json.dumps(body)}\n\n"


def token_event(*token_ids: int) -> str:
    return event({"id": "c", "choices": [{"index": 0, "text": "x", "token_ids": list(token_ids)}]})


def usage_event(tokens: int) -> str:
    return event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})


class ScriptedServer:
    """Context manager. Token k of a request is 100 + k. Bodies are kept in order of arrival."""

    def __init__(self, requests_expected: int = 0) -> None:
        self.bodies: list[dict[str, object]] = []
        self.requests_expected = requests_expected
        self.first_arrived = threading.Event()
        self.stream_closed = threading.Event()
        self._released = asyncio.Event()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(128)  # from here on connections wait for the thread to start
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=patient(10))
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.first_arrived.set()
        if len(self.bodies) == self.requests_expected:
            self._released.set()
        script = Script(body["prompt"][0])
        headers = {"X-Request-Id": f"req-{len(self.bodies)}"}
        if script is Script.UNAVAILABLE:
            error = {"error": {"message": "the queue is full", "code": "queue_full"}}
            return JSONResponse(error, 503, headers)
        if script is Script.PLAIN_502:
            return Response("<html>bad gateway", 502, headers)
        return StreamingResponse(
            self._stream(script, body["max_tokens"]), 200, headers, "text/event-stream"
        )

    async def _stream(self, script: Script, tokens: int) -> AsyncIterator[str]:
        if script is Script.SHORT:
            tokens -= 1
        try:
            async for piece in self._tokens(script, tokens):
                yield piece
        finally:
            self.stream_closed.set()
        yield usage_event(tokens + (script is Script.WRONG_USAGE))
        if script is not Script.NO_DONE:
            yield DONE

    async def _tokens(self, script: Script, tokens: int) -> AsyncIterator[str]:
        if script is Script.BUNDLED:
            yield token_event(*range(100, 100 + tokens))
            return
        for k in range(tokens):
            yield (
                event({"choices": [{"text": "x"}]})
                if script is Script.NO_TOKEN_IDS
                else (token_event(100 + k))
            )
            match script:
                case Script.ERROR_EVENT:
                    yield event({"error": {"message": "the worker was lost"}})
                    return
                case Script.DROPPED:
                    raise ConnectionAbortedError("the script ends this connection")
                case Script.GARBAGE:
                    yield "data: {nonsense\n\n"
                case Script.HELD:
                    await self._released.wait()
                case _:
                    pass
