"""A test that waits for anything is of the real stage, or fails by name; second tries are told."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slowness import patient
from stages import deterministic

TESTS = Path(__file__).parent
FLAKY = """
import pytest

pytestmark = pytest.mark.usefixtures("machine")
tries = dict.fromkeys(range({count}), 0)

@pytest.mark.parametrize("n", tries)
def test_sometimes(n):
    tries[n] += 1
    assert tries[n] == {passes_at}
"""


def bind() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))


def connect() -> None:
    with socket.socket() as caller:
        caller.connect_ex(("127.0.0.1", 9))


def start_a_process() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def spawn() -> None:
    child = multiprocessing.get_context("spawn").Process(target=str)
    child.start()
    child.join()


def sleep() -> None:
    time.sleep(0)


def sleep_in_a_loop() -> None:
    asyncio.run(asyncio.sleep(0.001))


def sleep_in_a_thread() -> None:
    thread = threading.Thread(target=sleep)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("waits", "name"),
    [
        (bind, "socket.bind"),
        (connect, "socket.connect"),
        (start_a_process, "subprocess.Popen"),
        (fork, "os.fork"),
        (spawn, "multiprocessing.spawn"),
        (sleep, "time.sleep"),
        (sleep_in_a_loop, "asyncio.sleep"),
        (sleep_in_a_thread, "time.sleep"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_what_waits_is_named(waits: Callable[[], None], name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=name), deterministic():
        waits()


def test_what_computes_is_not() -> None:
    with deterministic():
        asyncio.run(asyncio.sleep(0))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("count", "passes_at", "passes", "told"),
    [(1, 1, True, False), (3, 2, True, True), (4, 2, False, True), (1, 3, False, True)],
    ids=["at once", "at the second try", "too many", "never"],
)
def test_second_tries_are_told_and_few(
    count: int, passes_at: int, passes: bool, told: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text(FLAKY.format(count=count, passes_at=passes_at))
    done = pytest_in(tmp_path)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert ("flaky: test_some.py::test_sometimes[0]" in done.stdout) == told


@pytest.mark.usefixtures("machine")
def test_a_property_gets_no_second_try(tmp_path: Path) -> None:
    """An example that failed once has shown a fault."""
    rows = ["from hypothesis import given, strategies", FLAKY.format(count=1, passes_at=2)]
    text = "\n".join(rows).replace("def test", "@given(_=strategies.none())\ndef test")
    (tmp_path / "test_some.py").write_text(text.replace("(n)", "(_, n)"))
    assert pytest_in(tmp_path).returncode == 1


@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(77)
def test_the_time_that_a_test_may_take_is_a_deadline_too(request: pytest.FixtureRequest) -> None:
    mark = request.node.get_closest_marker("timeout")
    assert mark is not None
    assert mark.args == (patient(77.0),)


#: that the suite's own rules need, and these rules
PLUGINS = (
    "pytest_rerunfailures",
    "pytest_timeout",
    "xdist.plugin",
    "_hypothesis_pytestplugin",
    "conftest",
)


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest"),
            *itertools.chain.from_iterable(("-p", plugin) for plugin in PLUGINS),
            *("--stage", "real", "--reruns", "1", "."),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            # The others take seconds to import.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
