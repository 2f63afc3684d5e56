"""The receiving end of one plan: chunks into place, checksums, news, and what may be forwarded.

One Reception lives from its order until all layers are verified or the plan fails. Which
connection the chunks come on, and how they are matched to the order, is decided elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import xxhash

from livescale.transfer.arena import Arena
from livescale.transfer.carrier import Channel, WritePermit
from livescale.transfer.frames import Frame, FrameError, check_chunk
from livescale.transfer.orders import ABORTED, ChunkObserver, ReceiveListener, ReceiveOrder
from livescale.transfer.outbound import Flow
from livescale.types import Manifest


class Reception:
    """Carries out one ReceiveOrder. `has_begun` is set by who matches the stream to it."""

    def __init__(
        self,
        order: ReceiveOrder,
        arena: Arena,
        listener: ReceiveListener,
        flow: Flow | None,
        observer: ChunkObserver | None,
        tell_over: Callable[[Reception], None],
    ) -> None:
        self.order = order
        self.has_begun = False
        self.layer = 0
        self.received_bytes = 0
        self.failure: str | None = None
        self._arena = arena
        self._listener = listener
        # Whoever is forwarded to gets what has arrived and then every chunk: joining and advancing
        # exclude each other.
        self._forwarding = threading.Lock()
        self._flows = [flow] if flow is not None else []
        self._observer = observer
        self._tell_over = tell_over
        self._permit = WritePermit()
        self._told_onward: str | None = None
        self._offset_bytes = 0
        self._hasher = xxhash.xxh3_64()
        # Held while the listener is told: news never overlaps and stops with the last word.
        # Reentrant, because a listener may abort the plan while it is being told of it.
        self._telling = threading.RLock()
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Completed or failed. (Forwarding may go on.)"""
        return self._is_over

    def is_receiving(self, manifest: Manifest) -> bool:
        """This very model is on its way."""
        return not self._is_over and self.order.manifest == manifest

    def begin(self) -> None:
        """The stream has begun. Layers without bytes at its start have arrived."""
        self._pass_whole_layers()

    def take_chunk(self, frame: Frame, channel: Channel) -> None:
        """The chunk is taken from the channel; written in place unless the plan is over.

        A chunk that does not belong where the manifest has the next one fails the plan, not the
        connection. Raises OSError when the channel ends.
        """
        layers = self.order.manifest.layers
        if self._is_over or self.layer == len(layers):
            channel.discard(frame.payload_bytes)
            return
        entry = layers[self.layer]
        try:
            check_chunk(frame, entry, self._offset_bytes)
        except FrameError as error:
            self.fail(str(error))
            channel.discard(frame.payload_bytes)
            return
        if self.received_bytes == 0:
            self._tell_first_byte()
        place_bytes = entry.offset_bytes + frame.offset_bytes
        written = channel.receive_range(place_bytes, frame.payload_bytes, self._permit)
        if written < frame.payload_bytes:
            return
        at_ns = time.monotonic_ns()
        self._offset_bytes += written
        # Before hashing: the next worker in the chain gets the chunk as early as possible, and
        # verifies it itself.
        with self._forwarding:
            self.received_bytes += written
            for flow in self._flows:
                flow.advance(written)
        self._hasher.update(self._arena.view(place_bytes, written))
        if self._observer is not None:
            self._observer(frame.layer, frame.offset_bytes, written, at_ns)
        self._pass_whole_layers()

    def forward_also(self, flow: Flow) -> None:
        """The flow sends what has arrived so far and all that follows; it fails with this plan."""
        with self._forwarding:
            reason = self._told_onward
            if reason is None:
                self._flows.append(flow)
                flow.advance(self.received_bytes)
        if reason is not None:
            flow.end(reason)

    def end(self) -> None:
        """The sender says that this was all."""
        if not self._is_over:
            self.fail("the stream ended early")

    def fail(self, reason: str) -> None:
        """The plan failed here: the reason is told with plan, layer and peer. Idempotent."""
        story = self._story(reason)
        self._end_early(story, told_onward=story)

    def give_up_with_upstream(self, cause: str) -> None:
        """The upstream gave the plan up. `cause` goes on unchanged, however long the chain."""
        upstream = self.order.upstream
        self._end_early(self._story(f"{upstream} gave up: {cause}"), told_onward=cause)

    def abort(self) -> None:
        """The worker itself wants no more of it. Idempotent."""
        self._end_early(ABORTED, told_onward=ABORTED)

    def _end_early(self, reason: str, told_onward: str) -> None:
        with self._telling:
            if self._is_over:
                return
            self._is_over = True
            self.failure = reason
            self._permit.revoke()
            self._tell_over(self)
            self._listener.failed(reason)
        with self._forwarding:
            self._told_onward = told_onward
            flows = list(self._flows)
        for flow in flows:
            flow.end(told_onward)

    def _story(self, reason: str) -> str:
        order = self.order
        return (
            f"plan {order.plan}: receiving from {order.upstream} failed "
            f"at layer {self.layer}: {reason}"
        )

    def _pass_whole_layers(self) -> None:
        """The layer stands at the first one with bytes missing; those before it are verified."""
        layers = self.order.manifest.layers
        while not self._is_over and self._offset_bytes == layers[self.layer].size_bytes:
            entry = layers[self.layer]
            checksum = self._hasher.hexdigest()
            if checksum != entry.checksum:
                self.fail(f"checksum of layer {entry.layer} is {checksum}, not {entry.checksum}")
                return
            self._hasher.reset()
            self._offset_bytes = 0
            with self._telling:
                if self._is_over:
                    return
                self._listener.layer_arrived(entry.layer)
                # The listener may have aborted the plan.
                if self._is_over:
                    return
                self.layer += 1
                if self.layer == len(layers):
                    self._is_over = True
                    self._tell_over(self)
                    self._listener.completed(self.received_bytes)

    def _tell_first_byte(self) -> None:
        with self._telling:
            if not self._is_over:
                self._listener.first_byte()

    def __repr__(self) -> str:
        order = self.order
        state = "failed" if self.failure is not None else "completed" if self._is_over else ""
        return (
            f"<Reception plan {order.plan} from {order.upstream}, {state or 'waiting'} at "
            f"{self.layer}/{len(order.manifest.layers)} layers, {self.received_bytes} bytes>"
        )
