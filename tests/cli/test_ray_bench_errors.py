"""`livescale bench ray`, where it cannot be run: one sentence, before anything is started."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from livescale.main import main

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that is said."""
    assert main(["bench", "ray", *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return str(line)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hosts", "1"], "--hosts is 1"),
        (["--pause-s-max", "0"], "--pause-s-max"),
        (["--ray-patience-s", "-1"], "--ray-patience-s"),
        (["--burst", "0"], "--burst"),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, *flags)


def test_ray_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = "livescale bench: Ray is not installed: pip install 'livescale[ray]'"
    assert refusal(capsys) == line


@needs_ray
def test_no_namespaces_can_be_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    line = refusal(capsys)
    assert "root" in line or "iproute2" in line
