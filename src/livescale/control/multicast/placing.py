"""Where new instances go and which copies they are read from. No feeds: those are strategies'.

An *element* is one instance to load, or one copy to read: its workers by tensor-parallel rank.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from livescale.clusters.topology import Device, LinkKind, Topology
from livescale.control.multicast.fabric import IN, OUT, UNLIMITED, Fabric
from livescale.control.multicast.request import PlanRequest, Source
from livescale.values.types import WorkerRef

Element = tuple[WorkerRef, ...]
T = TypeVar("T")


def usable_sources(request: PlanRequest) -> tuple[Source, ...]:
    """The copies to read, device copies before host copies, else in the order given.

    BlitzScale §5.1 prunes sources whose outgoing direction serves. After that complete copies
    without readers come first; then those that are still arriving and have none (they pass on).
    Serving traffic costs less than another reader does (`_SERVING_PERCENT`): sources that serve
    and have no readers come next; then the least read of the complete ones.
    """
    nics = [use for use in request.busy if use.kind is LinkKind.NIC]
    serving = {use.owner for use in nics if use.direction is OUT}
    quiet = [s for s in request.sources if serving.isdisjoint(map(str, s.workers))]
    complete = [source for source in quiet if not source.is_loading]
    arriving = [source for source in quiet if source.is_loading]
    least = min((source.readers for source in complete), default=0)
    tiers = (
        [source for source in complete if not source.readers],
        [source for source in arriving if not source.readers],
        [source for source in request.sources if not source.readers],
        [source for source in complete if source.readers == least],
        [source for source in request.sources if not source.is_loading],
        request.sources,
    )
    chosen = next((tier for tier in tiers if tier), ())
    return tuple(sorted(chosen, key=lambda source: source.is_host_copy))


class Preference(enum.Enum):
    """What decides between devices that are in no source's scale-up group."""

    LEAF = "leaf"  # same leaf, then bandwidth: the rule
    RATE = "rate"  # the rate at which a source can reach it, then same leaf
    GROUP = "group"  # like RATE, but devices that share a group with the best follow at once


def choose_targets(
    request: PlanRequest,
    fabric: Fabric,
    sources: Sequence[Source],
    preference: Preference = Preference.LEAF,
) -> tuple[Element, ...]:
    """Spare workers for the new instances: in a source's scale-up group first, then under a
    source's leaf, then those with more bandwidth, then by id.

    The ranks of an instance share a group, or at least a host, where possible. Fewer than asked
    for, if there are not enough.
    """
    topology = fabric.topology
    groups = {topology.group_of(w): None for s in sources for w in s.workers}
    groups.pop("", None)
    hosts = {
        topology.host_of(w): None
        for s in sources
        for w in s.workers
        if w.is_agent and topology.agents[w].has_device_links
    }
    leaves = {topology.leaf_of(w): None for s in sources for w in s.workers}
    busy = {use.owner for use in request.busy if use.direction is IN and use.kind is LinkKind.NIC}
    devices = topology.devices
    is_leaf_first = preference is Preference.LEAF
    is_quiet, left = fabric.is_quiet, fabric.nic_bytes_per_s
    reach: dict[str, int] = {}
    if not is_leaf_first:
        senders = [source.workers[0] for source in sources]
        senders += [ref for ref in request.spare if devices[ref].group in groups]
        reach = _reach(fabric, senders, request.spare)

    def distance(ref: WorkerRef) -> tuple[int, ...]:
        device = devices[ref]
        rate = -(device.downlink_bytes_per_s or UNLIMITED) if is_quiet else -left(ref, IN)
        near = 0 if device.group in groups or device.host in hosts else 1
        far = 0 if device.leaf in leaves else 1
        first, second = (far, rate)
        if not is_leaf_first:
            first, second = max(rate, -reach[device.leaf]), far
        serves = 1 if busy and str(ref) in busy else 0
        return (serves, near, first, second, ref.worker, ref.incarnation)

    ranked: list[Element]
    if request.tp_size == 1:
        ranked = [(ref,) for ref in sorted(request.spare, key=distance)]
    else:
        cut = [((spread, *max(map(distance, e))), e) for spread, e in _cut(request, fabric)]
        ranked = [element for _, element in sorted(cut)]
    if preference is Preference.GROUP:
        # Members of one scale-up group follow the best of them.
        together = by_group(ranked, lambda element: fabric.topology.group_of(element[0]))
        ranked = [element for _, members in together for element in members]
    return tuple(ranked[: request.instances])


def by_group(items: Iterable[T], group_of: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    """Groups with their items, in the order of the first ones; what is in no group is alone."""
    together: dict[str, list[T]] = {}
    for number, item in enumerate(items):
        together.setdefault(group_of(item) or f"\0{number}", []).append(item)
    return [("" if name.startswith("\0") else name, its) for name, its in together.items()]


def with_few_alike(request: PlanRequest, topology: Topology) -> PlanRequest:
    """The request without spare workers that cannot be chosen: of devices of one host that are
    alike, and to which nothing goes, those with the lowest ids are enough for all instances."""
    busy = {use.owner for use in (*request.busy, *request.taken)}
    most = request.instances * request.tp_size
    if len(request.spare) <= most:
        return request
    # Equal devices are one object in a controller's topology. Of others, more than enough stay.
    counts: dict[int, int] = {}
    few = []
    for ref in sorted(request.spare):
        device = id(topology.devices[ref])
        count = counts.get(device, 0)
        if busy and str(ref) in busy:
            few.append(ref)
        elif count < most:
            counts[device] = count + 1
            few.append(ref)
    return msgspec.structs.replace(request, spare=tuple(few))


def on_no_host(device: Device) -> Device:
    """What the device has in common with others like it on other hosts."""
    return msgspec.structs.replace(device, host="", group="")


def kinds_of_spare(
    request: PlanRequest,
    topology: Topology,
    kind: Callable[[Device], Device] = on_no_host,
) -> frozenset[object] | None:
    """What the spare workers are, as far as it matters to how soon one instance can be loaded: on
    which hosts they are matters where a copy is, too, and which ones they are where something goes
    there. None: more matters, because ranks are put together, or because one has to read the
    storage of its own host."""
    if request.tp_size > 1 or not request.sources:
        return None
    near = {topology.host_of(worker) for source in request.sources for worker in source.workers}
    used = {use.owner for use in (*request.busy, *request.taken)}
    devices = topology.devices
    distinct = {id(devices[worker]): devices[worker] for worker in request.spare}
    kinds: list[object] = [d if d.host in near else kind(d) for d in distinct.values()]
    kinds += [worker for worker in request.spare if used and str(worker) in used]
    return frozenset(kinds)


def _reach(
    fabric: Fabric, senders: Sequence[WorkerRef], spare: Sequence[WorkerRef]
) -> dict[str, int]:
    """How fast the best of the senders can send to a device under each leaf."""
    topology = fabric.topology
    found: dict[str, int] = {}
    for name in {topology.leaf_of(ref): None for ref in spare}:
        into = topology.leaves.get(name)
        down = UNLIMITED if into is None else into.downlink_bytes_per_s or UNLIMITED
        for worker in senders:
            rate = fabric.nic_bytes_per_s(worker, OUT)
            own = topology.leaf_of(worker)
            if own != name:
                out = topology.leaves.get(own)
                up = UNLIMITED if out is None else out.uplink_bytes_per_s or UNLIMITED
                rate = min(rate, up, down)
            found[name] = max(found.get(name, 0), rate)
    return found


def _cut(request: PlanRequest, fabric: Fabric) -> list[tuple[int, Element]]:
    """Spare workers as instances: inside groups, then hosts (0); the rest as they come (1)."""
    topology = fabric.topology
    size = request.tp_size
    together: dict[str, list[WorkerRef]] = {}
    for ref in sorted(request.spare):
        device = topology.devices[ref]
        together.setdefault(device.group or f"host {device.host}", []).append(ref)
    found: list[tuple[int, Element]] = []
    left: list[WorkerRef] = []
    for members in together.values():
        whole = len(members) // size * size
        found += [(0, tuple(members[i : i + size])) for i in range(0, whole, size)]
        left += members[whole:]
    left.sort()
    whole = len(left) // size * size
    return found + [(1, tuple(left[i : i + size])) for i in range(0, whole, size)]
