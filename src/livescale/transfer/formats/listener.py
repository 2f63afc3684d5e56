"""A listening socket that another thread can break off, and socket options by which the system
itself notices a lost peer: a machine without power, or a link that was cut, sends no end of a
connection; and what channels over a socket do alike. What connections carry is elsewhere.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from livescale.transfer.formats.carrier import ChannelClosedError

_BACKLOG = 128


class Listener:
    """Takes over a bound socket and listens on it."""

    def __init__(self, sock: socket.socket) -> None:
        """Raises OSError; then the socket is still the caller's to close."""
        sock.listen(_BACKLOG)
        self._sock = sock
        self._name = sock.getsockname()
        self._is_broken_off = False

    def accept(self) -> socket.socket:
        """The next connection. Raises ChannelClosedError after `break_off`, else OSError."""
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if self._is_broken_off:
                raise ChannelClosedError("the carrier takes no more connections") from error
            raise
        return sock

    def break_off(self) -> None:
        """No more connections; `accept` wakes. Idempotent, from any thread."""
        self._is_broken_off = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def __repr__(self) -> str:
        return f"<Listener {self._name}{', broken off' if self._is_broken_off else ''}>"


class SocketChannel:
    """The part of a Channel that is the same over all connected sockets."""

    def __init__(self, sock: socket.socket) -> None:
        self.taken_bytes = 0
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def receive(
        self, size_bytes: int, timeout_s: float | None = None, is_urgent_payload: bool = False
    ) -> bytes:
        message = bytearray(size_bytes)
        view = memoryview(message)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        got = 0
        while got < size_bytes:
            wait_ms = None
            if deadline_s is not None:
                wait_ms = max(0.0, (deadline_s - time.monotonic()) * 1000)
            if not self._wait_readable(1, wait_ms):
                raise TimeoutError("nothing was received in time")
            taken = self._take_into(view[got:])
            if is_urgent_payload:
                self._took_urgent(taken)
            got += taken
        return bytes(message)

    def fileno(self) -> int:
        """The socket's descriptor, to wait on; -1 when it is closed."""
        return self._sock.fileno()

    def break_off(self) -> None:
        # Shutting down wakes threads that wait on the socket; closing it here would let the
        # system give its number to another socket under them.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _wait_readable(self, size_bytes: int, wait_ms: float | None) -> bool:
        """That many bytes are there, or some of them, or the end; False after the time."""
        return wait_ms is None or bool(self._readable.poll(wait_ms))

    def _take_into(self, view: memoryview) -> int:
        """Bytes that were taken. Raises ChannelClosedError at the end."""
        taken = self._sock.recv_into(view)
        if taken == 0:
            raise ChannelClosedError("the other side closed the connection")
        return taken

    def _took_urgent(self, size_bytes: int) -> None:
        """Bytes of an urgent payload were taken."""


_PROBES = 2


def notice_loss(sock: socket.socket, lost_after_s: float) -> None:
    """A TCP connection fails after about `lost_after_s` in which the peer acknowledged nothing,
    whether something was sent or not (whole seconds, at least 3). Raises OSError."""
    idle_s = max(1, round(lost_after_s / 2))
    gap_s = max(1, round(lost_after_s / 2 / _PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, gap_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        unacknowledged_ms = (idle_s + _PROBES * gap_s) * 1000
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unacknowledged_ms)
