"""The direct way of an answer's further parts: from where they are made into the connection, in one
call. Servers that know it offer it with the request (`scope["extensions"]`); with any other server
ASGI messages carry all parts.

An answer begins and ends with ASGI messages on both ways. What is in it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "livescale.body_writer"


class Writing(Protocol):
    """Who writes an answer the direct way. Its methods return at once and must not raise."""

    def resume(self) -> None:
        """All that was written is on its way: more may follow."""

    def lost(self) -> None:
        """The client is gone: nothing that is written reaches it."""


class BodyWriter(Protocol):
    """Parts of the body of an answer that has begun and is not over.

    Nothing should be written while `is_paused`: the client has not read yet what was.
    """

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_clear(self) -> bool:
        """All that was sent before is on its way: an ASGI message is sent without waiting."""

    def open(self, writing: Writing) -> None:
        """From now on, until `close`, `writing` learns what befalls the connection; at once, if the
        client has gone already."""

    def take_over(self) -> None:
        """From now on, until `close`, parts are written here."""

    def write(self, part: bytes) -> None:
        """Into the connection, as it would be sent in an ASGI message with more to follow."""

    def close(self) -> None:
        """The rest is sent in ASGI messages. Idempotent."""


def offered_writer(scope: Scope) -> BodyWriter | None:
    """None if the server knows only ASGI messages."""
    extensions: dict[str, BodyWriter] = scope.get("extensions") or {}
    return extensions.get(_EXTENSION)


class WritingConnection(HttpToolsProtocol):
    """uvicorn's connection, which offers a BodyWriter with each request of HTTP/1.1.

    One request of a connection is answered at a time, so that one writer is enough.
    """

    writing: Writing | None = None
    is_lost = False
    _writer: _ConnectionWriter

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = _ConnectionWriter(self)
        self._extensions = {_EXTENSION: self._writer}

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # makes the request's task, which has not begun yet
        if self.scope["http_version"] != "1.0":  # which knows no chunks
            self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.is_paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writer.is_paused = False
        if self.writing is not None:
            self.writing.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_lost = True
        # The scopes of its requests have the writer, and the writer has the connection, which has
        # a scope and the writer: without circles they all go at once.
        self._extensions.clear()
        self._writer.is_paused = False
        del self._writer
        if self.writing is not None:
            self.writing.lost()


class _ConnectionWriter:
    """BodyWriter of a connection's requests.

    While it is open the transport is paused as soon as it keeps bytes that the system did not take:
    what comes then can still be joined.
    """

    __slots__ = ("_connection", "_transport", "is_paused")

    def __init__(self, connection: WritingConnection) -> None:
        self._connection = connection
        # Here too, and not only there: asked for every token, of thousands of connections whose
        # objects are in no cache of the processor any more.
        self._transport = connection.transport
        self.is_paused = False

    @property
    def is_clear(self) -> bool:
        return not (self.is_paused or self._transport.get_write_buffer_size())

    def open(self, writing: Writing) -> None:
        connection = self._connection
        connection.writing = writing
        if connection.is_lost:
            writing.lost()
        else:
            # As a task that waits for the client's end does: an end that is not read does not show.
            connection.flow.resume_reading()

    def take_over(self) -> None:
        if not self._transport.is_closing():
            # Not 0: a TLS transport would then be paused while it keeps nothing.
            self._transport.set_write_buffer_limits(high=1, low=0)

    def write(self, part: bytes) -> None:
        transport = self._transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def close(self) -> None:
        self._connection.writing = None
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()
