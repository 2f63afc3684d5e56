"""POST /v1/embeddings: what it takes, what it asks of the backend, and what it answers."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest
from gateway_double import (
    EMBEDDING_SIZE,
    MODEL_TOKENS_MAX,
    LocalServer,
    Script,
    ScriptedBackend,
    scripted_embedding,
)
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from livescale.gateway.contract.backend import GenerationFailed, QueueFull
from livescale.values.types import SamplingParams


@pytest.fixture
def client(shared_server: LocalServer, backend: ScriptedBackend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0)


def embed(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": "tiny", **body})


def values_of(prompt_ids: list[int]) -> list[float]:
    return [*struct.unpack(f"<{EMBEDDING_SIZE}f", scripted_embedding(prompt_ids))]


def test_each_kind_of_input(http: httpx.Client, tokenizer: Tokenizer) -> None:
    texts = ["a user asks", "many models share one pool"]
    read = [tokenizer.encode(text).ids for text in texts]
    for given, prompts in (
        (texts[0], read[:1]),
        (texts, read),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        ([texts[0], [9]], [read[0], [9]]),
    ):
        answer = embed(http, input=given)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        tokens = sum(map(len, prompts))
        assert body["object"] == "list"
        assert body["model"] == "tiny"
        assert body["id"].startswith("embd-")
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert body["data"] == [
            {"object": "embedding", "index": index, "embedding": values_of(prompt)}
            for index, prompt in enumerate(prompts)
        ]


def test_special_tokens_may_be_left_out(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a user asks", add_special_tokens=False).ids
    answer = embed(http, input="a user asks", add_special_tokens=False).json()
    assert answer["data"][0]["embedding"] == values_of(ids)


def test_base64_has_the_same_values(http: httpx.Client) -> None:
    plain = embed(http, input=[5, 6], encoding_format="float").json()["data"][0]
    packed = embed(http, input=[5, 6], encoding_format="base64").json()["data"][0]
    assert base64.b64decode(packed["embedding"]) == scripted_embedding([5, 6])
    assert plain["embedding"] == values_of([5, 6])


@pytest.mark.parametrize("encoding", [None, "float"])
def test_the_official_client_reads_it(client: openai.OpenAI, encoding: Any) -> None:
    """By itself it asks for base64, and makes numbers of that."""
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=[[5, 6], [7]], **options)
    assert [entry.embedding for entry in answer.data] == [
        pytest.approx(values_of([5, 6])),
        pytest.approx(values_of([7])),
    ]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3


def test_the_backend_is_asked_for_one_pass(http: httpx.Client, backend: ScriptedBackend) -> None:
    embed(http, input=[[5, 6], [7]])
    asked = [stream.request for stream in backend.streams]
    assert [request.prompt_ids for request in asked] == [(5, 6), (7,)]
    assert {request.sampling for request in asked} == {SamplingParams(1, embeds=True)}
    assert backend.admitted == [("tiny", 2, 3)]


def test_other_endpoints_ask_for_none(http: httpx.Client, backend: ScriptedBackend) -> None:
    http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert not backend.streams[0].request.sampling.embeds


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "missing required field `input`"),
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input", "input is empty"),
        ({"input": [[]]}, "input", "input is empty"),
        ({"input": [5, "a"]}, "input", "mixes token ids"),
        ({"input": [1.5]}, "input[0]", "got `float`"),
        ({"input": {"text": "a"}}, "input", "got `object`"),
        ({"input": [9999]}, "input", "not in the model's vocabulary"),
        ({"input": [5] * MODEL_TOKENS_MAX}, "input", f"at most {MODEL_TOKENS_MAX}"),
        ({"input": "word " * 500}, "input", f"at most {MODEL_TOKENS_MAX}"),
        ({"input": ["a"] * 129}, "input", "129 inputs are given, above the maximum of 128"),
        ({"input": "a", "dimensions": 8}, "dimensions", f"absent or {EMBEDDING_SIZE}"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "Invalid enum value"),
        ({"input": "a", "normalize": True}, "normalize", "not supported"),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "model": "org/plain"}, "model", "does not support embeddings"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    http: httpx.Client, backend: ScriptedBackend, body: dict[str, Any], param: str, says: str
) -> None:
    answer = embed(http, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert says in error["message"]
    assert not backend.streams


def test_equal_dimensions_and_what_is_unknown_are_taken(http: httpx.Client) -> None:
    answer = embed(http, input="a", dimensions=EMBEDDING_SIZE, user="me", normalize=False)
    assert answer.status_code == 200, answer.text


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    assert embed(http, model="none", input="a").status_code == 404


def test_a_full_queue_and_a_failure_are_told(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.script = Script([], refusal=QueueFull(3))
    answer = embed(http, input="a")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    backend.script = Script([], then=GenerationFailed("the worker is gone"))
    answer = embed(http, input=["a", "b"])
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the worker is gone"
    assert all(stream.cancelled.wait(5) for stream in backend.streams[-2:])


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_embedding(
    value: float, encoding: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    """In JSON it would be null, with status 200. Its inputs count as failed."""
    before = ends(http)
    values = [0.5] * (EMBEDDING_SIZE - 1)
    backend.script = Script([], embedding=struct.pack(f"<{EMBEDDING_SIZE}f", *values, value))
    answer = embed(http, input=["a", "b"], encoding_format=encoding)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("input", "not_finite")
    after = ends(http)
    assert {end: after[end] - before[end] for end in after if after[end] != before[end]} == {
        ("livescale_request_success_total", "error"): 2,
        ("livescale_requests_total", "failed"): 2,
    }


def ends(http: httpx.Client) -> dict[tuple[str, str], float]:
    """How the requests so far ended: their number by metric and its label."""
    labels = {
        "livescale_request_success_total": "finished_reason",
        "livescale_requests_total": "outcome",
    }
    return {
        (sample.name, sample.labels[labels[sample.name]]): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name in labels and sample.labels["model"] == "tiny"
    }
