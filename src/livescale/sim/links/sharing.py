"""How flows share links: max-min fair rates by progressive filling (Bertsekas and Gallager, Data
Networks, §6.5.2), whole bytes per second.

All rates rise together. A flow stays where one of its links is full, or where all flows that
bring its sender what it passes on have stopped. A change is followed only as far as it goes: the
flows that are joined by links with those that changed, and then those that are held to somebody
whose rate is another one now.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from livescale.control.multicast.fabric import UNLIMITED
from livescale.sim.links.flows import SimFlow, SimLink
from livescale.sim.links.link_table import check_rates

_ROUNDS_MAX = 4
"""A flow that wants a part only of what its sender gets may turn out to have risen too far. Then
everything is filled again with what it can get as its limit, so many times at most."""


class Sharing:
    """The active flows, and which of them need another look."""

    def __init__(self) -> None:
        self._changed: dict[SimFlow, None] = {}

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    def start(self, flow: SimFlow) -> None:
        """The flow takes its place on its links."""
        for link in flow.links:
            link.flows[flow] = None
        self._changed[flow] = None

    def stop(self, flow: SimFlow) -> None:
        """Its place is free."""
        self._changed.pop(flow, None)
        for link in flow.links:
            del link.flows[flow]
        self.links_changed(flow.links)

    def mark(self, flow: SimFlow) -> None:
        """Who limits the flow has changed."""
        self._changed[flow] = None

    def links_changed(self, links: Iterable[SimLink]) -> None:
        """The links have more or less to give. One flow of each stands for all of them."""
        for link in links:
            for flow in link.flows:
                self._changed[flow] = None
                break

    def solve(self, now_ns: int) -> list[SimFlow]:
        """Give new rates; returns the flows whose rate is another one now."""
        wave, self._changed = self._changed, {}
        done: dict[SimFlow, None] = {}
        found: dict[SimFlow, None] = {}
        while wave:
            group = _joined(wave, is_downstream=False)
            # Somebody depends on what depends on him: all that hangs together is solved as one.
            is_last = any(flow in done for flow in group)
            if is_last:
                group = _joined({**done, **group}, is_downstream=True)
            wave = {}
            for flow, rate in fair_rates(group).items():
                if rate != flow.rate:
                    flow.advance(now_ns)
                    flow.rate = rate
                    found[flow] = None
                    wave.update(flow.holds)
            for link in _links_of(group):
                check_rates(link)
            done.update(group)
            if is_last:
                break
            wave = {flow: None for flow in wave if flow not in group}
        return list(found)


def fair_rates(flows: Iterable[SimFlow]) -> dict[SimFlow, int]:
    """Rates of flows that share no limited link with others, in bytes per second."""
    caps: dict[SimFlow, int] = {}
    for _ in range(_ROUNDS_MAX):
        filling = _Filling(flows, caps)
        rates = filling.run()
        late = {flow: filling.supply_of(flow) for flow in (*caps, *filling.late)}
        if not filling.late or late == caps:
            break
        caps = late
    return rates


def _joined(flows: Mapping[SimFlow, None], is_downstream: bool) -> dict[SimFlow, None]:
    """The flows and all that share limited links with them, directly or through others; with
    `is_downstream` also those that are held to any of them."""
    found = dict(flows)
    ahead = list(found)
    links: dict[SimLink, None] = {}
    for flow in ahead:
        near = list(flow.holds) if is_downstream else []
        for link in flow.links:
            if link not in links:
                links[link] = None
                near += link.flows
        for other in near:
            if other not in found:
                found[other] = None
                ahead.append(other)
    return found


def _links_of(flows: Iterable[SimFlow]) -> dict[SimLink, None]:
    return {link: None for flow in flows for link in flow.links}


class _Filling:
    """One progressive filling. `caps` are limits of single flows that are known before."""

    def __init__(self, flows: Iterable[SimFlow], caps: Mapping[SimFlow, int]) -> None:
        self.rates: dict[SimFlow, int] = {}
        #: flows that had risen above what they can get when that was known
        self.late: dict[SimFlow, None] = {}
        self._flows = dict.fromkeys(flows)
        self._left: dict[SimLink, int] = {}
        self._rising: dict[SimLink, int] = {}
        #: feeders that still rise, by held flow
        self._waits: dict[SimFlow, int] = {}
        self._level = 0
        self._heap: list[tuple[int, int, SimLink | SimFlow]] = []
        self._sequence = 0
        for flow in self._flows:
            for link in flow.links:
                if link not in self._left:
                    self._left[link] = link.bytes_per_s
                self._rising[link] = self._rising.get(link, 0) + 1
            self._waits[flow] = sum(feeder.flow in self._flows for feeder in flow.feeders)
            if flow in caps:
                self._push(caps[flow], flow)
        for link, count in self._rising.items():
            self._push(self._left[link] // count, link)
        for flow, count in self._waits.items():
            if not count and (flow.feeders or not flow.links):
                self._push(self.supply_of(flow), flow)

    def run(self) -> dict[SimFlow, int]:
        while self._heap:
            level, _, item = heapq.heappop(self._heap)
            if isinstance(item, SimFlow):
                if item not in self.rates:
                    if level < self._level:
                        self.late[item] = None
                    self._freeze(item, level)
            elif self._rising[item]:
                now = max(0, self._left[item]) // self._rising[item]
                if now > level:
                    self._push(now, item)
                    continue
                for flow in item.flows:
                    if flow not in self.rates:
                        self._freeze(flow, now)
            self._level = max(self._level, level)
        return self.rates

    def supply_of(self, flow: SimFlow) -> int:
        """What its feeders together bring of what it wants, as far as that is known."""
        if not flow.feeders:
            return UNLIMITED
        return sum(
            self.rates.get(feeder.flow, feeder.flow.rate) * feeder.wanted // feeder.brought
            for feeder in flow.feeders
        )

    def _freeze(self, flow: SimFlow, rate: int) -> None:
        self.rates[flow] = rate = max(1, rate)
        for link in flow.links:
            self._left[link] -= rate
            self._rising[link] -= 1
        for held in flow.holds:
            if held in self._waits:
                self._waits[held] -= 1
                if not self._waits[held] and held not in self.rates:
                    self._push(self.supply_of(held), held)

    def _push(self, level: int, item: SimLink | SimFlow) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (level, self._sequence, item))
