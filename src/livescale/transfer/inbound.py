"""The receiving end of a connection: reads frames and hands chunks to the plan they belong to.

Anything that the protocol does not allow ends the connection, never the process.
"""

from __future__ import annotations

from collections.abc import Callable

from livescale.transfer.carrier import Channel
from livescale.transfer.frames import (
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameKind,
    decode_header,
)
from livescale.transfer.order_book import OrderBook
from livescale.transfer.reception import Reception
from livescale.types import PlanId, WorkerRef


class Inbound:
    """The connection from one peer. `serve` runs in a thread of its own until it ends."""

    def __init__(
        self, peer: WorkerRef, channel: Channel, book: OrderBook, order_wait_s: float
    ) -> None:
        self.peer = peer
        self.reception: Reception | None = None
        self._channel = channel
        self._book = book
        self._order_wait_s = order_wait_s
        self._plan: PlanId | None = None

    def serve(self, welcome: bytes) -> str:
        """After `welcome`, frames are handled until the connection ends. Returns why it did."""
        try:
            self._channel.send(welcome)
            while True:
                frame = decode_header(self._channel.receive(HEADER_BYTES))
                if frame.sender != self.peer:
                    raise FrameError(f"a frame of {frame.sender} on the connection of {self.peer}")
                self._handle(frame)
        except FrameError as error:
            return f"{self.peer} does not keep to the protocol: {error}"
        except OSError as error:
            return f"the connection was lost: {error}"

    def break_off(self) -> None:
        """`serve` returns soon."""
        self._channel.break_off()

    def _handle(self, frame: Frame) -> None:
        handlers: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.BEGIN: self._begin,
            FrameKind.CHUNK: self._chunk,
            FrameKind.END: self._end,
            FrameKind.ABORT: self._abort,
        }
        if frame.kind not in handlers:
            raise FrameError(f"{frame.kind.name} on an open connection")
        handlers[frame.kind](frame)

    def _begin(self, frame: Frame) -> None:
        if self._plan is not None:
            raise FrameError(f"plan {frame.plan} begins inside plan {self._plan}")
        self._plan = frame.plan
        # Meanwhile nothing is read: the transport's back-pressure holds the sender.
        self.reception = self._book.claim(self.peer, frame.plan, self._order_wait_s)
        if self.reception is not None:
            self.reception.begin()

    def _chunk(self, frame: Frame) -> None:
        self._check_plan(frame)
        if self.reception is None:
            self._channel.discard(frame.payload_bytes)
        else:
            self.reception.take_chunk(frame, self._channel)

    def _end(self, frame: Frame) -> None:
        self._check_plan(frame)
        if self.reception is not None:
            self.reception.end()
        self._plan = self.reception = None

    def _abort(self, frame: Frame) -> None:
        cause = self._channel.receive(frame.payload_bytes).decode(errors="replace")
        if frame.plan == self._plan:
            if self.reception is not None:
                self.reception.give_up_with_upstream(cause)
            self._plan = self.reception = None
            return
        waiting = self._book.refuse(self.peer, frame.plan, f"{self.peer} gave up: {cause}")
        # A stream that began and ended is not touched by a late word about its plan.
        if waiting is not None and not waiting.has_begun:
            waiting.give_up_with_upstream(cause)

    def _check_plan(self, frame: Frame) -> None:
        if frame.plan != self._plan:
            raise FrameError(f"{frame.kind.name} of plan {frame.plan} inside plan {self._plan}")

    def __repr__(self) -> str:
        return f"<Inbound from {self.peer}, plan {self._plan}>"
