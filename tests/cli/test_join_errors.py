"""`livescale join`, where it cannot: one sentence that says why, and exit status 2."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_errors import livescale

from livescale.common.settings import ConfigError
from livescale.runtime.token import make_token, read_token


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "pool.token"
    make_token(path)
    return path


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def refusal(*words: object) -> str:
    code, _, error = livescale("join", *words)
    assert code == 2
    return error.strip().splitlines()[-1]


def test_nobody_listens(token: Path, silent_port: int) -> None:
    head = f"127.0.0.1:{silent_port}"
    assert head in refusal(head, "--token-file", token, "--patience-s", 0.1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--interface", "nowhere0"), "there is no interface nowhere0 here; there are: "),
        (("--address", "203.0.113.7"), "--address 203.0.113.7 is none of this machine"),
        (("--workers", "-1"), "--workers is -1, not 0 to 4096"),
        (("--device", "abacus"), "device is 'abacus', not one of"),
        (("--arena-bytes", "1"), "arena_bytes is 1 bytes, below the least value"),
    ],
)
def test_what_the_machine_does_not_have(token: Path, flags: tuple[str, ...], words: str) -> None:
    assert words in refusal("127.0.0.1:1", "--token-file", token, *flags)


@pytest.mark.parametrize("head", ["nonsense", "127.0.0.1", "127.0.0.1:0", ":7000", "h:99999"])
def test_what_is_no_address(token: Path, head: str) -> None:
    assert f"the head's address is '{head}'" in refusal(head, "--token-file", token)


def test_token_files(tmp_path: Path, token: Path) -> None:
    assert token.stat().st_mode & 0o777 == 0o600
    assert make_token(token) == read_token(token), "one that is there is kept"
    other = tmp_path / "other.token"
    assert "No such file" in refusal("127.0.0.1:1", "--token-file", other)
    other.write_text('{"secret": "1234"}')
    assert "others may read it" in refusal("127.0.0.1:1", "--token-file", other)
    other.chmod(0o600)
    assert "this is no token" in refusal("127.0.0.1:1", "--token-file", other)
    with pytest.raises(ConfigError, match="No such file"):
        make_token(tmp_path / "nowhere" / "token")
