"""An application on a listening socket, until it is told to stop.

The event loop is the caller's: run it with uvloop (`uvloop.run(serve(...))`). Nothing here knows
what the application does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they do not meet one being closed."""
CANCEL_S = 5.0
"""Time for cancelled responses to tell their clients, after the drain time is over."""


async def serve(app: ASGIApp, sock: socket.socket, stop: asyncio.Event, drain_s: float) -> None:
    """Serve on `sock` (bound, and closed on return) until `stop` is set; then drain.

    After `stop` no connection is accepted, running responses may finish for `drain_s` seconds, and
    what still runs then is cancelled. No signal handler is installed.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    # Declared as whole seconds, but only handed to asyncio.wait_for.
    config.timeout_graceful_shutdown = drain_s  # type: ignore[assignment]
    server = _Server(config)
    stopping = asyncio.create_task(_exit_when(server, stop))
    try:
        await server.serve(sockets=[sock])
        await _settle(server)
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


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
