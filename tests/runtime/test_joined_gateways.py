"""Gateways on machines of their own: `livescale gateway` beside a head and a host."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from completions import Answer
from joiners import JoinedGateway, Joiner, closing, is_running
from pool_thread import LocalPool, wait_until
from running_streams import TOKENS, are_given_up, check, nothing, right_tokens_of, streams_while

from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
TRIES = 5


@pytest.fixture(scope="module")
def head(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """A head without devices, with one host."""
    scratch = tmp_path_factory.mktemp("head")
    with LocalPool(
        tiny_model,
        scratch,
        "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=0,
        listen="127.0.0.1:0",
        timed_run_us=20_000,
        lost_after_ms=patient_ms(2000),
        request_attempts_max=4,
    ) as pool:
        joiner = Joiner(pool, "alice", scratch, "--workers", "2")
        with closing(joiner):
            pool.wait_ready()
            yield pool


@pytest.fixture(scope="module")
def gateway(head: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedGateway]:
    """One that stays."""
    made = JoinedGateway(head, "bob", tmp_path_factory.mktemp("bob"))
    with closing(made):
        yield made


def test_its_answers_are_those_of_the_heads_gateway(
    head: LocalPool, gateway: JoinedGateway
) -> None:
    right = right_tokens_of(head)
    check(asyncio.run(streams_while(head, nothing, [gateway.url])), right)
    assert gateway.said("the gateway is ready after")
    # The tokenizer has come over the wire.
    body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 8, "temperature": 0}
    answers = [
        httpx.post(f"{url}/v1/completions", json=body, timeout=patient(60)).json()
        for url in (head.url, gateway.url)
    ]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1] != ""


def test_it_shows_the_pool(head: LocalPool, gateway: JoinedGateway) -> None:
    url = gateway.url
    assert httpx.get(f"{url}/health", timeout=patient(60)).status_code == 200
    metrics = httpx.get(f"{url}/metrics", timeout=patient(60)).text
    assert "livescale_workers 2" in metrics.replace("2.0", "2")
    [model] = httpx.get(f"{url}/admin/models", timeout=patient(60)).json()["data"]
    [of_head] = httpx.get(f"{head.url}/admin/models", timeout=patient(60)).json()["data"]
    assert model["path"] == of_head["path"]


def test_limits_that_are_changed_at_one_gateway_hold_at_all(
    head: LocalPool, gateway: JoinedGateway
) -> None:
    answer = httpx.patch(
        f"{gateway.url}/admin/models/tiny", json={"max_replicas": 3}, timeout=patient(60)
    )
    assert answer.status_code == 200, answer.text

    def shown() -> int:
        [model] = httpx.get(f"{head.url}/admin/models", timeout=patient(60)).json()["data"]
        return int(model["max_replicas"])

    wait_until(lambda: shown() == 3, "the head's gateway shows it, too")


def test_streams_go_on_while_the_controller_is_replaced(
    head: LocalPool, gateway: JoinedGateway
) -> None:
    right = right_tokens_of(head)

    async def kill() -> None:
        head.kill("controller")

    check(asyncio.run(streams_while(head, kill, [head.url, gateway.url])), right)
    wait_until(lambda: gateway.said("connected to the controller again"), "it has connected again")


def test_the_streams_of_a_lost_gateway_end_and_others_do_not_notice(
    head: LocalPool, gateway: JoinedGateway, tmp_path: Path
) -> None:
    for number in range(TRIES):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        # On busy cores all of them may be over when the processes die.
        if streams_break_off(head, gateway, scratch):
            return
    raise AssertionError("no stream was under way")


def streams_break_off(head: LocalPool, gateway: JoinedGateway, scratch: Path) -> bool:
    """Whether any stream of a gateway that is lost was under way then."""
    right = right_tokens_of(head)
    lost = JoinedGateway(head, "carol", scratch, "--gateways", "2")
    with closing(lost):
        for number in range(2):
            words = f"gateway {number} is ready after"
            wait_until(lambda words=words: lost.said(words), "both of its processes serve")
        urls = [head.url, gateway.url, lost.url]

        async def kill() -> None:
            await asyncio.to_thread(
                wait_until,
                lambda: head.kv_in_use() > 0 or head.gauge("num_requests_running") == 0,
                "streams have KV, or are over",
            )
            await asyncio.to_thread(lost.kill)

        answers = asyncio.run(streams_while(head, kill, urls))
    ended = answers[2::3]
    broken = [answer for answer in ended if answer.error is not None]
    check_begun(broken, right)
    check_these([answer for answer in ended if answer.error is None], right)
    check_these([a for n, a in enumerate(answers) if n % 3 != 2], right)
    wait_until(lambda: head.kv_in_use() == 0, "workers have room for others")
    if not broken:
        return False
    wait_until(lambda: are_given_up(head.record, broken), "workers have given the lost ones up")
    return True


def check_begun(answers: list[Answer], right: dict[tuple[int, ...], list[int]]) -> None:
    """They have ended, and what came was right."""
    for answer in answers:
        assert answer.error is not None
        assert 0 < len(answer.token_ids) < TOKENS
        expected = right[tuple(answer.prompt_ids)]
        assert answer.token_ids == expected[: len(answer.token_ids)]


def check_these(answers: list[Answer], right: dict[tuple[int, ...], list[int]]) -> None:
    prompts = {tuple(answer.prompt_ids) for answer in answers}
    check(answers, {ids: tokens for ids, tokens in right.items() if ids in prompts})


@pytest.mark.long
def test_one_that_is_told_to_end_lets_its_streams_finish(
    head: LocalPool, gateway: JoinedGateway, tmp_path: Path
) -> None:
    right = right_tokens_of(head)
    leaving = JoinedGateway(head, "dave", tmp_path)
    with closing(leaving):
        url = leaving.url

        async def interrupt() -> None:
            leaving.interrupt()

        check(asyncio.run(streams_while(head, interrupt, [url])), right)
        assert leaving.ended() == 0
    assert leaving.said("stopped")


def test_one_that_is_told_to_end_while_the_head_is_away_lets_its_streams_finish(
    tiny_model: Path, tmp_path: Path
) -> None:
    away = head_of(tiny_model, tmp_path)
    alice = Joiner(away, "alice", tmp_path, "--workers", "1")
    dave = JoinedGateway(away, "dave", tmp_path)

    async def leave() -> None:
        await asyncio.to_thread(lose, away)
        words = "the controller is disconnected"
        await asyncio.to_thread(wait_until, lambda: dave.said(words), "the head is away")
        dave.interrupt()

    with closing(alice, dave):
        away.wait_ready()
        right = right_tokens_of(away)
        check(asyncio.run(streams_while(away, leave, [dave.url])), right)
        assert dave.ended() == 0
    assert dave.said("stopped")


def test_a_second_interrupt_of_the_head_waits_for_no_gateway(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Which has streams: without an interrupt they may finish."""
    ended = head_of(tiny_model, tmp_path)
    alice = Joiner(ended, "alice", tmp_path, "--workers", "1")
    dave = JoinedGateway(ended, "dave", tmp_path)

    async def interrupt_twice() -> None:
        stopping = asyncio.create_task(asyncio.to_thread(ended.__exit__))
        await asyncio.to_thread(wait_until, lambda: refuses(dave.url), "dave drains")
        await asyncio.to_thread(kill, ended)
        await asyncio.wait_for(stopping, patient(20))

    with closing(alice, dave):
        ended.wait_ready()
        asyncio.run(streams_while(ended, interrupt_twice, [dave.url]))


def head_of(model: Path, scratch: Path) -> LocalPool:
    """One without devices that may be lost: whoever asks for it ends it."""
    made = LocalPool(
        model,
        scratch,
        device="timed",
        workers=0,
        listen="127.0.0.1:0",
        timed_run_us=40_000,
        drain_timeout_s=round(patient(60)),
    )
    made.__enter__()
    return made


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=patient(10))
    except (httpx.NetworkError, httpx.RemoteProtocolError):  # or it came while the port closed
        return True
    return False


def kill(pool: LocalPool) -> None:
    pool.call(pool.pool.kill(), 10)


def lose(head: LocalPool) -> None:
    """Nobody of the pool learns that it ends."""
    kill(head)
    head.__exit__()


def test_a_gateway_that_leaves_is_not_reported_as_lost(
    head: LocalPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "livescale"):
        frank = JoinedGateway(head, "frank", tmp_path)
        with closing(frank):
            wait_until(lambda: frank.said("the gateway is ready after"), "it serves")
            frank.interrupt()
            assert frank.ended() == 0
        wait_until(lambda: "gateway frank has left" in caplog.text, "it has left")
    assert "lost" not in caplog.text


@pytest.mark.long
def test_its_process_is_started_again(head: LocalPool, tmp_path: Path) -> None:
    erin = JoinedGateway(head, "erin", tmp_path)
    with closing(erin):
        wait_until(lambda: erin.said("the gateway is ready after"), "it serves")
        [child] = psutil.Process(erin.process.pid).children()
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_running(child), "its process has died")
        check(asyncio.run(streams_while(head, nothing, [erin.url])), right_tokens_of(head))
        assert erin.said("the gateway is ready again after")


@pytest.mark.long
def test_the_end_of_the_pool_lets_streams_finish(tiny_model: Path, tmp_path: Path) -> None:
    pool = LocalPool(
        tiny_model, tmp_path, device="timed", workers=1, listen="127.0.0.1:0", timed_run_us=5_000
    )
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        ending.append(asyncio.create_task(asyncio.to_thread(pool.__exit__)))

    async def streams(url: str) -> list[Answer]:
        answers = await streams_while(pool, end, [url])
        await asyncio.gather(*ending)
        return answers

    pool.__enter__()
    try:
        right = right_tokens_of(pool)
        frank = JoinedGateway(pool, "frank", tmp_path)
        with closing(frank):
            check(asyncio.run(streams(frank.url)), right)
            assert frank.ended() == 0
    finally:
        if not ending:
            pool.__exit__()


def test_keys_are_asked_for_where_the_head_asks_for_them(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-secret\n")
    keys.chmod(0o600)
    flags = {"device": "timed", "workers": 1, "listen": "127.0.0.1:0"}
    with LocalPool(tiny_model, tmp_path, api_key_file=str(keys), **flags) as pool:
        open_one = JoinedGateway(pool, "grace", tmp_path)
        with closing(open_one):
            assert open_one.ended() == 2
        assert open_one.said("The pool requires API keys. Give --api-key-file")
        heidi = JoinedGateway(pool, "heidi", tmp_path, "--api-key-file", str(keys))
        with closing(heidi):
            url = f"{heidi.url}/v1/models"
            assert httpx.get(url, timeout=patient(60)).status_code == 401
            headers = {"Authorization": "Bearer sk-secret"}
            assert httpx.get(url, headers=headers, timeout=patient(60)).status_code == 200


def test_a_name_that_is_taken_is_asked_for_again(
    head: LocalPool, gateway: JoinedGateway, tmp_path: Path
) -> None:
    """And free again, when the gateway that has it is gone."""
    hasty = JoinedGateway(head, "hasty", tmp_path, "--name", "bob", "--patience-s", "0.2")
    with closing(hasty):
        assert hasty.ended() == 2
    assert hasty.said("a gateway named bob is in the pool: choose another --name")
    first = JoinedGateway(head, "first", tmp_path, "--name", "judy")
    with closing(first):
        wait_until(lambda: first.said("the gateway is ready after"), "it serves")
        second = JoinedGateway(head, "second", tmp_path, "--name", "judy")
        with closing(second):
            wait_until(lambda: second.said("named judy is in the pool"), "it is refused")
            first.kill()
            wait_until(lambda: second.said("the gateway is ready after"), "it has the name now")


@pytest.mark.parametrize("name", ["", "a\nb", 254 * "x"])
def test_what_is_no_name_is_refused(head: LocalPool, tmp_path: Path, name: str) -> None:
    kim = JoinedGateway(head, "kim", tmp_path, "--name", name)
    with closing(kim):
        assert kim.ended() == 2
    assert kim.said("A gateway's name has 1 to 253 printable characters")


def test_the_port_of_http_is_none_to_join_at(head: LocalPool, tmp_path: Path) -> None:
    port = head.url.rpartition(":")[2]
    leo = JoinedGateway(head, "leo", tmp_path, "--join", f"127.0.0.1:{port}", "--patience-s", "0.2")
    with closing(leo):
        assert leo.ended() == 2
    assert leo.said(f"127.0.0.1:{port}: what listens there is not the controller")


def test_another_version_is_refused(head: LocalPool, tmp_path: Path) -> None:
    ivan = JoinedGateway(head, "ivan", tmp_path, version="0.0.1")
    with closing(ivan):
        assert ivan.ended() == 2
    assert ivan.said("this gateway 0.0.1")
