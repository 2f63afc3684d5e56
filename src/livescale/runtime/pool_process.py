"""One process of a pool and its successors: started and watched.

Which processes there are is the supervisor's; when the next one begins is said in `restarts.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

import msgspec

from livescale.config import PoolConfig
from livescale.gateway.keys import ADMIN_KEY_VARIABLES, KEY_VARIABLES
from livescale.interpreter import module_words
from livescale.runtime.boot import Boot, Status
from livescale.runtime.forking import ForkedProcess, ForkServer, ForkServerError
from livescale.runtime.restarts import Restarts
from livescale.types import Value

_log = logging.getLogger(__name__)
# A controller tells all its models, with their manifests.
STATUS_BYTES_MAX = 256 << 20


class Child:
    """One process and its successors. `boot` builds the boot message of the n-th life."""

    def __init__(
        self,
        name: str,
        kind: str,
        boot: Callable[[int], Boot],
        fds: tuple[int, ...] = (),
        prefix: tuple[str, ...] = (),
        heed: Callable[[Status], None] = lambda _: None,
        forks: ForkServer | None = None,
    ):
        """With `forks` every life is a fork of that server, which has no descriptors to pass."""
        self.name = name
        self.kind = kind
        self.life = -1
        self.is_ready = asyncio.Event()
        self.process: asyncio.subprocess.Process | ForkedProcess | None = None
        #: when this life last answered `ask` (None: it has not yet)
        self.answered_ns: int | None = None
        self._boot = boot
        self._fds = fds
        self._prefix = prefix
        self._forks = forks
        self.heed = heed
        self.restarts = Restarts(name)
        #: when this life began (monotonic)
        self.started_s = 0.0

    async def start(self, config: PoolConfig) -> None:
        self.life += 1
        self.restarts.begins()
        self.started_s = time.monotonic()
        self.answered_ns = None
        self.process = await self._begin(config)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self._boot(self.life)) + b"\n")

    async def _begin(self, config: PoolConfig) -> asyncio.subprocess.Process | ForkedProcess:
        if self._forks is not None:
            try:
                return await self._forks.start(self.kind)
            except ForkServerError as error:
                _log.warning("%s is started without a fork: %s", self.name, error)
        return await asyncio.create_subprocess_exec(
            *self._prefix,
            *module_words("livescale.runtime.child", self.kind, config.log_level),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._fds,
            # Ctrl-C is the supervisor's alone: it stops its children in order.
            start_new_session=True,
            env=child_environment(config),
            limit=STATUS_BYTES_MAX,
        )

    async def watch(self) -> None:
        """Read status lines until the process is gone."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready_at: float | None = None
        async for text in self.process.stdout:
            with contextlib.suppress(msgspec.MsgspecError):
                status = msgspec.json.decode(text, type=Status)
                if status.is_working:
                    self.answered_ns = time.monotonic_ns()
                self.restarts.fatal = status.fatal or self.restarts.fatal
                if status.is_ready:
                    ready_at = time.monotonic()
                    self.restarts.ready()
                    self.is_ready.set()
                self.heed(status)
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        ready_s = None if ready_at is None else time.monotonic() - ready_at
        self.restarts.ended(self.process.returncode, ready_s)
        self.is_ready.clear()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def ask(self) -> None:
        """Let the process answer with a status line, if it works."""
        stdin = self.process.stdin if self.process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(b"\n")

    def tell(self, message: Value) -> None:
        """One line more after the boot message, for a process that heeds its parent."""
        stdin = self.process.stdin if self.process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(msgspec.json.encode(message) + b"\n")

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


def child_environment(config: PoolConfig) -> dict[str, str]:
    """The environment of every process of the pool."""
    threads = str(config.worker_threads)
    keys = (*KEY_VARIABLES, *ADMIN_KEY_VARIABLES)
    inherited = {name: text for name, text in os.environ.items() if name not in keys}
    return {
        **inherited,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Models come from directories only; nothing may try to reach a hub.
        "HF_HUB_OFFLINE": "1",
    }
