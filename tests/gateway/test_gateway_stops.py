"""Stop strings: what is sent is the text up to the first one, however it was cut into pieces."""

from __future__ import annotations

import json
from typing import SupportsIndex

import httpx
import openai
import pytest
from gateway_double import TEXT, LocalServer, Script, ScriptedBackend, sse_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from effort import examples
from livescale.gateway.requests.choices import StopScanner, StopString
from livescale.values.types import FinishReason

relaxed = settings(
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
served = settings(relaxed, max_examples=examples(60))
few_letters = st.text(alphabet="ab🦊", max_size=30)
stop_strings = st.lists(st.text(alphabet="ab🦊", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(
    pieces: list[str], strings: list[str], is_shown: bool, unarmed: int
) -> tuple[str, str | None, int]:
    """(text, the string that stopped it, pieces used), by looking at the whole text each time."""
    text = ""
    for used, piece in enumerate(pieces, 1):
        before, text = len(text), text + piece
        if used <= unarmed:
            continue
        found = [
            (start, place)
            for place, string in enumerate(strings)
            for start in range(len(text))
            if text.startswith(string, start) and before < start + len(string)
        ]
        if found:
            start, place = min(found)
            return text[: start + (len(strings[place]) if is_shown else 0)], strings[place], used
    return text, None, len(pieces)


@given(
    pieces=st.lists(few_letters, max_size=12),
    strings=stop_strings,
    is_shown=st.booleans(),
    unarmed=st.integers(0, 5),
)
@relaxed
def test_scanner_lets_through_exactly_the_text_before_the_stop(
    pieces: list[str], strings: list[str], is_shown: bool, unarmed: int
) -> None:
    expected, expected_stop, expected_used = reference(pieces, strings, is_shown, unarmed)
    scanner = StopScanner(tuple(map(StopString, strings)), is_shown)
    sent, whole, used = "", "", 0
    for used, piece in enumerate(pieces, 1):
        whole += piece
        sent += scanner.push(piece, is_armed=used > unarmed)
        assert expected.startswith(sent), "sent what has to be taken back"
        if scanner.found is not None:
            break
        kept = 0 if is_shown else longest_start(whole, strings)
        assert sent == whole[: len(whole) - kept], "held what no stop string can begin with"
        assert scanner.is_holding == (kept > 0)
    else:
        sent += scanner.flush()
    assert (sent, scanner.found, used) == (expected, expected_stop, expected_used)


def longest_start(text: str, strings: list[str]) -> int:
    """Characters at the end of the text that a stop string begins with."""
    return max(
        size
        for string in strings
        for size in range(min(len(string), len(text) + 1))
        if text.endswith(string[:size])
    )


def test_of_strings_that_one_piece_completes_the_first_in_the_text_counts() -> None:
    for strings, found, text in [
        (("b", "ab"), "ab", "x"),
        (("ab", "abc"), "ab", "x"),
        (("abc", "ab"), "abc", "x"),
        (("c", "b"), "b", "xa"),
    ]:
        scanner = StopScanner(tuple(map(StopString, strings)), is_stop_shown=False)
        assert (scanner.push("xabcd"), scanner.found) == (text, found)


@given(
    texts=st.lists(st.lists(few_letters, max_size=8), min_size=1, max_size=4),
    strings=stop_strings,
    is_shown=st.booleans(),
)
@relaxed
def test_choices_with_the_same_strings_do_not_disturb_one_another(
    texts: list[list[str]], strings: list[str], is_shown: bool
) -> None:
    """Their pieces come by turns, as those of a request's choices do."""
    stops = tuple(map(StopString, strings))
    scanners = [StopScanner(stops, is_shown) for _ in texts]
    sent = [""] * len(texts)
    for place in range(max(map(len, texts))):
        for choice, (pieces, scanner) in enumerate(zip(texts, scanners, strict=True)):
            if place < len(pieces) and scanner.found is None:
                sent[choice] += scanner.push(pieces[place])
    for pieces, scanner, text in zip(texts, scanners, sent, strict=True):
        rest = "" if scanner.found is not None else scanner.flush()
        expected, expected_stop, _ = reference(pieces, strings, is_shown, 0)
        assert (text + rest, scanner.found) == (expected, expected_stop)


class CountedText(str):
    """Counts how often its characters are looked at."""

    looks = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        self.looks += 1
        return super().__getitem__(key)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=256), min_size=1, max_size=16))
@served
def test_the_strings_are_worked_through_once_however_many_choices(stops: list[str]) -> None:
    """A choice alone costs as much for 16 strings of 256 characters as for 16 of one."""
    texts = [CountedText(stop) for stop in stops]
    strings = tuple(map(StopString, texts))
    before = [text.looks for text in texts]
    choices = 128
    for _ in range(choices):
        StopScanner(strings, is_stop_shown=False)
    looks = [text.looks - looks for text, looks in zip(texts, before, strict=True)]
    assert looks == [choices] * len(texts)  # at the first character


# -- over HTTP -------------------------------------------------------------------------------


@st.composite
def stops_in_the_text(draw: st.DrawFn) -> list[str]:
    """Pieces of TEXT (which certainly occur in it), and others."""
    pieces = st.integers(0, len(TEXT) - 1).flatmap(
        lambda start: st.integers(start + 1, min(len(TEXT), start + 6)).map(
            lambda stop: TEXT[start:stop]
        )
    )
    return draw(st.lists(pieces | st.text(min_size=1, max_size=3), min_size=1, max_size=3))


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@given(
    stop=stops_in_the_text(),
    is_shown=st.booleans(),
    min_tokens=st.integers(0, 20),
    max_tokens=st.integers(20, 120),
)
@served
def test_text_stops_at_the_stop_string(
    endpoint: str,
    stop: list[str],
    is_shown: bool,
    min_tokens: int,
    max_tokens: int,
    http: httpx.Client,
    backend: ScriptedBackend,
    tokenizer: Tokenizer,
) -> None:
    backend.reset()
    ids = backend.script.token_ids[:max_tokens]
    pieces = text_by_token(tokenizer, ids)
    text, stopped_by, used = reference(pieces, list(dict.fromkeys(stop)), is_shown, min_tokens)
    body: dict[str, object] = {
        "model": "tiny",
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "include_stop_str_in_output": is_shown,
        "return_token_ids": True,
    }
    is_chat = endpoint.startswith("chat")
    body |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    answer = http.post(f"/v1/{endpoint}", json=body).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if is_chat else choice["text"]) == text
    assert choice["stop_reason"] == stopped_by
    if stopped_by is not None:
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == used
        assert choice["token_ids"] == ids[:used]
        # Nothing was left to end when the stop string came with the last token there is.
        assert backend.streams[0].is_stopped == (used < max_tokens)
    assert not backend.streams[0].cancelled.is_set()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *data, done = sse_data(http.post(f"/v1/{endpoint}", json=body).text)
    *events, usage = [json.loads(entry) for entry in data]
    assert done == "[DONE]"
    assert usage["usage"] == answer["usage"]
    sent = ""
    for event in events:
        [choice] = event["choices"]
        sent += choice["delta"]["content"] if is_chat else choice["text"]
        assert text.startswith(sent)
        assert choice["token_ids"], "an event without a token"
    assert sent == text
    token_ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
    assert token_ids == answer["choices"][0]["token_ids"]
    last = events[-1]["choices"][0]
    for field in ("finish_reason", "stop_reason"):
        assert last[field] == answer["choices"][0][field]


def text_by_token(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The characters that are complete with each token; the last one brings all that is left."""
    whole = tokenizer.decode(ids)
    seen, pieces = 0, []
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        complete = len(text.rstrip("\ufffd")) if count < len(ids) else len(whole)
        pieces.append(whole[seen:complete])
        seen = max(seen, complete)
    return pieces


def test_events_wait_only_for_what_may_be_a_stop_string(
    http: httpx.Client, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    """One event per token, but for tokens whose whole text is held."""
    stop = "quick brown cow"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stop": stop, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *data, _, _ = sse_data(http.post("/v1/completions", json=body).text)
    events = [json.loads(entry) for entry in data]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == TEXT
    [late] = [text for text in texts if "quick brown " in text]
    held = len(tokenizer.encode(late, add_special_tokens=False).ids) - 1
    assert held >= 1
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[-1] == len(backend.script.token_ids) + 1
    steps = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert sorted(set(steps)) == [1, max(steps)]
    assert texts[steps.index(max(steps))] == late


def test_stop_tokens(http: httpx.Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    """A named one is the stop reason, the model's own is not; neither shows unless asked for."""
    ids = backend.script.token_ids
    named = next(token_id for token_id in ids[3:] if token_id not in ids[:3])
    place = ids.index(named)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 150, "stop_token_ids": [named, 1]}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == tokenizer.decode(ids[:place])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", named)
    assert set(backend.streams[0].request.sampling.stop_token_ids) == {1, named}
    shown = http.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()
    assert shown["choices"][0]["text"] == tokenizer.decode(ids[: place + 1])
    eos = http.post("/v1/completions", json={**body, "stop_token_ids": [1]}).json()["choices"][0]
    assert (eos["finish_reason"], eos["stop_reason"]) == ("stop", None)
    body |= {"stop_token_ids": [1], "ignore_eos": True}
    ignoring = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (ignoring["finish_reason"], ignoring["stop_reason"]) == ("stop", 1)


def test_special_tokens_show_only_if_asked_for(
    http: httpx.Client, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    ids = [*backend.script.token_ids[:3], 3, *backend.script.token_ids[3:6]]
    backend.script = Script(ids)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 7, "skip_special_tokens": False}
    shown = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)
    assert "<|user|>" in shown
    body["skip_special_tokens"] = True
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == tokenizer.decode(
        ids, skip_special_tokens=True
    )
    body |= {"skip_special_tokens": False, "max_tokens": 8, "include_stop_str_in_output": True}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"].endswith("</s>")
    body["stop"] = "<|user|>"
    stopped = http.post("/v1/completions", json=body).json()["choices"][0]
    assert stopped["text"] == tokenizer.decode(ids[:3]) + "<|user|>"


def test_openai_client_stops(shared_server: LocalServer, backend: ScriptedBackend) -> None:
    client = openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say it"}],
        max_tokens=150,
        stop=["jumps", "never"],
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == TEXT.split("jumps")[0]
    assert choices[-1].finish_reason == FinishReason.STOP
    assert backend.streams[0].is_stopped
