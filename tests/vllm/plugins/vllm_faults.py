"""A logits processor, as vLLM lets others add them: on demand it fails in the middle of a step.

A file in the folder that FAULT_FOLDER names asks for the fault of its name. The first process that
takes the file has the fault, so each is struck once.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

MESSAGE = "a tensor of this step is not as it must be"
_LONG_S = 3600
_MORE_BYTES = 1 << 30


class Faults(LogitsProcessor):
    """Changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._folder = Path(os.environ["FAULT_FOLDER"])

    def is_argmax_invariant(self) -> bool:
        """As if it were not: those that are do not see greedy requests."""
        return False

    def update_state(self, batch_update: object) -> None:
        """It keeps nothing of requests."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for asked in os.listdir(self._folder):
            if asked in FAULTS and _is_taken(self._folder / asked):
                FAULTS[asked]()
        return logits


def _is_taken(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def _assertion() -> NoReturn:
    raise AssertionError(MESSAGE)


def _memory() -> None:
    """All that the process may have is in use, and torch asks for more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), most))
    torch.empty(_MORE_BYTES, dtype=torch.uint8)


def _hang() -> None:
    """As for an answer that never comes."""
    time.sleep(_LONG_S)


def _hang_with_lock() -> None:
    """Compiled code that keeps the interpreter's lock."""
    ctypes.PyDLL(None).sleep(_LONG_S)


FAULTS = {
    "assertion": _assertion,
    "memory": _memory,
    "hang": _hang,
    "hang-with-lock": _hang_with_lock,
}
