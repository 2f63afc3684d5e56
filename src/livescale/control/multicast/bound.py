"""How fast a plan could possibly be: the bytes divided by the slowest link that all must cross.

No feeds and no strategy: only which bytes must get where. Predictions are compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from livescale.control.multicast.fabric import IN, OUT, UNLIMITED, Fabric
from livescale.control.multicast.placing import Element, by_group
from livescale.values.types import Value, WorkerRef
from livescale.values.units import NS_PER_S


class Bound(Value, frozen=True):
    """No plan is faster than `ns`, because of the link or links that `why` names."""

    ns: int
    why: str


def lower_bound(
    sources: Sequence[Element], targets: Sequence[Element], size_bytes: int, fabric: Fabric
) -> Bound | None:
    """The bound for bringing `size_bytes` per rank from copies to all targets; None if no rate
    that matters is known, or if there is no copy (storage is not considered).

    Every byte enters each scale-up group (or device) once, leaves the sources once, and enters
    every leaf that has none of them once.
    """
    if not sources or not targets:
        return None
    found: list[Bound] = []
    for rank in range(len(targets[0])):
        holders = [source[rank] for source in sources]
        receivers = [target[rank] for target in targets]
        found += _into_groups(holders, receivers, size_bytes, fabric)
        found += _out_of_sources(holders, receivers, size_bytes, fabric)
    found += _into_leaves(sources, targets, size_bytes, fabric)
    return max(found, key=lambda bound: bound.ns, default=None)


# -- helpers, in the order used -------------------------------------------------------------------


def _into_groups(
    holders: list[WorkerRef], receivers: list[WorkerRef], size_bytes: int, fabric: Fabric
) -> list[Bound]:
    topology = fabric.topology
    inside = {topology.group_of(holder) for holder in holders} - {""}
    found = []
    for group, members in by_group(receivers, topology.group_of):
        if group in inside or any(_is_beside(holders, member, fabric) for member in members):
            found += [bound for member in members for bound in _into(member, size_bytes, fabric)]
            continue
        who = f"{members[0]} NIC in" if len(members) == 1 else f"NICs into {group}"
        found += _bound(size_bytes, [fabric.nic_bytes_per_s(m, IN) for m in members], who)
    return found


def _into(receiver: WorkerRef, size_bytes: int, fabric: Fabric) -> list[Bound]:
    """By all ways at once: NIC, scale-up group, the host's own link."""
    topology = fabric.topology
    rates = [fabric.nic_bytes_per_s(receiver, IN)]
    if topology.group_of(receiver):
        rates.append(topology.group_bytes_per_s or UNLIMITED)
    agent = fabric.agent_of(topology.host_of(receiver))
    if agent is not None and topology.are_linked(agent, receiver):
        rates.append(topology.agents[agent].device_bytes_per_s or UNLIMITED)
    return _bound(size_bytes, rates, f"all links into {receiver}")


def _out_of_sources(
    holders: list[WorkerRef], receivers: list[WorkerRef], size_bytes: int, fabric: Fabric
) -> list[Bound]:
    """Receivers that a copy reaches without its NIC can send with theirs."""
    topology = fabric.topology
    inside = {topology.group_of(holder) for holder in holders} - {""}
    joined = [
        receiver
        for receiver in receivers
        if topology.group_of(receiver) in inside or _is_beside(holders, receiver, fabric)
    ]
    if len(joined) == len(receivers):
        return []
    exits = [*dict.fromkeys(holders), *joined]
    rates = [fabric.nic_bytes_per_s(worker, OUT) for worker in exits]
    who = f"{exits[0]} NIC out" if len(exits) == 1 else "NICs out of the sources"
    return _bound(size_bytes, rates, who)


def _into_leaves(
    sources: Sequence[Element], targets: Sequence[Element], size_bytes: int, fabric: Fabric
) -> list[Bound]:
    """Leaves whose targets can only be reached over the spine."""
    topology = fabric.topology
    spread: dict[str, dict[str, None]] = {}
    for element in [*sources, *targets]:
        for worker in element:
            joint = topology.group_of(worker) or f"host {topology.host_of(worker)}"
            spread.setdefault(joint, {})[topology.leaf_of(worker)] = None
    reached = {leaf for leaves in spread.values() if len(leaves) > 1 for leaf in leaves}
    ranks_there: dict[str, dict[int, None]] = {}
    for target in targets:
        for rank, worker in enumerate(target):
            ranks_there.setdefault(topology.leaf_of(worker), {})[rank] = None
    found = []
    for name, ranks in sorted(ranks_there.items()):
        leaf = topology.leaves.get(name)
        if leaf is None or name in reached or leaf.downlink_bytes_per_s is None:
            continue
        missing = [r for r in ranks if all(topology.leaf_of(s[r]) != name for s in sources)]
        rate = leaf.downlink_bytes_per_s
        found += _bound(size_bytes * len(missing), [rate], f"spine into {name}")
    return found


def _is_beside(holders: Iterable[WorkerRef], receiver: WorkerRef, fabric: Fabric) -> bool:
    """A copy in the memory of the receiver's host, or the receiver is the memory of a copy's, with
    a link of their own."""
    return any(fabric.topology.are_linked(holder, receiver) for holder in holders)


def _bound(size_bytes: int, rates: list[int], why: str) -> list[Bound]:
    if not size_bytes or UNLIMITED in rates:
        return []
    return [Bound(size_bytes * NS_PER_S // sum(rates), why)]
