"""Machines that join a pool: a head without devices, and `livescale join` beside it."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from joiners import Joiner, closing, is_running
from pool_thread import LocalPool, wait_until
from running_streams import STREAMS, check, nothing, right_tokens_of, streams_while

from effort import mostly_long
from interrupted import python_without_forks
from livescale import __version__
from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.base.token_checks import wrong_greedy_tokens, wrong_timed_tokens
from livescale.messages.commands import StartHolding
from livescale.messages.events import WorkerJoined
from livescale.runtime.wire.token import make_token
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient_ms

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(scope="module")
def head(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """A head without devices; what joins it is the tests' business."""
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("head"),
        "    min_replicas: 3\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=0,
        listen="127.0.0.1:0",
        timed_run_us=10_000,
        lost_after_ms=patient_ms(2000),
        request_attempts_max=4,
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def alice(head: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joiner]:
    """A host with two workers that stays."""
    joiner = Joiner(head, "alice", tmp_path_factory.mktemp("alice"), "--workers", "2")
    with closing(joiner):
        head.wait_ready()
        yield joiner


def test_a_head_without_devices_serves_with_those_of_a_host_that_joins(
    head: LocalPool, alice: Joiner
) -> None:
    wait_until(lambda: head.gauge("workers") == 2, "both workers are there")
    check(asyncio.run(streams_while(head, nothing)), right_tokens_of(head))
    assert alice.said("ready after")
    assert all(not name.startswith("worker") for name in head.pool.pids())


@pytest.mark.long
def test_streams_of_a_host_whose_supervisor_is_killed_go_on_elsewhere(
    head: LocalPool, alice: Joiner, tmp_path: Path
) -> None:
    right = right_tokens_of(head)
    bob = Joiner(head, "bob", tmp_path, "--workers", "2")
    with closing(bob):
        wait_until(lambda: head.gauge("instances") == 3, "one of its workers serves")

        async def kill() -> None:
            await asyncio.to_thread(bob.kill)

        check(asyncio.run(streams_while(head, kill)), right)
        wait_until(lambda: head.gauge("workers") == 2, "they are lost")
        again = Joiner(head, "bob", tmp_path, "--workers", "2")
        with closing(again):
            wait_until(lambda: head.gauge("workers") == 4, "the next start of the host has joined")
            again.interrupt()
            assert again.ended() == 0
            wait_until(lambda: head.gauge("workers") == 2, "it has left")
    assert alice.process.poll() is None


@pytest.mark.parametrize("controller", mostly_long(["stays", "dies"], short=["dies"]))
def test_a_host_that_leaves_in_order_disturbs_no_stream(
    head: LocalPool, alice: Joiner, tmp_path: Path, controller: str
) -> None:
    right = right_tokens_of(head)
    bob = Joiner(head, "bobby", tmp_path, "--workers", "2")
    with closing(bob):
        wait_until(lambda: head.gauge("instances") == 3, "one of its workers serves")

        async def leave() -> None:
            bob.interrupt()
            if controller == "dies":
                head.kill("controller")

        check(asyncio.run(streams_while(head, leave)), right)
        assert bob.ended() == 0
    assert bob.said("left")
    wait_until(lambda: head.gauge("workers") == 2, "the other host stays")


def test_what_leaves_in_order_is_not_reported_as_lost(
    head: LocalPool, alice: Joiner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "livescale"):
        carol = Joiner(head, "carol", tmp_path, "--workers", "1")
        with closing(carol):
            wait_until(lambda: head.gauge("workers") == 3, "it has joined")
            carol.interrupt()
            assert carol.ended() == 0
        wait_until(lambda: bool(re.search(r"worker w\S+ has left", caplog.text)), "its worker left")
        wait_until(lambda: "node carol has left" in caplog.text, "it has left")
    assert "lost" not in caplog.text


def test_a_host_that_leaves_does_not_wait_for_workers_that_are_not_there_yet(
    head: LocalPool, alice: Joiner, tmp_path: Path
) -> None:
    """A fork server imports and compiles before it answers: this one does so for ever."""
    python = python_without_forks(tmp_path)
    flags = ("--workers", "2", "--device", "cpu", "--worker-python", str(python))
    dora = Joiner(head, "dora", tmp_path, *flags)
    process = psutil.Process(dora.process.pid)
    with closing(dora):
        wait_until(
            lambda: any("sleep" in child.cmdline() for child in process.children()), "it starts"
        )
        children = process.children(recursive=True)
        dora.interrupt()
        assert dora.ended() == 0
    assert dora.said("left")
    wait_until(lambda: not any(is_running(child) for child in children), "all processes are gone")
    wait_until(lambda: head.gauge("workers") == 2, "the other host stays")


@pytest.mark.parametrize(
    "number", mostly_long([signal.SIGKILL, signal.SIGTERM], short=[signal.SIGKILL])
)
def test_a_host_stays_while_the_controller_is_replaced(
    head: LocalPool, alice: Joiner, number: int
) -> None:
    """It may be killed, or ended from outside: only `serve` ends the pool."""
    before = head.pool.pids()["controller"]
    back = alice.log.read_text().count("connected to the controller again")
    right = right_tokens_of(head)
    children = psutil.Process(alice.process.pid).children(recursive=True)

    async def kill() -> None:
        head.kill("controller", number)

    check(asyncio.run(streams_while(head, kill)), right)
    wait_until(
        lambda: alice.log.read_text().count("connected to the controller again") > back,
        "it has connected again",
    )
    assert head.pool.pids()["controller"] != before
    wait_until(lambda: head.gauge("workers") == 2, "its workers are known again")
    assert all(is_running(child) for child in children)


@pytest.mark.parametrize("name", ["alice", "head"])
def test_a_taken_name_is_refused(head: LocalPool, alice: Joiner, tmp_path: Path, name: str) -> None:
    twin = Joiner(head, name, tmp_path, "--patience-s", "0.2")
    with closing(twin):
        assert twin.ended() == 2
    assert twin.said("choose another --name")


def test_another_pools_token_is_refused(head: LocalPool, tmp_path: Path) -> None:
    token = tmp_path / "token"
    make_token(token)
    stranger = Joiner(head, "carol", tmp_path, token_file=token)
    with closing(stranger):
        assert stranger.ended() == 2
    assert stranger.said("has a wrong token")


def test_what_is_no_head_is_told_from_one(head: LocalPool, tmp_path: Path) -> None:
    port = head.url.rpartition(":")[2]
    lost = Joiner(head, "dave", tmp_path, "--patience-s", "0.2", address=f"127.0.0.1:{port}")
    with closing(lost):
        assert lost.ended() == 2
    assert lost.said("what listens there is n")


def test_another_version_is_refused_with_both(head: LocalPool, tmp_path: Path) -> None:
    old = Joiner(head, "frank", tmp_path, version="0.0.9")
    with closing(old):
        assert old.ended() == 2
    assert old.said(f"The pool runs livescale {__version__}, this host 0.0.9")


def test_less_kv_memory_than_the_pools_is_refused(head: LocalPool, tmp_path: Path) -> None:
    small = Joiner(head, "erin", tmp_path, "--kv-bytes", "1MiB")
    with closing(small):
        assert small.ended() == 2
    assert small.said("below the pool's")


@pytest.mark.long
def test_instances_of_unlike_hosts_go_only_where_they_fit(tiny_model: Path, tmp_path: Path) -> None:
    """One host has no room for the model, one computes for real, one has workers that wait."""
    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 4\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=0,
        listen="127.0.0.1:0",
        timed_run_us=20_000,
        live_order="stop-the-world",
        drain="finish",
        # Neither instance has room for all streams, however slow the one that computes is.
        sequences_max=STREAMS // 2,
    ) as pool:
        hosts = [
            Joiner(pool, "small", tmp_path, "--arena-bytes", "1MiB", "--workers", "2"),
            Joiner(pool, "waits", tmp_path, "--arena-bytes", "16MiB"),
            Joiner(pool, "computes", tmp_path, "--device", "cpu", "--kv-bytes", "16MiB"),
        ]
        with closing(*hosts):
            wait_until(lambda: pool.gauge("workers") == 4, "all workers are there")
            wait_until(lambda: pool.gauge("instances") == 2, "the model serves where it fits")
            answers = asyncio.run(streams_while(pool, nothing))
            assert pool.gauge("instances") == 2
    assert [answer.error for answer in answers] == [None] * len(answers)
    asked = [(answer.prompt_ids, answer.token_ids) for answer in answers]
    real = wrong_greedy_tokens(tiny_model, asked)
    made_up = wrong_timed_tokens(read_manifest(tiny_model, "tiny"), asked)
    # Each stream is its own host's from the first token to the last, and both had some.
    assert [min(wrong) for wrong in zip(real, made_up, strict=True)] == [0] * len(asked)
    assert 0 < real.count(0) < len(asked)
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    joined = [e for line in steps for e in line.events if isinstance(e, WorkerJoined)]
    host_of = {event.worker: event.device.host for event in joined}
    kinds = {event.device.host: event.device.kind for event in joined}
    assert len(set(kinds.values())) == 2
    orders = [c for line in steps for c in line.commands if isinstance(c, StartHolding)]
    placed = {host_of[c.holding.member] for c in orders if not c.holding.member.is_agent}
    assert placed == {"waits", "computes"}


@pytest.mark.parametrize("listen", mostly_long(["127.0.0.1:0", "[::1]:0"], short=["[::1]:0"]))
def test_hosts_come_back_to_a_head_that_starts_anew(
    listen: str, tiny_model: Path, tmp_path: Path
) -> None:
    """With the token of before they serve on, and say what they hold. Over IPv6, too: whatever a
    pool binds or tells has such an address then."""
    if "[" in listen and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    token = tmp_path / "pool.token"
    first = head_of(tiny_model, tmp_path / "first", token, listen)
    with first:
        joiner = Joiner(first, "alice", tmp_path)
        first.wait_ready()
        address = first.pool.join_address
        children = psutil.Process(joiner.process.pid).children(recursive=True)
        first.call(first.pool.kill(), 10)
    with closing(joiner):
        with head_of(tiny_model, tmp_path / "second", token, address) as second:
            second.wait_ready()
            # Its workers may have found the head before it.
            wait_until(lambda: joiner.said("connected to the controller again"), "the host is back")
            check(asyncio.run(streams_while(second, nothing)), right_tokens_of(second))
            assert all(is_running(child) for child in children)
        assert joiner.ended() == 0, "the pool ended in order"


def head_of(model: Path, scratch: Path, token: Path, listen: str) -> LocalPool:
    scratch.mkdir()
    settings = {"device": "timed", "workers": 0, "listen": listen, "token_file": str(token)}
    return LocalPool(model, scratch, "    prefill_tokens_per_s: 5000\n", **settings)
