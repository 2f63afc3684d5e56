"""All copies in one memory, whole and partial, and all peers that want parts of them.

A want waits for its copy, or for bytes of it, and is served as they come. Who writes the bytes
(a reception, a Filling) tells here what came. Nothing here sends or receives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from livescale.transfer.formats.frames import FrameError, WantedChunks, refusal
from livescale.transfer.links.outbox import Outbox, Want, Word
from livescale.transfer.memory.arena import ArenaError
from livescale.transfer.memory.model_bytes import ModelBytes, covering
from livescale.transfer.memory.open_writes import OpenWrites
from livescale.values.chunks import ChunkRange
from livescale.values.types import PlanId, WorkerRef

_WANTS_MAX = 64


class Store:
    """Thread-safe; one lock guards copies, wants and outboxes, because each touches the others."""

    def __init__(
        self,
        worker: WorkerRef,
        writes: OpenWrites,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`writes` of others into the memory, which no copy is put under."""
        self._worker = worker
        self._writes = writes
        self._now_ns = now_ns
        self.lock = threading.RLock()
        self._released = threading.Condition(self.lock)
        self._copies: dict[bytes, ModelBytes] = {}
        # By copy: those that are served and those whose copy is not here.
        self._wants: dict[bytes, list[Want]] = {}

    # -- copies -----------------------------------------------------------------------------------

    def add(self, held: ModelBytes, is_complete: bool = False) -> None:
        """The copy can be asked for. Raises ArenaError if it or another one lies there, or writes
        for one that is gone have not ended."""
        with self.lock:
            for other in self._copies.values():
                if held.start_bytes < other.end_bytes and other.start_bytes < held.end_bytes:
                    raise ArenaError(f"model {other.manifest.model!r} lies in the same memory")
            if held.copy in self._copies:
                raise ArenaError(f"model {held.manifest.model!r} is in this memory already")
            self._writes.check_closed(held.start_bytes, held.end_bytes - held.start_bytes)
            held.is_complete = is_complete
            self._copies[held.copy] = held
            for want in list(self._wants.get(held.copy, ())):
                self._bind(want, held)

    def find(self, copy: bytes) -> ModelBytes | None:
        with self.lock:
            return self._copies.get(copy)

    def mark(self, held: ModelBytes, chunk: int) -> None:
        """The chunk's bytes are in place."""
        with self.lock:
            held.mark(chunk)
            for want in self._wants.get(held.copy, ()):
                if want.held is not held:
                    continue
                if want.chunk_bytes == held.grid.chunk_bytes:
                    want.bytes_came((chunk,))
                else:
                    place = held.grid.place(chunk)
                    want.bytes_came(covering(want.grid, *place))

    def verify(self, held: ModelBytes, layer: int) -> None:
        """The whole layer is in place and right."""
        with self.lock:
            held.verify(layer)
            size_bytes = held.grid.layer_bytes[layer]
            for want in self._wants.get(held.copy, ()):
                if want.held is held and want.pending:
                    want.bytes_came(covering(want.grid, layer, 0, size_bytes))

    def reset(self, held: ModelBytes, layer: int) -> None:
        """The layer's bytes were wrong: they are not given to peers."""
        with self.lock:
            held.reset(layer)

    def complete(self, held: ModelBytes) -> None:
        with self.lock:
            held.is_complete = True

    def remove(self, held: ModelBytes, reason: str) -> None:
        """No peer is given any more of it; wants under way are refused. Idempotent."""
        with self.lock:
            held.is_withdrawn = True
            if self._copies.get(held.copy) is held:
                del self._copies[held.copy]
            for want in list(self._wants.get(held.copy, ())):
                if want.held is held:
                    self._refuse(want, reason)
            for changed in held.readers:
                changed.notify()

    def wait_unread(self, held: ModelBytes, timeout_s: float | None) -> bool:
        """No peer reads from it any more; False if one still does after the time."""
        with self._released:
            return self._released.wait_for(lambda: not held.readers, timeout_s)

    def settled(self, outbox: Outbox) -> None:
        """The connection reads from nothing any more."""
        with self._released:
            if outbox.settled() is not None:
                self._released.notify_all()

    # -- wants ------------------------------------------------------------------------------------

    def want(self, outbox: Outbox, plan: PlanId, wanted: WantedChunks) -> None:
        """The peer wants these chunks, too; what cannot be given is refused."""
        with self.lock:
            want = outbox.wants.get(plan)
            try:
                if want is None:
                    want = self._new_want(outbox, plan, wanted)
                want.add(wanted)
            except FrameError as error:
                if want is not None:
                    self._forget(want)
                outbox.put(Word(refusal(self._worker, plan, str(error))))

    def stop(self, outbox: Outbox, plan: PlanId, ranges: tuple[ChunkRange, ...]) -> None:
        """The peer wants these chunks, or none of the plan, no longer."""
        with self.lock:
            want = outbox.wants.get(plan)
            if want is None:
                return
            if not ranges:
                self._forget(want)
                return
            try:
                want.stop(ranges)
            except FrameError as error:
                self._refuse(want, str(error))

    def forget_peer(self, outbox: Outbox) -> None:
        """The connection has ended; its wants with it."""
        with self.lock:
            for want in list(outbox.wants.values()):
                self._forget(want)
            outbox.close()

    def expire(self, before_ns: int) -> None:
        """Wants that have waited for their copy since before then are refused."""
        with self.lock:
            early = [w for wants in self._wants.values() for w in wants if w.held is None]
            for want in early:
                if want.since_ns < before_ns:
                    self._refuse(want, f"{self._worker} does not hold the model")

    @property
    def has_early_wants(self) -> bool:
        with self.lock:
            return any(w.held is None for wants in self._wants.values() for w in wants)

    def count_wants(self) -> int:
        with self.lock:
            return sum(map(len, self._wants.values()))

    def _new_want(self, outbox: Outbox, plan: PlanId, first: WantedChunks) -> Want:
        if outbox.is_closed or len(outbox.wants) >= _WANTS_MAX:
            raise FrameError(f"{outbox.peer} wants for more than {_WANTS_MAX} plans")
        want = Want(outbox, plan, first, self._now_ns())
        outbox.wants[plan] = want
        self._wants.setdefault(first.copy, []).append(want)
        held = self._copies.get(first.copy)
        if held is not None:
            want.bind(held)
        return want

    def _bind(self, want: Want, held: ModelBytes) -> None:
        try:
            want.bind(held)
        except FrameError as error:
            self._refuse(want, str(error))

    def _refuse(self, want: Want, reason: str) -> None:
        self._forget(want)
        want.outbox.put(Word(refusal(self._worker, want.plan, reason)))

    def _forget(self, want: Want) -> None:
        want.outbox.drop(want)
        wants = self._wants[want.copy]
        wants.remove(want)
        if not wants:
            del self._wants[want.copy]

    def __repr__(self) -> str:
        return f"<Store {len(self._copies)} copies, {self.count_wants()} wants>"


class Filling:
    """Made by `DataPlane.fill`. Exactly what `layer_done` was called for is given to others."""

    def __init__(self, held: ModelBytes, store: Store) -> None:
        self._held = held
        self._store = store
        self._lock = threading.Lock()
        sizes = held.grid.layer_bytes
        self._missing = {layer for layer, size in enumerate(sizes) if size}
        if not self._missing:
            store.complete(held)

    def layer_done(self, layer: int) -> None:
        """The layer's bytes are in place and right, as the caller vouches. The copy is offered
        when all layers are done."""
        self._store.verify(self._held, layer)
        with self._lock:
            self._missing.discard(layer)
            is_whole = not self._missing
        if is_whole:
            self._store.complete(self._held)

    def fail(self, reason: str) -> None:
        """The rest does not come: who wants parts of the copy is refused."""
        self._store.remove(self._held, reason)

    def __repr__(self) -> str:
        return f"<Filling of {self._held}, {len(self._missing)} layers missing>"
