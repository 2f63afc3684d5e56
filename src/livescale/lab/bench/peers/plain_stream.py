"""One plain TCP stream between two processes: the yardstick of `bench multicast`.

One side receives and reports its port, the other sends there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from time import monotonic_ns

from livescale.lab.bench.peers.line_server import Job, serve_lines

_WAIT_S = 120.0
_BLOCK_BYTES = 1 << 20
_SOCKET_BUFFER_BYTES = 1 << 20


def load(job: Job) -> tuple[int, Callable[[Job], Job]]:
    """Memory of `size_bytes`, touched; a listening socket at `address`."""
    memory = memoryview(bytearray(b"\x01" * job["size_bytes"]))
    listening = socket.socket()
    _tune(listening)
    listening.bind((job["address"], 0))
    listening.listen()
    answer = partial(_answer, memory, listening, job["address"])
    return listening.getsockname()[1], answer


def _answer(memory: memoryview, listening: socket.socket, address: str, job: Job) -> Job:
    """All of the memory in one direction; times of the system's monotonic clock."""
    if job["do"] == "send":
        with socket.socket() as stream:
            _tune(stream)
            stream.settimeout(_WAIT_S)
            stream.bind((address, 0))
            stream.connect(tuple(job["to"]))
            began_ns = monotonic_ns()
            stream.sendall(memory)
            stream.shutdown(socket.SHUT_WR)
            return {"began_ns": began_ns}
    listening.settimeout(_WAIT_S)
    stream, _ = listening.accept()
    with stream:
        stream.settimeout(_WAIT_S)
        got = 0
        while got < len(memory):
            count = stream.recv_into(memory[got : got + _BLOCK_BYTES])
            if count == 0:
                raise ConnectionError(f"the stream ended after {got} of {len(memory)} bytes")
            got += count
    return {"ended_ns": monotonic_ns()}


def _tune(sock: socket.socket) -> None:
    """As the data plane's sockets are."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


if __name__ == "__main__":
    serve_lines(load)
