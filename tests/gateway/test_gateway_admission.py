"""The waiting line against a list that does the same slowly, and what clients are told of it."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gateway_double import MODEL_TOKENS_MAX, WAIT_S, ScriptedBackend, running
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tokenizers import Tokenizer

from livescale.gateway.contract.admission import (
    RETRY_RANGE_S,
    RETRY_UNKNOWN_S,
    WaitingLine,
    estimated_prompts,
    estimated_tokens,
)
from livescale.gateway.contract.backend import QueueFull, Unavailable

REQUESTS_MAX, TOKENS_MAX = 5, 100
tokens = st.integers(0, 2 * TOKENS_MAX)


CLIENTS = ("light", "heavy", "other")
clients = st.sampled_from(CLIENTS)
Waiting = list[tuple[str, int]]
"""Who waits, with how many prompt tokens."""


class LineMachine(RuleBasedStateMachine):
    """Whatever joins and leaves, the line counts what a list would, and refuses by its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(REQUESTS_MAX, TOKENS_MAX)
        self.waiting: Waiting = []
        self.now_s = 0.0

    @rule(client=clients, prompt_tokens=tokens, requests=st.integers(1, REQUESTS_MAX + 1))
    def check(self, client: str, prompt_tokens: int, requests: int) -> None:
        if is_taken(self.waiting, client, requests, prompt_tokens):
            self.line.check(client, requests, prompt_tokens, self.now_s)
        else:
            with pytest.raises(QueueFull) as full:
                self.line.check(client, requests, prompt_tokens, self.now_s)
            assert RETRY_RANGE_S[0] <= full.value.retry_after_s <= RETRY_RANGE_S[1]

    @rule(client=clients, prompt_tokens=tokens)
    def join(self, client: str, prompt_tokens: int) -> None:
        self.line.join(client, prompt_tokens, self.now_s)
        self.waiting.append((client, prompt_tokens))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_served=st.booleans())
    def leave(self, data: st.DataObject, is_served: bool) -> None:
        gone = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        if is_served:
            self.line.move_on(*gone, self.now_s)
        else:
            self.line.leave(*gone)

    @rule(client=clients, requests=st.integers(1, 3), prompt_tokens=tokens)
    def hold(self, client: str, requests: int, prompt_tokens: int) -> None:
        try:
            with self.line.holding(client, requests, prompt_tokens, self.now_s):
                assert self.line.requests == len(self.waiting) + requests
                assert self.line.prompt_tokens == tokens_of(self.waiting) + prompt_tokens
                raise KeyError("an error inside gives the places back, too")
        except (KeyError, QueueFull):
            pass

    @rule(pause_s=st.floats(0, 1000))
    def wait(self, pause_s: float) -> None:
        self.now_s += pause_s

    @invariant()
    def counts_agree(self) -> None:
        assert self.line.requests == len(self.waiting)
        assert self.line.prompt_tokens == tokens_of(self.waiting)


def tokens_of(waiting: Waiting, client: str | None = None) -> int:
    return sum(tokens for name, tokens in waiting if client in (None, name))


def is_taken(waiting: Waiting, client: str, requests: int, prompt_tokens: int) -> bool:
    """The rule, of a list: within the bound, or within the client's share of it and twice the
    bound."""
    own = [name for name, _ in waiting].count(client)
    sharing = len({client, *(name for name, _ in waiting)})
    own_tokens = tokens_of(waiting, client)
    amounts = [
        (own, len(waiting), requests, REQUESTS_MAX),
        (own_tokens, tokens_of(waiting), prompt_tokens, TOKENS_MAX),
    ]
    return not waiting or all(
        total + more <= most
        or (total + more <= 2 * most and (held == 0 or held + more <= most / sharing))
        for held, total, more, most in amounts
    )


TestLine = LineMachine.TestCase


@given(
    interval_s=st.floats(0.01, 0.5),
    waiting=st.integers(2, 100),
    idle_s=st.floats(0, 1e5),
    served=st.integers(1, 60),
)
def test_the_wait_is_the_line_at_its_measured_pace(
    interval_s: float, waiting: int, idle_s: float, served: int
) -> None:
    """However long nobody came before: an idle pool is not a slow one."""
    line = WaitingLine(1 << 20, None)
    assert line.wait_s("a", 0.0) == RETRY_UNKNOWN_S
    now_s = 100.0
    for _ in range(served):  # one at a time, with long pauses between
        line.join("a", 1, now_s)
        now_s += interval_s
        line.move_on("a", 1, now_s)
        now_s += idle_s
    line.join("a", waiting, now_s, waiting)
    expected_s = min(max(waiting * interval_s, RETRY_RANGE_S[0]), RETRY_RANGE_S[1])
    assert line.wait_s("a", now_s) == pytest.approx(expected_s, rel=1e-3)


@given(others=st.lists(st.integers(1, 200), min_size=1, max_size=5), own=st.integers(0, 20))
def test_a_client_waits_for_its_turns_and_not_for_all_that_others_sent(
    others: list[int], own: int
) -> None:
    line = WaitingLine(1 << 20, None)
    line.join("own", 1, 0.0)
    line.move_on("own", 1, 0.1)  # ten a second
    for number, count in enumerate(others):
        line.join(f"other {number}", count, 0.1, count)
    if own:
        line.join("own", own, 0.1, own)
    most = sum(others) + own
    turns = min(own * (len(others) + 1), most) if own else most
    assert line.wait_s("own", 0.1) == pytest.approx(min(turns * 0.1, RETRY_RANGE_S[1]))


@given(heavy=st.integers(1, 300), lights=st.integers(1, 20))
def test_a_client_that_fills_the_line_fills_it_for_itself(heavy: int, lights: int) -> None:
    """However much one asks for, others find a place; what they find is bounded, too."""
    line = WaitingLine(100, None)
    for _ in range(heavy):
        try:
            line.check("heavy", 1, 1, 0.0)
        except QueueFull:
            break
        else:
            line.join("heavy", 1, 0.0)
    assert line.requests == min(heavy, 100)
    for number in range(lights):
        line.check(f"light {number}", 1, 1, 0.0)
        line.join(f"light {number}", 1, 0.0)
    if line.requests >= 100:
        with pytest.raises(QueueFull):
            line.check("heavy", 1, 1, 0.0)
    while line.requests < 200:
        line.join("heavy", 1, 0.0)
    with pytest.raises(QueueFull):
        line.check("new", 1, 1, 0.0)


def test_a_line_that_stands_still_grows_slower() -> None:
    line = WaitingLine(1 << 20, None)
    line.join("a", 3, 0.0, 3)
    line.move_on("a", 1, 0.1)
    waits = [line.wait_s("a", 0.1 + still_s) for still_s in (0.0, 1.0, 10.0, 1000.0)]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.2)
    assert waits[-1] == RETRY_RANGE_S[1]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_an_estimate_never_needs_a_tokenizer(prompts: list[str]) -> None:
    assert estimated_prompts(prompts, 1 << 20) == [estimated_tokens(prompt) for prompt in prompts]
    assert all(estimate == 1 for estimate in estimated_prompts(prompts, 1))


def test_estimates_of_ids_are_exact() -> None:
    assert estimated_prompts([[5, 6], [7]], 9) == [2, 1]
    assert estimated_prompts([], 9) == []
    assert estimated_tokens("é" * 40) == 20  # bytes, not characters


# -- over HTTP ------------------------------------------------------------------------------------

LONG = "the quick brown fox " * 100
"""Too long for the model, by its tokens but not by its characters."""


@pytest.mark.parametrize(
    ("endpoint", "body", "places", "status"),
    [
        ("completions", {"prompt": LONG}, MODEL_TOKENS_MAX, 400),
        ("completions", {"prompt": [5] * (MODEL_TOKENS_MAX - 1)}, MODEL_TOKENS_MAX - 1, 200),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": LONG}]},
            MODEL_TOKENS_MAX,
            400,
        ),
    ],
)
def test_a_full_line_refuses_before_anything_is_tokenized(
    endpoint: str,
    body: dict[str, object],
    places: int,
    status: int,
    http: httpx.Client,
    backend: ScriptedBackend,
) -> None:
    """A text that is too long for the model would be a 400 if it were tokenized. None takes more
    places meanwhile than a prompt that the model could hold."""
    backend.script.admission = QueueFull(0.0123)
    response = http.post(f"/v1/{endpoint}", json={"model": "tiny", **body})
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    assert response.headers["retry-after-ms"] == "13"
    [(model, requests, prompt_tokens)] = backend.admitted
    assert (model, requests, prompt_tokens) == ("tiny", 1, places)
    backend.script.admission = None
    assert http.post(f"/v1/{endpoint}", json={"model": "tiny", **body}).status_code == status


def test_unknown_models_and_bad_bodies_take_no_place(
    http: httpx.Client, backend: ScriptedBackend
) -> None:
    backend.script.admission = QueueFull(1.0)
    for body, status in [({"model": "nope", "prompt": "x"}, 404), ({"model": "tiny"}, 400)]:
        assert http.post("/v1/completions", json=body).status_code == status
    assert not backend.admitted


def test_a_pool_that_starts_refuses_early_too(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.script.admission = Unavailable("the pool is starting")
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": LONG})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the pool is starting"


def test_every_generation_takes_a_place(http: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"model": "tiny", "prompt": [[5] * 8, [6] * 4], "n": 3, "temperature": 1.0}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert backend.admitted == [("tiny", 6, 36)]


def test_refusals_are_counted_as_the_pools_fault(
    http: httpx.Client, backend: ScriptedBackend
) -> None:
    def unavailable() -> float:
        name = 'livescale_requests_total{model="tiny",outcome="unavailable"} '
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = unavailable()
    backend.script.admission = QueueFull(1.0)
    http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    backend.script.admission = None
    backend.script.refusal = QueueFull(1.0)
    http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert unavailable() == before + 2


@pytest.mark.usefixtures("machine")
def test_tokenizing_a_long_prompt_does_not_stop_other_streams(
    backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    """Prompts that take a while are in threads: meanwhile other requests begin and end."""
    text = 20 * LONG
    card = dataclasses.replace(backend.models()[0], model_tokens_max=1 << 20)
    with running(ScriptedBackend((card,), [5])) as server, ThreadPoolExecutor() as threads:
        url = server.url
        asked = {"model": "tiny", "prompt": text}
        long = threads.submit(httpx.post, f"{url}/tokenize", json=asked, timeout=WAIT_S)
        for _ in range(3):
            assert httpx.get(f"{url}/live", timeout=WAIT_S).status_code == 200
        assert long.result().json()["count"] == len(tokenizer.encode(text).ids)
