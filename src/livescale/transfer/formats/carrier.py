"""What the data plane needs from a network: a handful of calls, and leave to write.

Interfaces and the write permit live here; sockets do not. A carrier moves ranges of registered
memory and small control messages, in order and reliably, between two holders.

A carrier gets the memory when it is made (register) and connects in its own way. A chunk's bytes
follow its header (TCP), or the header says where they lie and the receiver fetches them itself
(shared memory, NIXL); then `settle` waits until it has. A receiver may have several ranges under
way (NIXL): what becomes of each is told to the `landed` that came with it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Protocol

Address = tuple[str, int]
Landed = Callable[[int], None]
"""Told how many bytes of a range were written in place: all, or fewer if they are of no use."""


class ChannelClosedError(ConnectionError):
    """The other side closed the channel, or this side broke it off."""


class WritePermit:
    """Leave to write into the memory for one plan; once revoked, no thread writes for it.

    A channel holds `lock` for each short, non-blocking write and looks at `is_revoked` first,
    so `revoke` waits at most for one copy, never for the network. Where a network card writes,
    this is about the order to write: writes that were ordered before are in `open_writes.py`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_revoked = False

    def revoke(self) -> None:
        """No write of a thread is under way, and no write will begin."""
        with self.lock:
            self.is_revoked = True


class Channel(Protocol):
    """One connection. One thread sends and one receives; `break_off` may be called by anyone.

    All calls raise OSError (ChannelClosedError where the end is orderly) when the channel ends.
    """

    #: ranges may leave the machine
    is_network: bool

    @property
    def taken_bytes(self) -> int:
        """Of ranges, taken from the channel so far, whole chunks or not."""

    def protect(self, timeout_s: float) -> None:
        """From now on nothing on the way reads or changes what is sent, where that is asked for.
        Once, before anything is sent. Raises OSError, also for an end that is no member."""

    def share_memory(self, timeout_s: float) -> None:
        """Ranges can be sent both ways from now on. Once, when the other side has proved who it
        is: before that it gets no access to anything. Raises TimeoutError, too."""

    def send(self, message: bytes, is_urgent_payload: bool = False) -> None:
        """`message` is handed to the network. Only an urgent payload is paced."""

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        """`header`, then the range of registered memory, are on their way. Until `settle`, the
        range may still be read."""

    def settle(self) -> None:
        """No peer reads the ranges that were sent before any more."""

    def receive(
        self, size_bytes: int, timeout_s: float | None = None, is_urgent_payload: bool = False
    ) -> bytes:
        """Exactly `size_bytes` of message. TimeoutError after `timeout_s`."""

    def receive_range(
        self, offset_bytes: int, size_bytes: int, permit: WritePermit, landed: Landed
    ) -> None:
        """The range that comes next is taken from the channel and written in place while permitted.

        `landed` is told once, when nothing more is written for this range: by the receiving thread,
        in this call or a later one of this channel; or, with 0 bytes, by any thread after the
        channel has ended. It is never told if that cannot be known. A call that raises has not
        told it and will not.
        """

    def discard_range(self, size_bytes: int, landed: Landed) -> None:
        """A range of `size_bytes` is taken from the channel and forgotten. `landed` is told, of
        0 bytes, as in `receive_range`."""

    def break_off(self) -> None:
        """Every call under way and to come raises soon. Idempotent, from any thread."""

    def close(self) -> None:
        """Resources are freed. Only when no call is under way."""


class Carrier(Protocol):
    """A way to move bytes between holders (TCP works everywhere)."""

    def accept(self) -> Channel:
        """The next channel that a peer opened. Raises ChannelClosedError after `break_off`."""

    def break_off(self) -> None:
        """No more channels are accepted; `accept` wakes. Channels that exist live on."""

    def close(self) -> None:
        """Resources are freed. Only when no `accept` is under way."""


PLACE = struct.Struct(">Q")
"""What a channel sends in place of a range that its other end fetches: where it lies."""


def receive_place(channel: Channel, size_bytes: int, memory_bytes: int) -> int:
    """Where the range that comes next lies in the other side's memory. Raises OSError."""
    start: int = PLACE.unpack(channel.receive(PLACE.size))[0]
    if start + size_bytes > memory_bytes:
        raise ChannelClosedError(
            f"{size_bytes} bytes at {start} leave the other side's memory of {memory_bytes} bytes"
        )
    return start
