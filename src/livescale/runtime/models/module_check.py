"""Whether models' files fit the modules that workers compute with, found out in another process.

transformers and torch take seconds to import and hundreds of megabytes: the process imports them
while the models' bytes are read here, and ends when it has answered for all models.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from livescale.common.interpreter import module_words
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.engine.base.errors import ModelError
from livescale.engine.files.module_fit import FitAnswer, FitQuestion
from livescale.runtime.layout.worker_python import WorkerPythonError
from livescale.runtime.models.catalog import model_directory

ANSWER_S_MAX = 600.0
"""Seconds after which the process is taken for stuck."""

_COMPUTING = ("cpu", "cuda")
"""Devices whose workers compute with modules of transformers: vLLM has its own, and a timed device
computes nothing."""


class ModuleCheck:
    """Call it with a model's directory: it raises ModelError if the tensors there do not fit. Use
    as a context; the process starts at its beginning."""

    def __init__(self, config: PoolConfig, models: Iterable[ModelConfig]) -> None:
        directories = {str(model_directory(model)) for model in models}
        self._question = FitQuestion(tuple(sorted(directories)))
        self._is_needed = config.device in _COMPUTING and bool(directories)
        self._python = config.worker_python
        self._process: subprocess.Popen[bytes] | None = None
        self._refusals: dict[str, str] | None = None

    def __enter__(self) -> Self:
        if self._is_needed:
            try:
                self._process = _asked(self._question, self._python)
            except OSError as error:
                where = f"worker_python: {self._python}" if self._python else "a process"
                raise WorkerPythonError(f"{where} cannot be started: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def __call__(self, directory: Path) -> None:
        """Waits for the answer. Raises ModelError, too, where there is none."""
        assert str(directory) in self._question.directories, directory
        if self._process is None:
            return
        if self._refusals is None:
            self._refusals = _answer(self._process)
        refusal = self._refusals.get(str(directory))
        if refusal is not None:
            raise ModelError(refusal)


# -- helpers, in the order used -------------------------------------------------------------------


def _asked(question: FitQuestion, python: str | None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        module_words("livescale.engine.files.module_fit", python=python),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    # One that ended already says why when it is asked for its answer.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(question))
        process.stdin.close()
    process.stdin = None  # what remains to be done with the process is reading
    return process


def _answer(process: subprocess.Popen[bytes]) -> dict[str, str]:
    try:
        output, errors = process.communicate(timeout=ANSWER_S_MAX)
        return msgspec.json.decode(output, type=FitAnswer).refusals
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ANSWER_S_MAX:.0f} s"
    except msgspec.MsgspecError:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with {process.returncode}"
    raise ModelError(f"whether models' files fit their modules could not be found out: {reason}")
