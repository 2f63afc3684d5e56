"""What a machine says of itself, in lines for an operator."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.clusters.files import rate_text
from livescale.common.settings import size_text
from livescale.runtime.supervisor.gpu_links import Gpu
from livescale.runtime.supervisor.machine import Interface, Machine

_STATES = {True: "up", False: "down", None: "?"}


def machine_lines(machine: Machine) -> list[str]:
    """Interfaces, NUMA nodes and GPUs."""
    lines = ["interfaces"]
    lines += _table([_interface(interface) for interface in machine.interfaces])
    lines.append("NUMA nodes")
    lines += _table(
        [
            (str(node.number), f"CPUs {node.cpus or '?'}", _size(node.memory_bytes))
            for node in machine.numa_nodes
        ]
        or [("none reported by the system",)]
    )
    lines.append("GPUs")
    lines += _table([_gpu(gpu) for gpu in machine.gpus] or [(f"none: {machine.gpus_unknown}",)])
    lines += [f"  NVLink joins {', '.join(group)}" for group in machine.nvlink_groups]
    return lines


# -- helpers --------------------------------------------------------------------------------------


def _interface(interface: Interface) -> tuple[str, ...]:
    rate, node = interface.bytes_per_s, interface.numa_node
    return (
        interface.name,
        _STATES[interface.is_up],
        "MTU ?" if interface.mtu_bytes is None else f"MTU {interface.mtu_bytes}",
        "rate not known" if rate is None else rate_text(rate),
        f"({interface.source})",
        "" if node is None else f"NUMA node {node}",
        ", ".join(interface.addresses),
    )


def _gpu(gpu: Gpu) -> tuple[str, ...]:
    near = [f"CPUs {gpu.cpus}"] if gpu.cpus else []
    near += [] if gpu.numa_node is None else [f"NUMA node {gpu.numa_node}"]
    ways = ", ".join(f"{other} {way}" for other, way in gpu.ways.items())
    return gpu.name, ", ".join(near) or "near to: not told", ways


def _size(amount_bytes: int | None) -> str:
    return "memory ?" if amount_bytes is None else size_text(amount_bytes)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [f"  {'  '.join(row).rstrip()}" for row in cells]
