"""Clusters written down in YAML: names, patterns for many alike, rates with units.

Ground floor: text becomes a Topology. Nothing is measured or decided here. Clusters of papers and
providers come with the package, beside this file, and are found by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from livescale.clusters.topology import Device, Host, Leaf, Topology
from livescale.common.settings import (
    ConfigError,
    as_mapping,
    check_keys,
    kind_of,
    read_yaml,
    unknown,
)
from livescale.common.settings import amount_of_bytes as parse_bytes
from livescale.values.types import WorkerRef, agent_ref

MEMBERS_MAX = 1 << 20
"""Devices or hosts in one file; a slip of the pen must not fill the memory."""

_DEVICE_BYTES_MAX = 1 << 44
"""Of a device, whose KV blocks are counted one by one where it is simulated."""

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kKmMgGtT]?)(i?)(bit|bps|B)(?:/s)?")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PATTERN = re.compile(r"\{(n|host|device)(?:([/%])([1-9]\d*))?\}")

_SHIPPED = Path(__file__).parent
_MICRODOLLARS = 1_000_000

_TOP_KEYS = ("hosts", "leaves", "group_rate", "remote_storage")
_HOST_KEYS = (
    *("name", "count", "leaf", "memory", "nic", "uplink", "downlink"),
    *("device_link", "storage", "price", "devices"),
)
_DEVICE_KEYS = (
    *("count", "kind", "leaf", "group", "memory", "arena", "kv"),
    *("nic", "uplink", "downlink", "storage"),
)
_LEAF_KEYS = ("name", "count", "spine", "uplink", "downlink")


@dataclass(slots=True)
class NamedTopology:
    """A topology and what its members are called: hosts by name, devices as "host/number".

    `memory_bytes` is what a device's accelerator has, and `price_microdollars_per_hour` what a host
    costs (by its name), where the file has that.
    """

    topology: Topology = field(default_factory=Topology)
    refs: dict[str, WorkerRef] = field(default_factory=dict)
    memory_bytes: dict[WorkerRef, int] = field(default_factory=dict)
    price_microdollars_per_hour: dict[str, int] = field(default_factory=dict)

    def ref(self, name: str) -> WorkerRef:
        """The member of this name, or with this id ("w3", "h0"). Raises ConfigError."""
        found = self.refs.get(name) or _by_id(name)
        if found is None or not self._has(found):
            raise ConfigError(unknown("no host or device is called", name, self._names()))
        return found

    def _has(self, ref: WorkerRef) -> bool:
        return ref in self.topology.devices or ref in self.topology.agents

    def _names(self) -> list[str]:
        ids = [str(ref).removesuffix(".0") for ref in self.topology.devices]
        return [*self.refs, *ids]


def shipped_clusters() -> list[str]:
    """Names of the clusters that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def find_cluster(name: str) -> Path:
    """The file of a cluster given as a path or as the name of one that comes with the package.

    A path that exists wins. Raises ConfigError that lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    known = shipped_clusters()
    if name not in known:
        problem = unknown("there is no file and no cluster called", name, known)
        raise ConfigError(f"{problem}; there are {', '.join(known)}")
    return _SHIPPED / f"{name}.yaml"


def read_topology(path: Path) -> NamedTopology:
    """The cluster that a file describes. Raises ConfigError with file, place and value."""
    document = read_yaml(path)
    named = NamedTopology()
    topology = named.topology
    check_keys(document, _TOP_KEYS, f"{path}")
    topology.group_bytes_per_s = _rate(document, "group_rate", f"{path}: ")
    topology.remote_storage_bytes_per_s = _rate(document, "remote_storage", f"{path}: ")
    for place, item in _items(document, "leaves", f"{path}: "):
        _add_leaves(topology, item, place)
    for place, item in _items(document, "hosts", f"{path}: "):
        _add_hosts(named, item, place)
    if not topology.devices:
        raise ConfigError(f"{path}: there are no devices: list hosts with devices")
    return named


def parse_rate(text: object, where: str) -> int:
    """Bytes per second in "100Gbit", "1.5 gbit/s", "12.5GB/s"; a bare number is bytes per second.

    Prefixes are decimal (Gi and the like: binary). Raises ConfigError.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        amount, per_byte = Decimal(text), 1
    else:
        found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise ConfigError(f"{where} is {text!r}: write a rate as '100Gbit' or '12.5GB/s'")
        base = 1024 if found[3] else 1000
        amount = Decimal(found[1]) * base ** _POWER[found[2].upper()]
        per_byte = 1 if found[4] == "B" else 8
    rate = int(amount / per_byte)
    if rate < 1:
        raise ConfigError(f"{where} is {text!r}: a rate is at least one byte per second")
    return rate


def rate_text(bytes_per_s: int) -> str:
    """Bytes per second as a person reads the rate of a link: "10 Gbit/s"."""
    bits = bytes_per_s * 8
    for factor, unit in ((10**12, "Tbit"), (10**9, "Gbit"), (10**6, "Mbit"), (10**3, "kbit")):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}/s"
    return f"{bits} bit/s"


# -- helpers, in the order used -------------------------------------------------------------------


def _by_id(name: str) -> WorkerRef | None:
    found = re.fullmatch(r"([wh])(\d{1,9})", name)
    if found is None:
        return None
    return WorkerRef(int(found[2])) if found[1] == "w" else agent_ref(int(found[2]))


def _items(
    given: Mapping[object, object], key: str, where: str
) -> list[tuple[str, dict[object, object]]]:
    """The mappings of a list, each with its place in the file."""
    listed = given.get(key) or []
    if not isinstance(listed, list):
        raise ConfigError(f"{where}{key} must be a list, not {kind_of(listed)}")
    places = [f"{where}{key}[{number}]" for number in range(len(listed))]
    return [(p, as_mapping(item, p)) for p, item in zip(places, listed, strict=True)]


def _add_leaves(topology: Topology, item: dict[object, object], where: str) -> None:
    check_keys(item, _LEAF_KEYS, where)
    up, down = _both(item, "spine", where)
    for n in range(_count(item, where)):
        name = _text(item, "name", where, {"n": n})
        if name in topology.leaves:
            raise ConfigError(f"{where}.name: there are two leaves called '{name}'")
        topology.leaves[name] = Leaf(name, up, down)


def _add_hosts(named: NamedTopology, item: dict[object, object], where: str) -> None:
    check_keys(item, _HOST_KEYS, where)
    topology = named.topology
    up, down = _both(item, "nic", where)
    for n in range(_count(item, where)):
        number = len(topology.agents)
        numbers = {"n": n, "host": number}
        name = _text(item, "name", where, numbers)
        if name in named.refs:
            raise ConfigError(f"{where}.name: there are two hosts called '{name}'")
        named.refs[name] = agent_ref(number)
        if item.get("price") is not None:
            named.price_microdollars_per_hour[name] = _price(item["price"], f"{where}.price")
        first = len(topology.devices)
        position = 0
        for place, devices in _items(item, "devices", f"{where}."):
            position = _add_devices(named, devices, place, name, numbers, position)
        leaf = _leaf(topology, item, where, numbers, default="")
        if not leaf and len(topology.devices) > first:
            leaf = topology.devices[WorkerRef(first)].leaf
        topology.agents[agent_ref(number)] = Host(
            name,
            leaf,
            _bytes(item, "memory", where, 0),
            up,
            down,
            _rate(item, "device_link", f"{where}."),
            _rate(item, "storage", f"{where}."),
        )


def _add_devices(
    named: NamedTopology,
    item: dict[object, object],
    where: str,
    host: str,
    numbers: dict[str, int],
    position: int,
) -> int:
    """Returns the position of the host's next device."""
    check_keys(item, _DEVICE_KEYS, where)
    devices = named.topology.devices
    up, down = _both(item, "nic", where)
    memory_bytes = _memory(item, where)
    for n in range(_count(item, where)):
        at = {**numbers, "n": n, "device": position}
        if len(devices) >= MEMBERS_MAX:
            raise ConfigError(f"{where}: there are more than {MEMBERS_MAX} devices")
        ref = WorkerRef(len(devices))
        named.refs[f"{host}/{position}"] = ref
        if memory_bytes is not None:
            named.memory_bytes[ref] = memory_bytes
        devices[ref] = Device(
            kind=_text(item, "kind", where, at, default="device"),
            host=host,
            leaf=_leaf(named.topology, item, where, at, default="leaf"),
            arena_bytes=_device_bytes(item, "arena", where, 1 << 40),
            kv_bytes=_device_bytes(item, "kv", where, 0),
            uplink_bytes_per_s=up,
            downlink_bytes_per_s=down,
            group=_text(item, "group", where, at, default=""),
            storage_bytes_per_s=_rate(item, "storage", f"{where}."),
        )
        position += 1
    return position


def _memory(item: Mapping[object, object], where: str) -> int | None:
    """The accelerator's memory, which holds parameters and KV cache if the file gives them."""
    if item.get("memory") is None:
        return None
    memory_bytes = _device_bytes(item, "memory", where, 0)
    if not memory_bytes:
        raise ConfigError(f"{where}.memory is 0: leave out what is not known")
    used = _bytes(item, "arena", where, 0) + _bytes(item, "kv", where, 0)
    if used > memory_bytes:
        raise ConfigError(
            f"{where}: arena and kv take {used} bytes, the device's memory has {memory_bytes}"
        )
    return memory_bytes


def _device_bytes(item: Mapping[object, object], key: str, where: str, default: int) -> int:
    amount = _bytes(item, key, where, default)
    if amount > _DEVICE_BYTES_MAX:
        most = f"a device has at most {_DEVICE_BYTES_MAX}"
        raise ConfigError(f"{where}.{key} is {amount} bytes: {most}")
    return amount


def _price(value: object, where: str) -> int:
    """Millionths of a dollar, exactly, from dollars as YAML gives them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    amount = Decimal(repr(value)) * _MICRODOLLARS if is_number else Decimal("nan")
    if not amount.is_finite() or amount < 0 or amount != amount.to_integral_value():
        raise ConfigError(f"{where} is {kind_of(value)}: write dollars per hour as 40.44")
    return int(amount)


def _count(item: Mapping[object, object], where: str) -> int:
    count = item.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MEMBERS_MAX:
        raise ConfigError(f"{where}.count is {kind_of(count)}, not a number of 1 to {MEMBERS_MAX}")
    return count


def _text(
    item: Mapping[object, object],
    key: str,
    where: str,
    numbers: Mapping[str, int],
    default: str | None = None,
) -> str:
    """Text with its patterns filled in: {n} counts within the entry, {host} and {device} all
    hosts of the file and the devices of the host; {host/4} and {host%4} are quotient and rest."""
    text = item.get(key, default)
    if not isinstance(text, str) or (default is None and not text):
        raise ConfigError(f"{where}.{key} must be a name, not {kind_of(text)}")

    def number(found: re.Match[str]) -> str:
        if found[1] not in numbers:
            raise ConfigError(f"{where}.{key} is '{text}': {{{found[1]}}} is not known here")
        value, by = numbers[found[1]], int(found[3] or 1)
        return str(value % by if found[2] == "%" else value // by)

    filled = _PATTERN.sub(number, text)
    if "{" in filled or "}" in filled:
        known = "{n}, {host}, {device}, {host/4} or {host%4}"
        raise ConfigError(f"{where}.{key} is '{text}': a pattern is one of {known}")
    return filled


def _leaf(
    topology: Topology,
    item: Mapping[object, object],
    where: str,
    numbers: Mapping[str, int],
    default: str,
) -> str:
    """One that is named is among the file's leaves, if it lists any: no other has their limits."""
    leaf = _text(item, "leaf", where, numbers, default)
    if topology.leaves and leaf and "leaf" in item and leaf not in topology.leaves:
        raise ConfigError(unknown(f"{where}.leaf: there is no leaf", leaf, topology.leaves))
    return leaf


def _both(item: Mapping[object, object], both: str, where: str) -> tuple[int | None, int | None]:
    """Rates of the two directions: `both`, or `uplink` and `downlink` apart."""
    if both in item and ("uplink" in item or "downlink" in item):
        raise ConfigError(f"{where}: give {both}, or uplink and downlink")
    if both in item:
        rate = _rate(item, both, f"{where}.")
        return rate, rate
    return _rate(item, "uplink", f"{where}."), _rate(item, "downlink", f"{where}.")


def _rate(item: Mapping[object, object], key: str, where: str) -> int | None:
    value = item.get(key)
    return None if value is None else parse_rate(value, f"{where}{key}")


def _bytes(item: Mapping[object, object], key: str, where: str, default: int) -> int:
    value = item.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        value = str(value)
    if not isinstance(value, str):
        raise ConfigError(f"{where}.{key} is {kind_of(value)}: write bytes as '80GiB'")
    return parse_bytes(value, f"{where}.{key}")
