"""/tokenize and /detokenize against the tokenizer itself, and against what a generation gets."""

from __future__ import annotations

import dataclasses

import httpx
import pytest
from gateway_double import MODEL_TOKENS_MAX, WAIT_S, ScriptedBackend, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from effort import examples
from livescale import __version__
from livescale.gateway.text.text import OFF_LOOP_CHARS, OFF_LOOP_TOKENS

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
over_http = settings(
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def tokenize(http: httpx.Client, **body: object) -> dict[str, object]:
    answer = http.post("/tokenize", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@given(text=texts, has_special_tokens=st.booleans())
@over_http
def test_tokens_are_the_tokenizers(
    text: str, has_special_tokens: bool, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    answer = tokenize(
        http, prompt=text, add_special_tokens=has_special_tokens, return_token_strs=True
    )
    encoding = tokenizer.encode(text, add_special_tokens=has_special_tokens)
    assert answer == {
        "count": len(encoding.ids),
        "max_model_len": MODEL_TOKENS_MAX,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens,
    }


@given(text=texts)
@over_http
def test_text_survives_both_ways(text: str, http: httpx.Client) -> None:
    tokens = tokenize(http, prompt=text, add_special_tokens=False)["tokens"]
    answer = http.post("/detokenize", json={"model": "tiny", "tokens": tokens})
    assert answer.json() == {"prompt": text}


def test_defaults_are_those_of_vllm(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = tokenize(http, prompt="the quick")
    assert answer["tokens"] == tokenizer.encode("the quick").ids
    assert answer["token_strs"] is None
    shown = http.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]}).json()
    assert shown["prompt"] == "<s>the quick"  # special tokens included


def test_messages_are_what_a_chat_gets(http: httpx.Client, backend: ScriptedBackend) -> None:
    messages = [{"role": "user", "content": "say it"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    prompt_ids = list(backend.streams[0].request.prompt_ids)
    assert tokenize(http, messages=messages)["tokens"] == prompt_ids
    without = tokenize(http, messages=messages, add_generation_prompt=False)["tokens"]
    assert isinstance(without, list)
    assert without == prompt_ids[: len(without)]
    assert len(without) == len(prompt_ids) - 1  # <|assistant|>
    twice = tokenize(http, messages=messages, add_special_tokens=True)["tokens"]
    assert twice == [0, *prompt_ids]


@pytest.mark.usefixtures("machine")
def test_long_texts(shared_backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox " * (OFF_LOOP_CHARS // 10)
    card = dataclasses.replace(shared_backend.models()[0], model_tokens_max=1 << 20)
    with running(ScriptedBackend((card,), [])) as server, httpx.Client(base_url=server.url) as http:
        tokens = tokenize(http, prompt=text)["tokens"]
        assert tokens == tokenizer.encode(text).ids
        assert isinstance(tokens, list)
        many = tokens[1:] * (OFF_LOOP_TOKENS // len(tokens) + 2)
        shown = http.post("/detokenize", json={"model": "tiny", "tokens": many}).json()["prompt"]
        assert shown == tokenizer.decode(many)


def test_what_the_model_could_never_hold_is_refused(http: httpx.Client) -> None:
    """By both, with the bound of a generation: before anything is made of it."""
    texts = {"model": "tiny", "prompt": "word " * (MODEL_TOKENS_MAX * 10)}
    ids = {"model": "tiny", "tokens": [5] * (MODEL_TOKENS_MAX + 1)}
    for path, body in (("/tokenize", texts), ("/detokenize", ids)):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert http.post("/detokenize", json={**ids, "tokens": ids["tokens"][1:]}).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "param"),
    [
        ("tokenize", {"prompt": "x"}, 400, "model"),
        ("tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
        ("tokenize", {"model": "tiny"}, 400, "prompt"),
        ("tokenize", {"model": "tiny", "prompt": "x", "messages": []}, 400, "prompt"),
        ("tokenize", {"model": "tiny", "prompt": 5}, 400, "prompt"),
        ("tokenize", {"model": "tiny", "messages": []}, 400, "messages"),
        ("tokenize", {"model": "tiny", "messages": [{"role": "tool"}]}, 400, "messages"),
        ("tokenize", {"model": "tiny", "messages": [], "tools": [{}]}, 400, "tools"),
        ("tokenize", {"model": "org/plain", "messages": [{"role": "user"}]}, 400, "model"),
        ("detokenize", {"model": "tiny"}, 400, "tokens"),
        ("detokenize", {"model": "tiny", "tokens": ["x"]}, 400, "tokens[0]"),
        ("detokenize", {"model": "tiny", "tokens": [5, -1]}, 400, "tokens"),
        ("detokenize", {"model": "tiny", "tokens": [320]}, 400, "tokens"),
        ("detokenize", {"model": "tiny", "tokens": [2**70]}, 400, "tokens"),
    ],
)
def test_mistakes_are_named(
    endpoint: str, body: dict[str, object], status: int, param: str, http: httpx.Client
) -> None:
    answer = http.post(f"/{endpoint}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.usefixtures("machine")
def test_the_only_model_needs_no_name(shared_backend: ScriptedBackend) -> None:
    only = ScriptedBackend(shared_backend.models()[:1], [])
    with running(only) as server:
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "x"}, timeout=WAIT_S)
        assert answer.json()["count"] == 2
        answer = httpx.post(f"{server.url}/detokenize", json={"tokens": []}, timeout=WAIT_S)
        assert answer.json() == {"prompt": ""}


def test_no_generation_is_needed(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.is_up = False
    assert tokenize(http, prompt="x")["count"] == 2
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/live").status_code == 200
    assert http.get("/ping").status_code == 503
    assert not backend.streams
