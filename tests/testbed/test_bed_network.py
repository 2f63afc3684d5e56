"""Emulated hosts are built and removed completely, and their links carry what they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bed_streams import Place, bytes_per_s, is_reached, slowed

from livescale.clusters.topology import Direction
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.commands import existing_testbeds, namespaces, remove_leftovers
from livescale.lab.testbed.spec import NetworkSpec, TestbedError
from livescale.values.types import WorkerRef, agent_ref
from slowness import patient

pytestmark = pytest.mark.usefixtures("network_namespaces")

MBIT = 1_000_000
LINK = 200 * MBIT
SIZE = 8 << 20
TRIES, LOOKS = 5, 50
Stream = tuple[Place, Place, int]


@pytest.fixture(scope="module")
def testbed(network_namespaces: None) -> Iterator[Testbed]:
    """Two leaves of two hosts with two devices each; the spine is half as fast as a device."""
    link = slowed(LINK)
    spec = NetworkSpec(4, link, devices_per_host=2, leaves=2, spine_bits_per_s=link // 2)
    with Testbed(spec) as built:
        yield built


def goodput(testbed: Testbed) -> float:
    """Of a device's link, in bytes per second."""
    return testbed.spec.link_bits_per_s * 0.956 / 8


def check_rates(testbed: Testbed, streams: list[Stream], share: float) -> list[float]:
    """Each has so much of a device's link: never more, and as much in one of several measurements;
    what else the machine does may be in the way of the others."""
    full = share * goodput(testbed)
    for _ in range(TRIES):
        rates = bytes_per_s(testbed, streams)
        assert max(rates) < 1.3 * full
        if min(rates) > 0.7 * full:
            return rates
    raise AssertionError(f"{rates}, and the links carry {full}")


def own_namespaces(testbed: Testbed) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"{testbed.name}-")]


def test_nothing_is_left_after_the_end_an_error_or_an_interrupt() -> None:
    for error in (None, ValueError, KeyboardInterrupt):
        testbed = Testbed(NetworkSpec(2, LINK))
        try:
            with testbed:
                assert len(own_namespaces(testbed)) == 4
                sleeper = testbed.exec("h1", ["sleep", "600"])
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert own_namespaces(testbed) == []
        assert sleeper.wait(patient(60)) == -signal.SIGKILL


def test_a_network_that_cannot_be_built_leaves_nothing() -> None:
    testbed = Testbed(NetworkSpec(2, LINK))
    subprocess.run(["ip", "netns", "add", testbed.host("h1").namespace], check=True)
    with pytest.raises(TestbedError, match="h1"), testbed:
        pass
    assert own_namespaces(testbed) == []


def test_several_exist_at_once_and_only_the_dead_are_cleaned_away(testbed: Testbed) -> None:
    code = (
        "import os, signal\n"
        "from livescale.lab.testbed.bed import Testbed\n"
        "from livescale.lab.testbed.spec import NetworkSpec\n"
        "with Testbed(NetworkSpec(1, 10**9)) as testbed:\n"
        "    print(testbed.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = died.stdout.strip()
    found = {existing.name: existing for existing in existing_testbeds()}
    assert found[testbed.name].owner == os.getpid()
    assert set(found[testbed.name].places) == {"control", "h0", "h1", "h2", "h3", "switches"}
    assert found[name].owner is None
    assert name in remove_leftovers()
    names = [existing.name for existing in existing_testbeds()]
    assert name not in names
    assert testbed.name in names


def test_a_link_has_its_rate_in_both_directions_at_once(testbed: Testbed) -> None:
    check_rates(testbed, [(("h0", 0), ("h1", 0), SIZE), (("h1", 0), ("h0", 0), SIZE)], 1)


def test_devices_of_a_host_have_links_of_their_own(testbed: Testbed) -> None:
    check_rates(testbed, [(("h0", k), ("h1", k), SIZE) for k in (0, 1)], 1)
    # The same two streams into one device share its link: if one had it first, the other one would
    # take twice as long.
    shared = bytes_per_s(testbed, [(("h0", k), ("h1", 0), SIZE) for k in (0, 1)])
    assert sum(shared) < 1.2 * 1.5 * goodput(testbed)


def test_the_spine_limits_what_crosses_it(testbed: Testbed) -> None:
    check_rates(testbed, [(("h0", 0), ("h2", 0), SIZE // 2)], 0.5)


def test_a_rate_can_be_changed(testbed: Testbed) -> None:
    testbed.set_rate("h3", 1, testbed.spec.link_bits_per_s // 4)
    check_rates(testbed, [(("h2", 1), ("h3", 1), SIZE // 4)], 0.25)
    testbed.set_rate("h3", 1, testbed.spec.link_bits_per_s)
    check_rates(testbed, [(("h2", 1), ("h3", 1), SIZE)], 1)


def test_a_cut_link_carries_nothing_and_then_again(testbed: Testbed) -> None:
    assert is_reached(testbed, ("h0", 1), ("h1", 1), patient(30))
    testbed.cut("h1", 1)
    assert not is_reached(testbed, ("h0", 1), ("h1", 1), 0.5)
    assert is_reached(testbed, ("h0", 1), ("h1", 0), patient(30))
    testbed.restore("h1", 1)
    assert any(is_reached(testbed, ("h0", 1), ("h1", 1), patient(0.2)) for _ in range(LOOKS))


def test_control_is_a_network_of_its_own(testbed: Testbed) -> None:
    code = "import socket, sys; socket.create_connection((sys.argv[1], 9), 30)"
    address = testbed.host("h2").control_address
    words = [sys.executable, "-c", code, address]
    with testbed.exec("control", words, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"ConnectionRefusedError" in process.stderr.read()


def test_topology_tells_measured_rates_and_where_everybody_is(testbed: Testbed) -> None:
    shape = testbed.topology()
    assert len(shape.devices) == 8
    assert list(shape.agents) == [agent_ref(number) for number in range(4)]
    assert shape.leaves.keys() == {"leaf0", "leaf1"}
    assert shape.leaves["leaf0"].uplink_bytes_per_s == int(goodput(testbed) / 2)
    addresses = {testbed.address_of(ref) for ref in (*shape.devices, *shape.agents)}
    assert len(addresses) == 12
    for ref in (*shape.devices, *shape.agents):
        assert shape.nic_bytes_per_s(ref, Direction.OUT) == int(goodput(testbed))
        assert shape.host_of(ref) == testbed.host_of(ref).name
        assert shape.leaf_of(ref) == testbed.host_of(ref).leaf
    assert shape.leaf_of(WorkerRef(3)) == "leaf0"
    assert shape.leaf_of(WorkerRef(4)) == "leaf1"


def test_strangers_are_refused_by_name(testbed: Testbed) -> None:
    for call in (
        lambda: testbed.exec("h9", ["true"]),
        lambda: testbed.cut("h0", 2),
        lambda: testbed.address_of(WorkerRef(99)),
    ):
        with pytest.raises(TestbedError, match=r"h9|devices 0 to 1|w99"):
            call()


def test_the_command_line_runs_a_command_in_a_host(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "livescale.main", "testbed"]
    inner = f"{' '.join(command)} exec h1 -- cat /proc/net/dev; {' '.join(command)} status; exit 7"
    done = subprocess.run(
        [*command, "run", "--hosts", "2", "--devices-per-host", "2", "--", "sh", "-c", inner],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "d1:" in done.stdout
    assert "of process" in done.stdout
    name = done.stdout.split(":")[0]
    assert name not in [existing.name for existing in existing_testbeds()]


def test_the_command_line_ends_cleanly_when_it_is_stopped() -> None:
    words = [sys.executable, "-P", "-m", "livescale.main", "testbed", "run"]
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline().decode() for _ in range(4)]
            name = lines[0].split(":")[0]
            assert "Ctrl-C" in lines[3]
            process.send_signal(number)
            assert process.wait(patient(60)) in (130, 128 + signal.SIGTERM)
        assert name not in [existing.name for existing in existing_testbeds()]


@pytest.mark.parametrize("is_out", [True, False])
def test_a_link_that_is_cut_one_way_carries_the_other(testbed: Testbed, is_out: bool) -> None:
    """Nothing comes back over it; what goes the other way arrives all the same."""
    testbed.cut_one_way("h0", is_out=is_out)
    before = arrived_packets(testbed, "h0")
    try:
        assert not is_reached(testbed, ("h1", 0), ("h0", 0), 0.5)
        assert (arrived_packets(testbed, "h0") > before) == is_out
    finally:
        testbed.set_rate("h0", 0, testbed.spec.link_bits_per_s)
    assert is_reached(testbed, ("h1", 0), ("h0", 0), patient(5))


def arrived_packets(testbed: Testbed, host: str) -> int:
    words = [*testbed.inside(host), "cat", "/sys/class/net/d0/statistics/rx_packets"]
    return int(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
