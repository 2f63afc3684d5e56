"""A child process that answers JSON lines, seen from its parent: bounded waits, a clean end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from livescale.common.interpreter import module_words
from livescale.lab.bench.base.errors import BenchError

_END_S = 20.0
_LOG_TAIL_CHARS = 1500


class LineProcess:
    """One JSON object out, one back. Use as a context: the process and its children end with it."""

    def __init__(self, name: str, words: list[str], environ: Mapping[str, str]) -> None:
        self.name = name
        # Closed with the process.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **environ},
                # A group of its own, so that what it starts can be ended with it.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"{name}: cannot start {words[0]}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, object]) -> None:
        """Write one line. Raises BenchError when the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._early_end() from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises BenchError, with the end of the log, when none comes in time."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                self._kill()
                raise BenchError(
                    f"{self.name} gave no answer within {timeout_s:.0f} s: {self._log_tail()}"
                )
            content = os.read(descriptor, 1 << 20)
            if not content:
                raise self._early_end()
            self._unread += content
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, message: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Send one line and wait for the answer."""
        self.send(message)
        return self.receive(timeout_s)

    def check_alive(self) -> None:
        """Raises BenchError, with the end of the log, when the process has ended."""
        if self._process.poll() is not None:
            raise self._early_end()

    def __enter__(self) -> LineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process: its input ends first, then it is killed with all that it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # everything in the group ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)

    def _early_end(self) -> BenchError:
        return BenchError(f"{self.name} ended early: {self._log_tail()}")

    def _log_tail(self) -> str:
        self._process.wait(_END_S)
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        status = f"exit status {self._process.returncode}"
        return f"{status}; its log ends:\n{text[-_LOG_TAIL_CHARS:]}" if text else status


def bench_process(
    name: str,
    module: str,
    *arguments: str,
    threads: int | None = None,
    before: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> LineProcess:
    """A module of `lab.bench`, with its arguments, in a process of its own, which computes with so
    many threads. The words `before` its command start it somewhere else."""
    own = {} if threads is None else thread_environment(threads)
    words = [*before, *module_words(f"livescale.lab.bench.{module}", *arguments)]
    return LineProcess(name, words, {**own, **(environ or {})})


def thread_environment(threads: int) -> dict[str, str]:
    """With this environment libraries compute with so many threads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
