"""Everything that can be wrong with a request or with its generation, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from gateway_double import MODEL_TOKENS_MAX, LocalServer, Script, ScriptedBackend, sse_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_values import json_values

from effort import examples
from livescale.gateway.contract.backend import (
    GenerationFailed,
    ModelWithdrawn,
    NoInstance,
    QueueFull,
    Unavailable,
)
from livescale.gateway.contract.schema import HARMLESS, ChatBody, CompletionBody, GenerationBody

FIELDS = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
PROMPT = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "model", "required"),
        ([], None, "object"),
        ({"model": 5, "prompt": "x"}, "model", "str"),
        ({"model": "tiny"}, "prompt", "prompt"),
        ({**PROMPT, "prompt": None}, "prompt", "null"),
        ({**PROMPT, "prompt": 5}, "prompt", "int"),
        ({**PROMPT, "prompt": ""}, "prompt", "empty"),
        ({**PROMPT, "prompt": []}, "prompt", "empty"),
        ({**PROMPT, "prompt": [[]]}, "prompt", "empty"),
        ({**PROMPT, "prompt": [""]}, "prompt", "empty"),
        ({**PROMPT, "prompt": [5, True]}, "prompt[1]", "bool"),
        ({**PROMPT, "prompt": [5, -1]}, "prompt", "-1"),
        ({**PROMPT, "prompt": [5, 320]}, "prompt", "320"),
        ({**PROMPT, "prompt": [2**70]}, "prompt", "vocabulary"),
        ({**PROMPT, "max_tokens": 0}, "max_tokens", ">= 1"),
        ({**PROMPT, "max_tokens": "5"}, "max_tokens", "int"),
        ({**PROMPT, "stream": "yes"}, "stream", "bool"),
        ({**PROMPT, "response_format": {"type": "json_object"}}, "response_format", "json"),
        ({**PROMPT, "tools": [{"type": "function"}]}, "tools", "tools"),
        ({**PROMPT, "tools": [{}], "tool_choice": "auto"}, "tools", "tools"),
        ({**PROMPT, "tools": [], "tool_choice": "required"}, "tool_choice", "required"),
        ({**PROMPT, "suffix": "!"}, "suffix", "suffix"),
        ({**PROMPT, "guided_json": {}}, "guided_json", "guided_json"),
        ({**PROMPT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "regex"),
        ({**PROMPT, "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs"),
        ({**PROMPT, "use_beam_search": True}, "use_beam_search", "use_beam_search"),
    ],
)
def test_invalid_completion(
    body: object, param: str | None, says: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in str(error["message"])
    assert not backend.streams


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "empty"),
        ("hi", "messages", "array"),
        ([{"content": "x"}], "messages[0].role", "role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "robot"),
        ([{"role": "user", "content": 5}], "messages[0].content", "content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "text"),
        ([{"role": "tool", "content": "x"}], "messages", "tools cannot speak here"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls", "[{}]"),
    ],
)
def test_invalid_chat(messages: object, param: str, says: str, http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": messages}
    error = error_of(http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param
    assert says in str(error["message"])


def test_chat_without_a_template(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, "model": "org/plain"})
    assert "/v1/completions" in str(error_of(response, 400)["message"])


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"not json", b'{"a": "\xff"}', b"[" * 50_000, b'{"a": 1e999}', b"\x00"]
)
def test_invalid_json(raw: bytes, http: httpx.Client) -> None:
    error_of(http.post("/v1/completions", content=raw), 400)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"),
    [(MODEL_TOKENS_MAX, None), (MODEL_TOKENS_MAX + 50, 1), (150, 51), (1, 2**40)],
)
def test_context_length(prompt_tokens: int, max_tokens: int | None, http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [5] * prompt_tokens, "max_tokens": max_tokens}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(prompt_tokens) in str(error["message"])
    assert str(MODEL_TOKENS_MAX) in str(error["message"])


def test_the_limit_itself_fits(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [5] * 150, "max_tokens": 50}
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [("completions", PROMPT, "messages"), ("chat/completions", CHAT, "prompt")],
)
def test_what_the_other_endpoint_takes_is_not_ignored(
    endpoint: str, body: dict[str, object], param: str, http: httpx.Client
) -> None:
    asked = {**PROMPT, **CHAT}
    error = error_of(http.post(f"/v1/{endpoint}", json={**body, param: asked[param]}), 400)
    assert error["param"] == param
    assert http.post(f"/v1/{endpoint}", json={**body, param: None}).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "asked"), [("completions", PROMPT), ("chat/completions", CHAT)]
)
def test_unknown_model(endpoint: str, asked: dict[str, object], http: httpx.Client) -> None:
    body = {**asked, "model": "x" * 5000}
    error = error_of(http.post(f"/v1/{endpoint}", json=body), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'tiny', 'org/plain'" in str(error["message"])
    assert len(str(error["message"])) < 500


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/", "/v1/rerank", "/metrics/x"])
def test_unknown_path(path: str, http: httpx.Client) -> None:
    assert error_of(http.get(path), 404)["code"] == "not_found"


def test_wrong_method(http: httpx.Client) -> None:
    response = http.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_body_too_large(http: httpx.Client, backend: ScriptedBackend) -> None:
    error = error_of(http.post("/v1/completions", json={**PROMPT, "prompt": "x" * 100_001}), 413)
    assert "100000" in str(error["message"])

    def chunks() -> Iterator[bytes]:  # no content-length
        for _ in range(30):
            yield b" " * 10_000

    error_of(http.post("/v1/completions", content=chunks()), 413)
    assert http.post("/v1/completions", json=PROMPT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_queue_full(stream: bool, http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.script.refusal = QueueFull(1.2)
    response = http.post("/v1/completions", json={**PROMPT, "stream": stream})
    assert error_of(response, 503)["code"] == "queue_full"
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
def test_unavailable(stream: bool, http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.script.refusal = Unavailable("no instance of tiny can be started")
    error = error_of(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}), 503)
    assert error["message"] == "no instance of tiny can be started"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["admission", "refusal"])
def test_a_model_that_goes_while_a_request_is_read(
    stream: bool, when: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    setattr(backend.script, when, ModelWithdrawn("tiny"))
    error = error_of(http.post("/v1/completions", json={**PROMPT, "stream": stream}), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny' does not exist" in str(error["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_no_instance_in_time(stream: bool, http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.script = Script(
        [], then=NoInstance("no instance took it in 60 s", 2.5, "queue_timeout")
    )
    response = http.post("/v1/completions", json={**PROMPT, "stream": stream})
    error = error_of(response, 503)
    assert (error["code"], error["type"]) == ("queue_timeout", "server_error")
    assert error["message"] == "no instance took it in 60 s"
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2500"
    assert backend.streams[0].cancelled.is_set()


def test_no_instance_in_time_after_one_was_lost(
    http: httpx.Client, backend: ScriptedBackend
) -> None:
    then = NoInstance("no instance took it in 60 s", 2.5, "queue_timeout")
    backend.script = Script(backend.script.token_ids[:2], then=then)
    response = http.post("/v1/completions", json={**PROMPT, "stream": True})
    events = [json.loads(data) for data in sse_data(response.text)]
    assert [("error" in event) for event in events] == [False, False, True]
    assert events[-1]["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_be_loaded(
    stream: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    backend.script = Script([], then=NoInstance("layer 3 has another checksum", 3.5, "load_failed"))
    response = http.post("/v1/completions", json={**PROMPT, "stream": stream})
    error = error_of(response, 503)
    assert (error["code"], error["type"]) == ("load_failed", "server_error")
    assert error["message"] == "layer 3 has another checksum"
    assert response.headers["retry-after-ms"] == "3500"


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token(
    stream: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    backend.script.token_ids = []
    backend.script.then = GenerationFailed("three workers were lost")
    error = error_of(http.post("/v1/completions", json={**PROMPT, "stream": stream}), 503)
    assert error["message"] == "three workers were lost"
    assert backend.streams[0].cancelled.is_set()


@pytest.mark.parametrize(
    ("failure", "says"),
    [(GenerationFailed("the last worker was lost"), "worker"), (KeyError("k"), "internal error")],
)
def test_failure_in_mid_stream(
    failure: Exception, says: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    backend.script.token_ids = backend.script.token_ids[:3]
    backend.script.then = failure
    response = http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert response.status_code == 200
    events = [json.loads(data) for data in sse_data(response.text)]
    assert len(events) == 4
    assert says in events[-1]["error"]["message"]
    assert backend.streams[0].cancelled.is_set()
    backend.reset()
    assert http.post("/v1/completions", json=PROMPT).status_code == 200


def test_a_bug_is_a_500_without_internals(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.script.then = KeyError("secret")
    backend.script.token_ids = []
    for stream in (False, True):
        response = http.post("/v1/completions", json={**PROMPT, "stream": stream})
        assert "secret" not in str(error_of(response, 500))
        assert "x-request-id" in response.headers


right = {
    "add_generation_prompt": st.booleans(),
    "add_special_tokens": st.booleans(),
    "best_of": st.integers(1, 3),
    "continue_final_message": st.booleans(),
    "echo": st.booleans(),
    "frequency_penalty": st.floats(-2, 2),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 319).map(str), st.floats(-100, 100), max_size=3),
    "logprobs": st.integers(0, 20) | st.booleans(),
    "max_completion_tokens": st.integers(1, 100),
    "max_tokens": st.integers(1, 100),
    "min_p": st.floats(0, 1),
    "min_tokens": st.integers(0, 16),
    "n": st.integers(1, 3),
    "presence_penalty": st.floats(-2, 2),
    "reasoning_effort": st.none(),
    "repetition_penalty": st.floats(0.01, 100),
    "return_token_ids": st.booleans(),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "skip_special_tokens": st.booleans(),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=3) | st.sampled_from([" ", "fox"]),
    "stop_token_ids": st.lists(st.integers(0, 319), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "temperature": st.floats(0, 100),
    "top_k": st.integers(-1, 400),
    "top_logprobs": st.integers(0, 20),
    "top_p": st.floats(0.01, 1),
}
prompts = (
    st.text(min_size=1, max_size=30)
    | st.lists(st.integers(0, 319), min_size=1, max_size=60)
    | st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)
    | st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=9), min_size=1, max_size=3)
)
chats = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "developer"]),
            "content": st.text(max_size=8),
        }
    ),
    min_size=1,
    max_size=3,
)
valid = st.fixed_dictionaries(
    {"model": st.sampled_from(["tiny", "org/plain"]), "prompt": prompts, "messages": chats},
    optional=right,
)
wild_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool"]) | json_values},
        optional={
            **dict.fromkeys(("content", "name", "tool_calls", "refusal", "more"), json_values),
            "reasoning": st.text(max_size=3) | json_values,
        },
    )
    | json_values,
    max_size=3,
)
overrides = st.dictionaries(
    st.sampled_from(sorted({*FIELDS, *HARMLESS} - {"messages"})), json_values, max_size=2
) | st.fixed_dictionaries({"messages": wild_messages})
bodies = st.builds(lambda body, wild: {**body, **wild}, valid, overrides)


def test_every_field_is_tried() -> None:
    assert set(right) | {"model", "prompt", "messages"} == FIELDS


@given(
    endpoint=st.sampled_from(["completions", "chat/completions"]),
    body=bodies | json_values,
)
@settings(
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_body_gives_a_5xx(
    endpoint: str, body: object, http: httpx.Client, shared_server: LocalServer
) -> None:
    response = http.post(f"/v1/{endpoint}", json=body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        data = sse_data(response.text)
        assert data[-1] == "[DONE]"
        assert data.count("[DONE]") == 1
        assert not [entry for entry in data if entry.startswith('{"error"')]
    else:
        answer = response.json()
        assert answer["usage"]["completion_tokens"] >= len(answer["choices"]) >= 1


own = {
    "completions": {"logprobs": st.integers(0, 20), "echo": st.booleans()},
    "chat/completions": {
        "logprobs": st.booleans(),
        "add_generation_prompt": st.just(False),
        "continue_final_message": st.booleans(),
    },
}
shared = {name: right[name] for name in GenerationBody.__struct_fields__ if name in right} | {
    "max_completion_tokens": st.integers(16, 60),
    "best_of": st.none(),
}


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@given(data=st.data())
@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_everything_honoured_goes_together(
    endpoint: str, http: httpx.Client, data: st.DataObject
) -> None:
    needed = {"prompt": prompts} if endpoint == "completions" else {"messages": chats}
    optional = {**shared, **own[endpoint]}
    body = data.draw(st.fixed_dictionaries({"model": st.just("tiny"), **needed}, optional=optional))
    body["max_tokens"] = 16
    if body.get("echo"):
        body.pop("logprobs", None)
    response = http.post(f"/v1/{endpoint}", json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        *events, done = sse_data(response.text)
        assert done == "[DONE]"
        ended = [c for e in events for c in json.loads(e)["choices"] if c["finish_reason"]]
    else:
        ended = response.json()["choices"]
    prompt = body.get("prompt", "")
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    count = body.get("n", 1) * (1 if is_one else len(prompt))
    assert sorted(choice["index"] for choice in ended) == list(range(count))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in ended)


@given(raw=st.binary(max_size=200))
@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_bytes_give_a_5xx(raw: bytes, http: httpx.Client) -> None:
    error_of(http.post("/v1/completions", content=raw), 400)


@pytest.mark.parametrize(
    "value",
    [b"1e400", b'{"maximum":[1e999]}', b'"\xff"', b'["\xed\xa0\x80"]', b"9" * 4300, b"[" * 2000],
    ids=["huge", "huge within", "no text", "half a character", "long", "deep"],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions", "embeddings"])
def test_what_is_no_value_gives_no_5xx(value: bytes, endpoint: str, http: httpx.Client) -> None:
    """In whatever parameter: also in those that are passed over unread until they are refused."""
    body = {"model": "tiny", "prompt": "x"} if endpoint == "completions" else CHAT
    body = {"model": "tiny", "input": "x"} if endpoint == "embeddings" else body
    begun = json.dumps(body).encode()[:-1]
    if value.startswith(b"[["):
        value += b"]" * len(value)
    for name in sorted({*FIELDS, *HARMLESS} - body.keys()):
        raw = b'%b,"%b":%b}' % (begun, name.encode(), value)
        response = http.post(f"/v1/{endpoint}", content=raw)
        assert response.status_code in (200, 400), (name, response.text)
        assert len(response.text) < 9_000
