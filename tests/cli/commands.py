"""`livescale …` for tests: exit status, what was printed, and errors."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from unittest.mock import patch

from livescale.common.interpreter import module_words
from livescale.main import main
from slowness import patient

Ended = tuple[int, str, str]


def livescale(*words: object, environ: Mapping[str, str] | None = None) -> Ended:
    """In this process: starting one takes longer than what most commands do."""
    printed, errors = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environ_of(environ), clear=True),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
        own_logging(),
    ):
        try:
            code = main([str(word) for word in words])
        except SystemExit as usage:  # of argparse, which has told it
            code = int(usage.code or 0)
    assert "Traceback" not in errors.getvalue(), errors.getvalue()
    return code, printed.getvalue(), errors.getvalue()


def livescale_process(*words: object, environ: Mapping[str, str] | None = None) -> Ended:
    """In a process of its own."""
    done = subprocess.run(
        module_words("livescale.main", *map(str, words)),
        capture_output=True,
        text=True,
        timeout=patient(60),
        env=environ_of(environ),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def environ_of(more: Mapping[str, str] | None) -> dict[str, str]:
    """Ours without the traces, and what the test adds."""
    return {k: v for k, v in os.environ.items() if k != "LIVESCALE_DATA"} | {**(more or {})}


@contextlib.contextmanager
def own_logging() -> Iterator[None]:
    """A command that sets the process's log up changes nothing for the tests behind this one."""
    loggers = [logging.getLogger(), logging.getLogger("livescale.pool")]
    levels = [logger.level for logger in loggers]
    handlers, loggers[0].handlers = loggers[0].handlers, []
    try:
        yield
    finally:
        loggers[0].handlers = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
