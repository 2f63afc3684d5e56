"""The interpreter that a host's workers run in, where that is another one than this: an engine may
need libraries of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from livescale import __version__
from livescale.common.errors import UserError

_ANSWER_S = 120.0
#: with all that a worker imports
_VERSION = (
    "import livescale, livescale.runtime.member_process.worker_process;"
    " print(livescale.__version__)"
)
_GPUS = "from livescale.engine.base.gpus import gpu_count; print(gpu_count())"


class WorkerPythonError(UserError):
    """Workers cannot run in this interpreter; the message says why."""


def check_worker_python(python: str) -> None:
    """Raises WorkerPythonError unless this is an interpreter that has this very livescale."""
    version = _answer(python, _VERSION)
    if version != __version__:
        raise WorkerPythonError(
            f"worker_python: {python} has livescale {version}, this command "
            f"{__version__}. Install the same version there"
        )


def gpus_of(python: str | None) -> int:
    """GPUs that torch can use in this interpreter (None: in this process). Raises
    WorkerPythonError."""
    if python is not None:
        return int(_answer(python, _GPUS))
    # Here: only a machine that is to compute on GPUs waits for this import.
    from livescale.engine.base.gpus import gpu_count

    return gpu_count()


# -- helpers --------------------------------------------------------------------------------------


def _answer(python: str, code: str) -> str:
    return output_of([python, "-P", "-c", code], python).strip()


def output_of(words: Sequence[str], python: str, given: str = "") -> str:
    """What the command, which starts this interpreter, writes when it is `given` a text. Raises
    WorkerPythonError."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=True,
            timeout=_ANSWER_S,
            input=given,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"])[-1]
        raise WorkerPythonError(f"worker_python: {python} cannot run livescale: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise WorkerPythonError(f"worker_python: {python} does not answer") from error
    except OSError as error:
        raise WorkerPythonError(f"worker_python: {python}: {error.strerror}") from error
    return done.stdout
