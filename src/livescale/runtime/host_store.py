"""What a host agent does with its host's memory: keeps whole models in it, for others to receive.

Everything here happens on one thread, the agent's main thread. Other threads (sockets, transfers,
readers) hand in work with `post`. Which copies there shall be is decided by the controller.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from livescale.chunks import Feed
from livescale.messages.commands import AmendLoad, DropCopy, StartCopy
from livescale.messages.events import (
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
    FeedFailed,
)
from livescale.runtime.arrival import ArrivalOrder, ModelArrival
from livescale.runtime.examination import held_copy
from livescale.runtime.heartbeat import WorkPulse
from livescale.runtime.regions import Regions
from livescale.runtime.wire import AgentEvent, Examine, Examined, Order
from livescale.transfer.arena import Arena, ArenaError
from livescale.transfer.data_plane import DataPlane
from livescale.transfer.orders import ContentChecks
from livescale.types import Manifest, PlanId, WorkerRef


@dataclass(slots=True)
class _Copy:
    """A model in this memory, or on its way into it."""

    order: StartCopy
    manifest: Manifest
    arrival: ModelArrival
    offset_bytes: int
    feeds: tuple[Feed, ...]
    is_complete: bool = False
    #: what was said of feeds that have not been replaced: a new controller must hear it, too
    troubles: list[FeedFailed] = field(default_factory=list)


class HostStore:
    """The copies in one host's memory. `tell` may be called by the main thread only."""

    def __init__(
        self,
        agent: WorkerRef,
        memory: Arena,
        data_plane: DataPlane,
        tell: Callable[[AgentEvent | Examined], None],
        storage_bytes_per_s: int | None = None,
        *,
        lost_after_ms: int = 5000,
        stuck_after_ms: int = 60_000,
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._data_plane = data_plane
        self._tell = tell
        self._storage_bytes_per_s = storage_bytes_per_s
        self._regions = Regions(memory.size_bytes)
        self._copies: dict[PlanId, _Copy] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: asked by those who answer for the main thread
        self.pulse = WorkPulse(lost_after_ms, stuck_after_ms, self.post)
        #: read by the socket thread when a controller asks anew; replaced, never changed
        self.reports: tuple[CopyReport, ...] = ()

    # -- from other threads ---------------------------------------------------------------------

    def post(self, work: Callable[[], None]) -> None:
        """Let the main thread do this."""
        self._inbox.put(work)

    def stop(self) -> None:
        """End `run`."""
        self._inbox.put(None)

    def run(self) -> None:
        """Work until `stop`."""
        while (work := self._inbox.get()) is not None:
            with self.pulse.piece():
                work()

    # -- orders of the controller (main thread) -------------------------------------------------

    def copy(self, order: Order) -> None:
        """Bring the model into this memory; ends in CopyCompleted or CopyFailed."""
        command, manifest = order.command, order.manifest
        assert isinstance(command, StartCopy)
        assert manifest is not None
        assert command.plan not in self._copies, f"{self!r} is given plan {command.plan} again"
        offset_bytes = self._regions.allocate(manifest.size_bytes)
        if offset_bytes is None:
            self._fail(command, f"{manifest.size_bytes} bytes do not fit: {self._regions!r}")
            return
        try:
            self._memory.touch(offset_bytes, manifest.size_bytes)
        except ArenaError as error:
            self._regions.free(offset_bytes)
            self._fail(command, str(error))
            return
        arrival = self._arrival(command, manifest, offset_bytes)
        copy = _Copy(command, manifest, arrival, offset_bytes, command.feeds)
        self._copies[command.plan] = copy
        try:
            arrival.start(command.feeds, order.directory)
        except ValueError as error:
            self._forget(copy)
            self._fail(command, str(error))
        self._update_reports()

    def _arrival(self, command: StartCopy, manifest: Manifest, offset_bytes: int) -> ModelArrival:
        order = ArrivalOrder(
            plan=command.plan,
            attempt=0,
            manifest=manifest,
            chunk_bytes=command.chunk_bytes,
            offset_bytes=offset_bytes,
            storage_bytes_per_s=self._storage_bytes_per_s,
            # It is given to many, for long: once, its bytes are held against the manifest's hash.
            content_checks=ContentChecks.ALL,
        )
        region = self._region(manifest, offset_bytes)
        return ModelArrival(order, region, self._data_plane, _Copying(self, command.plan))

    def amend(self, order: Order) -> None:
        """Get what is missing of a copy by other feeds; nothing, if it is over."""
        command = order.command
        assert isinstance(command, AmendLoad)
        copy = self._copies.get(command.plan)
        if copy is None or copy.is_complete:
            return
        copy.feeds = command.feeds
        copy.troubles = []
        copy.arrival.amend(command.feeds, order.directory)
        self._update_reports()

    def drop(self, order: Order) -> None:
        """Free the memory; ends in CopyDropped. A copy under way ends in CopyFailed first."""
        command = order.command
        assert isinstance(command, DropCopy)
        copy = self._copies.get(command.plan)
        if copy is not None:
            self._forget(copy)
            if not copy.is_complete:
                self._fail(copy.order, f"dropped: {command.reason}")
        self._tell(CopyDropped(command.model, self._agent, command.plan, command.rank))

    def examine(self, asked: Examine) -> None:
        """Say what the memory holds, byte for byte."""
        copies = tuple(
            held_copy(c.manifest, self._region(c.manifest, c.offset_bytes), c.arrival.present())
            for c in self._copies.values()
        )
        self._tell(Examined(asked.call, self._agent, copies))

    # -- news of the copies under way (main thread) ---------------------------------------------

    def layer_arrived(self, plan: PlanId, layer: int) -> None:
        """A layer is complete and verified."""
        copy = self._copies.get(plan)
        if copy is not None:
            order = copy.order
            self._tell(CopyLayerArrived(order.model, self._agent, plan, layer, order.rank))

    def completed(self, plan: PlanId, received_bytes: int) -> None:
        """All layers are there."""
        copy = self._copies.get(plan)
        if copy is not None:
            copy.is_complete = True
            self._update_reports()
            order = copy.order
            self._tell(CopyCompleted(order.model, self._agent, plan, received_bytes, order.rank))

    def failed(self, plan: PlanId, reason: str) -> None:
        """Nothing comes any more: nothing of it is kept."""
        copy = self._copies.get(plan)
        if copy is not None:
            self._forget(copy)
            self._fail(copy.order, reason)

    def feed_failed(self, plan: PlanId, upstream: WorkerRef, reason: str, is_stalled: bool) -> None:
        """Nothing more comes from this one: the controller says who gives the rest."""
        copy = self._copies.get(plan)
        if copy is not None:
            trouble = FeedFailed(plan, self._agent, upstream, reason, is_stalled)
            copy.troubles.append(trouble)
            self._tell(trouble)

    def report_again(self) -> None:
        """A new controller was met: what the reports of copies do not tell is said again."""
        for copy in self._copies.values():
            if not copy.is_complete:
                for trouble in copy.troubles:
                    self._tell(trouble)

    # -- helpers --------------------------------------------------------------------------------

    def _region(self, manifest: Manifest, offset_bytes: int) -> memoryview:
        return self._memory.view(offset_bytes, manifest.size_bytes)

    def _forget(self, copy: _Copy) -> None:
        """Nobody writes into the memory or reads from it when this returns, and it is free."""
        del self._copies[copy.order.plan]
        copy.arrival.stop()
        self._memory.give_back(copy.offset_bytes, copy.manifest.size_bytes)
        self._regions.free(copy.offset_bytes)
        self._update_reports()

    def _fail(self, order: StartCopy, reason: str) -> None:
        self._tell(CopyFailed(order.model, self._agent, order.plan, reason, order.rank))

    def _update_reports(self) -> None:
        self.reports = tuple(
            CopyReport(c.order.model, plan, c.is_complete, c.order.rank, c.feeds)
            for plan, c in self._copies.items()
        )

    def __repr__(self) -> str:
        held = ", ".join(copy.order.model for copy in self._copies.values()) or "nothing"
        return f"<HostStore {self._agent} holds {held}; {self._regions!r}>"


class _Copying:
    """ArrivalListener: hands every piece of news to the main thread, in order."""

    def __init__(self, store: HostStore, plan: PlanId) -> None:
        self._store = store
        self._plan = plan

    def first_byte(self) -> None:
        """No news: nobody waits for the first byte of a copy."""

    def layer_arrived(self, layer: int) -> None:
        self._store.post(partial(self._store.layer_arrived, self._plan, layer))

    def completed(self, received_bytes: int) -> None:
        self._store.post(partial(self._store.completed, self._plan, received_bytes))

    def failed(self, reason: str) -> None:
        self._store.post(partial(self._store.failed, self._plan, reason))

    def feed_failed(self, upstream: WorkerRef, reason: str, is_stalled: bool) -> None:
        self._store.post(partial(self._store.feed_failed, self._plan, upstream, reason, is_stalled))
