"""The cluster as the controller knows it: what members say of themselves, and what was measured
between them.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from livescale.clusters.topology import Device, Host, Leaf, Topology, nic_rates
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.placing import on_no_host
from livescale.control.state.config import ControllerConfig
from livescale.control.state.fleet import Fleet
from livescale.messages.events import LinkMeasured
from livescale.values.chunks import fitting_chunk_bytes
from livescale.values.types import FromWorker, WorkerRef

_UPLINK, _DOWNLINK = "uplink_bytes_per_s", "downlink_bytes_per_s"


class KnownCluster:
    """Devices, hosts and links with their rates, for plans. What a NIC carries is, in this order:
    what is told of it, the best probe, what the NIC says of itself."""

    def __init__(self, config: ControllerConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        leaves: dict[str, Leaf] = {leaf.name: leaf for leaf in config.leaves}
        self.topology = Topology(
            leaves=leaves,
            group_bytes_per_s=config.group_bytes_per_s,
            remote_storage_bytes_per_s=config.remote_storage_bytes_per_s,
        )
        #: grows with everything that becomes known
        self.version = 0
        #: each device that was ever known, once
        self._alike: dict[Device, Device] = {}
        #: of each of these, by identity, what it is on no host in particular
        self._kinds: dict[int, Device] = {}
        #: the best probe over each direction of a NIC whose rate is not told
        self._measured: dict[tuple[WorkerRef, str], int] = {}
        #: the unit that fits each member's NIC, and how many have it
        self._fitting: dict[WorkerRef, int] = {}
        self._fittings: Counter[int] = Counter()
        #: the best probe between two members of a scale-up group
        self._measured_inside: int | None = None

    @property
    def chunk_bytes(self) -> int:
        """The unit of transfers that fits the slowest NIC of all members. What a probe showed does
        not count: it may be a busy moment's."""
        return min(self._fittings, default=self._config.chunk_bytes)

    def worker_joined(self, worker: WorkerRef, device: Device) -> None:
        self.version += 1
        self._fit(worker, device)
        self._know(worker, msgspec.structs.replace(device, **self._rates(device)))

    def agent_joined(self, agent: WorkerRef, host: Host) -> None:
        self.version += 1
        self._fit(agent, host)
        host = msgspec.structs.replace(host, **self._rates(host))
        self.topology.agents[agent] = self._with_memory_rate(host)

    def _fit(self, ref: WorkerRef, owner: Device | Host) -> None:
        self._unfit(ref)
        size = fitting_chunk_bytes(self._config.chunk_bytes, nic_rates(owner))
        self._fitting[ref] = size
        self._fittings[size] += 1

    def _unfit(self, ref: WorkerRef) -> None:
        size = self._fitting.pop(ref, None)
        if size is None:
            return
        self._fittings[size] -= 1
        if not self._fittings[size]:
            del self._fittings[size]

    def _rates(self, owner: Device | Host) -> dict[str, int | None]:
        """Of a NIC as plans reckon with it: of an uplink that is told parameters get their share,
        which the data plane keeps."""
        up, down = nic_rates(owner)
        if owner.uplink_bytes_per_s is not None:
            share = self._config.parameter_share_percent
            up = max(1, owner.uplink_bytes_per_s * share // 100)
        return {_UPLINK: up, _DOWNLINK: down}

    def _with_memory_rate(self, host: Host) -> Host:
        """What was measured inside a host holds for the host's own memory, too."""
        rate = self._measured_inside
        if rate is None or not self._config.assumes_group_rate or not host.has_device_links:
            return host
        return msgspec.structs.replace(host, device_bytes_per_s=rate)

    def member_left(self, ref: WorkerRef) -> None:
        self.version += 1
        self.topology.devices.pop(ref, None)
        self.topology.agents.pop(ref, None)
        self._unfit(ref)
        for name in (_UPLINK, _DOWNLINK):
            self._measured.pop((ref, name), None)

    def link_measured(self, event: LinkMeasured, _now_ns: int) -> bool:
        """Rates that are not told are what was measured; the best probe counts, because other
        traffic can only slow one down. Members of one scale-up group meet without their NICs."""
        self.version += 1
        topology, bytes_per_s = self.topology, event.bytes_per_s
        sender, receiver = event.sender, event.receiver
        if not all(ref in topology.devices or ref in topology.agents for ref in (sender, receiver)):
            return True
        group = topology.group_of(sender)
        if group and group == topology.group_of(receiver):
            self._measured_between(bytes_per_s)
        else:
            out, into = nic_rates(self._place(sender))[0], nic_rates(self._place(receiver))[1]
            self._measured_at(sender, _UPLINK, bytes_per_s, into)
            self._measured_at(receiver, _DOWNLINK, bytes_per_s, out)
        return True

    def _measured_at(self, ref: WorkerRef, name: str, bytes_per_s: int, other: int | None) -> None:
        """One end of a probe. `other` is what the other end's NIC is known to carry: where that is
        less than this NIC says of itself, the probe tells nothing of this one."""
        place = self._place(ref)
        own = place.interface_bytes_per_s
        is_others = own is not None and other is not None and other < own
        if getattr(place, name) is not None or is_others:
            return
        best = self._measured[ref, name] = max(bytes_per_s, self._measured.get((ref, name), 0))
        rate = {name: best if own is None else min(best, own)}
        topology = self.topology
        if ref.is_agent:
            topology.agents[ref] = msgspec.structs.replace(topology.agents[ref], **rate)
        else:
            self._know(ref, msgspec.structs.replace(topology.devices[ref], **rate))

    def _know(self, worker: WorkerRef, device: Device) -> None:
        """Equal devices are one object: plans compare thousands of them."""
        self.topology.devices[worker] = self._alike.setdefault(device, device)

    def _place(self, ref: WorkerRef) -> Device | Host:
        """What the member said of itself."""
        if ref.is_agent:
            return self._fleet.agents[ref.worker].host
        return self._fleet.workers[ref.worker].device

    def _measured_between(self, bytes_per_s: int) -> None:
        """Two members of a group, which is one host's where the rate is assumed."""
        self._measured_inside = max(bytes_per_s, self._measured_inside or 0)
        if self._config.assumes_group_rate or self._config.group_bytes_per_s is None:
            self.topology.group_bytes_per_s = self._measured_inside
        for agent, host in self.topology.agents.items():
            self.topology.agents[agent] = self._with_memory_rate(host)

    def kind(self, device: Device) -> Device:
        """`on_no_host` of a device of the topology, each made once."""
        found = self._kinds.get(id(device))
        if found is None:
            found = on_no_host(device)
            found = self._kinds[id(device)] = self._alike.setdefault(found, found)
        return found

    def link_bytes_per_s(self, sender: WorkerRef, receiver: WorkerRef) -> int | None:
        """What the slowest link on the way carries when nothing else uses it; None: not known."""
        fabric = Fabric(self.topology)
        path = fabric.path(FromWorker(sender), receiver)
        rates = [rate for rate in (fabric.rates[link] for link in path) if rate is not None]
        return min(rates, default=None)

    def __repr__(self) -> str:
        members = len(self.topology.devices), len(self.topology.agents)
        return f"<KnownCluster: {members[0]} devices, {members[1]} hosts>"
