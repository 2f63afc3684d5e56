"""Help texts of commands: short, with the defaults that hold."""

from __future__ import annotations

import io

import pytest

from livescale.main import main

CHOSEN = ("--workers", "--arena-bytes", "--kv-bytes", "--host-memory-bytes")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_serve_shows_auto_where_it_chooses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys, "serve", "--help").splitlines()
    assert len(lines) <= 50
    for flag in CHOSEN:
        [line] = [line for line in lines if line.startswith(f"  {flag} ")]
        assert line.endswith("(auto)")
    assert shown(capsys, "serve", "--help=all").count("(default: auto)") >= len(CHOSEN)


def test_a_demo_shows_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "demo", "--help")
    assert "(3; live 2)" in text
    assert "(auto)" not in text


@pytest.mark.parametrize("command", [("serve",), ("demo",), ("join",), ("gateway",)])
def test_help_fits_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys, *command, "--help").splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_flags_of_commands_show_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "swarm", "--help").split())
    assert "First seed (default: 0)." in text
    assert "Number of seeds (default: 1000)." in text


def test_characters_that_the_terminal_lacks_end_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    terminal = io.TextIOWrapper(shown, encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--help"])
    terminal.flush()
    assert ended.value.code == 0
    assert b"--sweep bandwidth=10,25,?" in shown.getvalue()
