"""Nothing outlives the process that started it, not even a child that is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from boot_messages import lonely_agent
from pool_thread import wait_until

pytestmark = pytest.mark.usefixtures("machine")

#: starts a child as a supervisor does, says when it is ready, and lives on
PARENT = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-P", "-m", "livescale.runtime.children.child", "agent", "error"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
)
child.stdin.write(sys.stdin.buffer.readline())
child.stdin.flush()
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_stopped_child_ends_with_its_parent(tmp_path: Path) -> None:
    boot = lonely_agent(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(msgspec.json.encode(boot) + b"\n")
        parent.stdin.flush()
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(child.pid, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "it ends")
