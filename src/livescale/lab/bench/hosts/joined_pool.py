"""A pool of several hosts on one machine, for benchmarks: `livescale serve` without devices, and
each host a `livescale join`, all on 127.0.0.1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.machine import own_cpu_s
from livescale.lab.bench.hosts.host_commands import HostCommand, ended_with

HEAD = "head"
_LOOK_S = 0.2
_START_S = 60.0
_END_S = 60.0
_JOIN_ADDRESS = re.compile(r"livescale join (\S+) --token-file")
_URL = re.compile(r"ready after \S+ s: (\S+)/v1")
_CHILD = "livescale.runtime.children.child"


class JoinedPool:
    """As a context: at its end the head's Ctrl-C ends the hosts, too; after an error all end at
    once."""

    def __init__(self, folder: Path) -> None:
        """Logs and the token lie in the folder."""
        self.commands: dict[str, HostCommand] = {}
        self._ending = ended_with(self.commands, HEAD, _END_S)
        self._folder = folder
        self._token = folder / "pool.token"
        self._address = ""

    def begin_head(self, *words: str) -> str:
        """Start `serve` with these words beside; where others join. Raises UserError."""
        self.commands[HEAD] = HostCommand.begin(
            HEAD,
            self._folder,
            [
                *("serve", "--workers", "0", "--listen", "127.0.0.1:0", "--port", "0"),
                *("--token-file", str(self._token), *words),
            ],
        )
        self._address = self._said(_JOIN_ADDRESS)
        return self._address

    def begin_host(self, name: str, *words: str) -> None:
        """Start `join` with these words beside."""
        known = ("join", self._address, "--token-file", str(self._token), "--name", name)
        self.commands[name] = HostCommand.begin(name, self._folder, [*known, *words])

    def url(self) -> str:
        """That of the API, without /v1, once the pool is ready. Raises UserError."""
        return self._said(_URL)

    def until(self, missing: Callable[[], Sequence[str]], patience_s: float) -> None:
        """Until none of the commands is named. Raises UserError with the last words of one that
        ended, or is missing after the patience."""
        deadline_s = time.monotonic() + patience_s
        while names := missing():
            for command in self.commands.values():
                command.check_runs()
            if time.monotonic() > deadline_s:
                raise BenchError(
                    f"{names[0]}, one of {len(names)}, is not there after {patience_s:.0f} s;"
                    f" its last words: {self.commands[names[0]].last_words()}"
                )
            time.sleep(_LOOK_S)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All that live now, by kind: supervisor, controller, gateway, worker, agent, …"""
        found: dict[str, list[psutil.Process]] = {}
        for command in self.commands.values():
            own = psutil.Process(command.process.pid)
            found.setdefault("supervisor", []).append(own)
            for child in own.children(recursive=True):
                found.setdefault(_kind(child), []).append(child)
        return found

    def __enter__(self) -> JoinedPool:
        self._ending.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ending.__exit__(*error)

    # -- helpers --------------------------------------------------------------------------------

    def _said(self, words: re.Pattern[str]) -> str:
        """What the head says there, once it has said so."""
        log = self.commands[HEAD].log
        self.until(lambda: [] if words.search(log.read_text()) else [HEAD], _START_S)
        found = words.search(log.read_text())
        assert found is not None, "a log only grows"
        return found[1]


def cpu_s(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """CPU seconds by kind. Raises psutil.NoSuchProcess when one is gone."""
    return {kind: sum(map(own_cpu_s, of)) for kind, of in processes.items()}


def _kind(child: psutil.Process) -> str:
    words = child.cmdline()
    return words[words.index(_CHILD) + 1] if _CHILD in words else "others"
