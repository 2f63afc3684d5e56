"""The least that a stream's token costs its sender: one `socket.send` each, and nothing else.

Two processes, as a gateway and its clients are two. The sender listens, then sends to every stream
in turn, a part of all streams at a time, as Runs of workers do; the reader throws away what comes.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import uvloop

from livescale.lab.bench.peers.line_server import Job, serve_lines

_HOST = "127.0.0.1"
_BACKLOG = 1024


class _Sender:
    """Answers `{}` with the port that it listens on, and then one job that it sends for."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def answer(self, job: Job) -> Job:
        if self._listener is None:
            self._listener = socket.create_server((_HOST, 0), backlog=_BACKLOG)
            return {"port": self._listener.getsockname()[1]}
        streams = [self._listener.accept()[0] for _ in range(job["streams"])]
        try:
            for stream in streams:
                stream.setblocking(False)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _send(streams, job)
        finally:
            for stream in streams:
                stream.close()


def _send(streams: list[socket.socket], job: Job) -> Job:
    event, parts = b"x" * job["event_bytes"], job["workers"]
    groups = [streams[part::parts] for part in range(parts)]
    pause_s = job["step_ms"] / 1000 / parts
    sends = unsent = 0
    began_cpu_s, due_s = time.process_time(), time.monotonic()
    end_s = due_s + job["seconds"]
    while due_s < end_s:
        for group in groups:
            for stream in group:
                try:
                    stream.send(event)
                except BlockingIOError:
                    unsent += 1
            sends += len(group)
            due_s += pause_s
            time.sleep(max(0.0, due_s - time.monotonic()))
    return {"cpu_s": time.process_time() - began_cpu_s, "sends": sends, "unsent": unsent}


class _Reader(asyncio.Protocol):
    """One stream."""

    def __init__(self) -> None:
        self.is_over = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """What is sent is taken, and not looked at."""

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over.set_result(None)


async def _read(job: Job) -> Job:
    loop = asyncio.get_running_loop()
    opened: list[tuple[Any, _Reader]] = [
        await loop.create_connection(_Reader, _HOST, job["port"]) for _ in range(job["streams"])
    ]
    await asyncio.gather(*(reader.is_over for _, reader in opened))
    return {}


def sides(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """The first line says which side the process is."""
    if job["sends"]:
        return "sender", _Sender().answer
    return "reader", lambda reading: uvloop.run(_read(reading))


if __name__ == "__main__":
    serve_lines(sides)
