"""`livescale …` as a process of its own, as on a machine of its own: for benchmarks and the demo of
several hosts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from livescale.common.errors import UserError
from livescale.common.interpreter import module_words


@dataclass(slots=True)
class HostCommand:
    """`livescale …` of a host, with its log. In a session of its own: Ctrl-C reaches only the
    process that began the command. `started_ns` is of the monotonic clock."""

    host: str
    log: Path
    process: subprocess.Popen[bytes]
    started_ns: int

    @classmethod
    def begin(
        cls, host: str, folder: Path, words: Sequence[str], *, inside: Sequence[str] = ()
    ) -> HostCommand:
        """The words `inside` start it somewhere else. Settings of this process's environment are
        not its own."""
        log = folder / f"{host}.log"
        own = {k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")}
        with log.open("wb") as file:
            started_ns = time.monotonic_ns()
            process = subprocess.Popen(
                [*inside, *module_words("livescale.main", *words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**own, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        return cls(host, log, process, started_ns)

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def check_runs(self) -> None:
        """Raises UserError with the end of its log."""
        if self.process.poll() is not None:
            raise UserError(
                f"{self.host} ended with exit status {self.process.returncode}:"
                f" {self.last_words()} ({self.log})"
            )

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"


@contextlib.contextmanager
def ended_with(commands: Mapping[str, HostCommand], head: str, patience_s: float) -> Iterator[None]:
    """The head's Ctrl-C ends all commands; after an error all end at once."""
    try:
        yield
    except BaseException:
        for command in commands.values():
            command.process.kill()
        raise
    else:
        commands[head].interrupt()
    finally:
        end_commands(list(commands.values()), patience_s)


def end_commands(commands: Sequence[HostCommand], patience_s: float) -> None:
    """All of them end: those that have not done so after the patience are killed. To be interrupted
    before, if they are to end in order."""
    deadline_s = time.monotonic() + patience_s
    for command in commands:
        try:
            command.process.wait(max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            command.process.kill()
            command.process.wait()
