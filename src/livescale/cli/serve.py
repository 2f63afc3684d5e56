"""`livescale serve MODEL… | -c pool.yaml`: run a pool until Ctrl-C, and show its news as log lines,
and on a terminal a line below them that says how far everything is.

Lines are written by a thread of their own: a terminal or pipe that is not read must not stop the
supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from livescale.common.addresses import is_loopback
from livescale.common.settings import ConfigError, size_text
from livescale.config.pool import PoolConfig
from livescale.config.reading import add_flags, given_flags, load_config
from livescale.runtime.news import LoadProgress, News, PoolProgress
from livescale.runtime.pool_layout import PoolLayout
from livescale.runtime.supervisor import Pool, describe
from livescale.runtime.worker_python import check_worker_python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="directory of a model")
    parser.add_argument("-c", "--config", type=Path, help="configuration file (YAML)")
    words = "wait until the head that acts is gone; this one has no workers of its own"
    parser.add_argument("--standby", action="store_true", help=words)
    words = "nodes of this Ray cluster are the hosts (its GCS, or auto; extra ray; see docs/ray.md)"
    parser.add_argument("--ray", metavar="ADDRESS", help=words)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first drains, the second ends everything at once."""
    flags = given_flags(arguments)
    if arguments.ray is not None:
        if arguments.standby:
            raise ConfigError("--standby and --ray do not go together yet")
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--ray: Ray is not installed: pip install 'livescale[ray]'")
        module = importlib.import_module("livescale.cli.ray_serve")
        code: int = module.run(arguments.ray, arguments.config, arguments.models, flags)
        return code
    config = load_config(arguments.config, arguments.models, os.environ, flags)
    if config.worker_python is not None:
        check_worker_python(config.worker_python)
    with ServeDisplay(config.log_level) as display:
        return asyncio.run(serve(config, display, is_standby=arguments.standby))


class HostSource(Protocol):
    """What brings hosts to a pool, as a context around the pool's life."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *_: object) -> None: ...

    def let_go(self) -> None:
        """The pool is about to end: it needs no more hosts."""


async def serve(
    config: PoolConfig,
    display: ServeDisplay,
    layout: PoolLayout | None = None,
    *,
    is_standby: bool = False,
    hosts_of: Callable[[Pool], HostSource] | None = None,
) -> int:
    """Run a pool, at this layout if there is one, until SIGINT or SIGTERM. Where `hosts_of` is
    given, hosts come from there."""
    started = time.monotonic()
    names = ", ".join(model.name for model in config.models)
    display.tell(News(f"reading {names or 'no model'}"))
    pool = Pool(config, os.environ, layout, display.tell, is_standby=is_standby)
    for line in describe(pool.models):
        print(line)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    if pool.token_file is not None:
        tls = "" if config.tls_dir is None else " --tls-dir DIR"
        words = f"livescale join {pool.join_address} --token-file {pool.token_file}{tls}"
        print(f"others join with: {words}")
        if config.tls_dir is None and not is_loopback(config.listen):
            display.tell(News(_PLAIN_TEXT, is_problem=True))
    print(f"starting {pool.layout} …", flush=True)
    hosts = hosts_of(pool) if hosts_of is not None else None
    async with hosts if hosts is not None else contextlib.nullcontext(), pool:
        stop = asyncio.create_task(interrupted.wait())
        ready = asyncio.create_task(pool.ready())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            print(f"ready after {time.monotonic() - started:.1f} s: {pool.base_url}/v1")
            print("Ctrl-C drains and stops.", flush=True)
            await pool.or_failure(stop)
        ready.cancel()
        if hosts is not None:
            hosts.let_go()
        print("draining (Ctrl-C again ends at once) …", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: asyncio.ensure_future(pool.kill()))
    print("stopped")
    return 0


_PLAIN_TEXT = (
    "prompts and answers cross the network as plain text: a listener there reads them, and may"
    " change them (docs/security.md: livescale cluster init, --tls-dir)"
)
_log = logging.getLogger("livescale.pool")
_LINES_MAX = 10_000
_CLOSE_S = 2.0
# Without a terminal a long load is a line in so many seconds.
_LONG_LOAD_S = 10.0
_BAR_CHARS = 20


class ServeDisplay(logging.Handler):
    """The log of the supervisor's own process, on `stream`. Use as a context.

    On a terminal lines are short; elsewhere they have date, level and no line that changes.
    """

    def __init__(self, log_level: str, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream if stream is not None else sys.stderr
        self._has_terminal = self._stream.isatty()
        level = getattr(logging, log_level.upper())
        # News is no chatter: it is shown unless only errors are wanted.
        _log.setLevel(level if level > logging.WARNING else min(level, logging.INFO))
        if self._has_terminal:
            self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        else:
            self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        #: lines, and what stands below them on a terminal (None: unchanged)
        self._queue: queue.Queue[tuple[str, str | None] | None] = queue.Queue(_LINES_MAX)
        self._writer = threading.Thread(target=self._write, name="display", daemon=True)
        self._last_progress_s = time.monotonic()
        logging.basicConfig(level=level, handlers=[self], force=True)

    def __enter__(self) -> ServeDisplay:
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """What waits is written, if the other end reads."""
        self._put(None)
        self._writer.join(_CLOSE_S)

    def emit(self, record: logging.LogRecord) -> None:
        self._put((self.format(record) + "\n", None))

    def tell(self, news: News | PoolProgress) -> None:
        """Show it. Never blocks: what cannot be written for long is dropped."""
        if isinstance(news, News):
            _log.log(logging.WARNING if news.is_problem else logging.INFO, "%s", news.text)
        elif self._has_terminal:
            self._put(("", _below(news)))
        elif news.loads and time.monotonic() >= self._last_progress_s + _LONG_LOAD_S:
            for load in news.loads:
                _log.info("model %s on %s: %s", load.model, load.receiver, _amounts(load))
            self._last_progress_s = time.monotonic()
        if isinstance(news, PoolProgress) and not news.loads:
            self._last_progress_s = time.monotonic()

    def _put(self, item: tuple[str, str | None] | None) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(item)

    def _write(self) -> None:
        below = ""
        while (item := self._queue.get()) is not None:
            lines, changed = item
            try:
                if below:
                    self._stream.write("\r\x1b[K")
                below = below if changed is None else changed
                self._stream.write(lines + below)
                self._stream.flush()
            except OSError:
                return  # the terminal is gone, the pool goes on
        if below:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _below(progress: PoolProgress) -> str:
    """One line: processes that are still starting, then loads."""
    parts = []
    if progress.ready < progress.processes:
        parts.append(f"{progress.ready} of {progress.processes} processes are ready")
    parts += [f"{load.model} on {load.receiver} {_bar(load)}" for load in progress.loads[:2]]
    if len(progress.loads) > len(parts):
        parts.append(f"{len(progress.loads)} loads")
    return ", ".join(parts)[: shutil.get_terminal_size().columns - 1]


def _bar(load: LoadProgress) -> str:
    done = _BAR_CHARS * load.arrived_bytes // max(load.size_bytes, 1)
    return f"[{'#' * done}{'.' * (_BAR_CHARS - done)}] {_amounts(load)}"


def _amounts(load: LoadProgress) -> str:
    """ "3.1 MB of 6.2 MB (1.5 MB/s)"."""
    arrived, size = size_text(load.arrived_bytes), size_text(load.size_bytes)
    return f"{arrived} of {size} ({size_text(load.bytes_per_s)}/s)"
