"""One process of a pool and its successors: started, watched, and when to give it up.

Which processes there are is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import msgspec

from livescale.config import PoolConfig
from livescale.gateway.keys import ADMIN_KEY_VARIABLES, KEY_VARIABLES
from livescale.interpreter import module_words
from livescale.runtime.boot import Boot, Status
from livescale.types import Value

# A process that dies so often before it is ready will not get better by itself.
_FAILED_STARTS_MAX = 3
# One that was ready is always replaced, but the sooner it dies again and again, the later.
_SHORT_LIFE_S = 10.0
_RESTART_PAUSE_S = (0.1, 5.0)
# A controller tells all its models, with their manifests.
_STATUS_BYTES_MAX = 256 << 20


class Child:
    """One process and its successors. `boot` builds the boot message of the n-th life."""

    def __init__(
        self,
        name: str,
        kind: str,
        boot: Callable[[int], Boot],
        fds: tuple[int, ...] = (),
        prefix: tuple[str, ...] = (),
        heed: Callable[[Status], None] | None = None,
    ):
        self.name = name
        self.kind = kind
        self.life = -1
        self.is_ready = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._boot = boot
        self._fds = fds
        self._prefix = prefix
        self._heed = heed
        self._failed_starts = 0
        self._short_lives = 0
        self._fatal: str | None = None

    async def start(self, config: PoolConfig) -> None:
        self.life += 1
        self.process = await asyncio.create_subprocess_exec(
            *self._prefix,
            *module_words("livescale.runtime.child", self.kind, config.log_level),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._fds,
            # Ctrl-C is the supervisor's alone: it stops its children in order.
            start_new_session=True,
            env=_child_environment(config),
            limit=_STATUS_BYTES_MAX,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self._boot(self.life)) + b"\n")

    async def watch(self) -> None:
        """Read status lines until the process is gone."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready_at: float | None = None
        async for text in self.process.stdout:
            with contextlib.suppress(msgspec.MsgspecError):
                status = msgspec.json.decode(text, type=Status)
                self._fatal = status.fatal or self._fatal
                if self._heed is not None:
                    self._heed(status)
                if status.is_ready:
                    ready_at = time.monotonic()
                    self.is_ready.set()
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._failed_starts = self._failed_starts + 1 if ready_at is None else 0
        is_short = ready_at is None or time.monotonic() - ready_at < _SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if is_short else 0
        self.is_ready.clear()

    def give_up_reason(self) -> str | None:
        """Why starting the process again makes no sense (None: it does)."""
        if self._failed_starts < _FAILED_STARTS_MAX:
            return None
        assert self.process is not None
        return (
            f"{self.name} died {self._failed_starts} times in a row before it was ready"
            f" (exit status {self.process.returncode}): {self._fatal or 'see its log'}"
        )

    def pause_s(self) -> float:
        """How long to wait before the next life: twice as long after each short one."""
        least, most = _RESTART_PAUSE_S
        return float(min(least * 2 ** max(self._short_lives - 1, 0), most))

    def tell(self, message: Value) -> None:
        """One line more after the boot message, for a process that heeds its parent."""
        stdin = self.process.stdin if self.process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(msgspec.json.encode(message) + b"\n")

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


def _child_environment(config: PoolConfig) -> dict[str, str]:
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
