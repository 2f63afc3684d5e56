"""The testbed: hosts as network namespaces, switches as bridges, links as shaped veth pairs.

Everything is made here, changed here and removed here; nothing is ever put into the machine's own
network. What runs in the hosts does not concern it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from livescale.clusters.topology import Device, Host, Leaf, Topology
from livescale.lab.testbed.commands import (
    PREFIX,
    batch,
    check_machine,
    inside,
    own_mark,
    remove,
    run,
)
from livescale.lab.testbed.spec import SHUT, NetworkSpec, TestbedError, goodput_bytes_per_s, shaping
from livescale.values.types import WorkerRef, agent_ref

CONTROL = "control"
NIC = "nic"
"""The name of a host's own link, which is no device's."""

_SWITCHES = "switches"
_DATA_NET, _CONTROL_NET = "10.10", "10.20"
_CONTROL_ADDRESS = f"{_CONTROL_NET}.255.1"
_TABLES_FROM = 100
# One sender's idle link must start at full rate again, and one run must not teach the next one;
# a host with several links answers on each for that link only.
_SYSCTLS = {
    "net/ipv6/conf/all/disable_ipv6": 1,
    "net/ipv6/conf/default/disable_ipv6": 1,
    "net/ipv4/tcp_slow_start_after_idle": 0,
    "net/ipv4/tcp_no_metrics_save": 1,
    "net/ipv4/conf/all/arp_ignore": 1,
    "net/ipv4/conf/all/arp_announce": 2,
    "net/ipv4/conf/all/rp_filter": 0,
    "net/ipv4/conf/default/rp_filter": 0,
}
# The default of sockets that choose none. A kernel may keep cubic from namespaces; bbr, the default
# of some, shares such links badly.
_CONGESTION = "net/ipv4/tcp_congestion_control"
_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class BedLink:
    """A link of a host: `name` inside the host, `port` on the switch."""

    name: str
    port: str
    address: str


@dataclass(frozen=True, slots=True)
class BedHost:
    """One emulated host. Its processes run in `namespace` and share the machine's files.

    `devices` are the links of its devices, `nic` is the one of the host itself; `control_address`
    is on a network of its own that has no limit, so that transfers never starve control.
    """

    name: str
    number: int
    leaf: str
    namespace: str
    devices: tuple[BedLink, ...]
    nic: BedLink
    control_address: str


class Testbed:
    """A network as `spec` says, while the context is entered.

    Names carry the process that made it, so several can exist at once; what a killed process left
    is removed by `remove_leftovers`. Leaving the context ends every process in its hosts.
    Addresses are reachable from inside only. A socket that is to use a device's link must be
    bound to the device's address, as listener and as sender.
    """

    __test__ = False  # pytest takes every class Test… for one of its own

    def __init__(self, spec: NetworkSpec) -> None:
        self.spec = spec
        self.name = f"{PREFIX}{own_mark()}-{next(_serials)}"
        self.hosts = tuple(self._host(number) for number in range(spec.hosts))
        self.control_namespace = f"{self.name}-{CONTROL}"
        self.control_address = _CONTROL_ADDRESS
        self._switches = f"{self.name}-{_SWITCHES}"

    def __enter__(self) -> Self:
        check_machine()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing of the testbed is left. Idempotent; Ctrl-C waits until it is done."""
        interrupted = None
        for _ in range(2):
            try:
                remove(self.name)
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def host(self, name: str) -> BedHost:
        """The host called "h0", "h1", … Raises TestbedError for another name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TestbedError(f"{name!r} is no host of {self}")

    def inside(self, host: str) -> list[str]:
        """The words in front of a command that is to run in a host, or in "control"."""
        namespace = self.control_namespace if host == CONTROL else self.host(host).namespace
        return inside(namespace)

    def exec(self, host: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a process in a host, or in "control". `popen` goes to `subprocess.Popen`."""
        return subprocess.Popen([*self.inside(host), *argv], **popen)

    def cut(self, host: str, device: int | None = 0) -> None:
        """The link of a device (None: of the host itself) carries nothing in both directions."""
        batch("ip", self._switches, [f"link set {self._link(host, device).port} down"])

    def restore(self, host: str, device: int | None = 0) -> None:
        """The link carries again, within a second."""
        batch("ip", self._switches, [f"link set {self._link(host, device).port} up"])

    def isolate(self, host: str) -> None:
        """No link of the host carries anything, that of its control network included."""
        batch("ip", self._switches, [f"link set {port} down" for port in self._ports(host)])

    def rejoin(self, host: str) -> None:
        """All links of the host carry again, within a second."""
        batch("ip", self._switches, [f"link set {port} up" for port in self._ports(host)])

    def set_rate(self, host: str, device: int | None, bits_per_s: int) -> None:
        """Both directions of a link have another rate from now on. `topology` does not follow."""
        link = self._link(host, device)
        words = shaping(bits_per_s)
        batch("tc", self.host(host).namespace, [f"qdisc replace dev {link.name} {words}"])
        batch("tc", self._switches, [f"qdisc replace dev {link.port} {words}"])

    def cut_one_way(self, host: str, device: int | None = 0, *, is_out: bool) -> None:
        """The link carries nothing out of the host (`is_out`), or nothing in; the other direction
        goes on. `set_rate` ends it."""
        link = self._link(host, device)
        place = (self.host(host).namespace, link.name) if is_out else (self._switches, link.port)
        batch("tc", place[0], [f"qdisc replace dev {place[1]} {SHUT}"])

    def address_of(self, worker: WorkerRef) -> str:
        """The address that `topology` means by a worker or an agent."""
        return self._place(worker)[1].address

    def host_of(self, worker: WorkerRef) -> BedHost:
        """The host of a worker or an agent of `topology`."""
        return self._place(worker)[0]

    def topology(self, group_bytes_per_s: int | None = None) -> Topology:
        """The testbed as planners see it: worker 0 has the first device of h0, and so on.

        Memory is not the testbed's: it is 0. Rates are those that one TCP stream reaches: `GOODPUT`
        of the line rate. Several devices of
        a host are a scale-up group of `group_bytes_per_s`: their processes share memory.
        """
        rate = goodput_bytes_per_s(self.spec.link_bits_per_s)
        leaf_rate = goodput_bytes_per_s(self.spec.leaf_bits_per_s)
        per_host = self.spec.devices_per_host
        shape = Topology(group_bytes_per_s=group_bytes_per_s)
        for host in self.hosts:
            agent = agent_ref(host.number)
            shape.agents[agent] = Host(host.name, host.leaf, 0, rate, rate)
            group = host.name if per_host > 1 else ""
            for number in range(per_host):
                shape.devices[WorkerRef(host.number * per_host + number)] = Device(
                    "cpu", host.name, host.leaf, 0, 0, rate, rate, group
                )
        if self.spec.leaves > 1:
            for number in range(self.spec.leaves):
                shape.leaves[f"leaf{number}"] = Leaf(f"leaf{number}", leaf_rate, leaf_rate)
        return shape

    def spine_bytes(self) -> int:
        """Bytes that all leaves have sent to the spine so far, headers included."""
        listed = json.loads(run(["ip", "-n", self._switches, "-json", "-s", "link", "show"]))
        ports = {f"leaf{number}up" for number in range(self.spec.leaves)}
        return sum(link["stats64"]["tx"]["bytes"] for link in listed if link["ifname"] in ports)

    def __str__(self) -> str:
        return f"testbed {self.name} ({self.hosts[0].name}..{self.hosts[-1].name})"

    # -- how it is made, in the order of the steps ------------------------------------------------

    def _host(self, number: int) -> BedHost:
        def link(name: str, last: int) -> BedLink:
            return BedLink(name, f"h{number}{name}", f"{_DATA_NET}.{number}.{last}")

        return BedHost(
            name=f"h{number}",
            number=number,
            leaf=f"leaf{self.spec.leaf_of(number)}",
            namespace=f"{self.name}-h{number}",
            devices=tuple(link(f"d{k}", k + 1) for k in range(self.spec.devices_per_host)),
            nic=link(NIC, 254),
            control_address=f"{_CONTROL_NET}.{number}.1",
        )

    def _build(self) -> None:
        for name in (self._switches, self.control_namespace, *(h.namespace for h in self.hosts)):
            run(["ip", "netns", "add", name])
            run([*inside(name), "sh", "-ec", "\n".join(_sysctl_lines())])
        self._build_switches()
        for host in self.hosts:
            self._build_host(host)
        self._build_control()

    def _build_switches(self) -> None:
        leaves = [f"leaf{number}" for number in range(self.spec.leaves)]
        lines = [_bridge(name) for name in (*leaves, "spine", CONTROL)]
        shaped = []
        if len(leaves) > 1:
            words = shaping(self.spec.leaf_bits_per_s)
            for leaf in leaves:
                lines.append(f"link add {leaf}up type veth peer name {leaf}down")
                lines += [f"link set {leaf}up master {leaf}", f"link set {leaf}down master spine"]
                lines += [f"link set {leaf}up up", f"link set {leaf}down up"]
                shaped += [f"qdisc add dev {leaf}{end} {words}" for end in ("up", "down")]
        lines += [f"link set {name} up" for name in (*leaves, "spine", CONTROL)]
        batch("ip", self._switches, lines)
        batch("tc", self._switches, shaped)

    def _build_host(self, host: BedHost) -> None:
        """Both ends of every link are shaped: sending out at the host, coming in at the switch."""
        links = (*host.devices, host.nic)
        words = shaping(self.spec.link_bits_per_s)
        cables = _cable(f"{host.name}{CONTROL}", CONTROL, CONTROL, host.namespace)
        for link in links:
            cables += _cable(link.port, link.name, host.leaf, host.namespace)
        batch("ip", self._switches, cables)
        batch("tc", self._switches, [f"qdisc add dev {link.port} {words}" for link in links])
        lines = ["link set lo up"]
        for table, link in enumerate(links, _TABLES_FROM):
            lines += [f"addr add {link.address}/16 dev {link.name}", f"link set {link.name} up"]
            # What is sent from a device's address leaves through that device.
            lines.append(f"rule add from {link.address} table {table}")
            lines.append(f"route add {_DATA_NET}.0.0/16 dev {link.name} table {table}")
        lines += [f"addr add {host.control_address}/16 dev {CONTROL}", f"link set {CONTROL} up"]
        batch("ip", host.namespace, lines)
        batch("tc", host.namespace, [f"qdisc add dev {link.name} {words}" for link in links])

    def _build_control(self) -> None:
        namespace = self.control_namespace
        batch("ip", self._switches, _cable("own", CONTROL, CONTROL, namespace))
        lines = ["link set lo up", f"addr add {_CONTROL_ADDRESS}/16 dev {CONTROL}"]
        batch("ip", namespace, [*lines, f"link set {CONTROL} up"])

    def _ports(self, host: str) -> list[str]:
        """The switches' ends of all links of a host."""
        found = self.host(host)
        links = (*found.devices, found.nic)
        return [f"{host}{CONTROL}", *(link.port for link in links)]

    def _link(self, host: str, device: int | None) -> BedLink:
        found = self.host(host)
        if device is None:
            return found.nic
        if not 0 <= device < len(found.devices):
            raise TestbedError(f"{host} has devices 0 to {len(found.devices) - 1}, not {device}")
        return found.devices[device]

    def _place(self, worker: WorkerRef) -> tuple[BedHost, BedLink]:
        per_host = self.spec.devices_per_host
        for host in self.hosts:
            if worker.worker == agent_ref(host.number).worker:
                return host, host.nic
            number = worker.worker - host.number * per_host
            if 0 <= number < per_host:
                return host, host.devices[number]
        raise TestbedError(f"{worker} is not in {self}")


def _sysctl_lines() -> list[str]:
    """A kernel without IPv6 has nothing to switch off."""
    lines = [f"test ! -e /proc/sys/{k} || echo {v} > /proc/sys/{k}" for k, v in _SYSCTLS.items()]
    choices = [f"echo {name} > /proc/sys/{_CONGESTION}" for name in ("cubic", "reno")]
    return [*lines, " || ".join((*choices, "true")) + " 2> /dev/null"]


def _bridge(name: str) -> str:
    return f"link add {name} type bridge stp_state 0 forward_delay 0"


def _cable(port: str, name: str, bridge: str, namespace: str) -> list[str]:
    """A link between a bridge and a namespace, whose end there is called `name`."""
    return [
        f"link add {port} type veth peer name {name} netns {namespace}",
        f"link set {port} master {bridge}",
        f"link set {port} up",
    ]
