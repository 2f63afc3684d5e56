"""One process of a pool and its successors: started, watched, and killed, to be replaced, where it
does not answer: a process that was stopped, or whose work is stuck, does not end by itself. When a
child counts as lost is decided in `control/cluster/liveness.py`.

Which processes there are is the supervisor's; when the next one begins stands in `restarts.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from livescale.common.interpreter import module_words
from livescale.config.pool import PoolConfig
from livescale.control.cluster.liveness import SilenceWatch, look_gap_ns
from livescale.gateway.contract.keys import ADMIN_KEY_VARIABLES, KEY_VARIABLES
from livescale.runtime.children.forking import ForkedProcess, ForkServer, ForkServerError
from livescale.runtime.children.restarts import Restarts
from livescale.runtime.wire.boot import Boot, Status
from livescale.values.types import Value
from livescale.values.units import NS_PER_MS

_log = logging.getLogger(__name__)
# Until its first word: imports, memory that is touched, kernels that are compiled.
_START_NS = 600_000_000_000
# A controller tells all its models, with their manifests.
STATUS_BYTES_MAX = 256 << 20
_SHOWN_BYTES = 200


@dataclass(eq=False)
class Child:
    """One process and its successors. `boot` builds the boot message of the n-th life. With `forks`
    every life is a fork of that server, which has no descriptors to pass. With a `last_word` it
    ends when it is told that; others by SIGTERM. `python` is the interpreter (None: this one).
    `ended` is called at the end of each life."""

    name: str
    kind: str
    boot: Callable[[int], Boot]
    fds: tuple[int, ...] = ()
    prefix: tuple[str, ...] = ()
    heed: Callable[[Status], None] = lambda _: None
    ended: Callable[[], None] = lambda: None
    forks: ForkServer | None = None
    last_word: Value | None = None
    python: str | None = None
    life: int = -1
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | ForkedProcess | None = None
    #: when this life last answered `ask` (None: it has not yet)
    answered_ns: int | None = None
    #: when this life began (monotonic)
    started_s: float = 0.0

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.name)

    async def start(self, config: PoolConfig) -> None:
        """Begin the next life. Raises OSError where the system gives no process."""
        self.life += 1
        self.restarts.begins()
        self.started_s = time.monotonic()
        self.answered_ns = None
        self.process = await self._begin(config)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.boot(self.life)) + b"\n")

    async def _begin(self, config: PoolConfig) -> asyncio.subprocess.Process | ForkedProcess:
        if self.forks is not None:
            try:
                return await self.forks.start(self.kind)
            except ForkServerError as error:
                _log.warning("%s is started without a fork: %s", self.name, error)
        return await asyncio.create_subprocess_exec(
            *self.prefix,
            *module_words(
                "livescale.runtime.children.child", self.kind, config.log_level, python=self.python
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self.fds,
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
            status = self._status(text)
            if status is None:
                continue
            if status.is_working:
                self.answered_ns = time.monotonic_ns()
            self.restarts.fatal = status.fatal or self.restarts.fatal
            if status.is_ready:
                ready_at = time.monotonic()
                self.restarts.ready()
                self.is_ready.set()
            self._let_heed(status)
        await self.process.wait()
        self.ended()
        if self.process.stdin is not None:
            self.process.stdin.close()
        ready_s = None if ready_at is None else time.monotonic() - ready_at
        self.restarts.ended(self.process.returncode, ready_s)
        self.is_ready.clear()

    def _status(self, line: bytes) -> Status | None:
        """None for a line that is none: a library may print."""
        try:
            return msgspec.json.decode(line, type=Status)
        except msgspec.MsgspecError as error:
            shown = line[:_SHOWN_BYTES].decode(errors="replace").rstrip()
            _log.warning("%s wrote a line that is not a status (%s): %s", self.name, error, shown)
            return None

    def _let_heed(self, status: Status) -> None:
        # The child is watched on, whatever its owner makes of a status: one that nobody reads from
        # hangs, and is not started again when it ends.
        try:
            self.heed(status)
        except Exception:
            told = [name for name in status.__struct_fields__ if getattr(status, name)]
            _log.exception("a status of %s is lost (%s)", self.name, ", ".join(told) or "empty")

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def ask(self) -> None:
        """Let the process answer with a status line, if it works."""
        self._write(b"\n")

    def tell(self, message: Value) -> None:
        """One line more after the boot message, for a process that heeds its parent."""
        self._write(msgspec.json.encode(message) + b"\n")

    def end(self) -> None:
        """Let the process end in order, for good."""
        if self.last_word is None:
            self.signal(signal.SIGTERM)
        else:
            self.tell(self.last_word)

    def _write(self, line: bytes) -> None:
        stdin = self.process.stdin if self.process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(line)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


SLEEPING_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Threads that wait for others sleep. Where several workers share cores, those that spin keep the
thread that is waited for from running: a Run with two threads took 4 to 7 times as long."""


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
        **({} if config.cores_profile is None else SLEEPING_THREADS),
        # Models come from directories only; nothing may try to reach a hub.
        "HF_HUB_OFFLINE": "1",
    }


async def watch_children(children: Sequence[Child], lost_after_ms: int) -> None:
    """Ask all living children again and again whether they work, for ever."""
    watch: SilenceWatch[tuple[str, int]] = SilenceWatch(lost_after_ms * NS_PER_MS)
    by_name = {child.name: child for child in children}
    while True:
        now_ns = time.monotonic_ns()
        watched = dict.fromkeys(watch.peers)
        for child in children:
            life = (child.name, child.life)
            if not child.is_alive:
                watch.remove(life)
                continue
            if life not in watched:
                for earlier in range(child.life):
                    watch.remove((child.name, earlier))
                watch.add(life, now_ns, _START_NS)
            child.ask()
            if child.answered_ns is not None:
                watch.received(life, child.answered_ns)
        for name, _ in watch.look(now_ns):
            child = by_name[name]
            silent_s = (now_ns - (child.answered_ns or now_ns - _START_NS)) / 1e9
            _log.warning("%s is silent for %.1f s: killing it", name, silent_s)
            child.signal(signal.SIGKILL)
        await asyncio.sleep(look_gap_ns(watch.lost_after_ns) / 1e9)
