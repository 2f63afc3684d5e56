"""Runs a command that heeds no standard input, and ends it with all that it started when standard
input ends: so that nothing is left when the benchmark is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_END_S = 10.0


def main() -> None:
    """To be the first process of a group of its own."""
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, args=(command,), daemon=True).start()
    sys.exit(command.wait())


def _end_with_input(command: subprocess.Popen[bytes]) -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass
    command.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(_END_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
