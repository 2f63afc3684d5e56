"""Both endpoints over real HTTP: answers, streams, usage, ids, the small GETs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from gateway_double import (
    MODEL_TOKENS_MAX,
    TEXT,
    LocalServer,
    Script,
    ScriptedBackend,
    sse_data,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from effort import examples
from livescale.gateway.contract.backend import Client, GenerateRequest
from livescale.values.types import SamplingParams

USER = [{"role": "user", "content": "say it"}]


@pytest.fixture
def client(shared_server: LocalServer, backend: ScriptedBackend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0)


def test_completion(http: httpx.Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 100}
    answer = http.post("/v1/completions", json=body).json()
    [stream] = backend.streams
    prompt_ids = tuple(tokenizer.encode("the quick").ids)
    seed = stream.request.sampling.seed
    sampling = SamplingParams(100, (1,), temperature=1.0, seed=seed)
    client = Client("127.0.0.1")
    expected = GenerateRequest(stream.request.request, "tiny", prompt_ids, sampling, client=client)
    assert stream.request == expected
    assert answer["object"] == "text_completion"
    assert answer["id"] == f"cmpl-{stream.request.request}"
    assert answer["choices"] == [
        {
            "text": TEXT,
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    generated = len(backend.script.token_ids) + 1  # the EOS token counts, its text does not show
    assert answer["usage"] == {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": generated,
        "total_tokens": len(prompt_ids) + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert not stream.cancelled.is_set()


def test_length_ends_with_length(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert answer["choices"][0]["text"] == tokenizer.decode(ids[:16])


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@given(tokens=st.integers(1, 110))
@settings(
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_streamed_text_is_the_whole_text(
    endpoint: str, tokens: int, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    """Cut anywhere, also inside an emoji: pieces join to what the other form answers."""
    body: dict[str, object] = {"model": "tiny", "max_tokens": tokens, "return_token_ids": True}
    body |= {"messages": USER} if endpoint.startswith("chat") else {"prompt": "x"}
    whole = http.post(f"/v1/{endpoint}", json=body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = http.post(f"/v1/{endpoint}", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *data, done = sse_data(response.text)
    assert done == "[DONE]"
    *events, usage_event = [json.loads(entry) for entry in data]
    assert usage_event["choices"] == []
    assert usage_event["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    choices = [event["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert token_ids == whole["choices"][0]["token_ids"]
    assert len(token_ids) == whole["usage"]["completion_tokens"] == len(events)
    decoded = tokenizer.decode(token_ids, skip_special_tokens=True)
    if endpoint.startswith("chat"):
        assert [choice["delta"].get("role") for choice in choices] == [
            "assistant",
            *[None] * (len(choices) - 1),
        ]
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert text == whole["choices"][0]["message"]["content"] == decoded
        assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert all("prompt_token_ids" not in event for event in events[1:])
    else:
        text = "".join(choice["text"] for choice in choices)
        assert text == whole["choices"][0]["text"] == decoded
        prompt_ids = whole["choices"][0]["prompt_token_ids"]
        assert choices[0]["prompt_token_ids"] == prompt_ids
        assert all("prompt_token_ids" not in choice for choice in choices[1:])
        assert len(prompt_ids) == whole["usage"]["prompt_tokens"]


def test_usage_only_when_asked_for(http: httpx.Client) -> None:
    body: dict[str, object] = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True}
    *data, _ = sse_data(http.post("/v1/completions", json=body).text)
    assert all("usage" not in json.loads(entry) for entry in data)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *data, _ = sse_data(http.post("/v1/completions", json=body).text)
    counts = [json.loads(entry)["usage"]["completion_tokens"] for entry in data]
    assert counts == [1, 2, 3, 3]


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: [ids]])
def test_prompt_as_token_ids(wrap: object, http: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"model": "tiny", "prompt": wrap([5, 6, 7])}  # type: ignore[operator]
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 3
    assert backend.streams[0].request.prompt_ids == (5, 6, 7)


def test_prompt_as_list_of_one_string(http: httpx.Client, backend: ScriptedBackend) -> None:
    for prompt in ("the fox", ["the fox"]):
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": prompt}).is_success
    first, second = backend.streams
    assert first.request.prompt_ids == second.request.prompt_ids
    assert first.request.request != second.request.request


def test_ignore_eos(http: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"model": "tiny", "prompt": "x", "ignore_eos": True, "max_tokens": 4}
    assert http.post("/v1/completions", json=body).is_success
    sampling = backend.streams[0].request.sampling
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((), True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
    ],
)
def test_chat_output_limit(
    body: dict[str, int], expected: int, http: httpx.Client, backend: ScriptedBackend
) -> None:
    assert http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": USER, **body}
    ).is_success
    assert backend.streams[0].request.sampling.output_tokens_max == expected


def test_default_output_is_what_the_limit_leaves(
    http: httpx.Client, backend: ScriptedBackend
) -> None:
    assert http.post("/v1/chat/completions", json={"model": "tiny", "messages": USER}).is_success
    prompt = [5] * (MODEL_TOKENS_MAX - 1)
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": prompt}).is_success
    chat, completion = (stream.request for stream in backend.streams)
    assert len(chat.prompt_ids) + chat.sampling.output_tokens_max == MODEL_TOKENS_MAX
    assert completion.sampling.output_tokens_max == 1


def test_harmless_parameters_are_accepted(http: httpx.Client) -> None:
    harmless = {
        "temperature": 0.0,
        "top_p": 1,
        "n": 1,
        "stop": [],
        "seed": 7,
        "user": "me",
        "logprobs": None,
        "presence_penalty": 0,
        "logit_bias": {},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "some_load_generators_field": {"deep": [1]},
    }
    body = {"model": "tiny", "prompt": "x", **harmless}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_openai_client(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="tiny", prompt="x", max_tokens=150)
    assert completion.choices[0].text == TEXT
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "say it"}]}],
        temperature=0,
        max_completion_tokens=150,
    )
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["tiny", "org/plain"]
    assert client.models.retrieve("org/plain").id == "org/plain"


def test_openai_client_streams(client: openai.OpenAI) -> None:
    pieces = client.completions.create(model="tiny", prompt="x", max_tokens=150, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == TEXT
    *chunks, last = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say it"}],
        max_tokens=150,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": False},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert last.usage is not None
    assert last.usage.completion_tokens == len(chunks)


def test_openai_client_sees_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=-0.7)
    assert caught.value.param == "temperature"


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0] == {
        "id": "tiny",
        "created": 1_700_000_000,
        "max_model_len": MODEL_TOKENS_MAX,
        "object": "model",
        "owned_by": "livescale",
        "root": "tiny",
        "parent": None,
    }
    assert http.get("/v1/models/org/plain").json()["id"] == "org/plain"
    assert http.get("/v1/models/nope").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_cached_tokens_of_each_prompt_once(
    stream: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    """Further choices of a prompt find it there because of the first."""
    scripts = [Script([5, 6], cached_tokens=cached) for cached in (3, 9, 2, 9)]
    backend.next_scripts = scripts
    body = {"model": "tiny", "prompt": [[5] * 10, [6] * 10], "n": 2, "temperature": 1}
    body |= {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
    answer = http.post("/v1/completions", json=body)
    usage = json.loads(sse_data(answer.text)[-2])["usage"] if stream else answer.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["prompt_tokens"] == 20


def test_health(http: httpx.Client, backend: ScriptedBackend) -> None:
    assert http.get("/health").status_code == 200
    backend.is_up = False
    assert http.get("/health").status_code == 503


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [("abc-1.é", False), ("a" * 129, False), ("a b~", True), ("x" * 128, True), (None, False)],
)
def test_request_id(
    sent: str | None, is_echoed: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    headers = {} if sent is None else {"X-Request-Id": sent.encode()}
    body = {"model": "tiny", "prompt": "x"}
    response = http.post("/v1/completions", json=body, headers=headers)  # type: ignore[arg-type]
    request = backend.streams[0].request
    assert request.request.startswith("gw-")
    assert request.client_request_id == (sent if is_echoed else None)
    assert response.headers["x-request-id"] == (sent if is_echoed else request.request)
    assert "x-request-id" in http.get("/nowhere").headers


def test_request_ids_are_unique(http: httpx.Client, backend: ScriptedBackend) -> None:
    for _ in range(5):
        http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "x"},
            headers={"X-Request-Id": "same"},
        )
    assert len({stream.request.request for stream in backend.streams}) == 5


def samples(http: httpx.Client) -> dict[tuple[str, str, str], float]:
    """(name, model, outcome or bucket) -> value."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (
            s.name,
            s.labels.get("model", ""),
            s.labels.get("outcome", s.labels.get("le", "")),
        ): s.value
        for family in families
        for s in family.samples
    }


def test_metrics(http: httpx.Client) -> None:
    before = samples(http)
    body = {"model": "org/plain", "prompt": [5, 6], "max_tokens": 8}
    http.post("/v1/completions", json=body)
    http.post("/v1/completions", json={**body, "prompt": ""})
    http.post("/v1/completions", json={**body, "model": "made-up-by-a-client"})
    after = samples(http)

    def added(name: str, model: str = "org/plain", label: str = "") -> float:
        key = (f"livescale_{name}", model, label)
        return after[key] - before.get(key, 0.0)

    assert added("requests_total", label="length") == 1
    assert added("requests_total", label="rejected") == 1
    assert added("requests_total", model="", label="rejected") == 1
    assert added("prompt_tokens_total") == 2
    assert added("generation_tokens_total") == 8
    assert added("time_to_first_token_seconds_count") == 1
    assert added("inter_token_latency_seconds_count") == 7
    assert after["livescale_workers", "", ""] == 3
    assert after["livescale_instances", "tiny", ""] == 2
    assert after["livescale_instances", "b", ""] == 1
    assert not any(model == "made-up-by-a-client" for _, model, _ in after)
    buckets = [
        le for name, _, le in after if name == "livescale_time_to_first_token_seconds_bucket"
    ]
    assert sum(float(le) < 1 for le in buckets) >= 15


def test_many_at_once(http: httpx.Client, backend: ScriptedBackend) -> None:
    """Interleaved streams do not mix."""

    def post(limit: int) -> httpx.Response:
        body = {"model": "tiny", "prompt": "x", "max_tokens": limit, "stream": True}
        return http.post("/v1/completions", json=body)

    limits = range(1, 33)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, limits))
    for limit, answer in zip(limits, answers, strict=True):
        assert len(sse_data(answer.text)) == limit + 1
