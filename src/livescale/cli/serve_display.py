"""The log of a supervisor's own process, for `serve`, `join` and `gateway`: news as log lines, and
on a terminal a line below them that says how far everything is.

Lines are written by a thread of their own: a terminal or pipe that is not read must not stop the
supervisor. Nothing of a pool is imported: what joins one starts in less time so.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import sys
import threading
import time

from livescale.common.settings import size_text
from livescale.runtime.wire.news import LoadProgress, News, PoolProgress

_log = logging.getLogger("livescale.pool")
_LINES_MAX = 10_000
_CLOSE_S = 2.0
# Without a terminal a long load is a line in so many seconds.
_LONG_LOAD_S = 10.0
_BAR_CHARS = 20


class ServeDisplay(logging.Handler):
    """The log of the supervisor's own process, on stderr. Use as a context.

    On a terminal lines are short; elsewhere they have date, level and no line that changes.
    """

    def __init__(self, log_level: str) -> None:
        super().__init__()
        self._stream = sys.stderr
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
