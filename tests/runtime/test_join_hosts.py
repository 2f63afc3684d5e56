"""Machines that join a pool over a network, each in a namespace of its own, with real models: with
certificates, as a pool over several machines should have them, and without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from certificates import Cluster
from completions import Answer, check, prompt
from joiners import Joiner, closing
from pool_thread import LocalPool, wait_until

from livescale.config.pool import PoolConfig
from livescale.engine.oracle import GreedyOracle
from livescale.lab.testbed.bed import CONTROL, Testbed
from livescale.lab.testbed.spec import NetworkSpec
from livescale.runtime.layout.pool_layout import PoolLayout, local_layout
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
TOKENS = 48


@pytest.fixture(scope="module")
def bed(network_namespaces: None) -> Iterator[Testbed]:
    with Testbed(NetworkSpec(hosts=2, link_bits_per_s=1_000_000_000)) as made:
        yield made


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["certificates", "plain"]
)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster | None:
    return Cluster(tmp_path / "cluster") if request.param else None


@pytest.fixture
def head(
    bed: Testbed, tiny_model: Path, tmp_path: Path, cluster: Cluster | None
) -> Iterator[LocalPool]:
    """A head without devices, in the testbed's "control"."""
    prefix = tuple(bed.inside(CONTROL))

    def inside(config: PoolConfig) -> PoolLayout:
        layout = local_layout(config)
        hosts = tuple(msgspec.structs.replace(seat, prefix=prefix) for seat in layout.hosts)
        return msgspec.structs.replace(layout, hosts=hosts, control_prefix=prefix)

    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n",
        make_layout=inside,
        workers=0,
        tls_dir=str(cluster.head_dir) if cluster is not None else None,
        listen=f"{bed.control_address}:7000",
        lost_after_ms=patient_ms(1500),
        request_attempts_max=4,
    ) as pool:
        yield pool


def joined(
    head: LocalPool, bed: Testbed, host: str, scratch: Path, cluster: Cluster | None
) -> Joiner:
    flags = ["--interface", "control", "--arena-bytes", "8MiB", "--kv-bytes", "8MiB"]
    if cluster is not None:
        flags += ["--tls-dir", str(cluster.member_dir(host))]
    return Joiner(head, host, scratch, *flags, prefix=bed.inside(host))


def burst(head: LocalPool, oracle: GreedyOracle, count: int) -> None:
    async def ask() -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=patient(120), limits=limits) as client:
            answers = [Answer(prompt(number, 40)) for number in range(count)]
            await asyncio.gather(*(answer.read(head.url, client, TOKENS) for answer in answers))
        return answers

    check(oracle, asyncio.run(ask()), TOKENS)


@pytest.mark.long
def test_two_machines_make_a_pool_and_one_falls_silent(
    head: LocalPool, bed: Testbed, tiny_model: Path, tmp_path: Path, cluster: Cluster | None
) -> None:
    oracle = GreedyOracle(tiny_model)
    hosts = [joined(head, bed, name, tmp_path, cluster) for name in ("h0", "h1")]
    with closing(*hosts):
        head.wait_ready()
        wait_until(lambda: head.gauge("instances") == 2, "an instance on each")
        burst(head, oracle, 12)
        words = "link of control: rate not known ("
        wait_until(lambda: hosts[0].said(words), "it says what it knows of its link")
        bed.isolate("h1")
        try:
            burst(head, oracle, 6)
            wait_until(lambda: head.gauge("workers") == 1, "the silent one is given up")
        finally:
            bed.rejoin("h1")
        wait_until(lambda: head.gauge("workers") == 2, "it is back")
        wait_until(lambda: head.gauge("instances") == 2, "and serves")
        burst(head, oracle, 6)
        hosts[1].interrupt()
        assert hosts[1].ended() == 0
        burst(head, oracle, 4)
