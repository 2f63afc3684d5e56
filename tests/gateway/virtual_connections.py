"""Connections of a gateway without sockets: what a client sends and reads, when the test says so.

The double stands where the event loop's transports do. Everything behind it is real: the protocol
of `server.py`, and the application.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from gateway_double import ScriptedBackend
from uvicorn.server import ServerState

from livescale.gateway.contract.limits import Limits
from livescale.gateway.endpoints.app import AppOptions, create_app
from livescale.gateway.http.server import server_config
from virtual_loop import settled

HIGH_BYTES, LOW_BYTES = 64 * 1024, 16 * 1024
"""Between these asyncio's transports pause and resume a protocol."""


class _Socket:
    """What the protocol asks of a socket."""

    def __init__(self) -> None:
        self.is_reset_at_close = False

    def setsockopt(self, level: int, option: int, _: object) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            self.is_reset_at_close = True

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 50_000)

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 8000)


class Client(asyncio.Transport):
    """One connection, from its client's side, and the server's transport of it. The client reads
    all that comes, unless it is deaf."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.received = bytearray()
        self.is_deaf = False
        self.is_lost = False
        #: of what is being poured, taken by the server so far
        self.poured_bytes = 0
        self._socket = _Socket()
        self._protocol = protocol
        self._unread = bytearray()
        self._high_bytes, self._low_bytes = HIGH_BYTES, LOW_BYTES
        self._is_paused = False
        self._is_closing = False
        self._may_send = asyncio.Event()
        self._may_send.set()
        protocol.connection_made(self)

    # -- the client -------------------------------------------------------------------------------

    async def send(self, *parts: bytes) -> None:
        """And what the server makes of it at once is done. It gets them also while it does not
        read: so much a system has read ahead."""
        for part in parts:
            if not self.is_lost:
                self._protocol.data_received(part)
        await settled()

    async def pour(self, data: bytes, part_bytes: int) -> None:
        """Part by part, each in a turn of its own and only when the server reads."""
        for start in range(0, len(data), part_bytes):
            await self._may_send.wait()
            if self.is_lost:
                return
            part = data[start : start + part_bytes]
            self.poured_bytes += len(part)
            self._protocol.data_received(part)
            await asyncio.sleep(0)
        await settled()

    async def read(self, size_bytes: int) -> None:
        """Of a deaf client, for once."""
        self.received += self._unread[:size_bytes]
        del self._unread[:size_bytes]
        self._drained()
        await settled()

    @property
    def was_reset(self) -> bool:
        return self.is_lost and self._socket.is_reset_at_close

    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1])

    def error(self) -> dict[str, Any]:
        """Of the one answer that came."""
        error: dict[str, Any] = json.loads(self.received.partition(b"\r\n\r\n")[2])["error"]
        return error

    # -- the server's transport -------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.is_lost:
            return
        if not self.is_deaf:
            self.received += data
            return
        self._unread += data
        if len(self._unread) > self._high_bytes and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = HIGH_BYTES if high is None else high
        self._low_bytes = LOW_BYTES if low is None else low

    def pause_reading(self) -> None:
        self._may_send.clear()

    def resume_reading(self) -> None:
        self._may_send.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self._end_if_closed()

    def abort(self) -> None:
        self._is_closing = True
        self._unread.clear()
        self._end_if_closed()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def _drained(self) -> None:
        if self._is_paused and len(self._unread) <= self._low_bytes:
            self._is_paused = False
            self._protocol.resume_writing()
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._is_closing and not self._unread and not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


class VirtualGateway:
    """A gateway on the running event loop, by whose time it goes."""

    def __init__(self, backend: ScriptedBackend, limits: Limits, app: Any = None) -> None:
        if app is None:
            now_s = asyncio.get_running_loop().time
            app = create_app(backend, AppOptions("gw"), limits=limits, now_s=now_s)
        self._config = server_config(app, limits)
        self._config.load()
        self._state = ServerState()

    def connect(self) -> Client:
        protocol = self._config.http_protocol_class
        return Client(protocol(config=self._config, server_state=self._state, app_state={}))

    async def counted(self, series: str) -> float:
        client = self.connect()
        await client.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        lines = client.received.decode().splitlines()
        [value] = [line.removeprefix(series) for line in lines if line.startswith(series + " ")]
        return float(value)
