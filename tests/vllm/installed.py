"""The interpreter that has vLLM, where there is one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from livescale.vllm_engine.environment import DEFAULTS, FIXED

VARIABLE = "LIVESCALE_VLLM_PYTHON"
MADE = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
"""What `make vllm` makes."""


def vllm_python() -> str | None:
    given = os.environ.get(VARIABLE)
    if given:
        return given
    return str(MADE) if MADE.exists() else None


REASON = f"vLLM is not installed here: make vllm, or {VARIABLE}"


def greedy_tokens(
    directories: Sequence[Path], prompts: Sequence[list[int]], tokens: int, ways: Sequence[str]
) -> dict[str, dict[str, tuple[Any, bool]]]:
    """As `tokens.py` says, which runs in the interpreter that has vLLM."""
    python = vllm_python()
    assert python is not None, REASON
    asked = {
        "directories": list(map(str, directories)),
        "prompts": prompts,
        "tokens": tokens,
        "ways": ways,
    }
    done = subprocess.run(
        [python, str(Path(__file__).with_name("tokens.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **DEFAULTS, **FIXED},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, tuple[Any, bool]]] = json.loads(done.stdout.splitlines()[-1])
    return found
