"""What `livescale serve` says of its pool: a log where there is no terminal, and on one."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
TRIES = 5
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) (.*)")
TIMED = ("--device", "timed", "--arena-bytes", "8MiB", "--kv-bytes", "8MiB")


def wait_s() -> float:
    return patient(120)


class Serving:
    """A running `livescale serve` whose standard error is `stderr`."""

    def __init__(self, stderr: int, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "livescale.main", "serve", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")},
            start_new_session=True,
        )
        self.printed: list[str] = []

    def wait_until_printed(self, pattern: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.search(pattern, line):
                return found[0]
        raise AssertionError(f"{pattern!r} was never printed: {self.printed}")


class Written:
    """Everything that comes from a descriptor, as it comes."""

    def __init__(self, source: int) -> None:
        self.text = ""
        self._source = source
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # A terminal whose other side is closed ends with an error.
        with contextlib.suppress(OSError):
            while content := os.read(self._source, 65536):
                with self._more:
                    self.text += content.decode()
                    self._more.notify_all()

    def wait_for(self, pattern: str) -> None:
        with self._more:
            found = self._more.wait_for(lambda: re.search(pattern, self.text), wait_s())
        assert found, f"{pattern!r} is not in {self.text}"

    def rest(self) -> str:
        self._thread.join(wait_s())
        return self.text


@contextlib.contextmanager
def serving(has_terminal: bool, *words: object) -> Iterator[tuple[Serving, Written]]:
    source, sink = pty.openpty() if has_terminal else os.pipe()
    running = Serving(sink, *words)
    os.close(sink)
    killer = threading.Timer(wait_s(), running.process.kill)
    killer.start()
    try:
        yield running, Written(source)
    finally:
        killer.cancel()
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
        os.close(source)


def test_without_a_terminal_each_event_is_a_dated_line(tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    flags = (*TIMED, "--port", 0, "--workers", 2, "--host-memory-bytes", "64MiB")
    with serving(False, tiny_model, *flags) as (running, written):
        url = running.wait_until_printed(r"http://[\d.:]+")
        log = written
        log.wait_for(r"model tiny: 0 -> 1 instances \(below_min\)")
        log.wait_for(r"model tiny: instance \d+ on w\d\.0 is loaded: 3\.\d+ MB in .* \(.*B/s\)")
        log.wait_for(r"worker 1 is ready after \d+\.\d s")
        children = psutil.Process(running.process.pid).children()
        workers = [c for c in children if "worker" in c.cmdline()]
        workers[0].kill()
        log.wait_for(r"WARNING worker \d ended \(killed by signal 9\); it is started again in")
        log.wait_for(r"WARNING worker w\d\.0 is lost")
        log.wait_for(r"INFO worker \d is ready again after")
        log.wait_for(r"INFO worker w\d\.1 has joined in its place")
        with httpx.Client(base_url=url, timeout=wait_s(), trust_env=False) as client:
            asked = {"path": str(other), "name": "new", "min_replicas": 0}
            assert client.post("/admin/models", json=asked).status_code == 201
            log.wait_for(r"INFO model new: published, 3\.\d+ MB, 0 to \d instances")
            for path in ("/health", "/live", "/metrics"):
                client.get(path)
            headers = {"Content-Type": "application/json"}
            assert client.delete("/admin/models/new", headers=headers).status_code == 202
            log.wait_for(r"INFO model new: withdrawn")
            log.wait_for(r"INFO model new: removed from all workers")
        running.process.send_signal(signal.SIGINT)
        running.wait_until_printed("stopped")
        assert running.process.wait(wait_s()) == 0
        text = log.rest()
    lines = text.splitlines()
    own = [line for line in lines if not re.search(r" (controller|gateway|worker|agent)\[", line)]
    assert own
    assert all(LINE.fullmatch(line) for line in own), text
    assert "\x1b" not in text
    assert not re.search("/health|/live|/metrics", text)
    # What scripts wait for stays as it was, without dates.
    begins = ("tiny: ", "starting ", "ready after ", "try: ", "Ctrl-C ", "draining ", "stopped")
    assert [line for line in running.printed if not line.startswith(begins)] == []


def is_seen_to_fail(client: httpx.Client, running: Serving, written: Written) -> bool:
    """The only worker is killed: whether a probe failed before the next one was ready. On a busy
    machine no probe may have come meanwhile."""
    [worker] = [
        child
        for child in psutil.Process(running.process.pid).children()
        if "worker" in child.cmdline()
    ]
    lives = written.text.count("is ready again")
    worker.kill()
    while written.text.count("is ready again") == lives:
        if client.get("/health").status_code != 200:
            return True
    return False


def test_probes_are_not_logged_though_they_fail(tiny_model: Path) -> None:
    flags = (*TIMED, "--port", 0, "--workers", 1, "--log-level", "info")
    with serving(False, tiny_model, *flags) as (running, written):
        url = running.wait_until_printed(r"http://[\d.:]+")
        with httpx.Client(base_url=url, timeout=wait_s(), trust_env=False) as client:
            assert any(is_seen_to_fail(client, running, written) for _ in range(TRIES))
            assert client.get("/nothing").status_code == 404
        written.wait_for("/nothing")
        running.process.send_signal(signal.SIGINT)
        running.wait_until_printed("stopped")
        text = written.rest()
    assert "/health" not in text


def test_a_terminal_has_a_line_that_says_how_far_the_start_is(tiny_model: Path) -> None:
    with serving(True, tiny_model, *TIMED, "--port", 0, "--workers", 1) as (running, written):
        running.wait_until_printed("ready after")
        running.process.send_signal(signal.SIGINT)
        running.wait_until_printed("stopped")
        assert running.process.wait(wait_s()) == 0
        text = written.rest()
    assert re.search(r"\d of 4 processes are ready\r\x1b\[K", text), text
    assert re.search(r"(^|\n|\x1b\[K)\d\d:\d\d:\d\d worker 0 is ready after", text), text
    assert "INFO" not in text
