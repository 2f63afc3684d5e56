"""Answers to clients of HTTP/1.0, which knows no chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(cycle: RequestResponseCycle) -> None:
    """The cycle, which is to close its connection, sends no chunks: a body of unknown size ends
    with the connection (RFC 9112, 6.3). Call it before the cycle sends anything."""
    cycle.send = _Sending(cycle)  # type: ignore[assignment, method-assign]


class _Sending:
    """What a cycle's own `send` would send, in no chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send: Callable[..., Awaitable[None]] = cycle.send
        self._has_size = True

    async def __call__(self, message: Message) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._has_size = b"content-length" in names
            if not self._has_size:
                cycle.chunked_encoding = False  # None would stand for chunks
        elif not self._has_size:
            # The cycle checks parts against the size that was named: here each has its own.
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
