"""Workers in an interpreter of their own, as an engine with other libraries needs it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import psutil
import pytest
from pool_thread import LocalPool

from effort import mostly_long
from livescale.runtime.layout.worker_python import WorkerPythonError, check_worker_python

pytestmark = pytest.mark.usefixtures("machine")

MARK = "IN_THE_INTERPRETER_OF_WORKERS"


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("device", mostly_long(["cpu", "timed"], short=["timed"]))
def test_workers_run_in_it_and_nothing_else_does(
    tiny_model: Path, tmp_path: Path, device: str
) -> None:
    """With forks (on CPUs) and without."""
    run = f'exec {shlex.quote(sys.executable)} "$@"'
    python = script(tmp_path / "python", f"export {MARK}=1", run)
    with LocalPool(tiny_model, tmp_path, workers=2, device=device, worker_python=python) as pool:
        pool.wait_ready()
        pids = pool.pool.pids()
        marked = {name for name, pid in pids.items() if MARK in psutil.Process(pid).environ()}
    assert marked == {"worker 0", "worker 1"}


def test_what_is_no_interpreter_for_workers(tmp_path: Path) -> None:
    for python, words in (
        (str(tmp_path / "none"), "No such file"),
        (script(tmp_path / "old", "echo 0.0.1"), "has livescale 0.0.1, this command "),
        (script(tmp_path / "bare", "echo 'No module named livescale' >&2; exit 1"), "No module"),
    ):
        with pytest.raises(WorkerPythonError, match=words) as raised:
            check_worker_python(python)
        assert str(raised.value).startswith(f"worker_python: {python}")
    check_worker_python(sys.executable)
