"""A host agent of the simulated world: copies in its host's memory, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from livescale.chunks import ChunkGrid, Feed
from livescale.messages.commands import AmendLoad, DropCopy, StartCopy
from livescale.messages.events import (
    AnyEvent,
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
    FeedFailed,
)
from livescale.sim.checkers import Checkers
from livescale.sim.config import SimConfig
from livescale.sim.transfers import Transfers
from livescale.topology import Host
from livescale.types import PlanId, WorkerRef

AgentOrder = StartCopy | DropCopy | AmendLoad


@dataclass(slots=True)
class _HeldCopy:
    """One rank of a model, whole or arriving."""

    order: StartCopy
    size_bytes: int
    feeds: tuple[Feed, ...]
    is_complete: bool = False
    #: what was said of feeds that have not been replaced
    troubles: list[FeedFailed] = field(default_factory=list)


class SimAgent:
    """One incarnation of an agent. `say` hands messages to the controller."""

    def __init__(
        self,
        ref: WorkerRef,
        host: Host,
        config: SimConfig,
        transfers: Transfers,
        checkers: Checkers,
        say: Callable[[AnyEvent], None],
    ) -> None:
        self.ref = ref
        self.host = host
        self._config = config
        self._transfers = transfers
        self._checkers = checkers
        self._say = say
        self._copies: dict[PlanId, _HeldCopy] = {}

    def die(self) -> None:
        """Nothing of this incarnation happens any more."""
        self._transfers.node_gone(self.ref)
        self._copies = {}
        self._tell_memory()

    def report(self) -> tuple[CopyReport, ...]:
        """What it tells a controller that it joins."""
        return tuple(
            CopyReport(
                model=copy.order.model,
                plan=plan,
                is_complete=copy.is_complete,
                rank=copy.order.rank,
                feeds=() if copy.is_complete else copy.feeds,
            )
            for plan, copy in self._copies.items()
        )

    def joined(self) -> None:
        """A controller that may know nothing was met: say again what its report does not tell."""
        for copy in self._copies.values():
            if not copy.is_complete:
                for trouble in copy.troubles:
                    self._say(trouble)

    # -- orders of the controller ---------------------------------------------------------------

    def take_order(self, order: AgentOrder) -> None:
        if isinstance(order, StartCopy):
            self._start(order)
        elif isinstance(order, AmendLoad):
            self._amend(order)
        else:
            self._drop(order)

    def _start(self, order: StartCopy) -> None:
        spec = self._config.spec(order.model)
        self._copies[order.plan] = _HeldCopy(order, spec.size_bytes, order.feeds)
        self._tell_memory()
        grid = ChunkGrid(spec.layer_bytes, order.chunk_bytes)
        key = (self.ref, order.model, order.rank)
        self._transfers.receive(order.plan, key, grid, order.feeds, self)

    def _amend(self, order: AmendLoad) -> None:
        copy = self._copies.get(order.plan)
        if copy is not None and not copy.is_complete:
            copy.feeds = order.feeds
            copy.troubles = []
            self._transfers.amend(order.plan, self.ref, order.feeds)

    def _drop(self, order: DropCopy) -> None:
        copy = self._copies.pop(order.plan, None)
        if copy is not None:
            if not copy.is_complete:
                reason = "dropped"
                self._say(CopyFailed(order.model, self.ref, order.plan, reason, order.rank))
            self._transfers.drop((self.ref, order.model, order.rank))
            self._tell_memory()
        self._say(CopyDropped(order.model, self.ref, order.plan, order.rank))

    # -- news of the transfers ------------------------------------------------------------------

    def load_started(self, plan: PlanId) -> None:
        """Nobody waits for a copy's first byte."""

    def layer_arrived(self, plan: PlanId, layer: int) -> None:
        order = self._copies[plan].order
        self._say(CopyLayerArrived(order.model, self.ref, plan, layer, order.rank))

    def load_completed(self, plan: PlanId) -> None:
        copy = self._copies[plan]
        copy.is_complete = True
        order = copy.order
        self._say(CopyCompleted(order.model, self.ref, plan, copy.size_bytes, order.rank))

    def load_failed(self, plan: PlanId, reason: str) -> None:
        order = self._copies.pop(plan).order
        self._tell_memory()
        self._say(CopyFailed(order.model, self.ref, plan, reason, order.rank))

    def feed_failed(self, plan: PlanId, upstream: WorkerRef, reason: str, is_stalled: bool) -> None:
        trouble = FeedFailed(plan, self.ref, upstream, reason, is_stalled)
        self._copies[plan].troubles.append(trouble)
        self._say(trouble)

    def _tell_memory(self) -> None:
        """The checkers look at what lies in host memory."""
        held = [(copy.order.model, copy.order.rank) for copy in self._copies.values()]
        size = sum(copy.size_bytes for copy in self._copies.values())
        self._checkers.holds(self.ref, self.host.memory_bytes, size, held)

    def __repr__(self) -> str:
        return f"<SimAgent {self.ref} on {self.host.name}, {len(self._copies)} copies>"
