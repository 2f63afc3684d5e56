"""All copies in one memory, whole and partial, and all peers that want parts of them.

A want waits for its copy, or for bytes of it, and is served as they come. Who writes the bytes
(a reception, a Filling) tells here what came. Nothing here sends or receives.
"""

from __future__ import annotations

import threading
import time

from livescale.chunks import ChunkRange
from livescale.transfer.arena import ArenaError
from livescale.transfer.frames import FrameError, WantedChunks, refusal
from livescale.transfer.holding import ModelBytes, covering
from livescale.transfer.outbox import Outbox, Want, Word
from livescale.types import PlanId, WorkerRef

_WANTS_MAX = 64


class Holdings:
    """Thread-safe; one lock guards copies, wants and outboxes, because each touches the others."""

    def __init__(self, worker: WorkerRef) -> None:
        self._worker = worker
        self.lock = threading.RLock()
        self._released = threading.Condition(self.lock)
        self._holdings: dict[bytes, ModelBytes] = {}
        # By copy: those that are served and those whose copy is not here.
        self._wants: dict[bytes, list[Want]] = {}

    # -- copies -----------------------------------------------------------------------------------

    def add(self, holding: ModelBytes, is_complete: bool = False) -> None:
        """The copy can be asked for. Raises ArenaError if it or another one lies there."""
        with self.lock:
            for other in self._holdings.values():
                if holding.start_bytes < other.end_bytes and other.start_bytes < holding.end_bytes:
                    raise ArenaError(f"model {other.manifest.model!r} lies in the same memory")
            if holding.copy in self._holdings:
                raise ArenaError(f"model {holding.manifest.model!r} is in this memory already")
            holding.is_complete = is_complete
            self._holdings[holding.copy] = holding
            for want in list(self._wants.get(holding.copy, ())):
                self._bind(want, holding)

    def find(self, copy: bytes) -> ModelBytes | None:
        with self.lock:
            return self._holdings.get(copy)

    def mark(self, holding: ModelBytes, chunk: int) -> None:
        """The chunk's bytes are in place."""
        with self.lock:
            holding.mark(chunk)
            for want in self._wants.get(holding.copy, ()):
                if want.holding is not holding:
                    continue
                if want.chunk_bytes == holding.grid.chunk_bytes:
                    want.bytes_came((chunk,))
                else:
                    place = holding.grid.place(chunk)
                    want.bytes_came(covering(want.grid, *place))

    def verify(self, holding: ModelBytes, layer: int) -> None:
        """The whole layer is in place and right."""
        with self.lock:
            holding.verify(layer)
            size_bytes = holding.grid.layer_bytes[layer]
            for want in self._wants.get(holding.copy, ()):
                if want.holding is holding and want.has_pending:
                    want.bytes_came(covering(want.grid, layer, 0, size_bytes))

    def reset(self, holding: ModelBytes, layer: int) -> None:
        """The layer's bytes were wrong: they are not given to peers."""
        with self.lock:
            holding.reset(layer)

    def complete(self, holding: ModelBytes) -> None:
        with self.lock:
            holding.is_complete = True

    def remove(self, holding: ModelBytes, reason: str) -> None:
        """No peer is given any more of it; wants under way are refused. Idempotent."""
        with self.lock:
            holding.is_withdrawn = True
            if self._holdings.get(holding.copy) is holding:
                del self._holdings[holding.copy]
            for want in list(self._wants.get(holding.copy, ())):
                if want.holding is holding:
                    self._refuse(want, reason)
            for changed in holding.readers:
                changed.notify()

    def wait_unread(self, holding: ModelBytes, timeout_s: float | None) -> bool:
        """No peer reads from it any more; False if one still does after the time."""
        with self._released:
            return self._released.wait_for(lambda: not holding.readers, timeout_s)

    def settled(self, outbox: Outbox) -> None:
        """The connection reads from nothing any more."""
        with self._released:
            was = outbox.settled()
            if was is not None and was.is_withdrawn:
                self._released.notify_all()

    # -- wants ------------------------------------------------------------------------------------

    def want(self, outbox: Outbox, plan: PlanId, attempt: int, wanted: WantedChunks) -> None:
        """The peer wants these chunks, too; what cannot be given is refused."""
        with self.lock:
            want = outbox.wants.get(plan)
            if want is not None and want.attempt > attempt:
                return
            if want is not None and want.attempt < attempt:
                self._forget(want)
                want = None
            try:
                if want is None:
                    want = self._new_want(outbox, plan, attempt, wanted)
                want.add(wanted)
            except FrameError as error:
                if want is not None:
                    self._forget(want)
                outbox.put(Word(refusal(self._worker, plan, attempt, str(error))))

    def stop(
        self, outbox: Outbox, plan: PlanId, attempt: int, ranges: tuple[ChunkRange, ...]
    ) -> None:
        """The peer wants these chunks, or none of the plan, no longer."""
        with self.lock:
            want = outbox.wants.get(plan)
            if want is None or want.attempt != attempt:
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
            early = [w for wants in self._wants.values() for w in wants if w.holding is None]
            for want in early:
                if want.since_ns < before_ns:
                    self._refuse(want, f"{self._worker} does not hold the model")

    @property
    def has_early_wants(self) -> bool:
        with self.lock:
            return any(w.holding is None for wants in self._wants.values() for w in wants)

    def count_wants(self) -> int:
        with self.lock:
            return sum(map(len, self._wants.values()))

    def _new_want(self, outbox: Outbox, plan: PlanId, attempt: int, first: WantedChunks) -> Want:
        if outbox.is_closed or len(outbox.wants) >= _WANTS_MAX:
            raise FrameError(f"{outbox.peer} wants for more than {_WANTS_MAX} plans")
        want = Want(outbox, plan, attempt, first, time.monotonic_ns())
        outbox.wants[plan] = want
        self._wants.setdefault(first.copy, []).append(want)
        holding = self._holdings.get(first.copy)
        if holding is not None:
            want.bind(holding)
        return want

    def _bind(self, want: Want, holding: ModelBytes) -> None:
        try:
            want.bind(holding)
        except FrameError as error:
            self._refuse(want, str(error))

    def _refuse(self, want: Want, reason: str) -> None:
        self._forget(want)
        want.outbox.put(Word(refusal(self._worker, want.plan, want.attempt, reason)))

    def _forget(self, want: Want) -> None:
        want.outbox.drop(want)
        wants = self._wants[want.copy]
        wants.remove(want)
        if not wants:
            del self._wants[want.copy]

    def __repr__(self) -> str:
        return f"<Holdings {len(self._holdings)} copies, {self.count_wants()} wants>"


class Filling:
    """Made by `DataPlane.fill`. Exactly what `layer_done` was called for is given to others."""

    def __init__(self, holding: ModelBytes, holdings: Holdings) -> None:
        self._holding = holding
        self._holdings = holdings
        self._lock = threading.Lock()
        sizes = holding.grid.layer_bytes
        self._missing = {layer for layer, size in enumerate(sizes) if size}
        if not self._missing:
            holdings.complete(holding)

    def layer_done(self, layer: int) -> None:
        """The layer's bytes are in place and right, as the caller vouches. The copy is offered
        when all layers are done."""
        self._holdings.verify(self._holding, layer)
        with self._lock:
            self._missing.discard(layer)
            is_whole = not self._missing
        if is_whole:
            self._holdings.complete(self._holding)

    def fail(self, reason: str) -> None:
        """The rest does not come: who wants parts of the copy is refused."""
        self._holdings.remove(self._holding, reason)

    def __repr__(self) -> str:
        return f"<Filling of {self._holding}, {len(self._missing)} layers missing>"
