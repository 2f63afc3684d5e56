"""How this program starts Python again: never with modules of the working directory.

`python -m` and `python -c` put the working directory first on the module path; a `queue.py` that
lies there would run in every process. PYTHONPATH is the user's own word and goes on to work.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import SpawnContext

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""The same for interpreters that are started by a library, or that may be too old for `-P`."""


def module_words(module: str, *words: str, python: str | None = None) -> list[str]:
    """The command that runs a module in a new process of this interpreter, or of `python`."""
    return [python or sys.executable, "-P", "-m", module, *words]


def spawning() -> SpawnContext:
    """For pools of fresh interpreters. Sets SAFE_PATH in this process: they inherit it."""
    os.environ.update(SAFE_PATH)
    return multiprocessing.get_context("spawn")
