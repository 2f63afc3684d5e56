"""The shared-memory carrier: between processes of one host, chunks are copied once and not sent.

A unix socket carries the frames; instead of a chunk's bytes it carries where they lie. Each side
gives the other a read-only descriptor of its memory and an eventfd on which the other counts the
chunks it has copied: that bounds the chunks in flight, and tells when no peer reads them any more.
No peer is given a descriptor before it has proved that it belongs to the pool.
Nothing here pays for the NIC.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
from pathlib import Path

import numpy as np
import numpy.typing as npt

from livescale.transfer.formats.carrier import (
    PLACE,
    ChannelClosedError,
    Landed,
    WritePermit,
    receive_place,
)
from livescale.transfer.formats.listener import Listener, SocketChannel

_MAGIC = b"LSsm\x01"
_HOST_NAME_BYTES_MAX = 64
_IN_FLIGHT_MAX = 4
_STEP_BYTES = 1 << 20
Bytes = npt.NDArray[np.uint8]
_PATH_BYTES_MAX = 107


class ShmChannel(SocketChannel):
    """A Channel over a unix socket and both sides' memory.

    Ranges are copied by numpy, which does not hold the interpreter's lock meanwhile.
    """

    def __init__(
        self, sock: socket.socket, memory: memoryview, memory_fd: int, hello: bytes
    ) -> None:
        """`memory_fd` and `hello` are what the other side is given once it has proved itself."""
        super().__init__(sock)
        self.is_network = False
        self._memory = _array(memory)
        self._memory_fd = memory_fd
        self._hello = hello
        self._peer_memory = _array(b"")
        self._peer_acks = self._acks = -1
        self._in_flight = 0
        self._scratch = _array(b"")
        self._waiting = select.poll()

    def protect(self, timeout_s: float) -> None:
        """Nothing leaves the host, and the directory of the socket is its owner's alone."""

    def share_memory(self, timeout_s: float) -> None:
        acks = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        received: list[int] = []
        try:
            self._sock.settimeout(timeout_s)
            socket.send_fds(self._sock, [self._hello], [self._memory_fd, acks])
            hello, received, _, _ = socket.recv_fds(self._sock, len(self._hello), 2)
            if hello != self._hello or len(received) != 2:
                raise ChannelClosedError("the other side is not a carrier of the same host")
            self._sock.settimeout(None)
            self._peer_memory = _array(_map(received[0]))
        except OSError:
            for descriptor in (acks, *received):
                os.close(descriptor)
            raise
        os.close(received[0])
        self._acks, self._peer_acks = acks, received[1]
        self._waiting.register(acks, select.POLLIN)
        # Nothing but the end of the connection is looked for on the socket.
        self._waiting.register(self._sock, select.POLLRDHUP)

    def send(self, message: bytes, is_urgent_payload: bool = False) -> None:
        self._sock.sendall(message)

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        while self._in_flight >= _IN_FLIGHT_MAX:
            self._await_acks()
        self._in_flight += 1
        self._sock.sendall(header + PLACE.pack(offset_bytes))

    def settle(self) -> None:
        while self._in_flight:
            self._await_acks()

    def receive_range(
        self, offset_bytes: int, size_bytes: int, permit: WritePermit, landed: Landed
    ) -> None:
        source = self._receive_place(size_bytes)
        place = self._memory[offset_bytes : offset_bytes + size_bytes]
        got = 0
        while got < size_bytes:
            stop = min(got + _STEP_BYTES, size_bytes)
            with permit.lock:
                if permit.is_revoked:
                    break
                np.copyto(place[got:stop], source[got:stop])
            got = stop
        self._taken(size_bytes)
        landed(got)

    def discard_range(self, size_bytes: int, landed: Landed) -> None:
        source = self._receive_place(size_bytes)
        # Copied all the same, so that a probe measures what a chunk would take.
        if not len(self._scratch):
            self._scratch = np.zeros(_STEP_BYTES, np.uint8)
        for start in range(0, size_bytes, _STEP_BYTES):
            part = source[start : start + _STEP_BYTES]
            np.copyto(self._scratch[: len(part)], part)
        self._taken(size_bytes)
        landed(0)

    def close(self) -> None:
        self._sock.close()
        self._memory = self._peer_memory = _array(b"")
        for descriptor in (self._peer_acks, self._acks):
            if descriptor >= 0:
                os.close(descriptor)

    def _receive_place(self, size_bytes: int) -> Bytes:
        """The range of the peer's memory that the peer says it sends."""
        start = receive_place(self, size_bytes, len(self._peer_memory))
        return self._peer_memory[start : start + size_bytes]

    def _taken(self, size_bytes: int) -> None:
        self.taken_bytes += size_bytes
        os.eventfd_write(self._peer_acks, 1)

    def _await_acks(self) -> None:
        events = dict(self._waiting.poll())
        if self._acks not in events:
            raise ChannelClosedError("the other side closed the connection")
        count = os.eventfd_read(self._acks)
        if count > self._in_flight:
            raise ChannelClosedError(f"{count} chunks were copied of {self._in_flight} sent")
        self._in_flight -= count


class ShmCarrier:
    """Listens on a unix socket at `path`; `memory_fd` is the memfd that `memory` maps.

    Both ends must name the same host: emulated hosts share a file system.
    """

    def __init__(self, path: Path, host_name: str, memory: memoryview, memory_fd: int) -> None:
        self._path = path
        self._hello = _MAGIC + host_name.encode()[:_HOST_NAME_BYTES_MAX].ljust(
            _HOST_NAME_BYTES_MAX, b"\0"
        )
        self._memory = memory
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            raise ValueError(f"{path} has more than {_PATH_BYTES_MAX} bytes, too many for a socket")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            sock.bind(str(path))
            path.chmod(0o600)
            self._listener = Listener(sock)
            # Opened anew: who reads must not be able to write.
            self._memory_fd = os.open(f"/proc/self/fd/{memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            sock.close()
            raise

    @property
    def path(self) -> str:
        """Where peers of this host connect to."""
        return str(self._path)

    def connect(self, path: str, timeout_s: float) -> ShmChannel:
        """A channel to the member that listens there. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.settimeout(None)
        except OSError:
            sock.close()
            raise
        return self._channel(sock)

    def accept(self) -> ShmChannel:
        return self._channel(self._listener.accept())

    def break_off(self) -> None:
        self._listener.break_off()

    def close(self) -> None:
        self._listener.close()
        self._memory = memoryview(b"")
        os.close(self._memory_fd)
        self._path.unlink(missing_ok=True)

    def _channel(self, sock: socket.socket) -> ShmChannel:
        return ShmChannel(sock, self._memory, self._memory_fd, self._hello)

    def __repr__(self) -> str:
        return f"<ShmCarrier {self._listener!r}>"


def _map(memory: int) -> mmap.mmap:
    """The peer's memory, to read. Raises ChannelClosedError if it could become smaller."""
    if not fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ChannelClosedError("the other side's memory is not sealed")
    return mmap.mmap(memory, 0, prot=mmap.PROT_READ)


def _array(memory: bytes | memoryview | mmap.mmap) -> Bytes:
    return np.frombuffer(memory, np.uint8)
