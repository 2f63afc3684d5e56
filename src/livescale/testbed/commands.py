"""Running `ip` and `tc`: batches of lines, in namespaces, with errors that say what failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from livescale.testbed.errors import TestbedError

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
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise TestbedError(f"{' '.join(words)}: {said}{_failed_line(said, lines)}")
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


def _failed_line(said: str, lines: Sequence[str]) -> str:
    """The line that a batch stopped at: the tools print its number only."""
    number = said.rpartition("-:")[2].split(":")[0].strip()
    if number.isdecimal() and 0 < int(number) <= len(lines):
        return f" ({lines[int(number) - 1]})"
    return ""
