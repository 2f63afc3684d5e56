"""The directory of one pool's sockets. A supervisor that is killed leaves it; the next removes it.

Who owns a directory holds a lock on it for as long as the process lives, whatever ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "livescale-pool-"


class PoolDirectory:
    """A directory of this process alone, below the system's temporary one."""

    def __init__(self) -> None:
        """Make it, and remove those of dead pools of this user."""
        _remove_leftovers()
        # Under its own name it is locked from the first moment on: a lock outlives the renaming.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = _lock(made)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_leftovers() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """A lock on a directory of this user; None if a living process has it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
