"""`livescale cluster topology`: what an operator sees of a machine before it joins a pool."""

from __future__ import annotations

import json
from pathlib import Path

from commands import livescale

from livescale.cli.machine_text import machine_lines
from livescale.runtime.supervisor.gpu_links import Gpu
from livescale.runtime.supervisor.machine import Interface, Machine, NumaNode, os_addresses


def test_this_machine_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    code, out, error = livescale("cluster", "topology", "--json", file)
    assert (code, error) == (0, "")
    told = json.loads(file.read_text())
    names = [interface["name"] for interface in told["interfaces"]]
    assert sorted(names) == sorted(os_addresses())
    for name in names:
        assert f"\n  {name} " in out
    assert set(told) == {"interfaces", "numa_nodes", "gpus", "nvlink_groups", "gpus_unknown"}


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, error = livescale("cluster", "topology", "--json", tmp_path / "file" / "figures")
    assert code == 1
    assert error.startswith("livescale cluster: ")
    assert str(tmp_path / "file") in error


def test_all_of_a_machine_is_in_the_lines() -> None:
    speed = "/net/eth0/speed"
    card = Interface("eth0", ("10.0.0.1", "fe80::1"), True, 9000, 1_250_000_000, speed, 1)
    loopback = Interface("lo", ("127.0.0.1",), source="virtual")
    gpus = tuple(Gpu(f"GPU{n}", {f"GPU{1 - n}": "NV4"}, "0-15", 0) for n in range(2))
    machine = Machine((card, loopback), (NumaNode(0, "0-15"),), gpus, (("GPU0", "GPU1"),))
    assert machine_lines(machine) == [
        "interfaces",
        "  eth0  up  MTU 9000  10 Gbit/s       (/net/eth0/speed)  NUMA node 1  10.0.0.1, fe80::1",
        "  lo    ?   MTU ?     rate not known  (virtual)                       127.0.0.1",
        "NUMA nodes",
        "  0  CPUs 0-15  memory ?",
        "GPUs",
        "  GPU0  CPUs 0-15, NUMA node 0  GPU1 NV4",
        "  GPU1  CPUs 0-15, NUMA node 0  GPU0 NV4",
        "  NVLink joins GPU0, GPU1",
    ]
