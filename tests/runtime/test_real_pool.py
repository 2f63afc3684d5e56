"""A pool of real processes: scaling under load, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until

from livescale.engine.oracle import GreedyOracle
from livescale.messages.events import InstanceReported
from livescale.telemetry.record.record import (
    LoadPhases,
    RequestLine,
    RunLine,
    ScaleLine,
    StepLine,
    read_record,
)
from livescale.telemetry.replay import replay
from livescale.values.types import Outcome
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
# About 3.4 MB at this rate: a load takes a third of a second.
LINK_BYTES_PER_S = 10_000_000
STREAMS, TRIES = 40, 5
# Far below what the machine does, so that a small burst is a burst.
CAPACITY = "    prefill_tokens_per_s: 2000\n"


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    scratch = tmp_path_factory.mktemp("pool")
    with LocalPool(
        tiny_model,
        scratch,
        CAPACITY,
        hosts=3,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        # So that the second target has nobody else than the first to get it from.
        host_memory_bytes=0,
        # And so that every burst loads.
        warm_spares="off",
    ) as local:
        yield local


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GreedyOracle:
    return GreedyOracle(tiny_model)


def run(work):
    return asyncio.run(work)


def test_a_burst_scales_to_all_workers_and_back_with_right_tokens(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    """Over some bursts: where requests come one by one, as on busy cores, two instances may do."""

    async def burst(number: int) -> list[Answer]:
        # Other prompts each time: none is found in an instance's prefix index.
        lengths = [3000, *(150 + n for n in range(1, STREAMS))]
        answers = [Answer(prompt(number * STREAMS + n, length)) for n, length in enumerate(lengths)]
        async with httpx.AsyncClient(
            timeout=patient(60), limits=httpx.Limits(max_connections=None)
        ) as c:
            return await asyncio.gather(*(answer.read(pool.url, c, 64) for answer in answers))

    loads: list[tuple[int, LoadPhases]] = []
    for number in range(TRIES):
        known = len(multicast_loads(pool))
        check(oracle, run(burst(number)), 64)
        wait_until(lambda: pool.gauge("instances") == 1, "the pool shrinks to one instance")
        loads = sorted(multicast_loads(pool)[known:], key=lambda planned: planned[1].loaded_ns)
        if len(loads) > 1:
            break
    else:
        raise AssertionError("no burst was worth two loads")
    (_, first), (planned_ns, second) = loads[:2]
    for load in (first, second):
        assert load.first_byte_ns <= load.first_layer_ns <= load.loaded_ns
    if planned_ns < first.loaded_ns:
        # In one plan or in two, one target hangs behind the other; on a busy machine the one in
        # front may report its end later.
        is_behind = second.upstream == str(first.worker)
        assert is_behind or first.upstream == str(second.worker)
    else:
        # The burst came so slowly that the first was whole: either of two holders may be read.
        assert second.upstream in (first.upstream, str(first.worker))
    if planned_ns < first.first_layer_ns:
        # The first passes on what it has while it still receives.
        assert second.first_byte_ns < first.loaded_ns


def test_both_endpoints_with_the_official_client(pool: LocalPool) -> None:
    client = openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", timeout=patient(60))
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


def test_choices_seeds_stops_and_logprobs_through_the_whole_pool(pool: LocalPool) -> None:
    def ask(**said: object) -> dict[str, object]:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
        body |= {"return_token_ids": True, **said}
        response = httpx.post(f"{pool.url}/v1/completions", json=body, timeout=patient(60))
        assert response.status_code == 200, response.text
        return response.json()

    three = ask(n=3, seed=11)["choices"]
    alone = [ask(seed=11 + place)["choices"][0] for place in range(3)]
    ids = [choice["token_ids"] for choice in three]
    assert ids == [choice["token_ids"] for choice in alone]
    assert len({tuple(entry) for entry in ids}) == 3
    greedy = ask(temperature=0, logprobs=2)["choices"][0]
    for chosen, likely in zip(
        greedy["logprobs"]["token_logprobs"], greedy["logprobs"]["top_logprobs"], strict=True
    ):
        assert chosen == max(likely.values()) <= 0
    # A stop string that ends the text early frees the request: others run after it.
    half = greedy["text"][len(greedy["text"]) // 2 :][:3]
    stopped = ask(temperature=0, stop=half)
    [choice] = stopped["choices"]
    assert choice["text"] == greedy["text"][: greedy["text"].index(half)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", half)
    assert choice["token_ids"] == greedy["token_ids"][: len(choice["token_ids"])]


def test_killing_the_controller_does_not_touch_streams(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    old = pool.pool.pids()["controller"]

    async def two_streams() -> list[Answer]:
        async with httpx.AsyncClient(timeout=patient(60)) as client:
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
    wait_until(lambda: lives(pool) == 2, "the next life is on record")
    # It goes on: what an earlier life started is scaled and released by the next.
    test_a_burst_scales_to_all_workers_and_back_with_right_tokens(pool, oracle)


def test_a_stream_survives_the_death_of_its_worker(pool: LocalPool, oracle: GreedyOracle) -> None:
    """Where the client is slow, a worker may have sent all tokens before it is killed: then the
    next one is."""

    async def stream(victim: int) -> Answer:
        async with httpx.AsyncClient(timeout=patient(60)) as client:
            answer = Answer(prompt(3, 30))
            async for count in answer.stream(pool.url, client, 300):
                if count == 20:
                    os.kill(victim, signal.SIGKILL)
            return answer

    for _ in range(TRIES):
        wait_until(lambda: pool.gauge("instances") == 1, "one instance is left")
        victim = worker_that_serves(pool)
        known = len(request_lines(pool))
        check(oracle, [run(stream(victim))], 300)
        wait_until(lambda: pool.gauge("workers") == 3, "the dead worker is replaced")
        if next_line(pool, known).attempts == 2:
            return
    raise AssertionError("no worker died while it had tokens to send")


def lives(pool: LocalPool) -> int:
    return sum(isinstance(line, RunLine) for line in read_record(pool.record))


def multicast_loads(pool: LocalPool) -> list[tuple[int, LoadPhases]]:
    """Loads from other workers, of scale events that are over, and when each was planned."""
    lines = [line for line in read_record(pool.record) if isinstance(line, ScaleLine)]
    loads = [(line.planned_ns, load) for line in lines for load in line.loads]
    return [(at_ns, load) for at_ns, load in loads if load.upstream != "storage"]


def worker_that_serves(pool: LocalPool) -> int:
    """The process of the only instance: the one that answers a request."""
    known = len(request_lines(pool))
    answer = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}
    answered = httpx.post(f"{pool.url}/v1/completions", json=answer, timeout=patient(60))
    assert answered.status_code == 200, answered.text
    worker = next_line(pool, known).worker
    assert worker is not None
    return pool.pool.pids()[f"worker {worker.worker}"]


def next_line(pool: LocalPool, known: int) -> RequestLine:
    """Of the last request, when there are more than those that were known."""
    wait_until(lambda: len(request_lines(pool)) > known, "the request is recorded")
    return request_lines(pool)[-1]


def request_lines(pool: LocalPool) -> list[RequestLine]:
    return [line for line in read_record(pool.record) if isinstance(line, RequestLine)]


def test_a_client_that_leaves_frees_its_request(pool: LocalPool) -> None:
    async def leave_early() -> None:
        async with httpx.AsyncClient(timeout=patient(60)) as client:
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
        ({"model": "tiny", "prompt": [5], "temperature": -1}, 400, ["temperature"]),
    ],
)
def test_wrong_requests_are_explained(
    pool: LocalPool, body: dict[str, object], status: int, words: list[str]
) -> None:
    answer = httpx.post(f"{pool.url}/v1/completions", json=body, timeout=patient(60))
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert all(word in message for word in words), message


def test_the_record_replays(pool: LocalPool) -> None:
    result = replay(read_record(pool.record))
    assert result.lives == 2
    assert result.commands > 0
