"""`livescale join` and `livescale gateway`, where they cannot: one sentence that says why, and exit
status 2."""

from __future__ import annotations

import argparse
import contextlib
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import livescale

from effort import mostly_long
from livescale.cli import join
from livescale.common.credentials import Credentials
from livescale.common.interpreter import module_words
from livescale.common.private_files import is_private
from livescale.common.settings import ConfigError
from livescale.config.settings.removed import instead_of
from livescale.runtime.join.cluster_folder import ClusterFolder
from livescale.runtime.join.head_talk import JoinError
from livescale.runtime.wire.token import make_token, read_token
from no_room import no_room
from slowness import patient


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "pool.token"
    make_token(path)
    return path


@pytest.fixture
def silent_port(machine: None) -> Iterator[int]:
    """A port where nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


#: what each command is told of the head, and what it needs besides
COMMANDS = {"join": (), "gateway": ("--port", 0, "--join")}
each_command = pytest.mark.parametrize("command", COMMANDS)


def refusal(*words: object, command: str = "join") -> str:
    """The last line; `words` begin with the head's address."""
    code, _, error = livescale(command, *COMMANDS[command], *words)
    assert code == 2
    return error.strip().splitlines()[-1]


@pytest.mark.parametrize("name", join.REMOVED)
def test_a_flag_that_is_gone_is_refused_with_what_replaces_it(name: str, token: Path) -> None:
    flag = "--" + name.replace("_", "-")
    said = refusal("127.0.0.1:1", "--token-file", token, flag, "1")
    assert f"argument {flag}: no longer a setting. {instead_of(name)}" in said


@each_command
def test_no_server_listens(command: str, token: Path, silent_port: int) -> None:
    head = f"127.0.0.1:{silent_port}"
    flags = ("--token-file", token, "--patience-s", 0.1)
    said = refusal(head, *flags, command=command)
    assert said == f"livescale {command}: {head}: Connection refused"


@each_command
@pytest.mark.parametrize("host", ["pool..example", 64 * "a" + ".example"])
def test_what_is_no_name_of_a_machine(command: str, host: str, token: Path) -> None:
    said = refusal(f"{host}:7000", "--token-file", token, command=command)
    assert f"{host} is an invalid host name" in said


@pytest.mark.usefixtures("machine")
def test_a_name_that_no_machine_has(token: Path) -> None:
    flags = ("--token-file", token, "--patience-s", 0.1)
    assert "nowhere.invalid:7000: " in refusal("nowhere.invalid:7000", *flags, command="gateway")
    assert "the head node nowhere.invalid is unreachable: " in refusal(
        "nowhere.invalid:7000", *flags
    )


@each_command
@pytest.mark.parametrize("patience", ["-1", "nan", "inf", "soon"])
def test_what_is_no_patience(command: str, patience: str, token: Path) -> None:
    flags = ("--token-file", token, f"--patience-s={patience}")
    said = refusal("127.0.0.1:1", *flags, command=command)
    assert f"--patience-s: '{patience}' is not a number of seconds" in said


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--interface", "nowhere0"),
            "--interface nowhere0 is unknown. Interfaces of this machine: ",
        ),
        (
            ("--address", "203.0.113.7"),
            "--address 203.0.113.7 is not assigned to a local interface",
        ),
        (("--worker-python", "/nowhere/python"), "worker_python: /nowhere/python: No such file"),
        (("--workers", "-1"), "--workers is -1. Give a number from 0 to 4096"),
        (("--device", "abacus"), "device is 'abacus', not one of"),
        (("--arena-bytes", "1"), "arena_bytes is 1 bytes, below the least value"),
        (("--rack", "r" * 254), "--rack is an invalid name. Give up to 253 printable characters"),
    ],
)
def test_what_the_machine_does_not_have(token: Path, flags: tuple[str, ...], words: str) -> None:
    assert words in refusal("127.0.0.1:1", "--token-file", token, *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", "nowhere.invalid"), "cannot listen on nowhere.invalid:0: "),
        (("--host", ""), "host is empty"),
        (("--port", "65536"), "port is 65536, above the largest value 65535"),
        (("--port", "http"), "port must be a whole number, not 'http'"),
        (("--ssl-certfile", "/nowhere/cert.pem"), "ssl_certfile and ssl_keyfile must both be set"),
        (
            ("--ssl-certfile", "/nowhere/cert.pem", "--ssl-keyfile", "/nowhere/key.pem"),
            "ssl_certfile /nowhere/cert.pem: No such file",
        ),
        (("--api-key-file", "/nowhere/keys"), "api_key_file /nowhere/keys: No such file"),
        (("--admin-key-file", "/nowhere/keys"), "admin_key_file /nowhere/keys: No such file"),
        (("--tls-dir", "/nowhere"), "tls_dir /nowhere/ca.pem: No such file"),
        (("--cors-origins", "here"), "cors_origins: 'here' is an invalid origin"),
        (("--log-level", "loud"), "log_level is 'loud', not one of"),
    ],
)
def test_what_a_gateway_cannot_use(token: Path, flags: tuple[str, ...], words: str) -> None:
    assert words in refusal("127.0.0.1:1", "--token-file", token, *flags, command="gateway")


@pytest.mark.usefixtures("machine")
def test_an_address_that_this_machine_does_not_have(token: Path) -> None:
    flags = ("--token-file", token, "--host", "203.0.113.7")
    said = refusal("127.0.0.1:1", *flags, command="gateway")
    assert "cannot listen on 203.0.113.7:0: Cannot assign" in said


@pytest.mark.usefixtures("machine")
def test_a_port_that_is_taken(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = ("--token-file", token, "--port", port)
        said = refusal("127.0.0.1:1", *flags, command="gateway")
    assert f"port {port} on 127.0.0.1 is in use. Choose another" in said


def test_an_address_that_is_not_given(token: Path) -> None:
    code, _, error = livescale("gateway", "--token-file", token)
    assert code == 2
    assert error.strip().endswith("the following arguments are required: --join")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("gpus", "words"), [(0, "torch finds no GPU"), (2, "above the 2 GPUs")])
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


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("command", mostly_long(COMMANDS, short=["join"]))
def test_what_is_sent_is_dropped_on_the_way(command: str, token: Path) -> None:
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
        said = refusal(head, "--token-file", token, "--patience-s", 0.1, command=command)
        assert f"{head}: no answer within the timeout. Check the firewall" in said


class Answerer(socketserver.BaseRequestHandler):
    """Something else that listens: answers once and ends the connection."""

    answer = b""

    def handle(self) -> None:
        self.request.recv(64)
        self.request.sendall(self.answer)


@pytest.mark.usefixtures("machine")
@each_command
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + 64 * b".",
            "Check that the token file",
        ),
        (b"SSH-2.0-x\r\n", "what listens there is not the controller"),
        (b"", "what listens there is not the controller"),
    ],
)
def test_something_else_listens(command: str, answer: bytes, words: str, token: Path) -> None:
    kind = type("This", (Answerer,), {"answer": answer})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        head = f"127.0.0.1:{server.server_address[1]}"
        flags = ("--token-file", token, "--patience-s", 0.1)
        said = refusal(head, *flags, command=command)
        server.shutdown()
    assert f"{head}: what listens there is not the controller" in said
    assert words in said


@pytest.mark.usefixtures("machine")
@each_command
def test_the_head_is_asked_again_until_it_is_there(command: str, token: Path) -> None:
    """For as long as it was told; what answers then without the secret ends that at once."""
    patience_s = round(patient(100))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{listener.getsockname()[1]}"
        flags = ("--token-file", token, "--patience-s", patience_s)
        words = map(str, (command, *COMMANDS[command], head, *flags))
        process = module_words("livescale.main", *words)
        with subprocess.Popen(process, stderr=subprocess.PIPE, text=True) as asking:
            assert asking.stderr is not None
            assert f"Connection refused; retrying for {patience_s} s" in asking.stderr.readline()
            listener.listen()
            caller, _ = listener.accept()
            with caller:
                caller.sendall(100 * b".")
                said = asking.stderr.read().strip().splitlines()
            assert asking.wait(patient(60)) == 2
    assert "Check that the token file is of this pool" in said[-1]


@each_command
@pytest.mark.parametrize("head", ["nonsense", "127.0.0.1", "127.0.0.1:0", ":7000", "h:99999"])
def test_what_is_no_address(command: str, token: Path, head: str) -> None:
    said = refusal(head, "--token-file", token, command=command)
    assert f"the head's address is '{head}'" in said


@each_command
def test_token_files(command: str, tmp_path: Path, token: Path) -> None:
    other = tmp_path / "other.token"

    def said() -> str:
        return refusal("127.0.0.1:1", "--token-file", other, command=command)

    assert "No such file" in said()
    other.write_text('{"secret": "1234"}')
    other.chmod(0o644)
    assert "is readable by other users" in said()
    other.chmod(0o600)
    assert "is not a valid token" in said()


@pytest.mark.usefixtures("machine")
@each_command
def test_tokens_and_certificates_belong_together(command: str, tmp_path: Path, token: Path) -> None:
    cluster, other = ClusterFolder(tmp_path / "pool"), ClusterFolder(tmp_path / "other")
    tls_dir, strange = cluster.init(), other.init()
    sealed = tmp_path / "sealed.token"
    make_token(sealed, Credentials(tls_dir).fingerprint)

    def said(*flags: object) -> str:
        return refusal("127.0.0.1:1", *flags, command=command)

    assert "is of a pool with certificates. Give tls_dir" in said("--token-file", sealed)
    assert "is of a pool without certificates" in said("--token-file", token, "--tls-dir", tls_dir)
    words = "another certificate authority than tls_dir"
    assert words in said("--token-file", sealed, "--tls-dir", strange)


def test_a_token_that_is_made(tmp_path: Path, token: Path) -> None:
    assert token.stat().st_mode & 0o777 == 0o600
    assert make_token(token) == read_token(token), "one that is there is kept"
    with pytest.raises(ConfigError, match="No such file"):
        make_token(tmp_path / "nowhere" / "token")


def test_a_token_that_a_full_disk_does_not_take_is_made_later(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    path.parent.mkdir()
    with no_room(), pytest.raises(ConfigError, match=str(path)):
        make_token(path)
    assert list(path.parent.iterdir()) == []
    assert make_token(path) == read_token(path)
    assert list(path.parent.iterdir()) == [path]


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
