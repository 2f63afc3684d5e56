"""Wrong words for a testbed end in one line that names them, whoever runs this."""

from __future__ import annotations

import os

import pytest

from livescale.lab.testbed.commands import existing_testbeds
from livescale.main import main


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "--hosts", "0"], "hosts"),
        (["run", "--link", "fast"], "fast"),
        (["run", "--spine", "1kbit", "--leaves", "2"], "spine"),
        (["run", "--leaves", "3"], "leaves"),
        (["run", "--devices-per-host", "99"], "devices"),
    ],
)
def test_wrong_flags_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["testbed", *words]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.usefixtures("network_namespaces")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "--at", "h7", "--", "true"], "h7"),
        (["run", "--", "/nowhere/command"], "/nowhere/command"),
        (["exec", "--testbed", "livescale-no", "h0", "--", "true"], "livescale-no"),
    ],
)
def test_what_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["testbed", *words]) == 1
    assert named in capsys.readouterr().err
    assert not [bed for bed in existing_testbeds() if bed.owner == os.getpid()]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may have network namespaces")
def test_without_root_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "status"]) == 1
    assert "root" in capsys.readouterr().err


def test_without_the_tools_the_reason_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["testbed", "run"]) == 1
    error = capsys.readouterr().err
    assert "root" in error or "iproute2" in error
