"""A listening socket that another thread can break off. What its connections carry is elsewhere."""

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
