"""What figures are worth nothing without: the machine, the versions, the command, other load."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import psutil

_CPU_INFO = Path("/proc/cpuinfo")


def describe_run(packages: Iterable[str]) -> dict[str, object]:
    """Machine, versions of `packages` (those that are installed) and the command line."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "versions": versions,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


class CpuShares:
    """Shares of the machine's CPU time since it was made: another program's load spoils figures."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = self._used_s()

    def cores_used(self) -> float:
        """CPU seconds of the processes (and their children) per second of wall time."""
        elapsed_s = time.monotonic() - self._began_s
        return (self._used_s() - self._own_s) / elapsed_s if elapsed_s > 0 else 0.0

    def others(self) -> float:
        """CPU time of everything but the processes (and their children) over all CPU time."""
        busy_s, total_s = _busy_s()
        elapsed_s = total_s - self._busy_s[1]
        if elapsed_s <= 0:
            return 0.0
        others_s = busy_s - self._busy_s[0] - (self._used_s() - self._own_s)
        return max(0.0, min(1.0, others_s / elapsed_s))

    def _used_s(self) -> float:
        return sum(used_cpu_s(pid) for pid in self._pids)


def used_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its living descendants; 0 when it is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    used_s = 0.0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s += own_cpu_s(process)
    return used_s


def own_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of one process alone. Raises psutil.NoSuchProcess when it is gone."""
    times = process.cpu_times()
    return float(times.user + times.system)


# -- helpers, in the order used -------------------------------------------------------------------


def _cpu_model() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _busy_s() -> tuple[float, float]:
    """CPU seconds spent and CPU seconds there were, all cores together, since the machine began."""
    times = psutil.cpu_times()
    total_s = float(sum(times)) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s
