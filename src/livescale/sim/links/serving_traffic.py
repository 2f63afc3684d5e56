"""Serving traffic on its way: rows and KV that workers send each other.

All that goes from one worker to another is one flow over the links that parameters use, in the
order in which it was sent. These flows share links before parameters do (`sharing.py`). Nothing is
decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from livescale.sim.base.clock import Action, Clock
from livescale.sim.links.flows import ServingFlow, SimLink
from livescale.sim.links.link_table import SimLinks
from livescale.sim.links.sharing import Sharing
from livescale.values.types import FromWorker, WorkerRef


class ServingTraffic:
    """All of it. `settle_soon` is called when rates have to be shared out anew before this instant
    is over; that code calls `paced`."""

    def __init__(
        self, clock: Clock, links: SimLinks, sharing: Sharing, settle_soon: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._links = links
        self._sharing = sharing
        self._settle_soon = settle_soon
        #: what has something under way, by sender and receiver
        self._flows: dict[WorkerRef, dict[WorkerRef, ServingFlow]] = {}
        #: when everything had left a sender
        self._free_ns: dict[WorkerRef, int] = {}

    def send(self, sender: WorkerRef, receiver: WorkerRef, size_bytes: int, then: Action) -> None:
        """`then` happens when so many bytes have crossed the links, behind all that the sender has
        sent the receiver before. At once, if there are none. KeyError for strangers."""
        flow = self._flows.get(sender, {}).get(receiver)
        now_ns = self._clock.now_ns
        if flow is None:
            if not size_bytes:
                then()
                return
            path = self._links.path(FromWorker(sender), receiver, now_ns)
            links = tuple(link for link in path if link.rated_bytes_per_s is not None)
            flow = ServingFlow(sender, receiver, path, links, now_ns)
            self._flows.setdefault(sender, {})[receiver] = flow
            flow.add(size_bytes, then)
            self._go_or_halt(flow)
        else:
            flow.advance(now_ns)
            flow.add(size_bytes, then)

    def gone(self, member: WorkerRef) -> None:
        """What is under way to the member, or from it, is lost."""
        for flow in self._all():
            if member in (flow.sender, flow.receiver):
                self._end(flow)

    def free_ns(self, sender: WorkerRef) -> int:
        """Since when nothing of the worker is under way; now, if something is."""
        return self._clock.now_ns if sender in self._flows else self._free_ns.get(sender, 0)

    def nics_changed(self, links: list[SimLink]) -> None:
        """The links carry another part of their rate."""
        for flow in self._all():
            if any(link in links for link in flow.path):
                self._go_or_halt(flow)

    def advance(self) -> None:
        """Count what has moved by now."""
        for flow in self._all():
            flow.advance(self._clock.now_ns)

    def paced(self, flow: ServingFlow) -> None:
        """The flow has another rate: its first message ends at another time."""
        if flow.ticket is not None:
            self._clock.cancel(flow.ticket)
            flow.ticket = None
        if flow.rate:
            left = flow.queue[0][0] - flow.moved_nanobytes
            due_ns = self._clock.now_ns - (-left // flow.rate)
            flow.ticket = self._clock.at(due_ns, partial(self._due, flow))

    # -- helpers --------------------------------------------------------------------------------

    def _all(self) -> list[ServingFlow]:
        return [flow for flows in self._flows.values() for flow in flows.values()]

    def _due(self, flow: ServingFlow) -> None:
        flow.ticket = None
        flow.advance(self._clock.now_ns)
        happening = flow.take_moved()
        if flow.queue:
            self.paced(flow)
        else:
            self._end(flow)
        for then in happening:
            then()

    def _go_or_halt(self, flow: ServingFlow) -> None:
        """It moves, unless nothing gets through."""
        moves = not self._links.is_cut(flow.path)
        if moves and not flow.is_active:
            flow.is_active = True
            flow.at_ns = self._clock.now_ns
            self._sharing.start(flow)
            self._settle_soon()
        elif flow.is_active and not moves:
            self._halt(flow)

    def _halt(self, flow: ServingFlow) -> None:
        if flow.is_active:
            flow.advance(self._clock.now_ns)
            flow.is_active = False
            flow.rate = 0
            self._sharing.stop(flow)
            self._settle_soon()
            self.paced(flow)

    def _end(self, flow: ServingFlow) -> None:
        self._halt(flow)
        flows = self._flows[flow.sender]
        del flows[flow.receiver]
        if not flows:
            del self._flows[flow.sender]
            self._free_ns[flow.sender] = self._clock.now_ns
