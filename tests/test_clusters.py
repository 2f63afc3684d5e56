"""The clusters that come with the package: what the papers' tables say of them."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path

import pytest

from livescale.clusters.files import (
    NamedTopology,
    find_cluster,
    parse_rate,
    read_topology,
    shipped_clusters,
)
from livescale.clusters.topology import Topology
from livescale.common.settings import ConfigError
from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest
from livescale.values.types import WorkerRef

GB = 10**9

#: BlitzScale, Table 2, per GPU: kind, GB, local SSD, remote SSD and network in Gbit/s; dollars
TABLE_2 = {
    "a2-ultragpu-8g": ("a100", 80, "2.58", "0.29", "12.5", "40.44"),
    "p4d.24xlarge": ("a100", 40, "2.31", None, "100", "45.039"),
    "ml.hpcpni2.28xlarge": ("a100", 80, "4", None, "100", "48.23"),
    "p4de.24xlarge": ("a100", 80, "2.31", None, "100", "56.328"),
    "a3-highgpu-8g": ("h100", 80, "6.09", "0.97", "100", "88.25"),
    "a3-megagpu-8g": ("h100", 80, "6.09", "0.97", "200", None),
    "p5.48xlarge": ("h100", 80, "9.8", None, "400", None),
}

KINDS = {"a100", "a800", "h100", "h800", "h200", "cpu"}


def cluster(name: str) -> NamedTopology:
    return read_topology(find_cluster(name))


def gbit(text: str) -> int:
    return parse_rate(f"{text}Gbit", "here")


def hosts(topology: Topology) -> list[int]:
    """Devices per host, in the order of the hosts."""
    names = [device.host for device in topology.devices.values()]
    return [names.count(host.name) for host in topology.agents.values()]


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_cluster_says_what_a_simulation_needs(name: str) -> None:
    named = cluster(name)
    topology = named.topology
    assert set(named.memory_bytes) == set(topology.devices)
    assert {device.kind for device in topology.devices.values()} <= KINDS
    for device in topology.devices.values():
        assert device.uplink_bytes_per_s == device.downlink_bytes_per_s
        assert device.uplink_bytes_per_s is not None
        assert not device.group or topology.group_bytes_per_s is not None
        assert not topology.leaves or device.leaf in topology.leaves
    for host in topology.agents.values():
        assert host.memory_bytes > 0
        assert None not in (host.uplink_bytes_per_s, host.device_bytes_per_s)
        assert host.storage_bytes_per_s is not None


@pytest.mark.parametrize("name", TABLE_2)
def test_instance_types_are_those_of_blitzscales_table_2(name: str) -> None:
    kind, memory_gb, local, remote, network, price = TABLE_2[name]
    named = cluster(name)
    topology = named.topology
    assert hosts(topology) == [8]
    assert set(named.memory_bytes.values()) == {memory_gb * GB}
    for device in topology.devices.values():
        assert device.kind == kind
        assert device.storage_bytes_per_s == gbit(local)
        assert device.uplink_bytes_per_s == gbit(network)
        assert device.group
    (host,) = topology.agents.values()
    assert host.storage_bytes_per_s == 8 * gbit(local)
    assert topology.remote_storage_bytes_per_s == (remote and 8 * gbit(remote))
    dollars = {host.name: int(Decimal(price) * 10**6)} if price else {}
    assert named.price_microdollars_per_hour == dollars


def test_storage_and_network_span_what_the_paper_says() -> None:
    """2.31 to 9.8 and 12.5 to 400 Gbit/s per GPU (Table 2)."""
    devices = [d for name in TABLE_2 for d in cluster(name).topology.devices.values()]
    storage = [device.storage_bytes_per_s or 0 for device in devices]
    network = [device.uplink_bytes_per_s or 0 for device in devices]
    assert (min(storage), max(storage)) == (gbit("2.31"), gbit("9.8"))
    assert (min(network), max(network)) == (gbit("12.5"), gbit("400"))


@pytest.mark.skipif("LIVESCALE_DATA" not in os.environ, reason="LIVESCALE_DATA is not set")
def test_table_2_is_copied_rightly() -> None:
    text = (Path(os.environ["LIVESCALE_DATA"]) / "papers" / "blitzscale-osdi25.txt").read_text()
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 7 and (name := cells[0].split("[")[0].strip()) in TABLE_2:
            figures = [re.match(r"[\d.]+", cells[column]) for column in (2, 3, 4, 6)]
            found[name] = tuple(figure and figure[0] for figure in figures)
    expected = {name: (row[2], row[3], row[4], row[5]) for name, row in TABLE_2.items()}
    assert found == expected


def test_blitzscales_clusters_are_those_of_table_1() -> None:
    for name, kind, count, group in (("a", "a800", 4, gbit("1600")), ("b", "a100", 2, None)):
        named = cluster(f"blitzscale-{name}")
        topology = named.topology
        assert hosts(topology) == [8] * count
        assert topology.group_bytes_per_s == group
        assert set(named.memory_bytes.values()) == {80 * GB}
        for device in topology.devices.values():
            assert device.kind == kind
            assert bool(device.group) == (group is not None)
            assert device.uplink_bytes_per_s == gbit("100")
            assert device.storage_bytes_per_s == gbit("10")
        for host in topology.agents.values():
            assert host.device_bytes_per_s == gbit("128")


@pytest.mark.parametrize("instances", [1, 8])
def test_16_gb_from_storage_take_12_8_s_on_one_gpu_and_on_eight(instances: int) -> None:
    """BlitzScale, section 2: no GPU gets more of its host's SSD than its own part."""
    topology = cluster("blitzscale-a").topology
    request = PlanRequest(
        plan=1,
        model="8b",
        layer_bytes=(GB // 2,) * 32,
        chunk_bytes=1 << 20,
        instances=instances,
        sources=(),
        targets=tuple((WorkerRef(number),) for number in range(instances)),
    )
    plan = make_plan(request, topology, "storage")
    assert plan.predicted_ns is not None
    assert plan.predicted_ns == pytest.approx(12.8 * GB, rel=0.01)


def test_lambdascales_testbeds_are_those_of_its_table_1() -> None:
    first, second = cluster("lambdascale-1").topology, cluster("lambdascale-2").topology
    assert hosts(first) == [1] * 12
    assert hosts(second) == [4] * 6
    for topology in (first, second):
        for host in topology.agents.values():
            assert host.memory_bytes == 1000 * GB
            assert host.uplink_bytes_per_s == gbit("400")
            assert host.device_bytes_per_s == 64 * GB
            assert host.storage_bytes_per_s == 5 * GB
        assert {device.kind for device in topology.devices.values()} == {"h800"}
    # One NIC per node: the four devices of a node reach other nodes through one link.
    assert {leaf.uplink_bytes_per_s for leaf in second.leaves.values()} == {gbit("400")}
    for device in second.devices.values():
        assert device.leaf == device.host
        assert sum(other.leaf == device.leaf for other in second.devices.values()) == 4


def test_the_large_fabric_has_1024_devices_and_half_the_rate_above_its_leaves() -> None:
    topology = cluster("leaf-spine-1024").topology
    assert hosts(topology) == [8] * 128
    for name, leaf in topology.leaves.items():
        below = [d.uplink_bytes_per_s or 0 for d in topology.devices.values() if d.leaf == name]
        assert len(below) == 64
        assert leaf.uplink_bytes_per_s == sum(below) // 2


# -- how clusters are found and what can be written -----------------------------------------------


def test_a_cluster_is_found_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_cluster("laptop").name == "laptop.yaml"
    Path("laptop").write_text("hosts: [{name: a, devices: [{kind: cpu}]}]")
    assert find_cluster("laptop") == Path("laptop")
    with pytest.raises(ConfigError, match=r"'labtop' \(nearest known: 'laptop'\); there are a2-"):
        find_cluster("labtop")


def test_memory_and_price_are_kept_exactly(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "hosts:\n"
        "- {name: a, price: 45.039, devices: [{memory: 80GB, count: 2}, {memory: 40GiB}]}\n"
        "- {name: b, count: 1, price: 3, devices: [{kind: cpu}]}\n"
        "- {name: c, devices: [{memory: 10GB, arena: 6GB, kv: 4GB}]}\n"
    )
    named = read_topology(file)
    assert named.price_microdollars_per_hour == {"a": 45_039_000, "b": 3_000_000}
    refs = [WorkerRef(number) for number in (0, 1, 2, 4)]
    sizes = [80 * GB, 80 * GB, 40 << 30, 10 * GB]
    assert named.memory_bytes == dict(zip(refs, sizes, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{name: a, price: cheap}", ["hosts[0].price", "'cheap'", "40.44"]),
        ("{name: a, price: -1}", ["hosts[0].price", "-1"]),
        ("{name: a, price: .nan}", ["hosts[0].price", "nan"]),
        ("{name: a, price: true}", ["hosts[0].price", "yes or no"]),
        ("{name: a, price: 0.0000001}", ["hosts[0].price", "1e-07"]),
        ("{name: a, devices: [{memory: 80XB}]}", ["devices[0].memory", "'80XB'"]),
        ("{name: a, devices: [{storage: fast}]}", ["devices[0].storage", "'fast'"]),
        (
            "{name: a, devices: [{memory: 10GB, arena: 8GB, kv: 4GB}]}",
            ["devices[0]", "12000000000", "10000000000"],
        ),
    ],
)
def test_impossible_memory_and_prices_are_named(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"hosts: [{text}]")
    with pytest.raises(ConfigError) as caught:
        read_topology(file)
    for word in [str(file), *words]:
        assert word in str(caught.value)
