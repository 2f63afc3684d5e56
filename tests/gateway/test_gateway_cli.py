"""`livescale models add|remove|list` against a gateway: what is asked, printed and refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_double import MODEL_TOKENS_MAX, LocalServer, ScriptedBackend, running

from livescale.gateway.contract.backend import ModelCard, ModelRefused, NewModel
from livescale.gateway.contract.keys import digest_of
from livescale.main import main

pytestmark = pytest.mark.usefixtures("machine")

KEY = "sk-cli"


@pytest.fixture
def own_backend(model_directory: Path) -> ScriptedBackend:
    card = ModelCard("tiny", MODEL_TOKENS_MAX, 0, (1,), model_directory)
    return ScriptedBackend((card,), [])


@pytest.fixture
def pool(own_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with running(own_backend, is_local=True) as server:
        yield server


def livescale(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["models", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_models_life(
    pool: LocalServer,
    own_backend: ScriptedBackend,
    model_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(model_directory.parent)
    words = ["--name", "a/b c", "--min-replicas", 0, "--max-replicas", "none", "--priority", -3]
    code, out, _ = livescale(capsys, "add", model_directory.name, *words, "--url", pool.url)
    assert code == 0
    assert out.splitlines()[0] == "a/b c: serving, copies in host memory: 1"
    assert "kept until the pool ends" in out
    settings = {"min_replicas": 0, "max_replicas": None, "priority": -3}
    assert own_backend.added == [NewModel(str(model_directory), "a/b c", settings)]

    code, out, _ = livescale(capsys, "list", "--url", f"{pool.url}/")
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split()[0] == "model"
    assert [row.split("  ")[0] for row in rows[2:]] == ["tiny", "a/b c"]

    code, out, _ = livescale(capsys, "remove", "a/b c", "--url", pool.url)
    assert code == 0
    assert out.startswith("a/b c: ")
    assert [state.name for state in own_backend.model_states()] == ["tiny"]


def test_refusals_are_one_clear_line(
    pool: LocalServer,
    own_backend: ScriptedBackend,
    model_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    at = ["--url", pool.url]
    own_backend.change_problem = ModelRefused("invalid", "it does not fit: 5 and 3 bytes")
    for words, says in [
        (["add", model_directory, *at], "it does not fit: 5 and 3 bytes"),
        (["add", "/nowhere", *at], "not a directory"),
        (["add", model_directory, "--min-replicas", "x", *at], "min_replicas"),
        (["add", model_directory, "--roles", "both", *at], "roles must be a mapping"),
        (["add", model_directory, "--roles", "{prefill: {}", *at], "roles must be a mapping"),
        (["add", model_directory, "--roles", "{prefill: {}}", *at], "roles: decode is missing"),
        (["add", model_directory, "--min-replicas", -1, *at], "min_replicas"),
        (["remove", "none", *at], "'none' does not exist"),
        (["list", "--url", nobody], nobody),
        (["list", "--url", f"{pool.url}/nowhere"], "/nowhere/admin/models' does not exist"),
        (["list", "--url", "nonsense://"], "nonsense"),
        (["list", "--admin-key-file", "/nowhere", *at], "/nowhere"),
    ]:
        code, out, error = livescale(capsys, *words)
        assert (code, out) == (1, ""), words
        assert says in error
        assert error.count("\n") == 1


def test_a_key_is_sent_from_a_file_or_the_environment(
    own_backend: ScriptedBackend,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n\n{KEY}\n")
    with running(own_backend, admin_key_digests=[digest_of(KEY)]) as server:
        at = ["list", "--url", server.url]
        code, _, error = livescale(capsys, *at)
        assert code == 1
        assert "an admin key" in error
        assert livescale(capsys, *at, "--admin-key-file", tmp_path / "keys")[0] == 0
        monkeypatch.setenv("LIVESCALE_ADMIN_KEY", KEY)
        assert livescale(capsys, *at)[0] == 0
