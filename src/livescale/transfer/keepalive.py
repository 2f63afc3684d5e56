"""Socket options by which the system itself notices a peer that is gone without a word.

A machine without power, or a link that was cut, sends no end of a connection. What a peer that
still answers packets does, or does not do, is not known here.
"""

from __future__ import annotations

import socket

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
