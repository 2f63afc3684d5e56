"""A pool of real processes: scaling under load, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from pool_thread import LocalPool, wait_until

from livescale.engine.oracle import GreedyOracle
from livescale.messages.events import InstanceReported
from livescale.telemetry.record import RequestLine, RunLine, ScaleLine, StepLine, read_record
from livescale.telemetry.replay import replay
from livescale.types import Outcome

pytestmark = pytest.mark.pool
# About 3.4 MB at this rate: a load takes a third of a second.
LINK_BYTES_PER_S = 10_000_000
# Far below what the machine does, so that a small burst is a burst.
CAPACITY = "    prefill_tokens_per_s: 2000\n"


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    scratch = tmp_path_factory.mktemp("pool")
    with LocalPool(
        tiny_model,
        scratch,
        CAPACITY,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
    ) as local:
        yield local


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GreedyOracle:
    return GreedyOracle(tiny_model)


def prompt(number: int, tokens: int) -> list[int]:
    return [(7 * number + 3 * position) % 900 + 10 for position in range(tokens)]


class Answer:
    """A streamed completion: its tokens as they come."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.error: str | None = None

    async def read(self, url: str, client: httpx.AsyncClient, max_tokens: int) -> Answer:
        async for _ in self.stream(url, client, max_tokens):
            pass
        return self

    async def stream(
        self, url: str, client: httpx.AsyncClient, max_tokens: int
    ) -> AsyncIterator[int]:
        body = {
            "model": "tiny",
            "prompt": self.prompt_ids,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.error = event.get("error", {}).get("message", self.error)
                    for choice in event.get("choices", []):
                        self.token_ids += choice.get("token_ids") or []
                        yield len(self.token_ids)


def run(work):
    return asyncio.run(work)


def check(oracle: GreedyOracle, answers: list[Answer], max_tokens: int) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [len(answer.token_ids) for answer in answers] == [max_tokens] * len(answers)
    checks = oracle.check_many([(a.prompt_ids, a.token_ids) for a in answers])
    assert [check.wrong for check in checks] == [()] * len(checks)


def test_a_burst_scales_to_all_workers_and_back_with_right_tokens(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    async def burst() -> list[Answer]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as c:
            # The first request alone is more than two instances' work: one decision for all.
            answers = [Answer(prompt(n, 150 + n if n else 3000)) for n in range(40)]
            return await asyncio.gather(*(answer.read(pool.url, c, 64) for answer in answers))

    known = len(scale_ups(pool))
    check(oracle, run(burst()), 64)
    wait_until(lambda: max_loads(scale_ups(pool)[known:]) == 2, "a scale-up by two is recorded")
    wait_until(lambda: pool.gauge("instances") == 1, "the pool shrinks to one instance")
    assert scale_ups(pool)[0].loads[0].upstream == "storage"
    largest = max(scale_ups(pool)[known:], key=lambda line: len(line.loads))
    assert len(largest.chains) == 1
    for load in largest.loads:
        assert load.first_byte_ns <= load.first_layer_ns <= load.loaded_ns
        assert largest.decided_ns <= largest.planned_ns <= load.first_byte_ns
    # Forwarding while receiving: the second target has its first byte before the first is done.
    first, second = sorted(largest.loads, key=lambda load: load.loaded_ns)
    assert second.first_byte_ns < first.loaded_ns


def test_both_endpoints_with_the_official_client(pool: LocalPool) -> None:
    client = openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", timeout=60)
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="one two", max_tokens=8, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 8
    messages = [{"role": "user", "content": "one two"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, temperature=0
    )
    pieces = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, temperature=0, stream=True
    )
    streamed = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert streamed == chat.choices[0].message.content


def test_killing_the_controller_does_not_touch_streams(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    old = pool.pool.pids()["controller"]

    async def two_streams() -> list[Answer]:
        async with httpx.AsyncClient(timeout=60) as client:
            early, late = Answer(prompt(1, 30)), Answer(prompt(2, 30))
            after = None
            async for count in early.stream(pool.url, client, 300):
                if count == 20:
                    os.kill(old, signal.SIGKILL)
                    # Sent while no controller is there: it waits for the next one.
                    after = asyncio.create_task(late.read(pool.url, client, 300))
            assert after is not None
            return [early, await after]

    check(oracle, run(two_streams()), 300)
    assert pool.pool.pids()["controller"] != old
    lives = [line for line in read_record(pool.record) if isinstance(line, RunLine)]
    assert len(lives) == 2
    # It goes on: what an earlier life started is scaled and released by the next.
    test_a_burst_scales_to_all_workers_and_back_with_right_tokens(pool, oracle)


def test_a_stream_survives_the_death_of_its_worker(pool: LocalPool, oracle: GreedyOracle) -> None:
    wait_until(lambda: pool.gauge("instances") == 1, "one instance is left")
    victim = worker_that_serves(pool)

    async def stream() -> Answer:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = Answer(prompt(3, 30))
            async for count in answer.stream(pool.url, client, 300):
                if count == 20:
                    os.kill(victim, signal.SIGKILL)
            return answer

    check(oracle, [run(stream())], 300)
    wait_until(lambda: pool.gauge("workers") == 3, "the dead worker is replaced")
    wait_until(lambda: len(request_lines(pool)) and request_lines(pool)[-1].attempts == 2, "record")


def scale_ups(pool: LocalPool) -> list[ScaleLine]:
    lines = [line for line in read_record(pool.record) if isinstance(line, ScaleLine)]
    return [line for line in lines if line.to_instances > line.from_instances]


def max_loads(lines: list[ScaleLine]) -> int:
    return max((len(line.loads) for line in lines), default=0)


def worker_that_serves(pool: LocalPool) -> int:
    """The process of the only instance: the one that answers a request."""
    known = len(request_lines(pool))
    answer = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}
    assert httpx.post(f"{pool.url}/v1/completions", json=answer, timeout=60).status_code == 200
    wait_until(lambda: len(request_lines(pool)) > known, "the request is recorded")
    worker = request_lines(pool)[-1].worker
    assert worker is not None
    return pool.pool.pids()[f"worker {worker.worker}"]


def request_lines(pool: LocalPool) -> list[RequestLine]:
    return [line for line in read_record(pool.record) if isinstance(line, RequestLine)]


def test_a_client_that_leaves_frees_its_request(pool: LocalPool) -> None:
    async def leave_early() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            async for count in Answer(prompt(4, 30)).stream(pool.url, client, 3000):
                if count == 5:
                    return

    run(leave_early())
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing runs")
    wait_until(lambda: request_lines(pool)[-1].outcome is Outcome.CANCELLED, "it is recorded")
    wait_until(lambda: kv_blocks_used(pool) == 0, "its KV blocks are free")


def kv_blocks_used(pool: LocalPool) -> int:
    """What the instance that spoke last says of its KV cache."""
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    reports = [e for line in steps for e in line.events if isinstance(e, InstanceReported)]
    return reports[-1].kv_blocks_used


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "tiny", "prompt": [5] * 5000, "max_tokens": 1}, 400, ["5000", "4096"]),
        ({"model": "huge", "prompt": [5], "max_tokens": 1}, 404, ["huge", "tiny"]),
        ({"model": "tiny", "prompt": [5], "temperature": 1}, 400, ["temperature"]),
    ],
)
def test_wrong_requests_are_explained(
    pool: LocalPool, body: dict[str, object], status: int, words: list[str]
) -> None:
    answer = httpx.post(f"{pool.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert all(word in message for word in words), message


def test_the_record_replays(pool: LocalPool) -> None:
    result = replay(read_record(pool.record))
    assert result.lives == 2
    assert result.commands > 0
