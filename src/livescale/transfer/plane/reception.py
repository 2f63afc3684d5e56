"""Carrying out one ReceiveOrder: whom to ask for which chunk, and what has come.

One Reception lives from its order until all layers are verified or it is aborted. It keeps what
has arrived when a holder fails, and waits for new feeds. Connections and other plans are not known
here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from livescale.transfer.formats import orders
from livescale.transfer.formats.carrier import WritePermit
from livescale.transfer.formats.frames import Frame, FrameError
from livescale.transfer.links.connection import Connection
from livescale.transfer.memory.arena import Arena
from livescale.transfer.memory.content_hashes import ContentHashes
from livescale.transfer.memory.layer_checks import LayerChecks
from livescale.transfer.memory.model_bytes import ModelBytes
from livescale.transfer.plane.chunk_sources import (
    Arrival,
    ChunkSources,
    Intake,
    stop_all_word,
    stop_words,
    want_words,
)
from livescale.transfer.plane.store import Store
from livescale.values.chunks import Feed
from livescale.values.types import WorkerRef

# A read from a member that has died fails within seconds, by the network's own timeouts: in so many
# times the time after which a feed is told to have stalled.
_LOST_STALLS = 5


@dataclass(frozen=True, slots=True)
class Receiver:
    """Whose memory chunks come into, which copies are there, and who is told of each chunk."""

    worker: WorkerRef
    memory: Arena
    store: Store
    contents: ContentHashes
    observer: orders.ChunkObserver | None = None


class Reception:
    """Thread-safe. `reach` gives a connection with a holder, or None if one may come later."""

    def __init__(
        self,
        receiver: Receiver,
        order: orders.ReceiveOrder,
        listener: orders.ReceiveListener,
        *,
        reach: Callable[[WorkerRef], Connection | None],
        tell_over: Callable[[Reception], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.order = order
        self.held = ModelBytes(order.manifest, order.chunk_bytes, order.offset_bytes)
        self.permit = WritePermit()
        self.received_bytes = 0
        self.is_over = False
        self._worker = receiver.worker
        self._store = receiver.store
        self._observer = receiver.observer
        self._listener = listener
        self._reach = reach
        self._tell_over = tell_over
        self._now_ns = now_ns
        grid = self.held.grid
        self._lock = threading.Lock()
        self._chunks = ChunkSources(grid.chunks)
        self._checks = LayerChecks(
            order, receiver.memory, self.held, receiver.contents, self._chunks.is_there, self
        )
        self._missing_layers = set(range(len(order.manifest.layers)))
        # Layers that were corrupt are wanted only from holders that have verified them.
        self._was_corrupt: set[int] = set()
        # Held while the listener is told: news never overlaps and stops with the last word.
        # Reentrant, because a listener may abort the plan while it is being told of it.
        self._telling = threading.RLock()
        self._has_begun = False

    def begin(self) -> None:
        """What is missing is asked for. Layers that need no bytes have arrived."""
        for layer in self.order.present_layers:
            self._missing_layers.discard(layer)
            for chunk in self.held.grid.of_layer(layer):
                self._chunks.set_there(chunk)
                self._store.mark(self.held, chunk)
            self._store.verify(self.held, layer)
        for layer, size_bytes in enumerate(self.held.grid.layer_bytes):
            if not size_bytes and layer in self._missing_layers:
                self._checks.is_empty(layer)
        with self._telling:
            self._complete_if_whole()
        self.amend(self.order.feeds)

    def amend(self, feeds: Iterable[Feed]) -> None:
        """These feeds, and no others, bring what is missing. Raises ValueError for feeds from
        storage or chunks that the model does not have."""
        feeds = tuple(feeds)
        orders.check_feeds(feeds, self.held.grid.chunks)
        with self._lock:
            if self.is_over:
                return
            for intake, dropped in self._chunks.assign(feeds, self._now_ns()):
                if dropped and intake.connection is not None:
                    for word in stop_words(self.order, self._worker, dropped):
                        intake.connection.outbox.put(word)
            hanging = self._chunks.hanging()
        self._cut(hanging)
        self._ask_all()

    def connected(self, connection: Connection) -> None:
        """There is a connection that was waited for."""
        for intake in self._open_intakes(connection.peer):
            if intake.connection is None:
                self._connect(intake)

    def introduced(self, peer: WorkerRef) -> None:
        """The holder can be reached now."""
        for intake in self._open_intakes(peer):
            if intake.connection is None and intake.to_ask:
                self._connect(intake)

    # -- what comes on connections ----------------------------------------------------------------

    def chunk_begins(self, connection: Connection, frame: Frame) -> Arrival | None:
        """Where the chunk's bytes go; None if they are not waited for. Raises FrameError if it
        is not the chunk that its number says."""
        chunk = frame.chunk
        with self._lock:
            if self.is_over:
                return None
            index = self._chunks.index_asked(connection, chunk)
            if index is None:
                return None
            layer, offset, size = self.held.grid.place(chunk)
            if (frame.layer, frame.payload_bytes) != (layer, size):
                raise FrameError(
                    f"chunk {chunk} is {frame.payload_bytes} bytes of layer {frame.layer} where "
                    f"{size} bytes of layer {layer} belong"
                )
            if not self._chunks.begin(index, chunk):
                self._ask(self._chunks.intakes[index])
                return None
            if frame.is_unproved or connection.channel.is_network:
                self.held.doubt(layer)
            is_first, self._has_begun = not self._has_begun, True
        if is_first:
            self._tell(self._listener.first_byte)
        return Arrival(index, chunk, layer, self.held.place(layer, offset), size)

    def chunk_ends(self, arrival: Arrival, written_bytes: int) -> None:
        """No more is written for the chunk; its bytes are in place, if these are all."""
        chunk = arrival.chunk
        is_whole = written_bytes == arrival.size_bytes
        with self._lock:
            self.received_bytes += written_bytes
            if self.is_over:
                return
            if is_whole:
                self._chunks.end(arrival.intake, chunk)
                intake = self._chunks.intakes[arrival.intake]
                if intake.to_ask:
                    self._ask(intake)
            elif not self._chunks.break_off(arrival.intake, chunk):
                return
        if not is_whole:
            self._ask_all()
            return
        # Before hashing: a peer that wants the chunk gets it as early as possible, and verifies it.
        self._store.mark(self.held, chunk)
        if self._observer is not None:
            self._observer(self.order.plan, chunk, arrival.size_bytes, self._now_ns())
        self._checks.chunk_came(arrival.layer)

    def refused(self, peer: WorkerRef, reason: str) -> None:
        """The holder gives no more for this order."""
        for intake in self._open_intakes(peer):
            self._fail(intake, reason)

    def unreachable(self, peer: WorkerRef, reason: str) -> None:
        """There is no connection with the holder and none will come."""
        for intake in self._open_intakes(peer):
            if intake.connection is None:
                self._fail(intake, reason)

    def connection_ended(self, connection: Connection, reason: str) -> None:
        """What is owed on it does not come; a chunk that was arriving did not arrive."""
        with self._lock:
            on_it = [i for i in self._chunks.intakes if i.connection is connection]
            for intake in on_it:
                self._chunks.take_back(intake, self._now_ns())
                intake.connection = None
            owing = [i for i in on_it if i.to_ask and not i.is_closed]
        for intake in owing:
            self._fail(intake, reason)
        self._ask_all()

    def check_stalls(self, now_ns: int, stall_ns: int) -> None:
        """Feeds that have brought nothing for too long are told of. A plan whose bytes a lost feed
        may write for ever is over: nothing else may be written there."""
        with self._lock:
            lost = self._chunks.left_behind(now_ns - _LOST_STALLS * stall_ns)
            stalled = [i for i in self._chunks.intakes if i.has_just_stalled(now_ns, stall_ns)]
            hanging = self._chunks.hanging()
        if lost:
            self.fail(f"plan {self.order.plan}: a read of chunk {lost[0]} has not ended")
            return
        self._cut(hanging)
        for intake in stalled:
            reason = f"no byte came from {intake.upstream} for {stall_ns / 1e9:g} s"
            self._tell(self._listener.feed_stalled, intake.upstream, reason)

    def unconnected(self, before_ns: int) -> list[WorkerRef]:
        """Holders that are waited for since before then, without a connection."""
        with self._lock:
            return self._chunks.unconnected(before_ns)

    # -- the end ----------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """The order is over, and nothing is written into the memory for it. Idempotent."""
        with self._telling:
            if self.is_over:
                return
            self._end(reason)
            self._store.remove(self.held, f"{self._worker} gave it up: {reason}")
            self._listener.failed(reason)

    def _end(self, reason: str | None) -> None:
        with self._lock:
            self.is_over = True
            intakes = list(self._chunks.intakes)
        if reason is not None:
            self.permit.revoke()
        self._tell_over(self)
        for intake in intakes:
            # Also where all has come: the holder keeps what is wanted until it is told.
            if intake.connection is not None:
                intake.connection.outbox.put(stop_all_word(self.order, self._worker))

    # -- verdicts on layers -----------------------------------------------------------------------

    def layer_is_right(self, layer: int) -> None:
        with self._telling:
            if self.is_over:
                return
            self._store.verify(self.held, layer)
            self._missing_layers.discard(layer)
            self._listener.layer_arrived(layer)
            self._complete_if_whole()

    def _complete_if_whole(self) -> None:
        # The listener may have aborted the plan.
        if self.is_over or self._missing_layers:
            return
        self._store.complete(self.held)
        self._end(None)
        self._listener.completed(self.received_bytes)

    def layer_is_corrupt(self, layer: int, problem: str) -> None:
        """Its chunks are asked for again where they came from; one that was wrong twice fails."""
        self._store.reset(self.held, layer)
        with self._lock:
            self._was_corrupt.add(layer)
            chunks = self.held.grid.of_layer(layer)
            wrong_twice = self._chunks.blame(layer, chunks)
            # First: what is hashed from its start again must not find the wrong bytes in place.
            self._chunks.lose(chunks)
            self._checks.reset(layer)
        for intake in wrong_twice:
            self._fail(intake, f"{problem}, for the second time")
        self._ask_all()

    # -- who brings what --------------------------------------------------------------------------

    def _cut(self, hanging: list[Connection]) -> None:
        for connection in hanging:
            connection.break_off(f"{connection.peer} does not end a chunk that it began")

    def _fail(self, intake: Intake, reason: str) -> None:
        """Its chunks wait for `amend`."""
        with self._lock:
            if intake.is_closed or self.is_over:
                return
            intake.is_closed = True
            if intake.connection is not None and intake.asked:
                intake.connection.outbox.put(stop_all_word(self.order, self._worker))
            intake.asked = set(intake.arriving)
            intake.to_ask.clear()
        self._tell(self._listener.feed_failed, intake.upstream, reason)

    def _ask_all(self) -> None:
        with self._lock:
            intakes = self._chunks.asking()
        for intake in intakes:
            self._connect(intake)

    def _connect(self, intake: Intake) -> None:
        """The intake asks on a connection with its holder, now or when there is one."""
        connection = intake.connection or self._reach(intake.upstream)
        with self._lock:
            if intake.connection is None:
                intake.connection = connection
            self._ask(intake)
        # Its end may have been told before this order was on it.
        if connection is not None and not connection.is_alive:
            self.connection_ended(connection, "the connection was lost")

    def _ask(self, intake: Intake) -> None:
        if intake.connection is None or intake.is_closed or self.is_over:
            return
        chunks = intake.next_to_ask()
        grid = self.held.grid
        for word in want_words(
            self.order,
            self._worker,
            self.held.copy,
            chunks,
            lambda chunk: bool(self._was_corrupt) and grid.layer(chunk) in self._was_corrupt,
        ):
            intake.connection.outbox.put(word)

    def _open_intakes(self, peer: WorkerRef) -> list[Intake]:
        with self._lock:
            return self._chunks.open_from(peer)

    def _tell(self, news: Callable[..., None], *args: object) -> None:
        with self._telling:
            if not self.is_over:
                news(*args)

    def __repr__(self) -> str:
        layers = len(self.order.manifest.layers)
        state = "over, " if self.is_over else ""
        return (
            f"<Reception plan {self.order.plan}, {state}{layers - len(self._missing_layers)}/"
            f"{layers} layers, {self.received_bytes} bytes, {self._chunks.intakes}>"
        )
