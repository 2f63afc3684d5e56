"""The oracle's tests once more, with two computing threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slowness import patient

FILES = ("test_greedy", "test_families", "test_live_tokens", "test_stages", "test_team_tokens")


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("machine")
def test_tokens_are_right_with_two_threads(name: str) -> None:
    tests = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", str(tests)],
        env={**os.environ, "ENGINE_TEST_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stdout + done.stderr
