"""What a machine says of itself: its network interfaces, what their links carry, its NUMA nodes,
and how its GPUs are joined (`gpu_links.py`).

Read from the files of the system's `root` (/sys on Linux). What a system does not tell is not
known, and the reason is said.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from livescale.clusters.files import rate_text
from livescale.runtime.supervisor.gpu_links import (
    PROGRAM,
    Gpu,
    GpuLinksError,
    nvlink_groups,
    read_gpus,
)
from livescale.values.types import Value

SYSTEM = Path("/sys")
_BYTES_PER_MBIT = 125_000
# Drivers that do not know write -1, also as an unsigned number.
_MBIT_MAX = 100_000_000
_KIB = 1024


class OsAddresses(Value, frozen=True):
    """Of one interface: its hardware address (empty: none) and the IP addresses."""

    hardware: str = ""
    internet: tuple[str, ...] = ()


class Interface(Value, frozen=True):
    """A network interface. Its link carries `bytes_per_s` each way (None: not known); `source` is
    the file that says so, or why it is not known. What else is None is not told."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool | None = None
    mtu_bytes: int | None = None
    bytes_per_s: int | None = None
    source: str = ""
    numa_node: int | None = None

    @property
    def link(self) -> str:
        """In words: "eth0: 10 Gbit/s each way (/sys/class/net/eth0/speed)"."""
        if self.bytes_per_s is None:
            return f"{self.name}: rate not known ({self.source})"
        return f"{self.name}: {rate_text(self.bytes_per_s)} each way ({self.source})"


class NumaNode(Value, frozen=True):
    """Processors that share a memory: `cpus` as the system lists them, such as "0-15,32-47"."""

    number: int
    cpus: str
    memory_bytes: int | None = None


class Machine(Value, frozen=True):
    """All of it. Where there are no `gpus`, `gpus_unknown` says why. Each of `nvlink_groups` are
    the names of GPUs that NVLink joins."""

    interfaces: tuple[Interface, ...]
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    nvlink_groups: tuple[tuple[str, ...], ...] = ()
    gpus_unknown: str = ""


def read_machine(
    root: Path = SYSTEM,
    addresses: Mapping[str, OsAddresses] | None = None,
    gpu_program: str = PROGRAM,
) -> Machine:
    """This machine, as far as it tells. Blocks while `gpu_program` answers."""
    interfaces, nodes = read_interfaces(root, addresses), read_numa_nodes(root)
    try:
        gpus = read_gpus(gpu_program)
    except GpuLinksError as error:
        return Machine(interfaces, nodes, gpus_unknown=str(error))
    return Machine(interfaces, nodes, gpus, nvlink_groups(gpus))


def os_addresses() -> dict[str, OsAddresses]:
    """Of all interfaces of this process's network, by name."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        hardware = [e.address for e in entries if e.family == psutil.AF_LINK]
        internet = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        found[name] = OsAddresses("".join(hardware[:1]), tuple(internet))
    return found


def read_interfaces(
    root: Path = SYSTEM, addresses: Mapping[str, OsAddresses] | None = None
) -> tuple[Interface, ...]:
    """All of them by name. `addresses` are those of the network (None: this process's)."""
    known = os_addresses() if addresses is None else addresses
    return tuple(_interface(root / "class" / "net", name, known[name]) for name in sorted(known))


def read_numa_nodes(root: Path = SYSTEM) -> tuple[NumaNode, ...]:
    """In the order of their numbers; none where the system has no such thing."""
    places = (root / "devices" / "system" / "node").glob("node[0-9]*")
    nodes = sorted((int(place.name.removeprefix("node")), place) for place in places)
    return tuple(
        NumaNode(number, _text(place / "cpulist") or "", _node_bytes(place))
        for number, place in nodes
    )


def interface_at(
    address: str, root: Path = SYSTEM, addresses: Mapping[str, OsAddresses] | None = None
) -> Interface | None:
    """The interface that has this IP address; None if none has."""
    wanted = ipaddress.ip_address(address)
    for interface in read_interfaces(root, addresses):
        if wanted in map(ipaddress.ip_address, interface.addresses):
            return interface
    return None


# -- helpers, in the order used -------------------------------------------------------------------


def _interface(net: Path, name: str, addresses: OsAddresses) -> Interface:
    place = net / name
    if not _is_of_this_network(place, addresses):
        return Interface(name, addresses.internet, source=f"{net} does not tell")
    bytes_per_s, source = _link(place)
    state = _text(place / "operstate")
    return Interface(
        name,
        addresses.internet,
        # Loopback interfaces have no state that a cable could change.
        is_up=None if state is None else state in ("up", "unknown"),
        mtu_bytes=_number(place / "mtu"),
        bytes_per_s=bytes_per_s,
        source=source,
        numa_node=_number(place / "device" / "numa_node"),
    )


def _is_of_this_network(place: Path, addresses: OsAddresses) -> bool:
    """In a network namespace the files may still be those of the network outside, which may have
    an interface of the same name."""
    own, known = _text(place / "address"), addresses.hardware.lower()
    # Of long addresses (InfiniBand's) not every side tells all.
    return own is not None and (own.lower().startswith(known) or known.startswith(own.lower()))


def _link(place: Path) -> tuple[int | None, str]:
    """What it carries, and where that is from. A bond has a speed of its own; a VLAN or a bridge is
    as fast as the fastest link below it. Others (veth, tun) have no link: their speed is a made-up
    one."""
    if (place / "device").exists() or (place / "bonding").is_dir():
        speed = place / "speed"
        mbit = _number(speed)
        if mbit is None or mbit > _MBIT_MAX:
            return None, f"{speed} does not say"
        return mbit * _BYTES_PER_MBIT, str(speed)
    below = sorted(entry.name.removeprefix("lower_") for entry in place.glob("lower_*"))
    found = [_link(place.parent / name) for name in below]
    known = [(rate, source) for rate, source in found if rate is not None]
    if known:
        return max(known)
    return (None, found[0][1]) if found else (None, "virtual, no link of its own")


def _number(path: Path) -> int | None:
    """What a file says, if that is a number that is not negative: -1 means not known."""
    text = _text(path)
    return int(text) if text is not None and re.fullmatch(r"\d{1,18}", text) else None


def _text(path: Path) -> str | None:
    """None if it cannot be read: drivers refuse to tell a link's speed while it is down."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _node_bytes(place: Path) -> int | None:
    found = re.search(r"MemTotal: +(\d+) kB", _text(place / "meminfo") or "")
    return None if found is None else int(found[1]) * _KIB
