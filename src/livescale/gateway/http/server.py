"""An application on a listening socket, until an event stops it.

The event loop is the caller's: run it with uvloop (`uvloop.run(serve(...))`). Nothing here knows
what the application does; connections whose client is too slow to be served are closed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from livescale.gateway.contract.errors import ApiError, invalid, request_too_slow
from livescale.gateway.contract.limits import HeadBounds, Limits, check_head
from livescale.gateway.contract.pacing import (
    PACED_BYTES_PER_S,
    PACED_FROM_BYTES,
    PacedFlow,
    ReadPacer,
)
from livescale.gateway.http.https import HttpsFiles
from livescale.gateway.http.unchunked import without_chunks
from livescale.gateway.requests.direct import WritingConnection

log = logging.getLogger(__name__)

_PLAIN = HttpsFiles()
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they do not meet one being closed."""
CANCEL_S = 5.0
"""Time in which cancelled responses may still reach their clients, after the drain time is over."""
LINGER_S = 1.0
"""After the time for a request is over the application may still answer so."""
REFUSED_S = 2.0
"""For which more of a request is read that has been answered: its client may only then read."""
AHEAD_BYTES_MAX = 64 * 1024
"""Of further requests, read while one is answered; beyond it the client is not read."""


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    stop: asyncio.Event,
    drain_s: float,
    limits: Limits | None = None,
    files: HttpsFiles = _PLAIN,
) -> None:
    """Serve on `sock` (bound, and closed on return) until `stop` is set; then drain. With `files`
    it is HTTPS.

    After `stop` no connection is accepted, running responses may finish for `drain_s` seconds, and
    what still runs then is cancelled. No signal handler is installed.
    """
    config = server_config(app, limits or Limits(), files)
    # Declared as whole seconds, but only handed to asyncio.wait_for.
    config.timeout_graceful_shutdown = drain_s  # type: ignore[assignment]
    server = _Server(config)
    stopping = asyncio.create_task(_exit_when(server, stop))
    # A line for each request that is none would let any client fill the log.
    seldom = Seldom()
    library_log = logging.getLogger("uvicorn.error")
    library_log.addFilter(seldom)
    try:
        await server.serve(sockets=[sock])
        await _settle(server)
    finally:
        library_log.removeFilter(seldom)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


def server_config(app: ASGIApp, limits: Limits, files: HttpsFiles = _PLAIN) -> uvicorn.Config:
    """How connections are served: by a protocol that keeps to the limits, all of whose timers are
    those of its event loop."""
    # uvicorn takes any callable that makes a protocol.
    protocol: Any = functools.partial(
        _Connection, limits=limits, pacer=ReadPacer(PACED_BYTES_PER_S)
    )
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="auto",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=files.certfile,
        ssl_keyfile=files.keyfile,
    )


class _Connection(WritingConnection):
    """uvicorn's connection, with a bound on what a client can hold by doing nothing.

    `_receiving` runs while a request is not here completely: one that trickles in is ended.
    `_reading` runs while the client should read: one that reads nothing is cut off, and the
    application sees it leave. Neither costs anything per token. What comes of a large body is read
    in turns with other large bodies, also when it is refused and only has to go.

    While a request is answered its connection is read on, or nobody would notice that its client
    has left. What comes are further requests: `_ahead` keeps them as bytes until it is their turn.
    """

    flow: PacedFlow

    def __init__(self, *args: Any, limits: Limits, pacer: ReadPacer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._pacer = pacer
        #: of the body that is coming in (None: no body is)
        self._body_bytes: int | None = None
        self._receiving: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._is_in_head = True
        self._bounds = HeadBounds()
        #: what is wrong with the request under way, found while the parser was in it
        self._problem: ApiError | None = None
        #: of the request that is answered; `cycle` is that of the last one that has come
        self._answered: RequestResponseCycle | None = None
        self._ahead = bytearray()
        self._is_ahead_full = False
        #: what is wrong behind the requests that are answered
        self._refusal: ApiError | None = None
        #: the head of a request that asks for another protocol, without that
        self._plain_head: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PacedFlow(transport)
        self._expect(self._limits.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._reading):
            if timer is not None:
                timer.cancel()
        answered, self._answered = self._answered, None
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # -- a request that does not arrive ---------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self._is_answering():
            self._take(data)
            return
        self._ahead += data
        if len(self._ahead) > AHEAD_BYTES_MAX and not self._is_ahead_full:
            self._is_ahead_full = True
            self.flow.hold()

    def _take(self, data: bytes) -> None:
        """Of the request whose turn it is, and perhaps of others behind it."""
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self._refuse(self._problem or invalid(message, code="invalid_http"))
            return
        if self.transport.is_closing():
            return
        try:
            self._bounds.feed(len(data))
        except ApiError as error:
            self._refuse(error)
        # Bytes have ended the wait for the next request, and may have begun none (empty lines).
        if self._receiving is None and not self._is_answering():
            self._expect(self._limits.receive_timeout_s)
        if self._body_bytes is not None and self._body_bytes > PACED_FROM_BYTES:
            self.flow.hold()
            is_refused = self.cycle.response_complete
            self._pacer.wait(len(data), self.flow.release, is_refused=is_refused)
        if self._is_answering():
            # Paused because of a long body, or of a request behind this one.
            self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has taken the head, and what follows for another protocol's.
                rest = rest[upgrade.args[0] :]
                head, self._plain_head = self._plain_head, None
                if head is None:
                    return  # behind a CONNECT, which has been refused
                self.parser.feed_data(head)
            else:
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._bounds.begin()
        self._expect(self._limits.receive_timeout_s)

    def on_url(self, url: bytes) -> None:
        with self._stopping_parser():
            self._bounds.take_target(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        with self._stopping_parser():
            self._bounds.take_header(name, value)
        if self._is_in_head:  # no endpoint reads trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        http_version = self.parser.get_http_version()
        with self._stopping_parser():
            check_head(http_version, self.headers)
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # No other protocol is spoken here, and who asks for one gets an answer without it.
            self._plain_head = self._head_without_upgrade(http_version)
            return
        self._is_in_head = False
        self._body_bytes = 0
        self._bounds.yielded()
        # The application has the same time for the body, and answers when it is over.
        self._expect(self._limits.receive_timeout_s + LINGER_S)
        if http_version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1: it knows no such answer
        super().on_headers_complete()
        if http_version == "1.0":
            without_chunks(self.cycle)
        if not self.pipeline:
            self._answered = self.cycle

    def _head_without_upgrade(self, http_version: str) -> bytes:
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, http_version.encode())
        headers = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((first, *headers, b"\r\n"))

    def on_chunk_header(self) -> None:
        self._bounds.yielded()

    def on_body(self, body: bytes) -> None:
        self._bounds.yielded()
        self._body_bytes = (self._body_bytes or 0) + len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bounds.yielded()
        if self._plain_head is not None:
            return  # it comes once more
        self._body_bytes = None
        super().on_message_complete()
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    @contextlib.contextmanager
    def _stopping_parser(self) -> Iterator[None]:
        """An ApiError raised inside is the answer, whatever the parser makes of it."""
        try:
            yield
        except ApiError as error:
            self._problem = error
            raise

    def _expect(self, timeout_s: float) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = self.loop.call_later(timeout_s, self._receive_timed_out)

    def _receive_timed_out(self) -> None:
        if self._is_answering():
            # A pipelined request waits for its turn, not for its client.
            self._expect(self._limits.receive_timeout_s)
        elif self._is_in_head:
            self._refuse(request_too_slow(self._limits.receive_timeout_s))
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        """A request that is here completely is being answered on this connection."""
        cycle = self.cycle
        is_running = cycle is not None and not cycle.response_complete and not cycle.more_body
        return is_running or bool(self.pipeline)

    def _refuse(self, error: ApiError) -> None:
        """Answer what is not a request, or not yet, and close. No id: it never got one."""
        if self._is_answering():
            self._refusal = error  # when it is its turn
            return
        if not self.transport.is_closing():
            body = error.body()
            lines = [
                b"HTTP/1.1 %d %b" % (error.status, http.HTTPStatus(error.status).phrase.encode()),
                *(b"%b: %b" % header for header in self.server_state.default_headers),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
                b"\r\n" if self.parser.get_method() == b"HEAD" else b"\r\n" + body,
            ]
            self.transport.write(b"\r\n".join(lines))
        self._close()

    # -- a client that does not read ------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self.transport.is_closing():
            self._watch_reading()  # the rest has to go, too

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reading()
        elif self._receiving is not None:
            # The rest of this request, which is refused; or of the next one, which waited for it.
            is_refused = self._body_bytes is not None and self.cycle.response_complete
            rest_s = self._limits.receive_timeout_s + LINGER_S
            self._expect(REFUSED_S if is_refused else rest_s)
        if not (self.transport.is_closing() or self._is_answering()):
            self._take_ahead()

    def _take_ahead(self) -> None:
        """What has come behind the requests that are answered now."""
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        ahead = bytes(self._ahead)
        self._ahead.clear()
        if self._is_ahead_full:
            self._is_ahead_full = False
            self.flow.release()
        if ahead:
            self._take(ahead)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close when the client has read what it was sent; it must not take forever."""
        self.transport.close()
        self._watch_reading()

    def _watch_reading(self) -> None:
        if self._reading is None:
            self._unread_bytes = self.transport.get_write_buffer_size()
            self._reading = self.loop.call_later(self._limits.stalled_client_s, self._check_reading)

    def _check_reading(self) -> None:
        """Nothing was added meanwhile (writing is paused, or over): less means that it reads."""
        self._reading = None
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes and unread_bytes < self._unread_bytes:
            self._watch_reading()
        elif unread_bytes:
            seconds = f"{self._limits.stalled_client_s:g} s"
            log.info(
                "%s read nothing for %s: the gateway closed the connection", self.client, seconds
            )
            # With a reset: the kernel must not keep what it could not send, either.
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process that calls `serve` decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _exit_when(server: uvicorn.Server, stop: asyncio.Event) -> None:
    await stop.wait()
    server.should_exit = True


async def _settle(server: uvicorn.Server) -> None:
    """Every response task has ended, and every connection is closed."""
    tasks = set(server.server_state.tasks)
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_S)
    for connection in list(server.server_state.connections):
        if connection.transport is not None:
            connection.transport.close()


SPAN_S = 60.0


class Seldom(logging.Filter):
    """Passes a message once per `span_s`, with the number of equal ones since the last."""

    def __init__(self, span_s: float = SPAN_S) -> None:
        super().__init__()
        self._span_s = span_s
        #: by message: when one passed last, and how many did not since
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = record.created
        passed_s, held = self._passed.get(record.msg, (-self._span_s, 0))
        if now_s - passed_s < self._span_s:
            self._passed[record.msg] = (passed_s, held + 1)
            return False
        self._passed[record.msg] = (now_s, 0)
        if held:
            record.msg = f"{record.msg} ({held} more since the last such line)"
        return True
