"""What the data plane needs from a network: a handful of calls, and leave to write.

Interfaces and the write permit live here; sockets do not. A carrier moves ranges of registered
memory and small control messages, in order and reliably, between two workers.
"""

from __future__ import annotations

import threading
from typing import Protocol

Address = tuple[str, int]


class ChannelClosedError(ConnectionError):
    """The other side closed the channel, or this side broke it off."""


class WritePermit:
    """Leave to write into the arena for one plan; once revoked, nobody writes for it again.

    A channel holds `lock` for each short, non-blocking write and looks at `is_revoked` first,
    so `revoke` waits at most for one copy, never for the network.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_revoked = False

    def revoke(self) -> None:
        """No write is under way and none will come."""
        with self.lock:
            self.is_revoked = True


class Channel(Protocol):
    """One connection. One thread sends and one receives; `break_off` may be called by anyone.

    All calls raise OSError (ChannelClosedError where the end is orderly) when the channel ends.
    """

    def send(self, message: bytes) -> None:
        """`message` is handed to the network."""

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        """`header`, then the range of registered memory, are handed to the network."""

    def receive(self, size_bytes: int, timeout_s: float | None = None) -> bytes:
        """Exactly `size_bytes` of control message. TimeoutError after `timeout_s`."""

    def receive_range(self, offset_bytes: int, size_bytes: int, permit: WritePermit) -> int:
        """`size_bytes` are taken from the channel and written in place while permitted.

        Returns the bytes that were written; the rest was discarded because the permit is revoked.
        """

    def discard(self, size_bytes: int) -> None:
        """`size_bytes` are taken from the channel and forgotten."""

    def wait_closed(self) -> None:
        """Returns when the channel has ended. For channels on which nothing is received."""

    def break_off(self) -> None:
        """Every call under way and to come raises soon. Idempotent, from any thread."""

    def close(self) -> None:
        """Resources are freed. Only when no call is under way."""


class Carrier(Protocol):
    """A way to move bytes between workers (TCP works everywhere)."""

    @property
    def address(self) -> Address:
        """Where others connect to."""

    def register(self, memory: memoryview) -> None:
        """Ranges refer to `memory` from now on. Once, before any channel."""

    def connect(self, address: Address, timeout_s: float) -> Channel:
        """A channel to whoever listens there. Raises OSError."""

    def accept(self) -> Channel:
        """The next channel that somebody opened. Raises ChannelClosedError after `break_off`."""

    def break_off(self) -> None:
        """No more channels are accepted; `accept` wakes. Channels that exist live on."""

    def close(self) -> None:
        """Resources are freed. Only when no `accept` is under way."""
