"""The sending end of a hop: streams of plans, queued on one connection.

A Flow knows how far its bytes may go; an Outbound carries one Flow after the other. Where the
bytes come from (a whole copy, or a reception that is still under way) is not known here.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from livescale.transfer.carrier import Channel
from livescale.transfer.frames import REASON_BYTES_MAX, Frame, FrameKind
from livescale.types import Manifest, PlanId, WorkerRef

_QUEUED_FLOWS_MAX = 256


class FlowStoppedError(Exception):
    """The flow ended before all its bytes were sent; the message is the reason."""


class Flow:
    """One plan's bytes on their way to one peer.

    `available_bytes` counts the bytes of the layers, in order, that lie in the arena: all of them
    for a holder of the whole model, what has arrived so far for a worker that is receiving.
    """

    def __init__(
        self,
        plan: PlanId,
        manifest: Manifest,
        target: WorkerRef,
        available_bytes: int,
        tell_ended: Callable[[int, str | None], None],
    ) -> None:
        self.plan = plan
        self.manifest = manifest
        self.target = target
        self.layer = 0
        self.sent_bytes = 0
        self._available_bytes = available_bytes
        self._tell_ended = tell_ended
        self._has_ended = False
        self._reason: str | None = None
        self._changed = threading.Condition()

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def advance(self, size_bytes: int) -> None:
        """`size_bytes` more may be sent."""
        with self._changed:
            self._available_bytes += size_bytes
            self._changed.notify_all()

    def wait_available(self, position_bytes: int) -> None:
        """The first `position_bytes` may be sent. Raises FlowStoppedError when stopped."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or self._available_bytes >= position_bytes
            )
            if self._has_ended:
                raise FlowStoppedError(self._reason)

    def end(self, reason: str | None = None) -> None:
        """The flow is over and its listener was told, if this call is the first to end it."""
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            self._reason = reason
            sent_bytes = self.sent_bytes
            self._changed.notify_all()
        self._tell_ended(sent_bytes, reason)

    def __repr__(self) -> str:
        state = "ended" if self._has_ended else f"layer {self.layer}"
        return f"<Flow plan {self.plan} to {self.target}, {state}, {self.sent_bytes} bytes>"


class Outbound:
    """The connection to one peer; its thread sends queued flows, a second one sees it end."""

    def __init__(
        self,
        worker: WorkerRef,
        peer: WorkerRef,
        channel: Channel,
        chunk_bytes: int,
        tell_lost: Callable[[Outbound], None],
    ) -> None:
        self.peer = peer
        self._worker = worker
        self._channel = channel
        self._chunk_bytes = chunk_bytes
        self._tell_lost = tell_lost
        self._changed = threading.Condition()
        self._queue: collections.deque[Flow] = collections.deque()
        self._current: Flow | None = None
        self._lost_reason: str | None = None
        self._watching = threading.Thread(
            target=self._watch, name=f"{worker} watches {peer}", daemon=True
        )
        self.thread = threading.Thread(target=self._run, name=f"{worker} to {peer}", daemon=True)

    def start(self) -> None:
        self._watching.start()
        self.thread.start()

    def submit(self, flow: Flow) -> None:
        """The flow is queued, or has ended because the connection is lost or has too many."""
        with self._changed:
            problem = self._lost_reason
            if problem is None and len(self._queue) >= _QUEUED_FLOWS_MAX:
                problem = f"{_QUEUED_FLOWS_MAX} plans are queued already"
            if problem is None:
                self._queue.append(flow)
                self._changed.notify_all()
                return
        flow.end(self._story(flow, problem))

    def lose(self, reason: str) -> None:
        """The connection is given up and its flows have ended. Idempotent, from any thread."""
        with self._changed:
            if self._lost_reason is not None:
                return
            self._lost_reason = reason
            flows = [*([self._current] if self._current else []), *self._queue]
            self._queue.clear()
            self._changed.notify_all()
        self._channel.break_off()
        # Who hears that a flow ended finds the list of connections up to date.
        self._tell_lost(self)
        for flow in flows:
            flow.end(self._story(flow, reason))

    def _watch(self) -> None:
        self._channel.wait_closed()
        self.lose("the connection was lost: the other side closed it")

    def _run(self) -> None:
        try:
            while (flow := self._next()) is not None:
                self._carry(flow)
        except OSError as error:
            self.lose(f"the connection was lost: {error}")
        finally:
            self.lose("its sending thread ended")
            self._watching.join()
            self._channel.close()

    def _next(self) -> Flow | None:
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._queue or self._lost_reason is not None)
            if self._lost_reason is not None:
                return None
            self._current = self._queue.popleft()
            return self._current

    def _carry(self, flow: Flow) -> None:
        """The flow has ended and the stream stands between two plans. Raises OSError."""
        try:
            self._send_layers(flow)
        except FlowStoppedError as stopped:
            reason = str(stopped).encode()[:REASON_BYTES_MAX]
            abort = Frame(
                FrameKind.ABORT,
                self._worker,
                flow.plan,
                layer=flow.layer,
                payload_bytes=len(reason),
            )
            self._channel.send(abort.encode() + reason)
        else:
            flow.end()

    def _send_layers(self, flow: Flow) -> None:
        flow.wait_available(0)
        self._channel.send(Frame(FrameKind.BEGIN, self._worker, flow.plan).encode())
        layer_start = 0
        for entry in flow.manifest.layers:
            flow.layer = entry.layer
            for offset in range(0, entry.size_bytes, self._chunk_bytes):
                size = min(self._chunk_bytes, entry.size_bytes - offset)
                flow.wait_available(layer_start + offset + size)
                header = Frame(
                    FrameKind.CHUNK, self._worker, flow.plan, entry.layer, offset, size
                ).encode()
                self._channel.send_range(header, entry.offset_bytes + offset, size)
                flow.sent_bytes += size
            layer_start += entry.size_bytes
        flow.wait_available(layer_start)
        self._channel.send(Frame(FrameKind.END, self._worker, flow.plan).encode())

    def _story(self, flow: Flow, reason: str) -> str:
        return f"plan {flow.plan}: sending to {self.peer} stopped at layer {flow.layer}: {reason}"

    def __repr__(self) -> str:
        state = "lost" if self._lost_reason is not None else f"{len(self._queue)} queued"
        return f"<Outbound {self._worker} -> {self.peer}, {state}>"
