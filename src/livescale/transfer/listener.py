"""A listening socket that another thread can break off, and socket options by which the system
itself notices a lost peer: a machine without power, or a link that was cut, sends no end of a
connection. What connections carry is elsewhere.
"""

from __future__ import annotations

import contextlib
import socket

from livescale.transfer.carrier import ChannelClosedError

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
