"""One accepted request from submission to the last byte of its answer.

Whatever way it ends (tokens, failure, client gone, time over, server stopping), its TokenStreams
are cancelled and the outcome of each is counted exactly once. What the tokens mean is decided in
`choices.py`, what the bytes look like in `replies.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from livescale.gateway.admission import refusals_answered
from livescale.gateway.backend import Backend
from livescale.gateway.choices import Choice, ChoiceOrder, Piece, gathered, interleaved
from livescale.gateway.errors import ApiError, internal_error, stopping
from livescale.gateway.metrics import Metrics
from livescale.gateway.replies import DONE_EVENT, Reply

log = logging.getLogger(__name__)

EVENT_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Generation(Response):
    """The answer to one generation request; submits it when the server is ready to answer."""

    def __init__(
        self,
        backend: Backend,
        orders: Sequence[ChoiceOrder],
        reply: Reply,
        metrics: Metrics,
        arrived_s: float,
        is_streamed: bool,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(
            media_type="text/event-stream" if is_streamed else "application/json",
            headers=EVENT_STREAM_HEADERS if is_streamed else None,
        )
        if is_streamed:
            del self.headers["content-length"]  # set by Response for its empty body
        self._backend = backend
        self._orders = orders
        self._reply = reply
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._is_streamed = is_streamed
        self._timeout_s = timeout_s
        self._choices: list[Choice] = []
        self._has_started = False
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError while nothing has been sent."""
        self._submit()
        answer = self._answer_streamed if self._is_streamed else self._answer_whole
        try:
            await unless_disconnected(receive, answer(send), self._rest_s())
        except TimeoutError:
            # First: a client that reads slowly must not hold the pool's memory.
            self._give_up("timeout")
            await self._answer_timeout(send)
        except asyncio.CancelledError:
            # Only a stopping server cancels its tasks. No task waits for this one's result, and
            # the client is still there: send an error instead of tearing the connection.
            if not self._has_started:
                raise stopping() from None
            if not self._is_streamed:
                raise  # half a JSON body has left: only a closed connection shows that
            if not self._has_ended:
                await self._end_with_error(stopping(), send)
        finally:
            for choice in self._choices:
                choice.end()

    def __repr__(self) -> str:
        return f"<Generation of {self._orders[0].request.model}: {self._choices}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _submit(self) -> None:
        """All generations are accepted, or none. Raises ApiError (503)."""
        model = self._orders[0].request.model
        with self._metrics.counting_rejections(model), refusals_answered():
            streams = self._backend.submit([order.request for order in self._orders])
        for order, stream in zip(self._orders, streams, strict=True):
            meter = self._metrics.meter(model, len(order.request.prompt_ids), self._arrived_s)
            self._choices.append(Choice(order, stream, meter))

    def _rest_s(self) -> float | None:
        """What is left of the request's time; None: no limit."""
        if self._timeout_s is None:
            return None
        return max(0.0, self._arrived_s + self._timeout_s - time.monotonic())

    async def _answer_timeout(self, send: Send) -> None:
        assert self._timeout_s is not None
        message = f"The request did not finish within {self._timeout_s:g} s"
        error = ApiError(504, message, code="request_timeout")
        if not self._has_started:
            raise error
        if self._is_streamed and not self._has_ended:
            await self._end_with_error(error, send)

    def _give_up(self, outcome: str) -> None:
        for choice in self._choices:
            choice.give_up(outcome)

    async def _answer_whole(self, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        try:
            async with aclosing(interleaved(self._choices)) as arriving:
                async for piece in arriving:
                    self._reply.head.count_cached(piece)
                    pieces[piece.choice].append(piece)
        except Exception:
            self._give_up("failed")
            raise
        body = self._reply.whole([gathered(of_choice) for of_choice in pieces])
        self.headers["content-length"] = str(len(body))
        await self._start(send)
        await _send_body(send, body, is_last=True)

    async def _answer_streamed(self, send: Send) -> None:
        reply, tokens = self._reply, 0
        try:
            async with aclosing(interleaved(self._choices)) as arriving:
                async for piece in arriving:
                    reply.head.count_cached(piece)
                    # The status line waits for the first token: until then a failure is an HTTP
                    # error.
                    if not self._has_started:
                        await self._start(send)
                    tokens += len(piece.token_ids)
                    await _send_body(send, reply.event(piece, tokens))
        except Exception as error:
            # All of them, and before the error is sent, which the client may take long to read.
            self._give_up("failed")
            if not self._has_started:
                raise
            if not isinstance(error, ApiError):
                log.exception("%r", self)
                error = internal_error()
            await self._end_with_error(error, send)
            return
        if reply.head.wants_usage:
            await _send_body(send, reply.usage_event(tokens))
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
        first = self._orders[0].request
        log.info(
            "request %s (client's id %r) ended in mid-stream: %r",
            first.request,
            first.client_request_id,
            error,
        )
        await _send_body(send, b"data: " + error.body() + b"\n\n", is_last=True)


async def unless_disconnected(
    receive: Receive, work: Coroutine[object, object, None], timeout_s: float | None = None
) -> None:
    """Run `work` to its end, or cancel it as soon as the client is gone.

    Raises TimeoutError when it is cancelled because `timeout_s` is over.

    The client is watched beside the work: work that waits for a token writes nothing, so a failing
    write would never show that. Errors of the work are raised; if this task is cancelled, so is the
    work. The request body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        done, _ = await asyncio.wait(
            (working, watching), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if working.done():
            working.result()
        elif not done:
            raise TimeoutError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
