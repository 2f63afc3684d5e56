"""Where a pool's processes run: hosts, what is on them, and how a process is started there.

Values only. The hosts of a pool may all be this machine, or network namespaces of it: then a
`prefix` of words starts a process in one, and every address is that of a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from livescale.clusters.topology import Device, Host, Leaf, Topology, nic_rates
from livescale.common.addresses import parse_address
from livescale.common.settings import size_text
from livescale.config.pool import PoolConfig
from livescale.values.types import Value, WorkerRef

LOOPBACK = "127.0.0.1"
HEAD = "head"
"""The name of the pool's own host where others may join."""
# For predictions until a probe tells more: what one copy between two processes was seen to carry on
# small machines.
_SHARED_MEMORY_BYTES_PER_S = 2_000_000_000


class DeviceSeat(Value, frozen=True):
    """A device and the address of its link: what its worker's data plane binds to."""

    device: Device
    address: str = LOOPBACK


class HostSeat(Value, frozen=True):
    """A host: its devices, the address of its own link and one that gateways can reach.

    `memory_touched_bytes` of the host's memory for copies are taken at the start.

    `prefix` are the words in front of a command that is to run there. A host whose
    `memory_bytes` is 0 gets no agent.
    """

    host: Host
    devices: tuple[DeviceSeat, ...]
    address: str = LOOPBACK
    control_address: str = LOOPBACK
    prefix: tuple[str, ...] = ()
    memory_touched_bytes: int = 0


class PoolLayout(Value, frozen=True):
    """All hosts of a pool. Controller and gateways run where `control_prefix` says.

    Worker n is the n-th device, counted through the hosts; agent k is that of the k-th host.
    With `has_links` the network itself keeps the rates that are told; else data planes do. With
    `assumes_group_rate` the rates inside a host are a guess, and what is measured replaces them.
    """

    hosts: tuple[HostSeat, ...]
    leaves: tuple[Leaf, ...] = ()
    group_bytes_per_s: int | None = None
    remote_storage_bytes_per_s: int | None = None
    control_address: str = LOOPBACK
    control_prefix: tuple[str, ...] = ()
    has_links: bool = False
    assumes_group_rate: bool = False

    def __str__(self) -> str:
        words = [f"{len(self.seats)} worker{'s' if len(self.seats) != 1 else ''}"]
        if len(self.hosts) > 1:
            words.append(f"on {len(self.hosts)} hosts")
        if self.agents:
            taken = sum(seat.memory_touched_bytes for _, seat in self.agents)
            words.append(f"with {size_text(taken)} for host copies")
            memory = sum(seat.host.memory_bytes for _, seat in self.agents)
            if memory > taken:
                words.append(f"(up to {size_text(memory)})")
        return " ".join(words)

    @property
    def rates_bytes_per_s(self) -> list[int | None]:
        """Of all NICs, both ways (None: not known)."""
        nics: list[Device | Host] = [
            *(seat.device for _, seat in self.seats),
            *(seat.host for seat in self.hosts),
        ]
        return [rate for nic in nics for rate in nic_rates(nic)]

    @property
    def seats(self) -> tuple[tuple[HostSeat, DeviceSeat], ...]:
        """Every device with its host, by worker number."""
        return tuple((host, seat) for host in self.hosts for seat in host.devices)

    @property
    def agents(self) -> tuple[tuple[int, HostSeat], ...]:
        """The hosts that get an agent, with their numbers."""
        return tuple((n, seat) for n, seat in enumerate(self.hosts) if seat.host.memory_bytes > 0)


def local_layout(config: PoolConfig, interface_bytes_per_s: int | None = None) -> PoolLayout:
    """This machine as `hosts` hosts with `workers` devices of equal links between them. Where
    others may join, all of them are reached at the address for that, whose interface says what its
    link carries."""
    counts = [config.workers // config.hosts] * config.hosts
    for number in range(config.workers % config.hosts):
        counts[number] += 1
    own = "localhost" if config.listen is None else HEAD
    names = [own] if config.hosts == 1 else [f"host{n}" for n in range(config.hosts)]
    hosts = [
        _local_host(config, name, count, interface_bytes_per_s)
        for name, count in zip(names, counts, strict=True)
    ]
    address = LOOPBACK if config.listen is None else parse_address(config.listen, "listen")[0]
    return PoolLayout(
        tuple(at_address(host, address) for host in hosts),
        group_bytes_per_s=_SHARED_MEMORY_BYTES_PER_S if shares_memory(config) else None,
        control_address=address,
        assumes_group_rate=shares_memory(config),
    )


def joined_seat(
    config: PoolConfig,
    name: str,
    address: str,
    *,
    reads_files: bool = False,
    rack: str = "",
    interface_bytes_per_s: int | None = None,
) -> HostSeat:
    """This machine as a host of a pool that is elsewhere: all it has is reached at an address,
    whose interface says what its link carries. It has the models' files where the head has them
    only if it `reads_files`. It hangs on the leaf switch `rack` (empty: on the one that the pool
    gives it)."""
    seat = _local_host(config, name, config.workers, interface_bytes_per_s)
    seat = at_address(seat, address)
    replace = msgspec.structs.replace
    own = {"reads_files": reads_files, "leaf": rack or seat.host.leaf}
    devices = [replace(one, device=replace(one.device, **own)) for one in seat.devices]
    host = replace(seat.host, **own)
    return replace(seat, host=host, devices=tuple(devices))


def at_address(host: HostSeat, address: str) -> HostSeat:
    """The host with everything at one address."""
    return msgspec.structs.replace(
        host,
        devices=tuple(msgspec.structs.replace(seat, address=address) for seat in host.devices),
        address=address,
        control_address=address,
    )


def shares_memory(config: PoolConfig) -> bool:
    """Processes of one host copy from each other's memory, which no NIC's rate limits."""
    return config.carrier != "tcp"


def _local_host(
    config: PoolConfig, name: str, devices: int, interface_bytes_per_s: int | None
) -> HostSeat:
    leaf = config.rack or "leaf0"
    device = Device(
        kind=config.device,
        host=name,
        leaf=leaf,
        arena_bytes=config.arena_bytes,
        kv_bytes=config.kv_bytes,
        uplink_bytes_per_s=config.uplink_bytes_per_s,
        downlink_bytes_per_s=config.downlink_bytes_per_s,
        # Shared memory is to processes of one host what a scale-up network is to GPUs.
        group=name if shares_memory(config) else "",
        interface_bytes_per_s=interface_bytes_per_s,
    )
    host = Host(
        name=name,
        leaf=leaf,
        memory_bytes=0,
        uplink_bytes_per_s=config.uplink_bytes_per_s,
        downlink_bytes_per_s=config.downlink_bytes_per_s,
        device_bytes_per_s=_SHARED_MEMORY_BYTES_PER_S if shares_memory(config) else None,
        storage_bytes_per_s=config.storage_bytes_per_s,
        has_device_links=shares_memory(config),
        interface_bytes_per_s=interface_bytes_per_s,
    )
    return HostSeat(host, (DeviceSeat(device),) * devices)


class _Place(Protocol):
    @property
    def control_address(self) -> str: ...


class NamespaceNetwork(Protocol):
    """A network whose hosts are namespaces of this machine, as a testbed makes it."""

    @property
    def control_address(self) -> str:
        """Of the controller, in the namespace that is called "control"."""

    def inside(self, host: str) -> Sequence[str]:
        """The words in front of a command that is to run in this host (or "control")."""

    def address_of(self, ref: WorkerRef) -> str:
        """Of the link of a worker's device, or of an agent's host."""

    def host_of(self, ref: WorkerRef) -> _Place:
        """The host of a worker or an agent."""


def layout_of(
    topology: Topology, config: PoolConfig, network: NamespaceNetwork | None = None
) -> PoolLayout:
    """All hosts of a topology: in namespaces, or all as this machine, with data planes that keep
    the rates. Kind and sizes of the devices are the configuration's."""
    devices: dict[str, list[DeviceSeat]] = {host.name: [] for host in topology.agents.values()}
    for ref in sorted(topology.devices):
        own = topology.devices[ref]
        device = msgspec.structs.replace(
            own,
            kind=config.device,
            arena_bytes=config.arena_bytes,
            kv_bytes=config.kv_bytes,
            group=own.group if shares_memory(config) else "",
        )
        address = LOOPBACK if network is None else network.address_of(ref)
        devices[own.host].append(DeviceSeat(device, address))
    layout = PoolLayout(
        hosts=tuple(
            _host_seat(ref, _host(topology.agents[ref], config), devices, network)
            for ref in sorted(topology.agents)
        ),
        leaves=tuple(topology.leaves[name] for name in sorted(topology.leaves)),
        group_bytes_per_s=topology.group_bytes_per_s,
        remote_storage_bytes_per_s=topology.remote_storage_bytes_per_s,
    )
    if network is None:
        return layout
    return msgspec.structs.replace(
        layout,
        control_address=network.control_address,
        control_prefix=tuple(network.inside("control")),
        has_links=True,
    )


def _host(host: Host, config: PoolConfig) -> Host:
    own = host.storage_bytes_per_s
    return msgspec.structs.replace(
        host,
        storage_bytes_per_s=config.storage_bytes_per_s if own is None else own,
        has_device_links=shares_memory(config),
    )


def _host_seat(
    ref: WorkerRef,
    host: Host,
    devices: dict[str, list[DeviceSeat]],
    network: NamespaceNetwork | None,
) -> HostSeat:
    if network is None:
        return HostSeat(host, tuple(devices[host.name]))
    return HostSeat(
        host,
        tuple(devices[host.name]),
        address=network.address_of(ref),
        control_address=network.host_of(ref).control_address,
        prefix=tuple(network.inside(host.name)),
    )
