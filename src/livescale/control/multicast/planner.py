"""The way into planning: a request and the topology in, a ScalePlan out.

Which strategies there are and which one is best stands here; how each works, in its own module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from livescale.clusters.topology import LinkKind, Topology
from livescale.common.errors import UserError
from livescale.control.multicast.binomial import BinomialPlan, groups_at_home
from livescale.control.multicast.bound import Bound, lower_bound
from livescale.control.multicast.chain import FeedsOf, chain_feeds, sharded_feeds
from livescale.control.multicast.cost import CostModel, Prediction
from livescale.control.multicast.direct import (
    STORAGE,
    direct_feeds,
    host_feeds,
    k_way_host_feeds,
    tree_feeds,
    unicast_feeds,
)
from livescale.control.multicast.fabric import OUT, UNLIMITED, Fabric, Layout
from livescale.control.multicast.placing import (
    Element,
    Preference,
    choose_targets,
    usable_sources,
    with_few_alike,
)
from livescale.control.multicast.request import PlanRequest, Source
from livescale.messages.scale_plan import LinkBytes, PlannedLoad, ScalePlan
from livescale.values.chunks import ChunkGrid
from livescale.values.types import WorkerRef

HOST_ONLY = ("host", "host-k-way")
"""Strategies that read nothing but host memory, and storage where that has no copy."""
STRATEGIES = (
    *("auto", "chain", "sharded", "binomial", "tree", "unicast", "direct"),
    *(*HOST_ONLY, "storage"),
)

_FROM_ALL = {
    "chain": chain_feeds,
    "sharded": sharded_feeds,
    "tree": tree_feeds,
    "direct": direct_feeds,
}
"""Strategies that use every source they are given."""

_SERVING_PERCENT = 150
"""How much longer a transfer takes that meets serving traffic (BlitzScale §1: 1.5 times)."""
_TARGETS_FEW = 64
"""Up to so many `auto` tries everything. With more it takes the first plan that is near the lower
bound and disturbs no traffic, and leaves out the binomial pipeline, which takes long to lay out."""
_NEAR_PERCENT = 105


class PlanError(UserError, ValueError):
    """No plan is possible; the message says why."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A finished plan before it is written down."""

    strategy: str
    targets: tuple[Element, ...]
    feeds: FeedsOf
    prediction: Prediction
    fabric: Fabric
    serving_bytes: int

    def cost(self) -> tuple[int, int]:
        """The last receiver's time, longer if something meets serving traffic, and the sum of all
        receivers' times."""
        ns = self.prediction.completed_ns
        if ns is None:
            return UNLIMITED, 0
        times = [max(layers, default=0) for layers in self.prediction.layer_ns.values()]
        return ns * (_SERVING_PERCENT if self.serving_bytes else 100), sum(times)

    def is_better_than(self, other: Draft) -> bool:
        """It ends sooner by more than rounding; or as soon, and its receivers sooner by 1 %."""
        (ns, total), (its_ns, its_total) = self.cost(), other.cost()
        if ns * 1000 < its_ns * 999:
            return True
        return ns * 999 <= its_ns * 1000 and total * 100 < its_total * 99

    def is_good(self, bound: Bound | None) -> bool:
        ns = self.prediction.completed_ns
        near = ns is not None and bound is not None and ns * 100 <= bound.ns * _NEAR_PERCENT
        return near and not self.serving_bytes


def make_plan(request: PlanRequest, topology: Topology, strategy: str = "auto") -> ScalePlan:
    """The plan of `strategy` ("auto": the best prediction of all).

    Without a copy to read one target reads storage and the others follow it. Raises PlanError.
    """
    if strategy not in STRATEGIES:
        raise PlanError(f"there is no strategy {strategy!r}, only {', '.join(STRATEGIES)}")
    drafting = Drafting(request, topology)
    first: Draft | None = None
    best: Draft | None = None
    for draft in drafting.drafts(strategy):
        if first is None:
            first = draft
        if best is None or draft.is_better_than(best):
            best = draft
        if first.prediction.completed_ns is None:
            break  # nothing can be compared with what is not known
        is_wide = strategy == "auto" and len(draft.targets) > _TARGETS_FEW
        if is_wide and draft.is_good(drafting.bound(draft)):
            break
    if best is None:
        raise PlanError(f"{request.model}: no copy for {strategy!r}, and storage cannot be read")
    return _written(request, best)


def free_uplinks(plan: ScalePlan) -> tuple[WorkerRef, ...]:
    """Receivers whose NIC sends nothing for the plan: they can serve while they load without
    meeting its bytes (BlitzScale §5.1, Figure 12)."""
    sending = {
        use.link.owner
        for use in plan.links
        if use.link.kind is LinkKind.NIC and use.link.direction is OUT and use.bytes
    }
    return tuple(load.receiver for load in plan.loads if str(load.receiver) not in sending)


class Drafting:
    """Makes the drafts of one request."""

    def __init__(self, request: PlanRequest, topology: Topology) -> None:
        self._request = request
        self._topology = topology
        self._grid = ChunkGrid(request.layer_bytes, request.chunk_bytes)
        _check(request, topology)
        if request.targets is None:
            request = self._request = with_few_alike(request, topology)
        self._sources = usable_sources(request)
        self._elements = [_element(source, request.tp_size) for source in self._sources]
        fabric = self._fabric()
        targets = request.targets
        if targets is None:
            if not self._sources:
                # One of them has to begin.
                readers = tuple(w for w in request.spare if topology.reads_files(w))
                request = self._request = msgspec.structs.replace(request, spare=readers)
            targets = choose_targets(request, fabric, self._sources)
        if not targets:
            raise PlanError(f"{request.model}: no {request.tp_size} spare workers")
        self._targets = tuple(targets)
        self._has_storage = request.has_storage and all(
            topology.reads_files(worker) for target in targets for worker in target
        )
        self._predicted: list[Draft] = []

    def bound(self, draft: Draft) -> Bound | None:
        size = sum(self._grid.layer_bytes)
        return lower_bound(self._elements, draft.targets, size, draft.fabric)

    def drafts(self, strategy: str) -> Iterator[Draft]:
        """All drafts of a strategy, those that are likely to be good first."""
        if strategy != "auto":
            yield from self._drafts_of(strategy, self._targets)
            return
        if not self._elements:
            yield from self._drafts_of("chain", self._targets)
            yield from self._drafts_of("storage", self._targets)
            return
        names = ["chain", "sharded", "unicast", "tree"]
        names += ["host"] if any(source.is_host_copy for source in self._sources) else []
        is_small = len(self._targets) <= _TARGETS_FEW
        is_whole = not any(source.is_loading for source in self._sources)
        # Its blocks come in an order of their own: the first layers are there late.
        is_pipeline_good = is_small and is_whole and not self._request.is_live
        names += ["binomial"] if is_pipeline_good else []
        for targets in self._choices():
            for name in names:
                yield from self._drafts_of(name, targets)
        if self._knows_storage():
            yield from self._drafts_of("storage", self._targets)

    # -- helpers, in the order used -----------------------------------------------------------

    def _fabric(self) -> Fabric:
        """A fresh one for every draft: it lists the links that the draft uses."""
        return Fabric.of(self._request, self._topology)

    def _layout(self) -> Layout:
        return Layout(self._request, self._fabric(), self._grid)

    def _knows_storage(self) -> bool:
        """How fast every target can read storage. What is not known is not taken for fast."""
        if self._topology.remote_storage_bytes_per_s is not None:
            return True
        hosts = {self._topology.host_of(w): None for target in self._targets for w in target}
        known = {
            h.name for h in self._topology.agents.values() if h.storage_bytes_per_s is not None
        }
        return all(host in known for host in hosts)

    def _choices(self) -> Iterator[tuple[Element, ...]]:
        """Which devices to take: by the rule first. With few targets other choices are tried."""
        yield self._targets
        if self._request.targets is not None or len(self._targets) > _TARGETS_FEW:
            return
        tried = [sorted(self._targets)]
        for preference in (Preference.RATE, Preference.GROUP):
            other = choose_targets(self._request, self._fabric(), self._sources, preference)
            if sorted(other) not in tried:
                tried.append(sorted(other))
                yield other

    def _drafts_of(self, name: str, targets: tuple[Element, ...]) -> Iterator[Draft]:
        grid, copies = self._grid, self._host_copies()
        if name in HOST_ONLY and copies:
            feeds = host_feeds(self._layout(), copies, targets)
            if not self._are_readable(feeds):
                return
            if name == "host-k-way":
                feeds = k_way_host_feeds(feeds, grid)
            yield self._draft(name, targets, feeds)
            return
        if name in (*HOST_ONLY, "storage") or not self._elements:
            if self._has_storage:
                yield self._from_storage(name, targets)
            return
        for sources in self._source_sets():
            if name in _FROM_ALL:
                yield self._draft(name, targets, _FROM_ALL[name](self._layout(), sources, targets))
            elif name == "unicast":
                yield self._draft(name, targets, unicast_feeds(grid, sources[0], targets))
            else:
                yield from self._binomial(sources, targets)

    def _are_readable(self, feeds: FeedsOf) -> bool:
        """Those that are sent to storage can read it."""
        fed = [who for (who, _), its in feeds.items() if any(f.upstream == STORAGE for f in its)]
        return all(map(self._topology.reads_files, fed))

    def _host_copies(self) -> list[Element]:
        """All that are complete, also those that no other host should read."""
        request = self._request
        found = [s for s in request.sources if s.is_host_copy and not s.is_loading]
        return [_element(source, request.tp_size) for source in found]

    def _from_storage(self, name: str, targets: tuple[Element, ...]) -> Draft:
        """One target reads storage and the others follow it, unless the strategy is that each
        reads for itself (as ServerlessLLM does when host memory has no copy)."""
        if name in (*HOST_ONLY, "storage") or len(targets) == 1:
            return self._draft("storage", targets, unicast_feeds(self._grid, None, targets))
        feeds = chain_feeds(self._layout(), (), targets)
        return self._draft("chain", targets, feeds)

    def _source_sets(self) -> list[list[Element]]:
        """All sources; only the fastest ones; the first of these. A slow source holds up those
        behind it, so fewer may be better."""
        fabric = self._fabric()
        rates = [min(fabric.nic_bytes_per_s(w, OUT) for w in e) for e in self._elements]
        fastest = [e for e, rate in zip(self._elements, rates, strict=True) if rate == max(rates)]
        sets = [self._elements, fastest]
        if len(self._targets) <= _TARGETS_FEW:
            sets.append(fastest[:1])
        return [chosen for i, chosen in enumerate(sets) if chosen not in sets[:i]]

    def _binomial(
        self, sources: Sequence[Element], targets: tuple[Element, ...]
    ) -> Iterator[Draft]:
        """An arriving copy has its blocks in one order only: no other order waits for it. Of more
        sources than targets the fastest send; or, for teams, targets read the copy in their own
        host's memory and the others what is left (λScale §4.4)."""
        arriving = [s.workers for s in self._sources if s.is_loading]
        whole = [element for element in sources if element not in arriving]
        if self._request.in_teams:
            yield from self._at_home(whole, targets)
        fabric = self._fabric()
        if len(whole) > len(targets):
            rates = {e: min(fabric.nic_bytes_per_s(w, OUT) for w in e) for e in whole}
            fastest = sorted(whole, key=lambda element: -rates[element])[: len(targets)]
            whole = [element for element in whole if element in fastest]
        yield self._of_blocks(BinomialPlan(self._grid, whole or sources[:1], targets), targets)

    def _at_home(self, whole: Sequence[Element], targets: tuple[Element, ...]) -> Iterator[Draft]:
        """Over NICs the ranks of a host copy would be in each other's way; to its own host's
        devices they are not."""
        copies = [*whole, *(copy for copy in self._host_copies() if copy not in whole)]
        near = {home: None for home in self._homes(copies, targets) if home is not None}
        if near:
            used = [c for n, c in enumerate(copies) if n < len(whole) or n in near]
            groups = groups_at_home(len(used), self._homes(used, targets))
            yield self._of_blocks(BinomialPlan(self._grid, used, targets, groups=groups), targets)

    def _of_blocks(self, plan: BinomialPlan, targets: tuple[Element, ...]) -> Draft:
        fabric = self._fabric()
        prediction = plan.predict(fabric)
        return self._finished("binomial", targets, plan.feeds(), prediction, fabric)

    def _homes(self, sources: Sequence[Element], targets: Sequence[Element]) -> list[int | None]:
        """For each target the number of the copy that its own host's memory has, if any."""
        topology = self._topology
        copies = {
            topology.host_of(source[0]): number
            for number, source in enumerate(sources)
            if source[0].is_agent and topology.agents[source[0]].has_device_links
        }
        found = []
        for target in targets:
            hosts = {topology.host_of(worker): None for worker in target}
            found.append(copies.get(next(iter(hosts))) if len(hosts) == 1 else None)
        return found

    def _draft(self, name: str, targets: tuple[Element, ...], feeds: FeedsOf) -> Draft:
        for draft in self._predicted:
            if draft.feeds == feeds:
                return draft  # for one target most strategies come to the same
        fabric = self._fabric()
        lagging = [w for source in self._sources if source.is_loading for w in source.workers]
        prediction = CostModel(self._grid, fabric, lagging).predict(feeds)
        draft = self._finished(name, targets, feeds, prediction, fabric)
        self._predicted.append(draft)
        return draft

    def _finished(
        self,
        name: str,
        targets: tuple[Element, ...],
        feeds: FeedsOf,
        prediction: Prediction,
        fabric: Fabric,
    ) -> Draft:
        busy = frozenset(self._request.busy)
        meets = zip(fabric.links, prediction.link_bytes, strict=True) if busy else ()
        serving = sum(size for link, size in meets if link in busy)
        return Draft(name, targets, feeds, prediction, fabric, serving)


def _element(source: Source, tp_size: int) -> Element:
    """The workers of a copy by rank: a host copy's agent may be named once for all ranks."""
    return source.workers if len(source.workers) == tp_size else source.workers * tp_size


def _check(request: PlanRequest, topology: Topology) -> None:
    """Everything named is known, and instances have as many workers as there are ranks."""
    if not sum(request.layer_bytes):
        raise PlanError(f"{request.model}: there are no bytes to move")
    size = request.tp_size
    for source in request.sources:
        if len(source.workers) != size and not (source.is_host_copy and len(source.workers) == 1):
            named = ", ".join(map(str, source.workers))
            raise PlanError(f"{request.model}: the source {named} has not {size} ranks")
    for target in request.targets or ():
        if len(target) != size:
            named = ", ".join(map(str, target))
            raise PlanError(f"{request.model}: the target {named} has not {size} ranks")
    named_workers = [w for s in request.sources for w in s.workers]
    named_workers += [w for target in request.targets or () for w in target]
    if request.targets is None:
        named_workers += request.spare
    for worker in named_workers:
        if worker not in topology.devices and worker not in topology.agents:
            raise PlanError(f"{request.model}: {worker} is not in the topology")


def _written(request: PlanRequest, draft: Draft) -> ScalePlan:
    loads = tuple(
        PlannedLoad(
            receiver, draft.feeds[receiver, rank], draft.prediction.layer_ns[receiver, rank]
        )
        for element in draft.targets
        for rank, receiver in enumerate(element)
    )
    links = tuple(
        LinkBytes(link, size)
        for link, size in zip(draft.fabric.links, draft.prediction.link_bytes, strict=True)
        if size
    )
    instances = tuple(element for element in draft.targets if not element[0].is_agent)
    plan = ScalePlan(
        request.plan,
        request.model,
        draft.strategy,
        instances,
        loads,
        request.chunk_bytes,
        sum(request.layer_bytes),
        draft.prediction.completed_ns,
        links,
    )
    return plan.beside(request.busy) if request.busy else plan
