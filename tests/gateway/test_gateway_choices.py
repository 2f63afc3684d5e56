"""Several prompts, several choices of each: one request, one answer, all or nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict

import httpx
import openai
import pytest
from gateway_double import TEXT, LocalServer, Script, ScriptedBackend, sse_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from effort import examples
from livescale.gateway.contract.backend import GenerationFailed, QueueFull
from livescale.gateway.requests.sampling import GENERATIONS_MAX

served = settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
USER = [{"role": "user", "content": "x"}]


@pytest.fixture
def client(shared_server: LocalServer, backend: ScriptedBackend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0)


prompts = st.lists(
    st.text(alphabet="abc ", min_size=1, max_size=8).filter(bool)
    | st.lists(st.integers(5, 319), min_size=1, max_size=8),
    min_size=1,
    max_size=3,
)


@given(prompt=prompts, n=st.integers(1, 3), data=st.data())
@served
def test_choices_are_numbered_prompt_after_prompt(
    prompt: list[str | list[int]],
    n: int,
    data: st.DataObject,
    http: httpx.Client,
    backend: ScriptedBackend,
    tokenizer: Tokenizer,
) -> None:
    """Each has its own text, of its own length; streamed or not, the answer is the same."""
    ids = backend.script.token_ids
    total = len(prompt) * n
    lengths = [data.draw(st.integers(0, 12)) for _ in range(total)]
    scripts = [Script(ids[place : place + size]) for place, size in enumerate(lengths)]
    body = {"model": "tiny", "prompt": prompt, "n": n, "max_tokens": 50, "return_token_ids": True}
    backend.reset()
    backend.next_scripts = list(scripts)
    answer = http.post("/v1/completions", json=body).json()
    asked = [
        tuple(tokenizer.encode(entry).ids) if isinstance(entry, str) else tuple(entry)
        for entry in prompt
        for _ in range(n)
    ]
    assert [stream.request.prompt_ids for stream in backend.streams] == asked
    assert len({stream.request.request for stream in backend.streams}) == total
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(total))
    for choice, script, prompt_ids in zip(choices, scripts, asked, strict=True):
        assert choice["token_ids"] == [*script.token_ids, 1]
        assert choice["text"] == tokenizer.decode(script.token_ids)
        assert choice["prompt_token_ids"] == list(prompt_ids)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, asked[::n]))
    assert usage["completion_tokens"] == sum(lengths) + total
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    backend.next_scripts = list(scripts)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = sse_data(http.post("/v1/completions", json=body).text)
    assert done == "[DONE]"
    *parts, last = [json.loads(event) for event in events]
    assert last["choices"] == []
    assert last["usage"] == usage
    streamed: dict[int, list[dict[str, object]]] = defaultdict(list)
    for part in parts:
        [choice] = part["choices"]
        streamed[choice["index"]].append(choice)
    assert sorted(streamed) == list(range(total))
    for index, pieces in streamed.items():
        assert "".join(str(piece["text"]) for piece in pieces) == choices[index]["text"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == "stop"
        assert [place for place, p in enumerate(pieces) if "prompt_token_ids" in p] == [0]


def test_chat_choices(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    ids = backend.script.token_ids
    scripts = [Script(ids[:3]), Script(ids[:9]), Script(ids[:1])]
    backend.next_scripts = list(scripts)
    ask = {"model": "tiny", "messages": USER, "n": 3, "max_tokens": 50}
    answer = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    backend.next_scripts = list(scripts)
    chunks = client.chat.completions.create(
        **ask,  # type: ignore[call-overload]
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    roles, texts, counts = defaultdict(list), defaultdict(str), []
    for chunk in chunks:
        counts.append(chunk.usage.completion_tokens)
        for choice in chunk.choices:
            roles[choice.index].append(choice.delta.role)
            texts[choice.index] += choice.delta.content
    assert [choice.message.content for choice in answer.choices] == [texts[i] for i in range(3)]
    assert answer.usage.completion_tokens == 3 + 9 + 1 + 3
    assert counts == [*range(1, 17), 16]
    for index, size in enumerate((3, 9, 1)):
        assert roles[index] == ["assistant", *[None] * size]


def test_events_interleave_as_tokens_come(
    shared_server: LocalServer, backend: ScriptedBackend, http: httpx.Client
) -> None:
    """A choice that waits holds up no other."""
    ids, gate = backend.script.token_ids, asyncio.Event()
    backend.next_scripts = [Script(ids[:2], then=gate), Script(ids[:5])]
    body = {"model": "tiny", "prompt": "x", "n": 2, "max_tokens": 50, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        first = [json.loads(line)["choices"][0] for line in itertools.islice(lines, 8)]
        assert [c["index"] for c in first].count(0) == 2
        assert [c["finish_reason"] for c in first if c["index"] == 1] == [None] * 5 + ["stop"]
        shared_server.call(gate.set)
        last, done = lines
    assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_submission_is_all_or_nothing(
    stream: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    full = Script([], refusal=QueueFull(2.0))
    backend.next_scripts = [backend.script, backend.script, full]
    body = {"model": "tiny", "prompt": ["x", "y"], "n": 2, "max_tokens": 50, "stream": stream}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_full"
    assert not backend.streams


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_fails_all(
    stream: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    ids = backend.script.token_ids
    failing = Script(ids[:2], then=GenerationFailed("the last worker was lost"))
    endless = Script(ids[:2], then=asyncio.Event())
    backend.next_scripts = [endless, Script(ids[:1]), failing]
    body = {"model": "tiny", "messages": USER, "n": 3, "max_tokens": 50, "stream": stream}
    response = http.post("/v1/chat/completions", json=body)
    if stream:
        last = sse_data(response.text)[-1]
        assert json.loads(last)["error"]["message"] == "the last worker was lost"
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 503
    waiting, finished, failed = backend.streams
    assert waiting.cancelled.is_set()
    assert failed.cancelled.is_set()
    assert not finished.cancelled.is_set()


def test_every_choice_is_counted_once(http: httpx.Client, backend: ScriptedBackend) -> None:
    def counts() -> dict[str, float]:
        name = 'livescale_requests_total{model="tiny",outcome="'
        lines = http.get("/metrics").text.splitlines()
        found = [line.removeprefix(name) for line in lines if line.startswith(name)]
        return {entry.split('"')[0]: float(entry.split()[-1]) for entry in found}

    ids, before = backend.script.token_ids, counts()
    backend.next_scripts = [Script(ids[:1]), Script(ids[:20]), Script(ids[:20])]
    http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 4})
    failing = Script(ids[:1], then=GenerationFailed("lost"))
    backend.next_scripts = [Script(ids[:1], then=asyncio.Event()), failing]
    http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 2})
    after = counts()
    added = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: count for name, count in added.items() if count} == {
        "stop": 1,
        "length": 2,
        "failed": 2,
    }


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": ["x"] * (GENERATIONS_MAX + 1)}, "prompt", str(GENERATIONS_MAX)),
        ({"prompt": ["x"] * 2, "n": GENERATIONS_MAX // 2 + 1}, "n", str(GENERATIONS_MAX)),
        ({"prompt": ["x", ""]}, "prompt", "empty"),
        ({"prompt": [[5], []]}, "prompt", "empty"),
        ({"prompt": [5, "x"]}, "prompt", "mixes"),
        ({"prompt": [[5], 5]}, "prompt", "mixes"),
        ({"prompt": [[5], [320]]}, "prompt", "320"),
        ({"prompt": ["x", [5] * 500]}, "prompt", "500"),
        ({"prompt": "x", "n": 2, "best_of": 3}, "best_of", "best_of"),
    ],
)
def test_prompts_that_cannot_be(
    body: dict[str, object], param: str, says: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    response = http.post("/v1/completions", json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]
    assert not backend.streams


@pytest.mark.parametrize("stream", [False, True])
def test_echo(
    stream: bool, http: httpx.Client, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("many models 🦊").ids
    body = {"model": "tiny", "prompt": ["the fox ", ids], "echo": True, "max_tokens": 150}
    if not stream:
        texts = [c["text"] for c in http.post("/v1/completions", json=body).json()["choices"]]
    else:
        *events, _ = sse_data(http.post("/v1/completions", json={**body, "stream": True}).text)
        texts = ["", ""]
        for choice in (json.loads(event)["choices"][0] for event in events):
            texts[choice["index"]] += choice["text"]
    assert texts == ["the fox " + TEXT, "<s>many models 🦊" + TEXT]


def test_as_many_as_allowed(http: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"model": "tiny", "prompt": ["x"] * 4, "n": GENERATIONS_MAX // 4, "max_tokens": 2}
    answer = http.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == GENERATIONS_MAX
    assert answer["usage"]["completion_tokens"] == 2 * GENERATIONS_MAX
