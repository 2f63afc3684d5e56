"""The channel that carries messages between the processes of a pool.

Both ends of a connection have proved that they belong to the pool before the first frame
(`doors.py`). A frame is a 4-byte big-endian length and a msgpack body. Lengths are bounded before
anything is allocated, bodies are decoded strictly into the types of `protocol.py`, and a channel
that breaks a rule is closed. A frame of length 0 is a heartbeat: it shows that the sender works,
and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from livescale.runtime.wire.doors import enter
from livescale.runtime.wire.protocol import Address, AnyMessage
from livescale.transfer.formats.listener import notice_loss

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

FRAME_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct(">I")
# A peer that leaves more than this unread, besides one message, is cut off: it must not fill our
# memory.
_BACKLOG_BYTES = 8 << 20
# More of one turn does not wait for its end.
_TURN_BYTES_MAX = 64 << 10
# A large message shows while it comes that its sender is there.
_PART_BYTES = 256 << 10
_HEARTBEAT = _LENGTH.pack(0)
# A connection that cannot be opened in this time is tried anew: the system would wait for minutes.
_CONNECT_S = 5.0
# A peer that connects must present itself within this time.
_HELLO_S = 10.0
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 1.0


_encoder = msgspec.msgpack.Encoder()
Incoming = TypeVar("Incoming")


class Wire(Generic[Incoming]):
    """A connection that carries messages both ways; `incoming` is the type that it accepts.

    Iterate to receive; the iteration ends when the peer is gone or breaks the protocol
    (`error` says why). `send` never blocks; a peer that lets too much pile up is cut off. What is
    sent in one turn of the event loop goes out together: one call of the system, one TLS record.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: object,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._loop = asyncio.get_running_loop()
        #: frames of this turn of the event loop
        self._unsent = bytearray()
        #: the most that went out at once since the peer had last read everything
        self._largest_bytes = 0
        self.error: str | None = None
        tls = writer.get_extra_info("ssl_object")
        #: what the other end has shown (DER; None: the pool has no certificates)
        self.certificate: bytes | None = None if tls is None else tls.getpeercert(True)
        self.opened_ns = time.monotonic_ns()
        #: when bytes were last taken from it (None: none were), and whether it waits for more
        self.received_ns: int | None = None
        self.is_waiting = False

    def send(self, message: AnyMessage) -> None:
        """Queue a message; a closed channel drops it (its end is told to the reader's side)."""
        if self._writer.is_closing():
            return
        body = _encoder.encode(message)
        self._put(_LENGTH.pack(len(body)))
        self._unsent += body
        if len(self._unsent) > _TURN_BYTES_MAX:
            self._flush()

    def beat(self) -> None:
        """Show the peer that this side works."""
        if not self._writer.is_closing():
            self._put(_HEARTBEAT)

    def _put(self, head: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += head

    def _flush(self) -> None:
        """What is unsent goes out."""
        if not self._unsent or self._writer.is_closing():
            return
        unsent, self._unsent = self._unsent, bytearray()
        transport = self._writer.transport
        if not transport.get_write_buffer_size():
            self._largest_bytes = 0
        # One message may be larger than the bound. The peer must be given time to read it, also
        # while small ones follow.
        self._largest_bytes = max(self._largest_bytes, len(unsent))
        self._writer.write(unsent)
        if transport.get_write_buffer_size() > _BACKLOG_BYTES + self._largest_bytes:
            self.break_off("the peer does not read")

    async def receive(self) -> Incoming | None:
        """The next message, or None at the end of the connection."""
        try:
            length = 0
            while not length:
                (length,) = _LENGTH.unpack(await self._take(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise msgspec.ValidationError(
                    f"a frame of {length} bytes exceeds {FRAME_BYTES_MAX}"
                )
            return self._decoder.decode(await self._take(length))
        except (OSError, EOFError) as error:
            self.error = self.error or str(error) or "connection closed"
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.error = f"not a message of this channel: {error}"
        self.close()
        return None

    async def hello(self) -> Incoming | None:
        """The first message; None if none comes in time."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.receive(), _HELLO_S)
        return None

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        try:
            while (message := await self.receive()) is not None:
                yield message
        finally:
            # A reader that is cancelled leaves no socket behind.
            self.close()

    async def _take(self, size_bytes: int) -> bytearray:
        """Raises OSError or EOFError at the end of the connection."""
        self.is_waiting = True
        try:
            taken = bytearray()
            while len(taken) < size_bytes:
                part_bytes = min(_PART_BYTES, size_bytes - len(taken))
                taken += await self._reader.readexactly(part_bytes)
                self.received_ns = time.monotonic_ns()
            return taken
        finally:
            self.is_waiting = False

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    def notice_loss(self, lost_after_s: float) -> None:
        """The wire breaks when the peer's machine acknowledges nothing for about so long."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            # One that has just ended takes no options.
            with contextlib.suppress(OSError):
                notice_loss(sock, lost_after_s)

    def break_off(self, reason: str) -> None:
        """Close at once, whatever has not been sent yet."""
        self.error = self.error or reason
        self._writer.transport.abort()

    def close(self) -> None:
        """What was sent before still goes out."""
        self._flush()
        # Python 3.11.2 cannot break a TLS connection off any more that was closed twice.
        if not self._writer.is_closing():
            self._writer.close()


async def open_wire(
    address: Address, incoming: object, *, secret: str, door: str, tls: Credentials | None = None
) -> Wire[Incoming]:
    """Connect to the door of this name that is there. Raises OSError, also for one that is not."""
    # Not wait_for: that may lose the cancellation of a task that has just been connected.
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    await enter(reader, writer, secret, door, tls)
    return Wire(reader, writer, incoming)


async def stay_connected(
    address: Address,
    incoming: object,
    *,
    secret: str,
    door: str,
    serve: Callable[[Wire[Incoming]], Awaitable[None]],
    tls: Credentials | None = None,
) -> None:
    """One wire after the other to the door of this name, whichever process is behind it: `serve`
    gets each, until its end. For ever."""
    pause_s = _PAUSE_S_MIN
    while True:
        try:
            wire: Wire[Incoming] = await open_wire(
                address, incoming, secret=secret, door=door, tls=tls
            )
        except OSError:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        else:
            await serve(wire)
            pause_s = _PAUSE_S_MIN
            await asyncio.sleep(pause_s)
