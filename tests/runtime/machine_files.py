"""Machines made of files, as Linux has them under /sys, and the table that a GPU driver prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from livescale.runtime.supervisor.machine import OsAddresses

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def make_interface(
    root: Path,
    name: str,
    *,
    speed: int | None = None,
    has_device: bool = True,
    numa_node: int = -1,
    hardware: str = "02:00:00:00:00:01",
    below: tuple[str, ...] = (),
    state: str = "up",
) -> None:
    """Without a `speed` the file cannot be read, as where a driver refuses."""
    place = root / "class" / "net" / name
    place.mkdir(parents=True)
    (place / "address").write_text(f"{hardware}\n")
    (place / "mtu").write_text("1500\n")
    (place / "operstate").write_text(f"{state}\n")
    if speed is None:
        (place / "speed").mkdir()
    else:
        (place / "speed").write_text(f"{speed}\n")
    if has_device:
        (place / "device").mkdir()
        (place / "device" / "numa_node").write_text(f"{numa_node}\n")
    for lower in below:
        (place / f"lower_{lower}").symlink_to(f"../{lower}")


def make_numa_node(root: Path, number: int, cpus: str, memory_kib: int) -> None:
    place = root / "devices" / "system" / "node" / f"node{number}"
    place.mkdir(parents=True)
    (place / "cpulist").write_text(f"{cpus}\n")
    lines = [f"Node {number} MemTotal:       {memory_kib} kB", f"Node {number} MemFree: 1 kB"]
    (place / "meminfo").write_text("\n".join(lines))


def addresses(
    internet: Mapping[str, str], hardware: str = "02:00:00:00:00:01"
) -> dict[str, OsAddresses]:
    """Of interfaces by name, with one IP address each."""
    return {name: OsAddresses(hardware, (ip,)) for name, ip in internet.items()}


def make_program(path: Path, answer: str, status: int = 0) -> str:
    """A program that prints an answer, whatever it is asked."""
    path.with_suffix(".txt").write_text(answer)
    path.write_text(f"#!/bin/sh\ncat {path.with_suffix('.txt')}\nexit {status}\n")
    path.chmod(0o755)
    return str(path)
