"""How flows share links: max-min fair rates by progressive filling (Bertsekas and Gallager, Data
Networks, §6.5.2), whole bytes per second.

Serving traffic gets its rates first, as if there were no parameters; these get what is left. In
each class all rates rise together. For comparison both can be one class ("equal"). A flow stays
where one of its links is full, or where all flows that bring its sender what it passes on have
stopped. A change is followed only as far as it goes: the flows that are joined by links with those
that changed, and then those that are held to a flow whose rate is another one now.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from livescale.control.multicast.fabric import UNLIMITED
from livescale.sim.base.config import EQUAL
from livescale.sim.links.flows import Flow, ServingFlow, SimLink
from livescale.sim.links.link_table import check_rates

_ROUNDS_MAX = 4
"""A flow that wants a part only of what its sender gets may turn out to have risen too far. Then
everything is filled again with what it can get as its limit, so many times at most."""


class Sharing:
    """The active flows, and which of them need another look. `link_sharing` as in SimConfig."""

    def __init__(self, link_sharing: str) -> None:
        self._is_equal = link_sharing == EQUAL
        self._changed: dict[Flow, None] = {}

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    def start(self, flow: Flow) -> None:
        """The flow takes its place on its links."""
        for link in flow.links:
            link.flows[flow] = None
        self._changed[flow] = None

    def stop(self, flow: Flow) -> None:
        """Its place is free."""
        self._changed.pop(flow, None)
        for link in flow.links:
            del link.flows[flow]
        self.links_changed(flow.links)

    def mark(self, flow: Flow) -> None:
        """Who limits the flow has changed."""
        self._changed[flow] = None

    def links_changed(self, links: Iterable[SimLink]) -> None:
        """The links have more or less to give. One flow of each stands for all of them."""
        for link in links:
            for flow in link.flows:
                self._changed[flow] = None
                break

    def solve(self, now_ns: int) -> list[Flow]:
        """Give new rates; returns the flows whose rate is another one now."""
        wave, self._changed = self._changed, {}
        done: dict[Flow, None] = {}
        found: dict[Flow, None] = {}
        while wave:
            group = _joined(wave, is_downstream=False)
            # A flow depends on what depends on that flow: all that hangs together is solved as one.
            is_last = any(flow in done for flow in group)
            if is_last:
                group = _joined({**done, **group}, is_downstream=True)
            wave = {}
            for flow, rate in fair_rates(group, is_equal=self._is_equal).items():
                if rate != flow.rate:
                    flow.advance(now_ns)
                    flow.rate = rate
                    found[flow] = None
                    wave.update(dict.fromkeys(flow.holds))
            for link in _links_of(group):
                check_rates(link)
            done.update(group)
            if is_last:
                break
            wave = {flow: None for flow in wave if flow not in group}
        return list(found)


def fair_rates(flows: Iterable[Flow], *, is_equal: bool) -> dict[Flow, int]:
    """Rates of flows that share no limited link with others, in bytes per second. `is_equal`:
    serving traffic and parameters are one class."""
    if is_equal:
        return _filled(flows, None)
    serving: list[Flow] = []
    parameters: list[Flow] = []
    for flow in flows:
        (serving if isinstance(flow, ServingFlow) else parameters).append(flow)
    served_rates = _filled(serving, None)
    served: dict[SimLink, int] = {}
    for flow, rate in served_rates.items():
        for link in flow.links:
            served[link] = served.get(link, 0) + rate
    return {**served_rates, **_filled(parameters, served)}


def _filled(flows: Iterable[Flow], served: Mapping[SimLink, int] | None) -> dict[Flow, int]:
    """Rates of the flows of one class, beside what links carry for serving."""
    flows = list(flows)
    caps: dict[Flow, int] = {}
    rates: dict[Flow, int] = {}
    for _ in range(_ROUNDS_MAX if flows else 0):
        filling = _Filling(flows, caps, served)
        rates = filling.run()
        late = {flow: filling.supply_of(flow) for flow in (*caps, *filling.late)}
        if not filling.late or late == caps:
            break
        caps = late
    return rates


def _joined(flows: Mapping[Flow, None], is_downstream: bool) -> dict[Flow, None]:
    """The flows and all that share limited links with them, directly or through others; with
    `is_downstream` also those that are held to any of them."""
    found = dict(flows)
    ahead = list(found)
    links: dict[SimLink, None] = {}
    for flow in ahead:
        near: list[Flow] = list(flow.holds) if is_downstream else []
        for link in flow.links:
            if link not in links:
                links[link] = None
                near += link.flows
        for other in near:
            if other not in found:
                found[other] = None
                ahead.append(other)
    return found


def _links_of(flows: Iterable[Flow]) -> dict[SimLink, None]:
    return {link: None for flow in flows for link in flow.links}


class _Filling:
    """One progressive filling of flows of one class. `caps` are limits of single flows that are
    known before; `served` is what links carry for serving, which goes before these (None: nothing
    goes before these)."""

    def __init__(
        self,
        flows: Iterable[Flow],
        caps: Mapping[Flow, int],
        served: Mapping[SimLink, int] | None,
    ) -> None:
        self.rates: dict[Flow, int] = {}
        #: flows that had risen above what they can get when that was known
        self.late: dict[Flow, None] = {}
        self._flows = dict.fromkeys(flows)
        self._left: dict[SimLink, int] = {}
        self._rising: dict[SimLink, int] = {}
        #: links that have less than a byte per second for each of the flows, as others are served
        self._full: dict[SimLink, None] = {}
        #: feeders that still rise, by held flow
        self._waits: dict[Flow, int] = {}
        self._level = 0
        self._heap: list[tuple[int, int, SimLink | Flow]] = []
        self._sequence = 0
        for flow in self._flows:
            for link in flow.links:
                self._rising[link] = self._rising.get(link, 0) + 1
        for link, count in self._rising.items():
            left = link.bytes_per_s
            if served is not None:
                left = link.parameter_bytes_per_s(served.get(link, 0))
                if left < count and link in served:
                    left = 0
                    self._full[link] = None
            self._left[link] = left
        for flow in self._flows:
            self._waits[flow] = sum(feeder.flow in self._flows for feeder in flow.feeders)
            if flow in caps:
                self._push(caps[flow], flow)
        for link, count in self._rising.items():
            self._push(self._left[link] // count, link)
        for flow, count in self._waits.items():
            if not count and (flow.feeders or not flow.links):
                self._push(self.supply_of(flow), flow)

    def run(self) -> dict[Flow, int]:
        while self._heap:
            level, _, item = heapq.heappop(self._heap)
            if not isinstance(item, SimLink):
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
                    if flow in self._flows and flow not in self.rates:
                        self._freeze(flow, now)
            self._level = max(self._level, level)
        return self.rates

    def supply_of(self, flow: Flow) -> int:
        """What its feeders together bring of what it wants, as far as that is known."""
        if not flow.feeders:
            return UNLIMITED
        return sum(
            self.rates.get(feeder.flow, feeder.flow.rate) * feeder.wanted // feeder.brought
            for feeder in flow.feeders
        )

    def _freeze(self, flow: Flow, rate: int) -> None:
        if rate < 1 and not any(link in self._full for link in flow.links):
            rate = 1
        self.rates[flow] = rate
        for link in flow.links:
            self._left[link] -= rate
            self._rising[link] -= 1
        for held in flow.holds:
            if held in self._waits:
                self._waits[held] -= 1
                if not self._waits[held] and held not in self.rates:
                    self._push(self.supply_of(held), held)

    def _push(self, level: int, item: SimLink | Flow) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (level, self._sequence, item))
