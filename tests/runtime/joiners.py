"""Machines that join a pool, for tests: each is a process of its own, as `livescale join` is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from pool_thread import LocalPool, wait_until

from livescale.common.interpreter import module_words
from slowness import patient

END_S = 60.0
_OF_VERSION = """
import sys, livescale
livescale.__version__ = "{}"
from livescale.main import main
sys.exit(main())
"""


class Machine:
    """One `livescale` command on a machine beside the head, with its log."""

    def __init__(
        self,
        name: str,
        scratch: Path,
        words: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        version: str | None = None,
    ) -> None:
        """With `version` the machine has another release of livescale."""
        self.name = name
        self.log = scratch / f"{name}.log"
        command = module_words("livescale.main", *words)
        if version is not None:
            command = [sys.executable, "-P", "-c", _OF_VERSION.format(version), *words]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environ, "PYTHONUNBUFFERED": "1"},
            )

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def ended(self) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(patient(END_S))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """The supervisor dies without a word; its processes end by themselves."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(patient(END_S))
        wait_until(lambda: not any(is_running(c) for c in children), f"{self.name} is gone")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(patient(END_S))


class Joiner(Machine):
    """One `livescale join`."""

    def __init__(
        self,
        pool: LocalPool,
        name: str,
        scratch: Path,
        *flags: str,
        prefix: Sequence[str] = (),
        token_file: Path | None = None,
        address: str | None = None,
        version: str | None = None,
    ) -> None:
        assert pool.pool.token_file is not None
        words = [
            *("join", address or pool.pool.join_address, "--name", name, *flags),
            *("--token-file", str(token_file or pool.pool.token_file)),
        ]
        super().__init__(name, scratch, words, prefix=prefix, version=version)


class JoinedGateway(Machine):
    """One `livescale gateway`; `url` is there when the process listens."""

    def __init__(
        self,
        pool: LocalPool,
        name: str,
        scratch: Path,
        *flags: str,
        prefix: Sequence[str] = (),
        version: str | None = None,
    ) -> None:
        """`flags` come last, so they replace what is the same in every test."""
        assert pool.pool.token_file is not None
        words = [
            *("gateway", "--join", pool.pool.join_address, "--name", name, "--port", "0"),
            *("--token-file", str(pool.pool.token_file), *flags),
        ]
        super().__init__(name, scratch, words, prefix=prefix, version=version)

    @property
    def url(self) -> str:
        """Without /v1."""
        wait_until(lambda: self._urls() != [], f"{self.name} listens")
        return self._urls()[0]

    def _urls(self) -> list[str]:
        return re.findall(r"(https?://\S+)/v1\n", self.log.read_text())


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def closing(*joiners: Machine) -> Iterator[None]:
    """Whatever happens, none of them is left."""
    try:
        yield
    finally:
        for joiner in joiners:
            joiner.close()
