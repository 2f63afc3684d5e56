"""Log probabilities in OpenAI's formats: none is lost, and every token is spelled right."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from gateway_double import (
    NEVER_CHOSEN,
    NOT_A_NUMBER,
    TEXT,
    LocalServer,
    Script,
    ScriptedBackend,
    scripted_logprobs,
    sse_data,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from effort import examples
from livescale.gateway.text.spelling import TokenSpelling

relaxed = settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
served = settings(relaxed, max_examples=examples(40))
unicode_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture
def client(shared_server: LocalServer, backend: ScriptedBackend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0)


# -- spelling --------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 319), max_size=30))
@relaxed
def test_byte_level_bytes_are_the_texts_bytes(ids: list[int], tokenizer: Tokenizer) -> None:
    spelling = TokenSpelling(tokenizer)
    spelled = b"".join(spelling.of(token_id)[1] for token_id in ids)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert spelled.decode("utf-8", errors="replace") == whole
    for token_id in ids:
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert spelling.of(token_id)[0] == alone


@given(text=unicode_text)
@relaxed
def test_byte_level_bytes_are_exact(text: str, tokenizer: Tokenizer) -> None:
    spelling = TokenSpelling(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(spelling.of(token_id)[1] for token_id in ids) == text.encode()


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: spaces as ▁, the first one dropped, unknown characters in bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"<unk>": 256, "▁": 257, "a": 258, "b": 259, "▁a": 260, "▁b": 261}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@given(text=st.text(alphabet="ab 🦊é", min_size=1, max_size=20).filter(lambda t: t == t.strip()))
@relaxed
def test_byte_fallback_bytes_are_the_texts_bytes(text: str, sentencepiece_like: Tokenizer) -> None:
    """A leading space belongs to its token; that of the first word is the tokenizer's own."""
    spelling = TokenSpelling(sentencepiece_like)
    ids = sentencepiece_like.encode(text).ids
    spelled = b"".join(spelling.of(token_id)[1] for token_id in ids)
    assert spelled.decode().removeprefix(" ") == text
    assert sentencepiece_like.decode(ids) == text


def test_an_id_that_only_the_model_knows_is_empty(tokenizer: Tokenizer) -> None:
    assert TokenSpelling(tokenizer).of(5000) == ("", b"")


# -- formats ---------------------------------------------------------------------------------


def test_completion_logprobs(
    client: openai.OpenAI, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    ids = [*backend.script.token_ids, 1]
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=150, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    expected = [scripted_logprobs(token_id, 2) for token_id in ids]
    assert logprobs.token_logprobs == [
        max(entry.chosen, -9999.0) for entry in expected if entry is not None
    ]
    assert logprobs.top_logprobs is not None
    for token_id, token, entry, shown in zip(
        ids, logprobs.tokens, expected, logprobs.top_logprobs, strict=True
    ):
        assert entry is not None
        assert set(shown) == {
            token,
            *(tokenizer.decode([i], skip_special_tokens=False) for i, _ in entry.top),
        }, token_id
    offsets = logprobs.text_offset
    assert offsets is not None
    assert offsets == sorted(offsets)
    for place, (token, offset) in enumerate(zip(logprobs.tokens, offsets, strict=True)):
        if "\ufffd" not in token and token != "</s>":
            assert TEXT.startswith(token, offset), place


def test_chat_logprobs(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    ids = [*backend.script.token_ids, 1]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say it"}],
        max_tokens=150,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.refusal is None
    assert len(logprobs.content) == len(ids)
    spelled = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert spelled == TEXT.encode() + b"</s>"
    for token_id, token in zip(ids, logprobs.content, strict=True):
        entry = scripted_logprobs(token_id, 3)
        assert entry is not None
        assert token.logprob == entry.chosen
        assert [top.logprob for top in token.top_logprobs] == [value for _, value in entry.top]
        assert all(top.bytes is not None for top in token.top_logprobs)


def test_chat_logprobs_without_likely_tokens(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = client.chat.completions.create(**ask, logprobs=True)  # type: ignore[call-overload]
    assert [token.top_logprobs for token in answer.choices[0].logprobs.content] == [[], []]
    without = client.chat.completions.create(**ask, logprobs=False)  # type: ignore[call-overload]
    assert without.choices[0].logprobs is None
    assert [stream.request.sampling.logprobs for stream in backend.streams] == [0, None]


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@given(
    tokens=st.integers(1, 110),
    likely=st.integers(0, 20),
    stop=st.sampled_from([None, "brown cow", "dog – n", "jum"]),
)
@served
def test_streamed_logprobs_are_those_of_the_whole(
    endpoint: str,
    tokens: int,
    likely: int,
    stop: str | None,
    http: httpx.Client,
) -> None:
    """Also those of tokens whose text is held back, or cut off by a stop string."""
    body: dict[str, object] = {"model": "tiny", "max_tokens": tokens, "stop": stop}
    is_chat = endpoint.startswith("chat")
    if is_chat:
        body |= {"messages": [{"role": "user", "content": "x"}]}
        body |= {"logprobs": True, "top_logprobs": likely}
    else:
        body |= {"prompt": "x", "logprobs": likely}
    answer = http.post(f"/v1/{endpoint}", json=body).json()
    whole = answer["choices"][0]["logprobs"]
    *data, _ = sse_data(http.post(f"/v1/{endpoint}", json={**body, "stream": True}).text)
    parts = [json.loads(entry)["choices"][0]["logprobs"] for entry in data]
    for field in ["content"] if is_chat else list(whole):
        joined = [entry for part in parts for entry in part[field]]
        assert joined == whole[field]
        assert len(joined) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("token_id", [NEVER_CHOSEN, NOT_A_NUMBER])
def test_what_json_has_not_is_a_number(
    token_id: int, http: httpx.Client, backend: ScriptedBackend
) -> None:
    backend.script = Script([token_id])
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "logprobs": 0}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert list(choice["logprobs"]["top_logprobs"][0].values()) == [-9999.0]
