"""The testbeds that exist on this machine: whose they are, and how they are removed.

Names carry the process that made a testbed, so that what a killed process left can be told from
what another one is using.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from livescale.testbed.commands import namespaces, processes, run
from livescale.testbed.errors import TestbedError

PREFIX = "livescale-"

_NAMESPACE = re.compile(rf"({PREFIX}(\d+)\.(\d+)-\d+)-(\w+)")


@dataclass(frozen=True, slots=True)
class ExistingTestbed:
    """A testbed by the namespaces that are there. `owner` made it; None when that has ended."""

    name: str
    owner: int | None
    places: tuple[str, ...]

    def namespace(self, place: str) -> str:
        """The namespace of a host, or of "control"."""
        return f"{self.name}-{place}"


def own_mark() -> str:
    """This process, told apart from a later one with the same id."""
    pid = os.getpid()
    return f"{pid}.{_started(pid)}"


def existing_testbeds() -> list[ExistingTestbed]:
    """All testbeds, in the order of their names. Raises TestbedError."""
    places: dict[str, list[str]] = {}
    owners: dict[str, int | None] = {}
    for namespace in namespaces():
        found = _NAMESPACE.fullmatch(namespace)
        if found is None:
            continue
        pid, started = int(found[2]), int(found[3])
        places.setdefault(found[1], []).append(found[4])
        owners[found[1]] = pid if _started(pid) == started else None
    return [ExistingTestbed(name, owners[name], tuple(places[name])) for name in sorted(places)]


def remove(name: str) -> None:
    """End all processes in the hosts of a testbed and remove its namespaces; links go with them."""
    for namespace in namespaces():
        if not namespace.startswith(f"{name}-"):
            continue
        for pid in processes(namespace):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            run(["ip", "netns", "delete", namespace])
        except TestbedError:
            # Somebody else may be removing it, too.
            if namespace in namespaces():
                raise


def remove_leftovers() -> list[str]:
    """Remove the testbeds whose processes have ended; their names. Raises TestbedError."""
    left = [testbed.name for testbed in existing_testbeds() if testbed.owner is None]
    for name in left:
        remove(name)
    return left


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None when it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold blanks and brackets itself.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])
