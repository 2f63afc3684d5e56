"""One accepted request from submission to the last byte of its answer.

Whatever way it ends (tokens, failure, client gone, server stopping), its TokenStream is cancelled
and its outcome is counted exactly once. What the bytes look like is decided in `replies.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from livescale.gateway.backend import (
    Backend,
    GenerateRequest,
    GenerationFailed,
    QueueFull,
    TokenChunk,
    TokenStream,
    Unavailable,
)
from livescale.gateway.errors import (
    ApiError,
    generation_failed,
    internal_error,
    queue_full,
    stopping,
    unavailable,
)
from livescale.gateway.metrics import Metrics, TokenMeter
from livescale.gateway.replies import DONE_EVENT, Piece, Reply
from livescale.gateway.text import TokenDecoder
from livescale.types import FinishReason

log = logging.getLogger(__name__)

EVENT_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Generation(Response):
    """The answer to one generation request; submits it when the server is ready to answer."""

    def __init__(
        self,
        backend: Backend,
        request: GenerateRequest,
        reply: Reply,
        decoder: TokenDecoder,
        metrics: Metrics,
        arrived_s: float,
        is_streamed: bool,
    ) -> None:
        super().__init__(
            media_type="text/event-stream" if is_streamed else "application/json",
            headers=EVENT_STREAM_HEADERS if is_streamed else None,
        )
        if is_streamed:
            del self.headers["content-length"]  # set by Response for its empty body
        self._backend = backend
        self._request = request
        self._reply = reply
        self._decoder = decoder
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._is_streamed = is_streamed
        self._has_started = False
        self._has_ended = False
        self._outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError while nothing has been sent."""
        stream = self._submit()
        meter = self._metrics.meter(
            self._request.model, len(self._request.prompt_ids), self._arrived_s
        )
        pieces = self._pieces(stream, meter)
        answer = self._answer_streamed if self._is_streamed else self._answer_whole
        try:
            await unless_disconnected(receive, answer(pieces, meter, send))
        except asyncio.CancelledError:
            # Only a stopping server cancels its tasks. Nobody waits for this one's result, and
            # the client is still there: tell it instead of tearing the connection.
            if not self._has_started:
                raise stopping() from None
            if not self._is_streamed:
                raise  # half a JSON body has left: only a closed connection can tell
            if not self._has_ended:
                await self._end_with_error(stopping(), send)
        finally:
            stream.cancel()
            self._metrics.request_ended(self._request.model, self._outcome)

    def __repr__(self) -> str:
        return f"<Generation {self._request.request} of {self._request.model}: {self._outcome}>"

    def _submit(self) -> TokenStream:
        try:
            return self._backend.submit(self._request)
        except QueueFull as full:
            self._metrics.request_ended(self._request.model, "unavailable")
            raise queue_full(str(full), full.retry_after_s) from full
        except Unavailable as reason:
            self._metrics.request_ended(self._request.model, "unavailable")
            raise unavailable(str(reason)) from reason

    async def _pieces(self, stream: TokenStream, meter: TokenMeter) -> AsyncIterator[Piece]:
        """One Piece per token, the last with the finish reason; failures set the outcome."""
        try:
            async for chunk in stream:
                assert chunk.index == meter.tokens, f"{chunk} came as token {meter.tokens}"
                meter.token(time.monotonic())
                text = self._text(chunk)
                if chunk.finish_reason is not None:
                    text += self._decoder.flush()
                    self._outcome = chunk.finish_reason.value
                yield Piece(text, [chunk.token_id], chunk.finish_reason)
                if chunk.finish_reason is not None:
                    return
        except GenerationFailed as failure:
            self._outcome = "failed"
            raise generation_failed(str(failure)) from failure
        except Exception:
            self._outcome = "failed"
            raise
        self._outcome = "failed"
        raise AssertionError(f"{self._request.request} ended without a finish reason")

    def _text(self, chunk: TokenChunk) -> str:
        # The token that stops generation is no text, special or not.
        is_stop = chunk.token_id in self._request.sampling.stop_token_ids
        if chunk.finish_reason is FinishReason.STOP and is_stop:
            return ""
        return self._decoder.push(chunk.token_id)

    async def _answer_whole(
        self, pieces: AsyncIterator[Piece], meter: TokenMeter, send: Send
    ) -> None:
        texts, token_ids, finish_reason = [], [], None
        async for piece in pieces:
            texts.append(piece.text)
            token_ids += piece.token_ids
            finish_reason = piece.finish_reason
        body = self._reply.whole(Piece("".join(texts), token_ids, finish_reason))
        self.headers["content-length"] = str(len(body))
        await self._start(send)
        await _send_body(send, body, is_last=True)

    async def _answer_streamed(
        self, pieces: AsyncIterator[Piece], meter: TokenMeter, send: Send
    ) -> None:
        try:
            async for piece in pieces:
                # The status line waits for the first token: until then a failure is an HTTP error.
                is_first = not self._has_started
                if is_first:
                    await self._start(send)
                await _send_body(send, self._reply.event(piece, meter.tokens, is_first))
        except ApiError as error:
            if not self._has_started:
                raise
            await self._end_with_error(error, send)
            return
        except Exception:
            if not self._has_started:
                raise
            log.exception("%r", self)
            await self._end_with_error(internal_error(), send)
            return
        if self._reply.head.wants_usage:
            await _send_body(send, self._reply.usage_event(meter.tokens))
        self._has_ended = True
        await _send_body(send, DONE_EVENT, is_last=True)

    async def _start(self, send: Send) -> None:
        self._has_started = True
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

    async def _end_with_error(self, error: ApiError, send: Send) -> None:
        """A last event with the error and no [DONE]: the client must not take it for the end."""
        self._has_ended = True
        await _send_body(send, b"data: " + error.body() + b"\n\n", is_last=True)


async def unless_disconnected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the client is gone.

    The client is watched beside the work: work that waits for a token writes nothing, so a failing
    write would never tell. Errors of the work are raised; if this task is cancelled, so is the
    work. The request body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
