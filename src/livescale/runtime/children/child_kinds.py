"""Kinds of child processes, and the life of one from its first line to its exit status.

The kinds import only what they need: the gateway has no torch, the controller neither.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import msgspec

from livescale.runtime.wire.boot import Status, report

_SET_PARENT_DEATH_SIGNAL = 1
_KINDS = {
    "agent": "livescale.runtime.member_process.agent_process",
    "controller": "livescale.runtime.controller_process.controller_process",
    "gateway": "livescale.runtime.gateway_process.gateway_process",
    "prepare": "livescale.runtime.models.prepare_process",
    "worker": "livescale.runtime.member_process.worker_process",
}


def run(kind: str, level: str) -> NoReturn:
    """Be a process of this kind until its end."""
    live(kind, level, lambda: importlib.import_module(_KINDS[kind]).main())


def live(kind: str, level: str, work: Callable[[], None]) -> NoReturn:
    """Do the work of a process that is called so; with it the process ends."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {kind}[{os.getpid()}] %(levelname)s %(message)s",
        force=True,
    )
    exit_status = 0
    try:
        work()
    except (OSError, ValueError, MemoryError, msgspec.MsgspecError) as error:
        # Expected: the supervisor tells the user. The traceback is for developers.
        logging.getLogger(__name__).debug("the %s process ends", kind, exc_info=error)
        report(Status(fatal=f"{type(error).__name__}: {error}"))
        exit_status = 1
    except Exception as error:
        report(Status(fatal=f"{type(error).__name__}: {error}"))
        logging.getLogger(__name__).exception("the %s process ends", kind)
        exit_status = 1
    # Nothing is left to save. Taking libraries apart and giving gigabytes back piece by piece takes
    # seconds on a busy machine, and the parent, which waits for this process, would give up on it.
    # After an error threads of a library may wait for what never comes: others would take this
    # process for lost only when it has been silent for long enough.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_status)


def end_with_parent() -> None:
    """A process that is stopped does not see the end of its standard input: the system kills it
    when its parent has died. (Not elsewhere than on Linux.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
