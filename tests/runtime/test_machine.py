"""What a machine says of itself: interfaces, rates and NUMA nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_files import addresses, make_interface, make_numa_node, make_program

from livescale.runtime.supervisor.machine import (
    Interface,
    NumaNode,
    interface_at,
    os_addresses,
    read_interfaces,
    read_machine,
    read_numa_nodes,
)


def only(root: Path, name: str) -> Interface:
    (found,) = read_interfaces(root, addresses({name: "10.0.0.1"}))
    return found


def test_a_card_tells_its_rate(tmp_path: Path) -> None:
    make_interface(tmp_path, "eth0", speed=25_000, numa_node=1)
    speed = tmp_path / "class" / "net" / "eth0" / "speed"
    found = only(tmp_path, "eth0")
    rate = 25_000 * 125_000
    assert found == Interface("eth0", ("10.0.0.1",), True, 1500, rate, str(speed), 1)
    assert found.link == f"eth0: 25 Gbit/s each way ({speed})"


@pytest.mark.parametrize("speed", [-1, None, 4_294_967_295])
def test_a_card_may_not_know_its_rate(tmp_path: Path, speed: int | None) -> None:
    make_interface(tmp_path, "eth0", speed=speed, state="down")
    found = only(tmp_path, "eth0")
    assert (found.bytes_per_s, found.is_up, found.numa_node) == (None, False, None)
    assert found.link.startswith("eth0: rate not known (")
    assert found.link.endswith("speed does not say)")


def test_the_speed_of_a_virtual_interface_is_none(tmp_path: Path) -> None:
    """The kernel says 10 Gbit/s of every veth, whatever is behind it."""
    make_interface(tmp_path, "veth0", speed=10_000, has_device=False)
    found = only(tmp_path, "veth0")
    assert (found.bytes_per_s, found.source) == (None, "virtual, no link of its own")


def test_what_lies_over_a_card_is_as_fast_as_the_card(tmp_path: Path) -> None:
    make_interface(tmp_path, "eth0", speed=1000)
    make_interface(tmp_path, "eth1", speed=10_000)
    make_interface(tmp_path, "veth0", speed=10_000, has_device=False)
    make_interface(tmp_path, "br0", speed=40_000, has_device=False, below=("eth0", "veth0"))
    make_interface(tmp_path, "br0.7", speed=10_000, has_device=False, below=("br0",))
    make_interface(tmp_path, "br1", has_device=False, below=("veth0",))
    make_interface(tmp_path, "bond0", speed=11_000, has_device=False, below=("eth0", "eth1"))
    (tmp_path / "class" / "net" / "bond0" / "bonding").mkdir()
    rates = {name: only(tmp_path, name).bytes_per_s for name in ("br0", "br0.7", "br1", "bond0")}
    own = 11_000 * 125_000
    assert rates == {"br0": 125_000_000, "br0.7": 125_000_000, "br1": None, "bond0": own}


def test_files_of_another_network_tell_nothing(tmp_path: Path) -> None:
    """Inside a namespace they may be those of the network outside."""
    make_interface(tmp_path, "eth0", speed=25_000, hardware="02:00:00:00:00:02")
    found = only(tmp_path, "eth0")
    assert (found.bytes_per_s, found.mtu_bytes, found.is_up) == (None, None, None)
    make_interface(tmp_path, "ib0", speed=200_000, hardware="02:00:00:00:00:01:0a:0b:0c:0d")
    assert only(tmp_path, "ib0").bytes_per_s == 200_000 * 125_000, "a longer address"
    assert only(tmp_path, "eth1").source == f"{tmp_path / 'class' / 'net'} does not tell"


def test_an_interface_is_found_by_its_address(tmp_path: Path) -> None:
    make_interface(tmp_path, "eth0", speed=1000)
    known = addresses({"eth0": "10.0.0.1", "eth1": "fe80::1%eth1"})
    found = interface_at("10.0.0.1", tmp_path, known)
    assert found is not None
    assert (found.name, found.bytes_per_s) == ("eth0", 125_000_000)
    assert interface_at("10.0.0.2", tmp_path, known) is None


def test_numa_nodes(tmp_path: Path) -> None:
    assert read_numa_nodes(tmp_path) == ()
    make_numa_node(tmp_path, 10, "16-23", 1000)
    make_numa_node(tmp_path, 2, "0-15,32-47", 2000)
    expected = (NumaNode(2, "0-15,32-47", 2_048_000), NumaNode(10, "16-23", 1_024_000))
    assert read_numa_nodes(tmp_path) == expected


def test_this_machine_tells_of_itself(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no-such-program")
    found = read_machine(gpu_program=nowhere)
    assert {interface.name for interface in found.interfaces} == set(os_addresses())
    assert found.gpus_unknown == f"there is no {nowhere}"
    loopback = interface_at("127.0.0.1")
    assert loopback is not None
    assert loopback.bytes_per_s is None


@pytest.mark.usefixtures("machine")
def test_a_machine_with_gpus(tmp_path: Path) -> None:
    table = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-3\nGPU1\tNV2\t X \t0-3\n"
    program = make_program(tmp_path / "smi", table)
    found = read_machine(tmp_path, {}, program)
    assert (found.nvlink_groups, found.gpus_unknown) == ((("GPU0", "GPU1"),), "")
