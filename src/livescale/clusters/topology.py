"""The cluster's shape: devices, the hosts they sit in and the leaf switches they hang on.

Ground floor: values only. Rates are bytes per second; None means not limited and not known. Every
link has two directions that do not disturb each other.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from livescale.values.types import Value, WorkerRef


class Device(Value, frozen=True):
    """What one worker owns: a device with a NIC on a leaf switch, and its memory.

    `kind` names the accelerator model ("cpu", "h200"); capacities are measured per kind. Devices
    of one `group` are joined by a scale-up network (NVLink and its like); an empty name is no
    group. In a rail-optimized fabric the devices of a host hang on different leaves.
    `storage_bytes_per_s` is the most that one device gets of its host's storage, which has the
    models' files if it `reads_files`. `interface_bytes_per_s` is what the NIC itself says of its
    link, which counts each way where no rate is told, until a measurement shows less.
    """

    kind: str
    host: str
    leaf: str
    arena_bytes: int
    kv_bytes: int
    uplink_bytes_per_s: int | None = None
    downlink_bytes_per_s: int | None = None
    group: str = ""
    storage_bytes_per_s: int | None = None
    reads_files: bool = True
    interface_bytes_per_s: int | None = None


class Host(Value, frozen=True):
    """A machine: memory for host copies, and the ways to and from it.

    `memory_bytes` is what host copies may take. The NIC of the host itself carries host copies to
    and from other hosts; `device_bytes_per_s` is each device's own link to host memory (PCIe),
    `storage_bytes_per_s` the local storage. Where it has no such links (`has_device_links`), bytes
    between host memory and the host's own devices cross the NICs of both. Only a host that
    `reads_files` finds the models' files where the others do. `interface_bytes_per_s` is as for a
    device. A guest `wants` a model: its memory is for a copy of that one alone (empty: for what the
    pool puts there).
    """

    name: str
    leaf: str
    memory_bytes: int
    uplink_bytes_per_s: int | None = None
    downlink_bytes_per_s: int | None = None
    device_bytes_per_s: int | None = None
    storage_bytes_per_s: int | None = None
    has_device_links: bool = True
    reads_files: bool = True
    interface_bytes_per_s: int | None = None
    wants: str = ""

    @property
    def is_guest(self) -> bool:
        return bool(self.wants)


class Leaf(Value, frozen=True):
    """A leaf switch; its rates are those of its links to the spine (None: non-blocking)."""

    name: str
    uplink_bytes_per_s: int | None = None
    downlink_bytes_per_s: int | None = None


class LinkKind(enum.StrEnum):
    """Links of a cluster. All are full duplex but storage."""

    NIC = "nic"  # a device's, or a host's own
    SPINE = "spine"  # between a leaf and the spine
    GROUP = "group"  # a device's port in its scale-up group
    HOST = "host"  # between a device and its host's memory
    STORAGE = "storage"  # a host's local storage
    REMOTE_STORAGE = "remote_storage"  # shared by all hosts


class Direction(enum.StrEnum):
    """Seen from the device, host or leaf that the link belongs to."""

    OUT = "out"
    IN = "in"


class LinkUse(Value, frozen=True, order=True):
    """One direction of one link. `owner` is a worker or agent ("w3.0"), a leaf or a host's name."""

    kind: LinkKind
    owner: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.owner} {self.kind} {self.direction}"


def nic_rates(owner: Device | Host) -> tuple[int | None, int | None]:
    """What its NIC carries out and in: as it is told, else as the NIC itself says."""
    up, down, own = (
        owner.uplink_bytes_per_s,
        owner.downlink_bytes_per_s,
        owner.interface_bytes_per_s,
    )
    return own if up is None else up, own if down is None else down


@dataclass(slots=True)
class Topology:
    """The cluster as far as it is known. Members come and go; what a plan needs is read from it.

    `devices` and `agents` are keyed by who owns them: a worker its device, an agent its host.
    Leaves that are not listed are non-blocking.
    """

    devices: dict[WorkerRef, Device] = field(default_factory=dict)
    agents: dict[WorkerRef, Host] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    group_bytes_per_s: int | None = None
    remote_storage_bytes_per_s: int | None = None

    def host_of(self, ref: WorkerRef) -> str:
        """The host that a worker's device or an agent is on. KeyError for a stranger."""
        return self.agents[ref].name if ref.is_agent else self.devices[ref].host

    def leaf_of(self, ref: WorkerRef) -> str:
        return self.agents[ref].leaf if ref.is_agent else self.devices[ref].leaf

    def group_of(self, ref: WorkerRef) -> str:
        """The scale-up group of a worker's device; empty if it has none."""
        return "" if ref.is_agent else self.devices[ref].group

    def reads_files(self, ref: WorkerRef) -> bool:
        """The member can load a model from its files."""
        return self.agents[ref].reads_files if ref.is_agent else self.devices[ref].reads_files

    def are_linked(self, ref: WorkerRef, other: WorkerRef) -> bool:
        """One is the memory of a host, the other a device with a link of its own to it."""
        if ref.is_agent == other.is_agent or self.host_of(ref) != self.host_of(other):
            return False
        return self.agents[ref if ref.is_agent else other].has_device_links

    def nic_bytes_per_s(self, ref: WorkerRef, direction: Direction) -> int | None:
        owner = self.agents[ref] if ref.is_agent else self.devices[ref]
        if direction is Direction.OUT:
            return owner.uplink_bytes_per_s
        return owner.downlink_bytes_per_s
