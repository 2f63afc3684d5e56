"""Two heads of a pool: one acts, the other takes over, and streams do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from joiners import Joiner, closing, is_running
from pool_thread import LocalPool, wait_until
from running_streams import ANSWER_S, check, nothing, right_tokens_of, streams_while

from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.runtime.supervisor.supervisor import Pool
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
LIMITS = "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n"
JSON = {"Content-Type": "application/json"}


def kept_port() -> socket.socket:
    """Has a port, at which somebody else may listen who asks for it by its number. Nobody gets it
    who asks for any free one, also between two lives of who listens."""
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper


class Heads:
    """Makes heads of one pool, which know each other's addresses."""

    def __init__(self, model: Path, scratch: Path, limits: str = LIMITS) -> None:
        """`limits` are the model's settings in the file."""
        self._model = model
        self._limits = limits
        self._scratch = scratch
        self._keepers = [kept_port() for _ in range(2)]
        self._ports = [keeper.getsockname()[1] for keeper in self._keepers]
        # By other names than those by which their members know them: so do Services of Kubernetes.
        self._heads = ",".join(f"localhost:{port}" for port in self._ports)

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.close()

    def make(self, number: int) -> LocalPool:
        """The second one stands by, with two gateways."""
        scratch = self._scratch / f"head-{number}"
        scratch.mkdir()
        return LocalPool(
            self._model,
            scratch,
            self._limits,
            is_standby=number == 1,
            device="timed",
            workers=0,
            gateways=1 + number,
            listen=f"127.0.0.1:{self._ports[number]}",
            heads=self._heads,
            lease=str(self._scratch / "lease"),
            lease_ms=patient_ms(1500),
            token_file=str(self._scratch / "token"),
            timed_run_us=20_000,
            lost_after_ms=patient_ms(30_000),
            request_attempts_max=4,
        )


@pytest.fixture
def heads(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[LocalPool, LocalPool, Joiner]]:
    """One that acts, one that stands by, and a host with two workers."""
    with contextlib.closing(Heads(tiny_model, tmp_path)) as made, made.make(0) as first:
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
    wait_until(lambda: second.gauge("workers") == 2, "it knows both workers")
    assert all(is_running(child) for child in children)


@pytest.mark.long
def test_no_stream_is_lost_when_the_controllers_of_both_heads_die(
    heads: tuple[LocalPool, LocalPool, Joiner],
) -> None:
    first, second, _ = heads
    right = right_tokens_of(second)
    before = [head.pool.pids()["controller"] for head in (first, second)]

    async def kill() -> None:
        for head in (first, second):
            head.kill("controller")

    check(asyncio.run(streams_while(first, kill)), right)
    check(asyncio.run(streams_while(second, nothing)), right)
    after = [head.pool.pids()["controller"] for head in (first, second)]
    assert not set(before) & set(after)


@pytest.mark.long
def test_models_and_limits_of_one_head_hold_at_the_other(
    heads: tuple[LocalPool, LocalPool, Joiner], tiny_model: Path
) -> None:
    first, second, _ = heads
    body = {"model": "new", "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True}
    with (
        httpx.Client(base_url=first.url, timeout=patient(ANSWER_S), trust_env=False) as at_first,
        httpx.Client(base_url=second.url, timeout=patient(ANSWER_S), trust_env=False) as at_second,
    ):
        new = {"path": str(tiny_model), "name": "new", "min_replicas": 0}
        added = at_first.post("/admin/models", json=new)
        assert added.status_code == 201, added.text
        changed = at_first.patch("/admin/models/tiny", json={"min_replicas": 1, "idle_s": 1234})
        assert changed.status_code == 200, changed.text
        expected = at_first.post("/v1/completions", json=body).json()["choices"][0]["text"]

        first.call(first.pool.kill(), 60)
        answer = at_second.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected
        models = {model["name"]: model for model in at_second.get("/admin/models").json()["data"]}
        assert sorted(models) == ["new", "tiny"]
        assert (models["tiny"]["min_replicas"], models["tiny"]["idle_s"]) == (1, 1234)
        # The one that acts now goes on from there.
        gone = at_second.request("DELETE", "/admin/models/new", headers=JSON)
        assert gone.status_code == 202, gone.text
        assert at_second.post("/v1/completions", json=body).status_code == 404


@pytest.mark.long
def test_a_controller_that_was_stopped_finds_that_another_one_acts(
    heads: tuple[LocalPool, LocalPool, Joiner], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = heads
    right = right_tokens_of(first)
    caplog.set_level(logging.INFO, "livescale.runtime.wire.news")
    stopped = first.pool.pids()["controller"]

    def said(words: str) -> bool:
        return any(words in record.getMessage() for record in caplog.records)

    async def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)
        await asyncio.to_thread(
            wait_until, lambda: said("this head node is leader (epoch 2)"), "it acts"
        )
        os.kill(stopped, signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: said("the controller stops"), "it is over")

    # Streams of both gateways, whose controller is another one from then on.
    check(asyncio.run(streams_while(first, stop)), right)
    check(asyncio.run(streams_while(second, nothing)), right)
    check(asyncio.run(streams_while(first, nothing)), right)
    acting = f"this head node is standby; the leader is {second.pool.join_address} on "
    wait_until(lambda: said(acting), "the first one waits for the lease, and says who has it")


@pytest.mark.parametrize(
    ("settings", "is_standby", "words"),
    [
        ({"heads": "127.0.0.1:1"}, False, "Several head nodes need both"),
        ({"lease": "/tmp/x"}, False, "Several head nodes need both"),
        ({}, True, "Several head nodes need both"),
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
