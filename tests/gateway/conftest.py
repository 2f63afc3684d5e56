"""Fixtures of the gateway's tests: one tiny model directory and one server for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_double import (
    EMBEDDING_SIZE,
    JSON,
    MODEL_TOKENS_MAX,
    TEXT,
    WAIT_S,
    LocalServer,
    ScriptedBackend,
    build_model_directory,
    running,
)
from tokenizers import Tokenizer

from livescale.gateway.contract.backend import ModelCard


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_directory(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="session")
def text_ids(tokenizer: Tokenizer) -> list[int]:
    """TEXT as a model would generate it."""
    return tokenizer.encode(TEXT, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def shared_backend(
    model_directory: Path, text_ids: list[int], tmp_path_factory: pytest.TempPathFactory
) -> ScriptedBackend:
    plain = build_model_directory(tmp_path_factory.mktemp("plain"))
    (plain / "chat_template.jinja").unlink()
    tiny = ModelCard("tiny", MODEL_TOKENS_MAX, 1_700_000_000, (1,), model_directory)
    tiny = dataclasses.replace(tiny, embedding_size=EMBEDDING_SIZE)
    other = dataclasses.replace(tiny, name="org/plain", directory=plain, embedding_size=0)
    cards = (tiny, other)
    return ScriptedBackend(cards, text_ids)


@pytest.fixture(scope="session")
def shared_server(machine: None, shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with running(shared_backend) as server:
        yield server


@pytest.fixture
def backend(shared_backend: ScriptedBackend) -> Iterator[ScriptedBackend]:
    """The server's backend with its default script: it answers TEXT, then EOS."""
    yield shared_backend
    shared_backend.reset()


@pytest.fixture
def http(shared_server: LocalServer, backend: ScriptedBackend) -> Iterator[httpx.Client]:
    options = {"timeout": WAIT_S, "trust_env": False, "headers": JSON}
    with httpx.Client(base_url=shared_server.url, **options) as client:
        yield client
