"""Several gateways behind one port of a head: one pool, two gateways."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from completions import Answer, prompt
from hypothesis import given
from hypothesis import strategies as st
from pool_thread import LocalPool, wait_until
from prometheus_client.parser import text_string_to_metric_families
from running_streams import (
    STREAMS,
    TOKENS,
    RightTokens,
    check,
    nothing,
    right_tokens_of,
    streams_while,
)

from livescale.config.pool import PoolConfig
from livescale.runtime.supervisor.own_gateways import OwnGateways, with_share_of_line
from livescale.runtime.wire.news import News, PoolProgress
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
NAMES = ("gateway 0", "gateway 1")
LONG_STREAMS, LONG_TOKENS = 16, 1000
TRIES = 5


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=2,
        gateways=2,
        timed_run_us=5_000,
        lost_after_ms=patient_ms(2000),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def right(pool: LocalPool) -> RightTokens:
    return right_tokens_of(pool)


def number_of(request: str) -> str:
    """Of the gateway that the request came to."""
    return request.removeprefix("g").partition(".")[0]


def shown(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of a page, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def total(page: str, name: str) -> float:
    return sum(value for (known, _), value in shown(page).items() if known == f"livescale_{name}")


def page_of(pool: LocalPool) -> str:
    return httpx.get(f"{pool.url}/metrics", timeout=patient(60)).text


def generated(pool: LocalPool) -> int:
    """All tokens of the model so far, as the gateway says that answers."""
    model = httpx.get(f"{pool.url}/admin/models/tiny", timeout=patient(60)).json()
    return int(model["usage"]["generation_tokens"])


def whole_page(pool: LocalPool) -> str:
    """One for which both gateways answered in time, which a busy machine does not grant always."""
    pages = [page_of(pool)]

    def is_of_both() -> bool:
        if total(pages[-1], "gateway_answers") != 2:
            pages.append(page_of(pool))
            return False
        return True

    wait_until(is_of_both, "both gateways answer")
    return pages[-1]


def is_whole(pool: LocalPool) -> bool:
    page = page_of(pool)
    return total(page, "gateway_answers") == 2 and total(page, "instances") == 2


def test_connections_come_to_both(pool: LocalPool, right: RightTokens) -> None:
    answers = asyncio.run(streams_while(pool, nothing))
    check(answers, right)
    assert {number_of(answer.request) for answer in answers} == {"0", "1"}


def test_every_page_has_the_requests_of_both(pool: LocalPool) -> None:
    before = whole_page(pool)
    answers = asyncio.run(streams_while(pool, nothing))
    # What a request was is counted when its last token has left.
    wait_until(
        lambda: total(whole_page(pool), "num_requests_running") == 0, "all requests have ended"
    )
    pages = [whole_page(pool) for _ in range(12)]
    for page in pages:
        grown = {
            name: total(page, name) - total(before, name)
            for name in (
                "generation_tokens_total",
                "prompt_tokens_total",
                "requests_total",
                "time_to_first_token_seconds_count",
                "inter_token_latency_seconds_count",
                "e2e_request_latency_seconds_count",
            )
        }
        assert grown == {
            "generation_tokens_total": STREAMS * TOKENS,
            "prompt_tokens_total": sum(len(answer.prompt_ids) for answer in answers),
            "requests_total": STREAMS,
            "time_to_first_token_seconds_count": STREAMS,
            "inter_token_latency_seconds_count": STREAMS * (TOKENS - 1),
            "e2e_request_latency_seconds_count": STREAMS,
        }
        # What the controller tells both is not added.
        assert (total(page, "workers"), total(page, "instances")) == (2, 2)
    for _ in range(12):
        wait_until(
            lambda: generated(pool) == total(pages[-1], "generation_tokens_total"),
            "either of them tells the same",
        )


def test_running_requests_of_both_are_shown(pool: LocalPool) -> None:
    async def look() -> set[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=patient(60), limits=limits) as client:
            answers: list[Answer] = []

            async def ask(number: int) -> None:
                """One after the other: where the last one begins late, the first goes on."""
                while True:
                    answers.append(Answer(prompt(number, 20)))
                    await answers[-1].read(pool.url, client, LONG_TOKENS)

            tasks = [asyncio.create_task(ask(number)) for number in range(LONG_STREAMS)]
            await asyncio.to_thread(
                wait_until,
                lambda: pool.gauge("num_requests_running") == LONG_STREAMS,
                "all of them are shown",
            )
            # A request runs before its first token, with which its client learns its name.
            await asyncio.to_thread(
                wait_until,
                lambda: sum(answer.request != "" for answer in answers) >= LONG_STREAMS,
                "all of them have begun to come",
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return {number_of(answer.request) for answer in answers if answer.request}

    assert asyncio.run(look()) == {"0", "1"}
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "their clients have left")


def test_a_gateway_that_dies_takes_its_own_streams_alone(
    pool: LocalPool, right: RightTokens
) -> None:
    """Clients that come meanwhile are served, and counts do not go back."""
    wait_until(lambda: is_whole(pool), "both gateways answer")
    seen = whole_page(pool)

    async def kill() -> None:
        pool.kill("gateway 0")

    for life in range(1, TRIES + 1):
        with Callers(pool) as callers:
            answers = asyncio.run(streams_while(pool, kill))
            wait_until(lambda: is_whole(pool), "it is replaced")
            next_life = f"0.{life}"
            callers.wait_for(
                lambda here=callers, name=next_life: here.lives[name] > 0,
                "the next one gets clients, too",
            )
        assert callers.problems == []
        lost = {number_of(answer.request) for answer in answers if answer.error}
        assert lost <= {"0"}
        check_these([answer for answer in answers if not answer.error], right)
        # On busy cores the first streams are over when the last ones begin.
        if lost:
            break
    else:
        raise AssertionError("it never had a stream")
    later = whole_page(pool)
    back = [
        key
        for key, value in shown(seen).items()
        if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
        and shown(later).get(key, 0.0) < value
    ]
    assert back == []


def check_these(answers: list[Answer], right: RightTokens) -> None:
    prompts = {tuple(answer.prompt_ids) for answer in answers}
    check(answers, {ids: tokens for ids, tokens in right.items() if ids in prompts})


class Callers:
    """Threads that ask again and again, each time on a new connection. A gateway that dies breaks
    off what it has accepted, as a single one does; none is refused and none hangs."""

    def __init__(self, pool: LocalPool, count: int = 4) -> None:
        self._url = f"{pool.url}/v1/completions"
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(count)]
        #: answers by gateway and life
        self.lives: Counter[str] = Counter()
        self.problems: list[str] = []

    def _call(self) -> None:
        body = {"model": "tiny", "prompt": prompt(1, 20), "max_tokens": 2}
        while not self._is_over.is_set():
            try:
                answer = httpx.post(self._url, json=body, timeout=patient(60))
            except (httpx.RemoteProtocolError, httpx.ReadError):
                continue
            except httpx.TransportError as error:
                self.problems.append(repr(error))
                continue
            if answer.status_code == 200:
                self.lives[answer.json()["id"].removeprefix("cmpl-g").partition("-")[0]] += 1
            else:
                self.problems.append(answer.text)

    def wait_for(self, is_true: Callable[[], bool], what: str) -> None:
        wait_until(is_true, what)

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def test_one_that_is_told_to_end_lets_its_streams_finish(
    pool: LocalPool, right: RightTokens
) -> None:
    """New connections come to the other one meanwhile."""
    wait_until(lambda: is_whole(pool), "both gateways answer")
    process = psutil.Process(pool.pool.pids()["gateway 1"])

    async def end() -> None:
        process.terminate()

    check(asyncio.run(streams_while(pool, end)), right)
    wait_until(lambda: not process.is_running(), "it has ended")
    wait_until(lambda: is_whole(pool), "and is replaced")


@pytest.mark.long
def test_streams_of_both_go_on_while_the_controller_is_replaced(
    pool: LocalPool, right: RightTokens
) -> None:
    async def kill() -> None:
        pool.kill("controller")

    answers = asyncio.run(streams_while(pool, kill))
    check(answers, right)
    assert {number_of(answer.request) for answer in answers} == {"0", "1"}
    wait_until(lambda: is_whole(pool), "the pool is whole again")


def test_the_end_of_the_pool_lets_the_streams_of_both_finish(
    tiny_model: Path, tmp_path: Path
) -> None:
    made = LocalPool(
        tiny_model, tmp_path, device="timed", workers=1, gateways=2, timed_run_us=5_000
    )
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        ending.append(asyncio.create_task(asyncio.to_thread(made.__exit__)))

    async def streams() -> list[Answer]:
        answers = await streams_while(made, end)
        await asyncio.gather(*ending)
        return answers

    made.__enter__()
    processes = [psutil.Process(pid) for pid in made.pool.pids().values()]
    try:
        assert set(NAMES) <= made.pool.pids().keys()
        right = right_tokens_of(made)
        check(asyncio.run(streams()), right)
    finally:
        if not ending:
            made.__exit__()
    assert not any(process.is_running() for process in processes)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{made.url}/live")


def test_more_gateways_than_cores_are_started_with_a_word() -> None:
    cores = len(os.sched_getaffinity(0))
    told: list[News | PoolProgress] = []
    for count in (cores, cores + 1):
        OwnGateways(PoolConfig(port=0, gateways=count), told.append).port.close()
    [news] = told
    assert isinstance(news, News)
    assert news.is_problem
    assert f"gateways is {cores + 1}, and this machine has {cores} cores" in news.text


@given(st.integers(1, 64), st.integers(0, 5000), st.none() | st.integers(0, 1 << 20))
def test_bounds_of_the_line_are_divided(count: int, more: int, tokens: int | None) -> None:
    config = PoolConfig(
        gateways=count, queue_requests_max=count + more, queue_prompt_tokens_max=tokens
    )
    shares = [with_share_of_line(config, number) for number in range(count)]
    assert sum(share.queue_requests_max for share in shares) == config.queue_requests_max
    assert all(share.queue_requests_max for share in shares)
    divided = [share.queue_prompt_tokens_max for share in shares]
    assert divided == [None] * count if tokens is None else sum(map(int, divided)) == tokens
    # Nothing else differs.
    like = {"queue_requests_max": 1, "queue_prompt_tokens_max": None}
    assert len({msgspec.json.encode(msgspec.structs.replace(s, **like)) for s in shares}) == 1
