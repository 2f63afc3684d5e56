"""Two heads of a pool: one acts, the other takes over, and streams do not notice."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from joiners import Joiner, closing, is_running
from pool_thread import LocalPool, wait_until
from running_streams import check, right_tokens_of, streams_while

from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.runtime.supervisor import Pool

pytestmark = pytest.mark.pool


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in with_ports]
    for one in with_ports:
        one.close()
    return ports


class Heads:
    """Makes heads of one pool, which know each other's addresses."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model = model
        self._scratch = scratch
        self._ports = free_ports(2)
        self._heads = ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def make(self, number: int) -> LocalPool:
        """The second one stands by."""
        scratch = self._scratch / f"head-{number}"
        scratch.mkdir()
        return LocalPool(
            self._model,
            scratch,
            "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n",
            is_standby=number == 1,
            device="timed",
            workers=0,
            listen=f"127.0.0.1:{self._ports[number]}",
            heads=self._heads,
            lease=str(self._scratch / "lease"),
            lease_ms=1500,
            token_file=str(self._scratch / "token"),
            timed_run_us=20_000,
            lost_after_ms=15_000,
            request_attempts_max=4,
        )


@pytest.fixture
def heads(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[LocalPool, LocalPool, Joiner]]:
    """One that acts, one that stands by, and a host with two workers."""
    made = Heads(tiny_model, tmp_path)
    with made.make(0) as first:
        # Whichever head is there first acts.
        wait_until((tmp_path / "lease").exists, "the first head acts")
        joiner = Joiner(first, "alice", tmp_path, "--workers", "2")
        with closing(joiner), made.make(1) as second:
            first.wait_ready()
            second.wait_ready()
            yield first, second, joiner


def test_the_standby_acts_when_the_head_is_killed_and_no_stream_is_lost(
    heads: tuple[LocalPool, LocalPool, Joiner],
) -> None:
    first, second, alice = heads
    right = right_tokens_of(second)
    children = psutil.Process(alice.process.pid).children(recursive=True)

    async def kill() -> None:
        await asyncio.to_thread(lambda: first.call(first.pool.kill(), 60))

    check(asyncio.run(streams_while(second, kill)), right)
    check(asyncio.run(streams_while(second, nothing)), right)
    assert second.gauge("workers") == 2
    assert all(is_running(child) for child in children)


def test_a_controller_that_was_stopped_finds_that_another_one_acts(
    heads: tuple[LocalPool, LocalPool, Joiner], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = heads
    right = right_tokens_of(first)
    caplog.set_level(logging.INFO, "livescale.runtime.news")
    stopped = first.pool.pids()["controller"]

    def said(words: str) -> bool:
        return any(words in record.getMessage() for record in caplog.records)

    async def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)
        await asyncio.to_thread(wait_until, lambda: said("this head acts now (epoch 2)"), "it acts")
        os.kill(stopped, signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: said("the controller stops"), "it is over")

    # Streams of both gateways, whose controller is another one from then on.
    check(asyncio.run(streams_while(first, stop)), right)
    check(asyncio.run(streams_while(second, nothing)), right)
    check(asyncio.run(streams_while(first, nothing)), right)
    wait_until(lambda: said("this head stands by"), "the first one waits for the lease")


async def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("settings", "is_standby", "words"),
    [
        ({"heads": "127.0.0.1:1"}, False, "several heads need both"),
        ({"lease": "/tmp/x"}, False, "several heads need both"),
        ({}, True, "several heads need both"),
        ({"heads": "nonsense", "lease": "lease"}, False, "heads"),
        ({"heads": "127.0.0.1:1", "lease": "/nowhere/lease"}, False, "No such file"),
    ],
)
def test_wrong_settings_are_named(
    settings: dict[str, str],
    is_standby: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = PoolConfig(models=(), workers=0, **settings)
    with pytest.raises(ConfigError, match=words):
        Pool(config, is_standby=is_standby)
