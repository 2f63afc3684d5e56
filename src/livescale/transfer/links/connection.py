"""One connection with one peer: a thread that sends what its outbox says, and one that receives.

Frames are taken apart here and handed on; what they mean for plans and copies is not known here.
Anything that the protocol does not allow ends the connection, never the process.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from livescale.transfer.formats.carrier import Channel
from livescale.transfer.formats.frames import (
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameKind,
    decode_header,
    encode_header,
)
from livescale.transfer.formats.orders import BytesMoved, TransferError
from livescale.transfer.links.outbox import (
    Outbox,
    OutboxFullError,
    ProbeBytes,
    Settle,
    WantedChunk,
    Word,
)
from livescale.values.types import WorkerRef

_PROBE_CHUNK_BYTES = 256 << 10
# How soon a parcel that found no room tries again.
_ROOM_PAUSE_S = 0.002


class Switchboard(Protocol):
    """Where a connection hands on what it receives. Called from its threads."""

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Takes the frame's payload from the channel, too. Raises FrameError, OSError."""

    def settled(self, connection: Connection) -> None:
        """Nothing of any copy is read for this connection any more."""

    def ended(self, connection: Connection, reason: str) -> None:
        """Nothing more is received. Once."""


class Connection:
    """A channel whose `peer` has named itself. Both sides ask and answer on it."""

    def __init__(
        self,
        worker: WorkerRef,
        outbox: Outbox,
        channel: Channel,
        switchboard: Switchboard,
        memory_bytes: int,
        is_own: bool,
    ) -> None:
        """`is_own`: opened from here."""
        self.peer = outbox.peer
        self.outbox = outbox
        self.channel = channel
        self.is_own = is_own
        #: parcels went over it, or are about to: its end may have lost some
        self.carries_parcels = False
        self.moved = BytesMoved()
        self._worker = worker
        self._switchboard = switchboard
        self._probe_chunk_bytes = min(_PROBE_CHUNK_BYTES, memory_bytes)
        self._reason: str | None = None
        self._sending = threading.Thread(
            target=self._send, name=f"{worker} to {self.peer}", daemon=True
        )
        self._receiving = threading.Thread(
            target=self._receive, name=f"{worker} from {self.peer}", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        return self._reason is None

    @property
    def is_running(self) -> bool:
        """Its threads have not ended."""
        return self._receiving.is_alive()

    def start(self) -> None:
        """Both threads run until the connection ends; then its channel is closed."""
        self._sending.start()
        self._receiving.start()

    def join(self) -> None:
        self._receiving.join()

    def post(self, body: bytes, patience_s: float) -> None:
        """The parcel is on its way. Raises TransferError if too much waits to be sent, and still
        does after `patience_s`, or if the connection has ended."""
        # Before the parcel: should the connection end right after it, that is told.
        self.carries_parcels = True
        frame = Frame(FrameKind.PARCEL, self._worker, payload_bytes=len(body))
        word = Word(frame.encode(), body)
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                self.outbox.put(word)
                break
            except OutboxFullError as error:
                if time.monotonic() >= deadline_s:
                    raise TransferError(str(error)) from None
            time.sleep(_ROOM_PAUSE_S)
        if not self.is_alive:
            raise TransferError(f"the connection with {self.peer} has ended")

    def break_off(self, reason: str) -> None:
        """Both threads end soon. The first reason is told. Idempotent, from any thread."""
        if self._reason is None:
            self._reason = reason
        self.channel.break_off()
        self.outbox.close()

    def count(self, received_bytes: int, discarded_bytes: int) -> None:
        """Bytes of ranges came, and some of them were of no use."""
        self.moved.parameter_received_bytes += received_bytes
        self.moved.discarded_bytes += discarded_bytes

    def _receive(self) -> None:
        reason = "its receiving thread failed"
        try:
            while True:
                frame = decode_header(self.channel.receive(HEADER_BYTES))
                if frame.sender != self.peer:
                    raise FrameError(f"a frame of {frame.sender} on the connection of {self.peer}")
                self._switchboard.handle(self, frame)
        except FrameError as error:
            reason = f"{self.peer} does not keep to the protocol: {error}"
        except OSError as error:
            reason = f"the connection was lost: {error}"
        finally:
            self.break_off(reason)
            self._sending.join()
            self.channel.close()
            self._switchboard.ended(self, self._reason or reason)

    def _send(self) -> None:
        try:
            while (what := self.outbox.next(self._probe_chunk_bytes)) is not None:
                self._send_one(what)
        except OSError as error:
            self.break_off(f"the connection was lost: {error}")
        finally:
            self.break_off("its sending thread ended")
            self._switchboard.settled(self)

    def _send_one(self, what: Word | WantedChunk | ProbeBytes | Settle) -> None:
        match what:
            case WantedChunk():
                header = encode_header(
                    FrameKind.CHUNK,
                    self._worker,
                    (what.plan, what.layer, what.chunk),
                    what.size_bytes,
                    what.is_unproved,
                )
                self.channel.send_range(header, what.offset_bytes, what.size_bytes)
                self.moved.parameter_sent_bytes += what.size_bytes
            case Word(frame, None):
                self.channel.send(frame)
            case Word(frame, parcel):
                assert parcel is not None
                self.channel.send(frame)
                self.channel.send(parcel, is_urgent_payload=True)
            case ProbeBytes(plan, size):
                header = Frame(FrameKind.PROBED, self._worker, plan, payload_bytes=size).encode()
                self.channel.send_range(header, 0, size)
                self.moved.parameter_sent_bytes += size
            case Settle():
                self.channel.settle()
                self._switchboard.settled(self)

    def __repr__(self) -> str:
        state = "open" if self._reason is None else f"ended: {self._reason}"
        return f"<Connection {self._worker} - {self.peer}, {state}>"
