"""Clusters in YAML: patterns, units, and errors that name file, place and value."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.files import NamedTopology, parse_rate, read_topology
from livescale.clusters.topology import Direction, Topology
from livescale.common.settings import ConfigError
from livescale.values.types import WorkerRef, agent_ref

EXAMPLES = Path(__file__).parent.parent / "examples" / "topologies"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return file


def example(name: str) -> Topology:
    return read_topology(EXAMPLES / name).topology


def test_the_rail_optimized_example() -> None:
    topology = example("rail-optimized-8x8.yaml")
    assert (len(topology.devices), len(topology.agents), len(topology.leaves)) == (64, 8, 8)
    for number, device in enumerate(topology.devices.values()):
        assert device.leaf == f"rail{number % 8}"
        assert device.group == f"nvlink{number // 8}"
        assert device.host == f"host{number // 8}"
        assert device.uplink_bytes_per_s == device.downlink_bytes_per_s == 12_500_000_000
    assert topology.group_bytes_per_s == 200_000_000_000
    host = topology.agents[agent_ref(3)]
    assert (host.device_bytes_per_s, host.storage_bytes_per_s) == (16 * 10**9, 1_250_000_000)


def test_the_leaf_spine_example_is_oversubscribed_two_to_one() -> None:
    topology = example("leaf-spine-2to1.yaml")
    for name, leaf in topology.leaves.items():
        below = [
            topology.nic_bytes_per_s(ref, Direction.OUT) or 0
            for ref, device in topology.devices.items()
            if device.leaf == name
        ]
        assert len(below) == 8
        assert leaf.uplink_bytes_per_s is not None
        assert sum(below) == 2 * leaf.uplink_bytes_per_s


def test_the_testbed_example() -> None:
    topology = example("two-leaves-of-three.yaml")
    leaves = [device.leaf for device in topology.devices.values()]
    assert leaves == ["leaf0"] * 3 + ["leaf1"] * 3
    assert topology.leaves["leaf1"].downlink_bytes_per_s == 119_500_000


def test_a_thousand_devices_take_a_few_lines(tmp_path: Path) -> None:
    text = (EXAMPLES / "rail-optimized-8x8.yaml").read_text().replace("count: 8   ", "count: 128 ")
    named = read_topology(written(tmp_path, text))
    assert len(named.topology.devices) == 1024
    assert named.ref("host127/7") == WorkerRef(1023)


def test_members_have_names_and_ids() -> None:
    named = read_topology(EXAMPLES / "leaf-spine-2to1.yaml")
    assert named.ref("host3") == named.ref("h3") == agent_ref(3)
    assert named.ref("host3/1") == named.ref("w7") == WorkerRef(7)
    for name in ("w32", "h16", "host3/2", "w", ""):
        with pytest.raises(ConfigError, match="nearest known"):
            named.ref(name)
    assert isinstance(named, NamedTopology)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100Gbit", 12_500_000_000),
        ("1gbit", 125_000_000),
        ("956 Mbit/s", 119_500_000),
        ("1.6Tbps", 200_000_000_000),
        ("12.5GB/s", 12_500_000_000),
        ("1MiB/s", 1 << 20),
        ("64B/s", 64),
        (5000, 5000),
    ],
)
def test_rates(text: object, rate: int) -> None:
    assert parse_rate(text, "here") == rate


@given(st.integers(1, 10**6), st.sampled_from(["kbit", "Mbit", "Gbit", "kB/s", "MB/s", "GB/s"]))
def test_rates_are_exact(number: int, unit: str) -> None:
    power = {"k": 10**3, "M": 10**6, "G": 10**9}[unit[0]]
    assert parse_rate(f"{number}{unit}", "here") == number * power // (8 if "bit" in unit else 1)


@pytest.mark.parametrize("text", ["100", "100Gb/s", "fast", "-1Gbit", "1e3Gbit", "", None, True])
def test_what_is_no_rate_is_named(text: object) -> None:
    with pytest.raises(ConfigError, match=r"hosts\[0\]\.nic"):
        parse_rate(text, "hosts[0].nic")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no devices"]),
        ("hosts: 3", ["hosts must be a list", "3"]),
        ("host: []", ["'host'", "'hosts'"]),
        ("hosts: [{name: a, nick: 1Gbit}]", ["hosts[0]", "'nick'", "'nic'"]),
        ("hosts: [{name: a, devices: [{nic: 1Gb}]}]", ["hosts[0].devices[0].nic", "'1Gb'"]),
        ("hosts: [{name: a, count: 2}]", ["hosts[0].name", "two hosts called 'a'"]),
        ("hosts: [{name: 'a{m}'}]", ["hosts[0].name", "'a{m}'"]),
        ("hosts: [{name: 'a{device}'}]", ["hosts[0].name", "{device}"]),
        ("hosts: [{name: a, count: 0}]", ["hosts[0].count", "0"]),
        ("hosts: [{name: a, memory: 4XB}]", ["hosts[0].memory", "'4XB'"]),
        ("hosts: [{name: a, nic: 1Gbit, uplink: 2Gbit}]", ["hosts[0]", "uplink"]),
        ("hosts: [{count: 2}]", ["hosts[0].name"]),
        ("leaves: [{name: x, count: 2}]", ["leaves[0].name", "two leaves"]),
        ("leaves: [{name: x, spine: 0Gbit}]", ["leaves[0].spine", "'0Gbit'"]),
        ("hosts: [{name: a, devices: [{count: 2000000}]}]", ["devices[0].count"]),
        ("hosts: [{name: a, memory: 99999999999999999999TB}]", ["hosts[0].memory", "above"]),
        ("hosts: [{name: a, memory: 99999999999999999999}]", ["hosts[0].memory", "above"]),
        ("hosts: [{name: a, devices: [{arena: 9999999999TB}]}]", ["devices[0].arena", "above"]),
        *(
            (
                f"hosts: [{{name: a, devices: [{{{key}: 100TB}}]}}]",
                [f"hosts[0].devices[0].{key} is 100000000000000 bytes", "at most"],
            )
            for key in ("memory", "arena", "kv")
        ),
        ("hosts: [{name: a, devices: [{memory: 0}]}]", ["hosts[0].devices[0].memory is 0"]),
        ("hosts: [{name: a, devices: [{memory: 0GB}]}]", ["hosts[0].devices[0].memory is 0"]),
        (
            "leaves: [{name: 'l{n}', count: 2}]\nhosts: [{name: a, devices: [{leaf: l2}]}]",
            ["hosts[0].devices[0].leaf", "'l2'", "'l1'"],
        ),
        ("leaves: [{name: x}]\nhosts: [{name: a, leaf: y}]", ["hosts[0].leaf", "'y'", "'x'"]),
    ],
)
def test_mistakes_name_file_place_and_value(tmp_path: Path, text: str, words: list[str]) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_topology(file)
    for word in [str(file), *words]:
        assert word in str(caught.value)
