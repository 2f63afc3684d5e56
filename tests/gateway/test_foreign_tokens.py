"""A tokenizer that knows more ids than its model: no such id reaches a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_double import (
    EMBEDDING_SIZE,
    JSON,
    MODEL_TOKENS_MAX,
    WAIT_S,
    ScriptedBackend,
    build_model_directory,
    running,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.errors import ApiError
from livescale.gateway.requests.prompts import read_prompts
from livescale.gateway.text.text import TextCodec
from livescale.gateway.text.tokenizer_files import foreign_tokens

VOCABULARY = 320
MARKS = ("<|pad|>", "<|more|>", "<|last|>")


def add_marks(directory: Path, vocabulary: int = VOCABULARY) -> Tokenizer:
    """The directory's tokenizer gets ids behind those of its model, which has `vocabulary`."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build_model_directory(tmp_path_factory.mktemp("marked"))
    add_marks(directory)
    return directory


@pytest.fixture(scope="module")
def codec_of(marked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, TextCodec]:
    """The codec by the number of ids that its model has. Templates would need a process."""
    codecs = {}
    for vocabulary in range(VOCABULARY - 1, VOCABULARY + len(MARKS) + 1):
        directory = tmp_path_factory.mktemp(str(vocabulary))
        (directory / "tokenizer.json").write_bytes((marked / "tokenizer.json").read_bytes())
        (directory / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
        codecs[vocabulary] = TextCodec.load(directory)
    return codecs


pieces = st.lists(st.one_of(st.sampled_from(MARKS), st.text("ab <|>é", max_size=5)), max_size=5)


@given(
    texts=st.lists(pieces.map("".join), min_size=1, max_size=3),
    vocabulary=st.integers(VOCABULARY - 1, VOCABULARY + len(MARKS)),
    is_framed=st.booleans(),
)
def test_prompts_have_ids_of_the_model_or_are_refused(
    texts: list[str], vocabulary: int, is_framed: bool, codec_of: dict[int, TextCodec]
) -> None:
    codec = codec_of[vocabulary]
    [*encoded] = asyncio.run(codec.encode_all(texts, is_framed))
    foreign = [i for text, ids in zip(texts, encoded, strict=True) if text for i in ids]
    foreign = [token_id for token_id in foreign if token_id >= vocabulary]
    reading = read_prompts(codec, list(texts), is_framed, param="input")
    if not foreign:
        prompts = asyncio.run(reading)
        assert [p.ids for p in prompts] == [
            ids if text else () for text, ids in zip(texts, encoded, strict=True)
        ]
        return
    with pytest.raises(ApiError) as refused:
        asyncio.run(reading)
    assert (refused.value.status, refused.value.detail.param) == (400, "input")
    assert f"tokenizer makes token id {foreign[0]} " in str(refused.value)


def test_foreign_tokens_are_found_wherever_they_come_from(marked: Path) -> None:
    tokenizer = Tokenizer.from_file(str(marked / "tokenizer.json"))
    first = {VOCABULARY + place: mark for place, mark in enumerate(MARKS)}
    assert foreign_tokens(tokenizer, VOCABULARY) == first
    assert foreign_tokens(tokenizer, VOCABULARY + 2) == {VOCABULARY + 2: MARKS[2]}
    assert foreign_tokens(tokenizer, VOCABULARY + len(MARKS)) == {}
    # Ids of a post-processor are its own.
    saved = json.loads((marked / "tokenizer.json").read_text())
    saved["post_processor"]["special_tokens"]["<s>"]["ids"] = [999]
    assert foreign_tokens(Tokenizer.from_str(json.dumps(saved)), 900) == {999: "<s>"}


@pytest.fixture(scope="module")
def marked_http(machine: None, marked: Path) -> Iterator[tuple[httpx.Client, ScriptedBackend]]:
    card = ModelCard(
        "marked", MODEL_TOKENS_MAX, 1_700_000_000, (1,), marked, embedding_size=EMBEDDING_SIZE
    )
    backend = ScriptedBackend((card,), [5])
    options = {"timeout": WAIT_S, "trust_env": False, "headers": JSON}
    with running(backend) as server, httpx.Client(base_url=server.url, **options) as client:
        yield client, backend


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": "a <|pad|>"}),
        ("/v1/completions", "prompt", {"prompt": ["a", "b <|pad|> <|more|>"]}),
        ("/v1/embeddings", "input", {"input": "a <|pad|>"}),
        (
            "/v1/chat/completions",
            "messages",
            {"messages": [{"role": "user", "content": "a <|pad|>"}]},
        ),
        # A role becomes part of a marker.
        (
            "/v1/chat/completions",
            "messages",
            {"messages": [{"role": "user", "content": "<|last|>"}]},
        ),
    ],
)
def test_no_foreign_id_is_given_to_a_worker(
    marked_http: tuple[httpx.Client, ScriptedBackend],
    path: str,
    param: str,
    body: dict[str, object],
) -> None:
    client, backend = marked_http
    answer = client.post(path, json={"model": "marked", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "foreign_token")
    assert str(VOCABULARY) in error["message"] or str(VOCABULARY + 2) in error["message"]
    assert backend.streams == []


def test_what_the_tokenizer_makes_can_be_looked_at(
    marked_http: tuple[httpx.Client, ScriptedBackend],
) -> None:
    client, _ = marked_http
    for asked in ({"prompt": "<|pad|>"}, {"messages": [{"role": "user", "content": "<|pad|>"}]}):
        answer = client.post("/tokenize", json={"model": "marked", **asked})
        assert answer.status_code == 200, answer.text
        assert VOCABULARY in answer.json()["tokens"]
