"""Prefill and decode on hosts that join, with certificates and without, and under two heads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest
from certificates import Cluster
from completions import Answer, check, prompt
from joiners import Joiner, closing
from pool_thread import LocalPool, wait_until
from running_streams import TOKENS as STREAM_TOKENS
from running_streams import streams_while
from test_standby import Heads

from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.lab.bench.base.token_checks import wrong_timed_tokens
from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, RequestEnded, WorkerJoined
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.scaling_policies import ROLES
from livescale.values.types import RequestId
from slowness import patient

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.long]
LIMITS = (
    "    roles: {prefill: {max_replicas: 1}, decode: {max_replicas: 1}}\n"
    "    prefill_tokens_per_s: 5000\n"
)
TOKENS = 60


def wait_for_both(pool: LocalPool) -> None:
    def serving() -> list[int]:
        rows = [f'instances{{model="tiny",role="{role}",state="serving"}}' for role in ROLES]
        return [pool.gauge(row) for row in rows]

    wait_until(lambda: serving() == [1, 1], "both roles have an instance")


def ask(url: str, numbers: Sequence[int], tokens: int) -> list[Answer]:
    """Streams at the same time, read to their end."""

    async def all_of_them() -> list[Answer]:
        async with httpx.AsyncClient(timeout=patient(120), limits=httpx.Limits()) as client:
            answers = [Answer(prompt(number, 40 + number)) for number in numbers]
            await asyncio.gather(*(answer.read(url, client, tokens) for answer in answers))
        return answers

    return asyncio.run(all_of_them())


def handed_over(record: Path) -> dict[RequestId, None]:
    """Requests that decode instances have taken over from prefill instances."""
    pulled = [batch for i in read_history(read_record(record)).instances for _, batch in i.pulled]
    return {request: None for batch in pulled for request, *_ in batch.requests}


def is_told_of(record: Path, requests: set[RequestId]) -> bool:
    """Of each of these somebody has said that it is over."""
    events = (e for line in read_record(record) if isinstance(line, StepLine) for e in line.events)
    return requests <= {event.request for event in events if isinstance(event, RequestEnded)}


def ask_until_handed_over(pool: LocalPool, url: str) -> list[Answer]:
    """Streams, until all of a round have decoded at a decode instance: where that does not answer
    in time, a request decodes where its prompt was computed."""
    answers: list[Answer] = []
    for _ in range(5):
        asked = ask(url, range(len(answers), len(answers) + 12), TOKENS)
        wanted = {answer.request for answer in asked}
        wait_until(partial(is_told_of, pool.record, wanted), "their ends are recorded")
        answers += asked
        if wanted <= set(handed_over(pool.record)):
            return answers
    raise AssertionError(f"{len(answers)} requests, not all of a round were handed over")


def hosts_of_handovers(record: Path) -> set[tuple[str, str]]:
    """From which host to which."""
    events = [e for line in read_record(record) if isinstance(line, StepLine) for e in line.events]
    host_of = {e.worker: e.device.host for e in events if isinstance(e, WorkerJoined)}
    instances = read_history(read_record(record)).by_number
    workers = {number: i.duty.workers[0] for number, i in instances.items()}
    taken = [event for event in events if isinstance(event, BatchTaken)]
    return {(host_of[workers[t.target]], host_of[t.worker]) for t in taken}


@pytest.mark.parametrize("has_certificates", [True, False], ids=["certificates", "plain"])
def test_kv_of_a_real_model_goes_from_host_to_host(
    tiny_model: Path, tmp_path: Path, has_certificates: bool
) -> None:
    """And streams go on when the host leaves that decodes."""
    cluster = Cluster(tmp_path / "cluster") if has_certificates else None
    head = LocalPool(
        tiny_model,
        tmp_path,
        LIMITS,
        workers=0,
        listen="127.0.0.1:0",
        token_file=str(tmp_path / "token"),
        tls_dir=str(cluster.head_dir) if cluster is not None else None,
    )
    with head as pool:
        joiners = {}
        for name in ("alice", "bob"):
            flags = ["--arena-bytes", "8MiB", "--kv-bytes", "8MiB"]
            if cluster is not None:
                flags += ["--tls-dir", str(cluster.member_dir(name))]
            joiners[name] = Joiner(pool, name, tmp_path, *flags)
        with closing(*joiners.values()):
            pool.wait_ready()
            wait_for_both(pool)
            answers = ask_until_handed_over(pool, pool.url)
            [(sender, receiver)] = hosts_of_handovers(pool.record)
            assert {sender, receiver} == {"alice", "bob"}

            async def leave() -> None:
                joiners[receiver].interrupt()

            # All of them come back, or are computed again.
            last = asyncio.run(streams_while(pool, leave))
            assert joiners[receiver].ended() == 0
    check(GreedyOracle(tiny_model), answers, TOKENS)
    check(GreedyOracle(tiny_model), last, STREAM_TOKENS)


def test_the_head_that_takes_over_keeps_the_roles(tiny_model: Path, tmp_path: Path) -> None:
    """Streams go on, what comes later is handed over, and nothing is loaded again."""
    made = contextlib.closing(Heads(tiny_model, tmp_path, LIMITS))
    with made as heads, heads.make(0) as first:
        wait_until((tmp_path / "lease").exists, "the first head acts")
        joiner = Joiner(first, "alice", tmp_path, "--workers", "2")
        with closing(joiner), heads.make(1) as second:
            first.wait_ready()
            second.wait_ready()
            wait_for_both(first)

            def kill_decoding() -> None:
                wait_until(lambda: bool(handed_over(first.record)), "requests changed hands")
                first.call(first.pool.kill(), 60)

            async def kill() -> None:
                await asyncio.to_thread(kill_decoding)

            answers = asyncio.run(streams_while(second, kill))
            wait_for_both(second)
            later = ask_until_handed_over(second, second.url)
            lines = [line for line in read_record(second.record) if isinstance(line, StepLine)]
    orders = [order for line in lines for order in line.commands]
    assert not [order for order in orders if isinstance(order, StartHolding) and order.duty]
    for streams, count in ((answers, STREAM_TOKENS), (later, TOKENS)):
        assert [answer.error for answer in streams] == [None] * len(streams)
        outputs = [(answer.prompt_ids, answer.token_ids) for answer in streams]
        assert [len(token_ids) for _, token_ids in outputs] == [count] * len(outputs)
        assert not any(wrong_timed_tokens(read_manifest(tiny_model, "tiny"), outputs))
