"""Running `ip` and `tc`: batches of lines, in namespaces, with errors that say what failed.

And the testbeds that exist on this machine: whose they are, and how they are removed. Names carry
the process that made a testbed, so that what a killed process left can be told from what another
one is using.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from livescale.lab.testbed.spec import TestbedError

_COMMAND_S = 60.0


def check_machine() -> None:
    """Raises TestbedError when this machine cannot have network namespaces with shaped links."""
    if not sys.platform.startswith("linux"):
        raise TestbedError(f"network namespaces need Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise TestbedError("network namespaces need root; run this with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise TestbedError(f"{tool} is missing: install iproute2 (apt-get install iproute2)")


def run(words: Sequence[str], lines: Sequence[str] = ()) -> str:
    """What the command printed; `lines` are its standard input. Raises TestbedError.

    In a session of its own, so that Ctrl-C at the terminal does not stop it half-way.
    """
    try:
        done = subprocess.run(
            words,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TestbedError(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise TestbedError(f"{' '.join(words)}: {reason}{_failed_line(reason, lines)}")
    return done.stdout


def batch(tool: str, namespace: str, lines: Sequence[str]) -> None:
    """Run the lines of `ip` or `tc` in a namespace; the first that fails ends it."""
    if lines:
        run([tool, "-n", namespace, "-batch", "-"], lines)


def inside(namespace: str) -> list[str]:
    """The words in front of a command that is to run in a namespace."""
    return ["ip", "netns", "exec", namespace]


def namespaces() -> list[str]:
    """Names of all network namespaces, in order."""
    listed = run(["ip", "netns", "list"])
    return sorted(line.split()[0] for line in listed.splitlines() if line.strip())


def processes(namespace: str) -> list[int]:
    """Ids of the processes that are in a namespace; empty when it is gone."""
    try:
        return [int(pid) for pid in run(["ip", "netns", "pids", namespace]).split()]
    except TestbedError:
        return []


def _failed_line(reason: str, lines: Sequence[str]) -> str:
    """The line that a batch stopped at: the tools print its number only."""
    number = reason.rpartition("-:")[2].split(":")[0].strip()
    if number.isdecimal() and 0 < int(number) <= len(lines):
        return f" ({lines[int(number) - 1]})"
    return ""


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
    found = [match for name in namespaces() if (match := _NAMESPACE.fullmatch(name)) is not None]
    testbeds = []
    for (name, pid, started), places in itertools.groupby(
        found, lambda match: match.group(1, 2, 3)
    ):
        owner = int(pid) if _started(int(pid)) == int(started) else None
        testbeds.append(ExistingTestbed(name, owner, tuple(match[4] for match in places)))
    return testbeds


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
            # Another process may be removing it, too.
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
