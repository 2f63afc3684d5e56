"""Ctrl-C in the middle of a command that runs other processes, or a testbed."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from livescale.common.interpreter import module_words
from livescale.lab.testbed.commands import namespaces
from slowness import patient


def check_interrupt(words: Sequence[str], line: str) -> None:
    """As `check_processes_end`; and no namespace of a testbed is left."""
    assert nothing_is_left(check_processes_end(words, line))


def check_processes_end(words: Sequence[str], line: str) -> int:
    """`livescale …` is interrupted when this line has come: one word of it, exit status 130, and
    no process is left. The id that its process had."""
    with subprocess.Popen(
        module_words("livescale.main", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for told in process.stdout:
            if line in told:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=patient(60))
    assert process.returncode == 130
    assert error.strip().endswith("interrupted")
    _, alive = psutil.wait_procs(children, patient(10))
    assert alive == []
    return process.pid


def nothing_is_left(pid: int) -> bool:
    """No namespace of a testbed of this process."""
    return not any(name.startswith(f"livescale-{pid}.") for name in namespaces())


def python_without_forks(directory: Path) -> Path:
    """An interpreter in which a fork server never answers; it is a process named sleep."""
    python = directory / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *fork-server*) exec sleep 100000;; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o700)
    return python
