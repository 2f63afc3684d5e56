"""Bytes on their way: which flow moves what at which rate, and when it has to be looked at again.

All that happens at one instant happens first; then the flows that it touched are looked at, and
rates are shared once. What arrives is reported; what it means for receptions is in `transfers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from livescale.clusters.topology import Topology
from livescale.sim.base.clock import Clock
from livescale.sim.links.feeding import LayerPiece
from livescale.sim.links.flows import (
    Feeder,
    HoldingKey,
    ServingFlow,
    SimFlow,
    SimHolding,
    SimReception,
)
from livescale.sim.links.link_table import SimLinks
from livescale.sim.links.sender_stock import SenderStock, Supply
from livescale.sim.links.serving_traffic import ServingTraffic
from livescale.sim.links.sharing import Sharing
from livescale.values.types import WorkerRef


class Movement:
    """All flows. `tell_arrived` is called for every piece that is in place: flow and layer.
    `link_sharing` as in SimConfig."""

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        parameter_percent: int,
        link_sharing: str,
        tell_arrived: Callable[[SimFlow, int], None],
    ) -> None:
        self.holdings: dict[HoldingKey, SimHolding] = {}
        #: receptions under way
        self.receiving: dict[HoldingKey, SimReception] = {}
        #: flows by what they come from
        self._readers: dict[HoldingKey, dict[SimFlow, None]] = {}
        self._clock = clock
        self._tell_arrived = tell_arrived
        self._links = SimLinks(topology, parameter_percent)
        self._sharing = Sharing(link_sharing)
        self.serving = ServingTraffic(clock, self._links, self._sharing, self._settle_soon)
        self._supplies = SenderStock(self.holdings, self.receiving)
        #: members from which nothing comes until then. Touch what such a member sends
        self.frozen: dict[WorkerRef, int] = {}
        #: flows to look at before this instant is over
        self._touched: dict[SimFlow, None] = {}
        self._settles = False

    # -- flows come and go --------------------------------------------------------------------

    def add(self, flow: SimFlow) -> None:
        """The flow moves what it can from now on."""
        if flow.sender is not None:
            self._readers.setdefault(flow.sender, {})[flow] = None
        self.touch(flow)

    def close(self, flow: SimFlow) -> None:
        """The flow is over. Chunks stay that came before this instant."""
        if flow.is_over:
            return
        flow.advance(self._clock.now_ns)
        self._give_up(flow, flow.moved_nanobytes - 1)
        self._halt(flow)
        self._look_in(flow, None)
        flow.is_over = True
        if flow.sender is not None:
            del self._readers[flow.sender][flow]

    def give_up(self, flow: SimFlow) -> None:
        """Let go what the flow moves now. Chunks stay that came before this instant."""
        flow.advance(self._clock.now_ns)
        self._give_up(flow, flow.moved_nanobytes - 1)
        self.touch(flow)

    def readers(self, key: HoldingKey) -> list[SimFlow]:
        """The flows that come from there."""
        return list(self._readers.get(key, ()))

    def sent_by(self, member: WorkerRef) -> list[SimFlow]:
        """The flows that come from the member, or will when it has something."""
        asked = [flows for key, flows in self._readers.items() if key[0] == member]
        return [flow for flows in asked for flow in flows]

    def received_by(self, member: WorkerRef) -> list[SimFlow]:
        """Flows that bring something to the member."""
        receptions = [r for key, r in self.receiving.items() if key[0] == member]
        return [flow for r in receptions for flow in r.flows if not flow.is_over]

    def touch(self, flow: SimFlow) -> None:
        """Look at the flow when all that happens at this instant has happened."""
        self._touched[flow] = None
        self._settle_soon()

    def touch_all(self, flows: Iterable[SimFlow]) -> None:
        for flow in flows:
            self.touch(flow)

    # -- links and members --------------------------------------------------------------------

    def set_nic(self, member: WorkerRef, permille: int) -> None:
        """The member's NIC carries so much of its rate; bytes from storage cross that of a host,
        too, on their way to its devices."""
        links = self._links.slow_nic(member, permille, self._clock.now_ns)
        self._sharing.links_changed(links)
        self.serving.nics_changed(links)
        self._settle_soon()
        for reception in self.receiving.values():
            for flow in reception.flows:
                if not flow.is_over and any(link in links for link in flow.path or ()):
                    self.touch(flow)

    def carried_bytes(self) -> dict[str, int]:
        """Parameters that links have carried by now, by kind of link. Each byte counts once per
        link that it crossed; of the two ends of a hop, the sender's NIC and leaf count."""
        self._advance_all()
        return self._links.carried_bytes()

    def check_links(self) -> None:
        """No link has carried more than its rate times time. Raises InvariantBroken. That none
        is given away above its rate is looked at whenever rates change, without this."""
        self._advance_all()
        self._links.check(self._clock.now_ns)

    # -- helpers, in the order used -----------------------------------------------------------

    def _advance_all(self) -> None:
        for reception in self.receiving.values():
            for flow in reception.flows:
                flow.advance(self._clock.now_ns)
        self.serving.advance()

    def _settle_soon(self) -> None:
        if not self._settles:
            self._settles = True
            self._clock.after(0, self._settle)

    def _settle(self) -> None:
        while self._touched or self._sharing.has_changed:
            touched, self._touched = self._touched, {}
            for flow in touched:
                if not flow.is_over:
                    self._look(flow)
            if not self._touched:
                for paced in self._sharing.solve(self._clock.now_ns):
                    if isinstance(paced, ServingFlow):
                        self.serving.paced(paced)
                    else:
                        self.touch(paced)
                        self._touch_readers(paced)
        self._settles = False

    def _look(self, flow: SimFlow) -> None:
        """What the flow moves, whether it does, who holds it, and when to look again."""
        flow.advance(self._clock.now_ns)
        supply = None if self._is_blocked(flow) else self._find(flow)
        if supply is None:
            self._halt(flow)
            self._look_in(flow, None)
        elif supply.is_whole:
            self._go(flow, self._supplies.trailing(flow, self._clock.now_ns))
            self._look_in(flow, _time_ns(flow.left_nanobytes, flow.rate))
        else:
            self._follow(flow, supply)

    def _is_blocked(self, flow: SimFlow) -> bool:
        """Its sender has nothing, or nothing gets through."""
        sender = flow.sender
        if sender is not None and (sender not in self.holdings or sender[0] in self.frozen):
            return True
        if flow.path is None:
            receiver, now_ns = flow.reception.key[0], self._clock.now_ns
            flow.path = self._links.path(flow.feed.upstream, receiver, now_ns)
            flow.links = tuple(link for link in flow.path if link.rated_bytes_per_s is not None)
        return self._links.is_cut(flow.path)

    def _find(self, flow: SimFlow) -> Supply | None:
        """What there is of the piece that the flow moves, or of the next one."""
        now_ns = self._clock.now_ns
        if flow.piece is not None and flow.is_begun:
            return self._supplies.of(flow, flow.piece, now_ns)
        found = self._supplies.choose(flow, now_ns)
        if found is None:
            flow.piece = None
            return None
        number, piece, supply = found
        flow.begin(number, piece)
        return supply

    def _follow(self, flow: SimFlow, supply: Supply) -> None:
        """Its sender is itself getting the piece: whole chunks go on, the one that is arriving
        does not."""
        held = supply.there_nanobytes + supply.coming_nanobytes
        if flow.moved_nanobytes > held:
            # Within one nanosecond a link without a limit carries more than there is.
            flow.take_back(flow.moved_nanobytes - held)
            self._touch_readers(flow)
        ahead = held - flow.unit_nanobytes
        can_begin = flow.is_begun or supply.can_begin(flow.unit_nanobytes)
        times = [supply.change_ns]
        if not supply.feeders:
            left = supply.there_nanobytes - flow.moved_nanobytes
            if left > 0 and can_begin:
                self._go(flow, ())
                times.append(_time_ns(left, flow.rate))
            elif self._set_aside(flow):
                return
        elif not can_begin:
            self._halt(flow)
            times.append(_time_ns(-ahead, supply.bytes_per_s))
        elif ahead - flow.moved_nanobytes > supply.slack_nanobytes:
            self._go(flow, ())
            gain = flow.rate - supply.bytes_per_s
            times.append(_time_ns(ahead - flow.moved_nanobytes, gain))
        elif self._switch(flow):
            return
        else:
            self._go(flow, supply.feeders)
        self._look_in(flow, min((ns for ns in times if ns is not None), default=None))

    def _switch(self, flow: SimFlow) -> bool:
        """A flow that would have to follow its feeders moves something that is whole instead."""
        if not flow.has_more:
            return False
        flow.has_more = False
        found = self._supplies.choose_whole(flow, self._clock.now_ns)
        if found is None or flow.feed.window is not None:
            return False
        self._give_up(flow, flow.moved_nanobytes)
        flow.has_more = True
        flow.begin(*found)
        self._go(flow, ())
        self._look_in(flow, _time_ns(flow.left_nanobytes, flow.rate))
        return True

    def _set_aside(self, flow: SimFlow) -> bool:
        """The sender has no more of the piece, and no flow brings it: maybe there is another, if
        something had moved."""
        moved = flow.moved_nanobytes
        self._give_up(flow, moved)
        self._halt(flow)
        if moved:
            self._look_in(flow, None)
            self.touch(flow)
        return moved > 0

    def _give_up(self, flow: SimFlow, moved_nanobytes: int) -> None:
        if flow.is_begun:
            self._touch_readers(flow)
            flow.give_up(moved_nanobytes, self._supplies.whole_chunks(flow, self._clock.now_ns))

    def _touch_readers(self, flow: SimFlow) -> None:
        """Look at those who want what the flow moves now."""
        piece = flow.piece
        if piece is not None:
            for reader in self._readers.get(flow.reception.key, ()):
                if reader.listed.get(piece.layer, 0) & piece.chunks:
                    self.touch(reader)

    def _go(self, flow: SimFlow, feeders: tuple[Feeder, ...]) -> None:
        """The piece moves, held to these."""
        if not flow.is_begun:
            flow.is_begun = True
            self._touch_readers(flow)
        if flow.feeders != feeders:
            flow.hold_to(feeders)
            self._sharing.mark(flow)
        if not flow.is_active:
            flow.is_active = True
            flow.has_told_stall = False
            self._sharing.start(flow)
            flow.reception.begin()

    def _halt(self, flow: SimFlow) -> None:
        if flow.is_active:
            flow.is_active = False
            flow.rate = flow.spare_nanobytes = 0
            flow.hold_to(())
            self._sharing.stop(flow)
            self._settle_soon()
            self.touch_all(flow.holds)
            self._touch_readers(flow)

    def _look_in(self, flow: SimFlow, delay_ns: int | None) -> None:
        due_ns = None if delay_ns is None else self._clock.now_ns + delay_ns
        if due_ns == flow.due_ns:
            return
        if flow.due_ns is not None:
            self._clock.cancel(flow.ticket)
        flow.due_ns = due_ns
        if due_ns is not None:
            flow.ticket = self._clock.at(due_ns, partial(self._due, flow))

    def _due(self, flow: SimFlow) -> None:
        flow.due_ns = None
        flow.advance(self._clock.now_ns)
        piece = flow.piece
        # Before its readers: they look at what it moves next.
        self.touch(flow)
        if piece is not None and flow.is_begun and not flow.left_nanobytes:
            self._end_piece(flow, piece)

    def _end_piece(self, flow: SimFlow, piece: LayerPiece) -> None:
        """All of the piece has moved: it is there, if its sender has all of it."""
        if not self._supplies.of(flow, piece, self._clock.now_ns).is_whole:
            return
        flow.complete()
        for reader in self._readers.get(flow.reception.key, ()):
            is_awaited = piece.layer in reader.reception.was_corrupt
            if is_awaited or reader.listed.get(piece.layer, 0) & piece.chunks:
                self.touch(reader)
                if reader.piece is None or reader.piece.layer != piece.layer:
                    reader.has_more = True
        self._tell_arrived(flow, piece.layer)


def _time_ns(amount_nanobytes: int, rate: int) -> int | None:
    """How long that takes; None if it never ends."""
    return -(-amount_nanobytes // rate) if rate > 0 else None
