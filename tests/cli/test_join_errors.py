"""`livescale join`, where it cannot: one sentence that says why, and exit status 2."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_errors import livescale

from livescale.cli import join
from livescale.common.private_files import is_private
from livescale.common.settings import ConfigError
from livescale.runtime.head_talk import JoinError
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
        (("--worker-python", "/nowhere/python"), "worker_python: /nowhere/python: No such file"),
        (("--workers", "-1"), "--workers is -1, not 0 to 4096"),
        (("--device", "abacus"), "device is 'abacus', not one of"),
        (("--arena-bytes", "1"), "arena_bytes is 1 bytes, below the least value"),
        (("--rack", "r" * 254), "--rack is no name of up to 253 printable characters"),
    ],
)
def test_what_the_machine_does_not_have(token: Path, flags: tuple[str, ...], words: str) -> None:
    assert words in refusal("127.0.0.1:1", "--token-file", token, *flags)


@pytest.mark.parametrize(("gpus", "words"), [(0, "has no GPU that torch"), (2, "has 2 GPUs")])
def test_gpus_that_are_not_there(
    token: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    flags = ("--token-file", str(token), "--device", "cuda", "--workers", "3")
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    with pytest.raises(JoinError, match=words):
        join.run(parser.parse_args(["127.0.0.1:1", *flags]))


def test_what_is_sent_is_dropped_on_the_way(token: Path) -> None:
    """A full queue of connections drops what comes, as a firewall does."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        head = f"127.0.0.1:{server.getsockname()[1]}"
        said = refusal(head, "--token-file", token, "--patience-s", 0.1)
        assert f"{head}: no answer (does a firewall on the way drop what is sent?)" in said


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


@pytest.mark.parametrize("reader", [0, 1000])
@pytest.mark.parametrize("owner", [0, 1000, 1001])
def test_who_may_read_a_token_file(owner: int, reader: int) -> None:
    """A group may only where root hands the file over, as Kubernetes and systemd do; others never,
    and none but the owner may write."""
    assert is_private(0o600, owner, reader)
    assert is_private(0o400, owner, reader)
    assert is_private(0o440, owner, reader) == (owner == 0 and reader != 0)
    assert is_private(0o640, owner, reader) == (owner == 0 and reader != 0)
    for mode in (0o604, 0o444, 0o660, 0o644, 0o601, 0o610, 0o602):
        assert not is_private(mode, owner, reader)


def test_a_token_may_be_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text('{"secret": "00112233445566778899aabbccddeeff"}')
    path.chmod(0o400)
    assert read_token(path).secret == "00112233445566778899aabbccddeeff"
