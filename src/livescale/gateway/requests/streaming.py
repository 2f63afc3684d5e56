"""One accepted request from submission to the last byte of its answer.

Whatever way it ends (tokens, failure, client gone, time over, server stopping), its TokenStreams
are cancelled and the outcome of each is counted exactly once. What the tokens mean is decided in
`choices.py` and `arrivals.py`, what the bytes look like in `replies.py`. The events of a stream
behind the first ones go into the connection in the turn of the event loop that brings their tokens
(`event_writing.py`), if the server offers that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from livescale.gateway.contract.admission import refusals_answered
from livescale.gateway.contract.backend import Backend
from livescale.gateway.contract.errors import ApiError, internal_error, stopping
from livescale.gateway.metrics.metrics import Metrics
from livescale.gateway.requests.arrivals import Arrivals, TurnEnd
from livescale.gateway.requests.choices import Choice, ChoiceOrder, Piece, joined
from livescale.gateway.requests.direct import BodyWriter, offered_writer
from livescale.gateway.requests.event_writing import EventWriting
from livescale.gateway.requests.replies import Reply, StreamableReply

log = logging.getLogger(__name__)

T = TypeVar("T")
_EVENT_STREAM = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class AnswerTerms:
    """How a request is answered, and until when: it arrived at `arrived_s` of the clock `now_s`,
    and may take `timeout_s` (None: any time)."""

    is_streamed: bool
    arrived_s: float
    timeout_s: float | None = None
    now_s: Callable[[], float] = time.monotonic


class Generation:
    """The answer to one generation request (an ASGI application); submits it when the server is
    ready to answer."""

    def __init__(
        self,
        backend: Backend,
        orders: Sequence[ChoiceOrder],
        reply: Reply,
        metrics: Metrics,
        turn_end: TurnEnd,
        terms: AnswerTerms,
    ) -> None:
        self._backend = backend
        self._orders = orders
        self._reply = reply
        self._metrics = metrics
        self._turn_end = turn_end
        self._terms = terms
        self._choices: list[Choice] = []
        self._has_come = asyncio.Event()
        self._arrivals = Arrivals(self._has_come.set, terms.now_s)
        self._has_started = False
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError while nothing has been sent."""
        self._submit()
        try:
            if self._terms.is_streamed:
                await self._answer_streamed(offered_writer(scope), receive, send)
            else:
                await unless_disconnected(receive, self._answer_whole(send), self._rest_s())
        except TimeoutError:
            # First: a client that reads slowly must not hold the pool's memory.
            self._give_up("timeout")
            await self._answer_timeout(send)
        except asyncio.CancelledError:
            # Only a stopping server cancels its tasks. No task waits for this one's result, and
            # the client is still there: send an error instead of tearing the connection.
            if not self._has_started:
                raise stopping() from None
            if not self._terms.is_streamed:
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
            meter = self._metrics.meter(model, len(order.request.prompt_ids), self._terms.arrived_s)
            choice = Choice(order, stream, meter)
            self._choices.append(choice)
            self._arrivals.add(choice, stream)

    def _rest_s(self) -> float | None:
        """What is left of the request's time; None: no limit."""
        if self._terms.timeout_s is None:
            return None
        return max(0.0, self._terms.arrived_s + self._terms.timeout_s - self._terms.now_s())

    async def _answer_timeout(self, send: Send) -> None:
        assert self._terms.timeout_s is not None
        message = f"The request exceeded its time limit of {self._terms.timeout_s:g} s"
        error = ApiError(504, message, code="request_timeout")
        if not self._has_started:
            raise error
        if self._terms.is_streamed and not self._has_ended:
            await self._end_with_error(error, send)

    def _give_up(self, outcome: str) -> None:
        for choice in self._choices:
            choice.give_up(outcome)

    async def _answer_whole(self, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        try:
            while self._arrivals.unfinished:
                await self._has_more()
                for piece in self._arrivals.take():
                    self._reply.head.count_cached(piece)
                    pieces[piece.choice].append(piece)
        except Exception:
            self._give_up("failed")
            raise
        body = self._reply.whole([joined(of_choice) for of_choice in pieces])
        await self._start(send, (b"content-length", b"%d" % len(body)), _JSON)
        await _send_body(send, body, is_last=True)

    async def _has_more(self) -> None:
        """Waits until something has come."""
        if not self._arrivals.came:
            self._has_come.clear()
            await self._has_come.wait()

    async def _answer_streamed(
        self, writer: BodyWriter | None, receive: Receive, send: Send
    ) -> None:
        reply = self._reply
        assert isinstance(reply, StreamableReply), f"{reply} has no events"
        if writer is None:
            await unless_disconnected(receive, self._send_all(reply, send), self._rest_s())
            return
        writing = EventWriting(self._arrivals, reply, writer, self._turn_end)
        writing.open(self._rest_s())
        try:
            while not self._has_started:
                if not await writing.has_more():
                    return
                if not await self._unhindered(writer, receive, self._send_next(reply, send)):
                    return
            rest = await writing.run()
        finally:
            writing.close()
        if rest is None:
            return
        if isinstance(rest, Exception):
            ended = self._end_failed(rest, send)
        else:
            ended = self._end(reply, rest, send)
        await self._unhindered(writer, receive, ended)

    async def _unhindered(
        self, writer: BodyWriter, receive: Receive, work: Coroutine[object, object, T]
    ) -> T | None:
        """As `unless_disconnected`. What the client has been sent before is on its way, as a rule:
        then the work waits for nothing, and no tasks are made for it."""
        if writer.is_clear:
            return await work
        return await unless_disconnected(receive, work, self._rest_s())

    async def _send_all(self, reply: StreamableReply, send: Send) -> None:
        await self._has_more()
        while await self._send_next(reply, send):
            await self._has_more()

    async def _send_next(self, reply: StreamableReply, send: Send) -> bool:
        """Send the events of what has come. True: more will follow."""
        try:
            pieces = self._arrivals.take()
            if not pieces:
                return True
            # The status line waits for the first token: until then a failure is an HTTP error.
            if not self._has_started:
                await self._start(send, *_EVENT_STREAM)
            events = reply.events(pieces)
            if self._arrivals.unfinished:
                await _send_body(send, events)
                return True
        except Exception as error:
            await self._end_failed(error, send)
        else:
            await self._end(reply, events, send)
        return False

    async def _end(self, reply: StreamableReply, events: bytes, send: Send) -> None:
        """These are the last events of choices."""
        self._has_ended = True
        await _send_body(send, events + reply.ending(), is_last=True)

    async def _end_failed(self, error: Exception, send: Send) -> None:
        # All of them, and before the error is sent, which the client may take long to read.
        self._give_up("failed")
        if not self._has_started:
            raise error
        if not isinstance(error, ApiError):
            log.error("%r", self, exc_info=error)
            error = internal_error()
        await self._end_with_error(error, send)

    async def _start(self, send: Send, *headers: tuple[bytes, bytes]) -> None:
        self._has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})

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
    receive: Receive, work: Coroutine[object, object, T], timeout_s: float | None = None
) -> T | None:
    """Run `work` to its end and return its result; or cancel it as soon as the client is gone, and
    return None.

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
            return working.result()
        if not done:
            raise TimeoutError
        return None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
