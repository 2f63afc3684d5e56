"""A pool of real processes whose prompts and tokens are computed on instances of their own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until
from running_streams import STREAMS, RightTokens, check_undisturbed, right_tokens_of, streams_while
from running_streams import check as check_streams

from livescale.common.settings import ConfigError
from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.lab.bench.base.token_checks import wrong_timed_tokens
from livescale.messages.commands import ChangeDuty, Dispatch, StartHolding
from livescale.messages.events import BatchTaken, InstanceReported, RequestEnded, RoleChanged
from livescale.report.run.role_usage import usage_by_role
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import RunLine, StepLine, read_record
from livescale.telemetry.replay import replay
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ROLES
from livescale.values.types import InstanceId, Role
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
LIMITS = "    roles: {prefill: {max_replicas: 1}, decode: {max_replicas: 1}}\n"
CAPACITY = "    prefill_tokens_per_s: 5000\n"
TRIES = 5


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        LIMITS + CAPACITY,
        device="timed",
        workers=3,
        timed_run_us=4000,
        timed_token_us=10,
    ) as local:
        yield local


@pytest.fixture(scope="module")
def right(pool: LocalPool) -> RightTokens:
    """And as many requests have been served."""
    wait_for_both(pool)
    right = right_tokens_of(pool)
    check_undisturbed(pool, right)
    return right


def words(pool: LocalPool, kind: type) -> list:
    lines = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [w for line in lines for w in (*line.events, *line.commands) if isinstance(w, kind)]


def ends(pool: LocalPool) -> list[RequestEnded]:
    """As workers report them; a gateway that lost its controller for a while tells of some too."""
    return [event for event in words(pool, RequestEnded) if event.worker is not None]


def duties(pool: LocalPool) -> dict[InstanceId, Duty]:
    """What each instance was told last."""
    told = [order.duty for order in (*words(pool, StartHolding), *words(pool, ChangeDuty))]
    return {duty.instance: duty for duty in told if duty is not None}


def has_role(pool: LocalPool, role: Role) -> bool:
    return any(duty.role is role for duty in duties(pool).values())


def serving(pool: LocalPool, role: Role) -> int:
    return pool.gauge(f'instances{{model="tiny",role="{role}",state="serving"}}')


def wait_for_both(pool: LocalPool) -> None:
    wait_until(
        lambda: [serving(pool, role) for role in ROLES] == [1, 1], "both roles have an instance"
    )


def lives_of(pool: LocalPool) -> int:
    """Of the controller."""
    return sum(isinstance(line, RunLine) for line in read_record(pool.record))


def test_requests_decode_on_the_decode_instance(pool: LocalPool, right: RightTokens) -> None:
    assert len(right) == STREAMS
    wait_until(lambda: len(ends(pool)) >= STREAMS, "the ends are recorded")
    told = duties(pool)
    taken = words(pool, BatchTaken)
    assert {told[batch.instance].role for batch in taken} == {Role.DECODE}
    assert {told[batch.target].role for batch in taken} == {Role.PREFILL}
    moved = {request for batch in taken for request, *_ in batch.requests}
    ended = ends(pool)
    [decoder] = {batch.worker for batch in taken}
    assert moved == {event.request for event in ended}
    assert {event.worker for event in ended} == {decoder}
    assert len(words(pool, Dispatch)) == STREAMS
    # What the record makes of the KV is what came over the wires.
    decode = usage_by_role(read_history(read_record(pool.record)), 0, 1 << 62)[Role.DECODE]
    assert decode.requests == STREAMS
    came = "all KV is reported"
    wait_until(lambda: pool.gauge("handover_bytes_total") == decode.kv_bytes > 0, came)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_a_worker_that_dies_under_streams_loses_no_request(
    pool: LocalPool, right: RightTokens, role: Role
) -> None:
    async def kill() -> None:
        last = (await asyncio.to_thread(words, pool, BatchTaken))[-1]
        told = await asyncio.to_thread(duties, pool)
        instance = last.instance if role is Role.DECODE else last.target
        assert told[instance].role is role
        pool.kill(f"worker {told[instance].workers[0].worker}")

    known, sent = len(words(pool, BatchTaken)), len(words(pool, Dispatch))
    check_streams(asyncio.run(streams_while(pool, kill)), right)
    wait_for_both(pool)
    wait_until(lambda: pool.gauge("workers") == 3, "the worker is back")
    # And these do what they are for.
    first = len(words(pool, BatchTaken))
    assert first > known
    if role is Role.DECODE:  # it had them all
        assert len(words(pool, Dispatch)) > sent + STREAMS
    check_undisturbed(pool, right)
    wait_until(lambda: len(words(pool, BatchTaken)) >= first + STREAMS, "requests move again")


def test_a_controller_that_dies_finds_the_roles(pool: LocalPool, right: RightTokens) -> None:
    async def kill() -> None:
        pool.kill("controller")

    before = duties(pool)
    loads = len([order for order in words(pool, StartHolding) if order.duty is not None])
    lives = lives_of(pool)
    check_streams(asyncio.run(streams_while(pool, kill)), right)
    wait_until(lambda: lives_of(pool) > lives, "the next life is recorded")
    wait_for_both(pool)
    moved = len(words(pool, BatchTaken))
    check_undisturbed(pool, right)
    wait_until(lambda: len(words(pool, BatchTaken)) >= moved + STREAMS, "requests move again")
    taken = words(pool, BatchTaken)[moved:]
    assert {before[batch.instance].role for batch in taken} == {Role.DECODE}
    assert {before[batch.target].role for batch in taken} == {Role.PREFILL}
    assert len([o for o in words(pool, StartHolding) if o.duty is not None]) == loads


def test_administrators_see_the_roles_and_change_their_limits(
    pool: LocalPool, right: RightTokens
) -> None:
    model = httpx.get(f"{pool.url}/admin/models/tiny", timeout=patient(10)).json()
    assert model["instances_by_role"] == {"prefill": {"serving": 1}, "decode": {"serving": 1}}
    assert (model["min_replicas"], model["max_replicas"]) == (2, 2)
    for most in (2, 1):
        decode = {"min_replicas": most, "max_replicas": most}
        changes = {"roles": {"prefill": {"max_replicas": 1}, "decode": decode}}
        changed = httpx.patch(f"{pool.url}/admin/models/tiny", json=changes, timeout=patient(60))
        assert changed.status_code == 200, changed.text
        assert changed.json()["max_replicas"] == 1 + most
        wait_until(lambda most=most: serving(pool, Role.DECODE) == most, "the limit holds")
        check_undisturbed(pool, right)
    changed = httpx.patch(
        f"{pool.url}/admin/models/tiny", json={"max_replicas": 3}, timeout=patient(60)
    )
    assert changed.status_code == 400
    assert "roles" in changed.json()["error"]["message"]


def test_the_record_replays(pool: LocalPool, right: RightTokens) -> None:
    assert replay(read_record(pool.record)).lives == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tokens_of_a_real_model_are_right_when_a_process_dies(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Each worker dies once while it computes prompts, or decodes."""
    oracle, streams, tokens = GreedyOracle(tiny_model), 12, 60

    async def burst(pool: LocalPool, dies: Role | None) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        begun = asyncio.Event()
        async with httpx.AsyncClient(timeout=patient(60), limits=limits) as client:
            answers = [Answer(prompt(number, 250 + number)) for number in range(streams)]

            async def read(answer: Answer) -> None:
                async for count in answer.stream(pool.url, client, tokens):
                    if count == 2:
                        begun.set()

            tasks = [asyncio.create_task(read(answer)) for answer in answers]
            await begun.wait()
            if dies is not None:
                # The record may be behind.
                has = functools.partial(has_role, pool, dies)
                await asyncio.to_thread(wait_until, has, "the record has the role")
                told = duties(pool)
                last = told[max(number for number, duty in told.items() if duty.role is dies)]
                pool.kill(f"worker {last.workers[0].worker}")
            await asyncio.gather(*tasks)
        return answers

    with LocalPool(tiny_model, tmp_path, LIMITS + CAPACITY, workers=2) as pool:
        wait_for_both(pool)
        for dies in (Role.DECODE, Role.PREFILL):
            for _ in range(TRIES):
                sent = len(words(pool, Dispatch))
                check(oracle, asyncio.run(burst(pool, dies)), tokens)
                wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
                wait_for_both(pool)
                # Where the record is late, the worker dies when it has nothing to do any more.
                if len(words(pool, Dispatch)) > sent + streams:
                    break
            assert len(words(pool, Dispatch)) > sent + streams
        last = asyncio.run(burst(pool, None))
    check(oracle, last, tokens)
    told, taken = duties(pool), words(pool, BatchTaken)
    for answer in last:
        [batch] = [b for b in taken if answer.request in {r for r, *_ in b.requests}]
        assert told[batch.instance].role is Role.DECODE
        assert told[batch.target].role is Role.PREFILL


@pytest.mark.long
def test_a_prefill_instance_has_its_new_role_before_its_prompt_is_computed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Both compute a prompt when one of them is to decode."""
    limits = "    roles: {prefill: {min_replicas: 2, max_replicas: 2}, decode: {max_replicas: 1}}\n"
    wanted = {"prefill": (1, 1), "decode": (2, 2)}
    roles = {r: {"min_replicas": n, "max_replicas": m} for r, (n, m) in wanted.items()}

    async def answers_while_one_changes(pool: LocalPool) -> list[Answer]:
        async with httpx.AsyncClient(timeout=patient(60)) as client:
            answers = [Answer(prompt(number, 100)) for number in range(2)]
            tasks = [asyncio.create_task(a.read(pool.url, client, 5)) for a in answers]
            sent = functools.partial(words, pool, Dispatch)
            await asyncio.to_thread(wait_until, lambda: len(sent()) == 2, "both are sent")
            url = f"{pool.url}/admin/models/tiny"
            changed = await client.patch(url, json={"roles": roles})
            assert changed.status_code == 200, changed.text
            await asyncio.gather(*tasks)
        return answers

    with LocalPool(
        tiny_model,
        tmp_path,
        limits + CAPACITY,
        device="timed",
        workers=4,
        timed_run_us=1000,
        timed_token_us=30_000,
    ) as pool:
        wait_until(lambda: serving(pool, Role.PREFILL) == 2, "both prefill")
        wait_until(lambda: serving(pool, Role.DECODE) == 1, "one decodes")
        answers = asyncio.run(answers_while_one_changes(pool))
    outputs = [(answer.prompt_ids, answer.token_ids) for answer in answers]
    assert [len(token_ids) for _, token_ids in outputs] == [5, 5]
    assert not any(wrong_timed_tokens(read_manifest(tiny_model, "tiny"), outputs))
    [changed] = words(pool, RoleChanged)
    told = words(pool, RoleChanged | InstanceReported)
    later = told[told.index(changed) :]
    started = [pair for e in later if isinstance(e, InstanceReported) for pair in e.started]
    assert {request for request, _ in started} >= {answer.request for answer in answers}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"arena_bytes": "1MiB"},
            r"has \d{7} bytes of parameters, above the worker's arena of 1048576",
        ),
        (
            {"kv_bytes": "64KiB", "block_tokens": 1024},
            r"kv_bytes 65536 holds no KV block of model tiny: one block of 1024 tokens has \d{7}",
        ),
    ],
)
def test_what_can_never_fit_a_worker_is_refused_with_both_sizes(
    tiny_model: Path, tmp_path: Path, sizes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LocalPool(tiny_model, tmp_path, LIMITS, device="timed", **sizes)


@pytest.mark.long
def test_both_roles_go_to_zero_and_come_back_together(tiny_model: Path, tmp_path: Path) -> None:
    at_zero = "    roles: {prefill: {min_replicas: 0}, decode: {min_replicas: 0}}\n    idle_s: 1\n"
    with LocalPool(
        tiny_model, tmp_path, at_zero + CAPACITY, device="timed", workers=2, timed_run_us=2000
    ) as pool:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
        body |= {"return_token_ids": True}
        tokens = []
        for _ in range(2):
            wait_until(lambda: pool.gauge("instances") == 0, "it is at zero")
            answer = httpx.post(f"{pool.url}/v1/completions", json=body, timeout=patient(60))
            assert answer.status_code == 200, answer.text
            tokens.append(answer.json()["choices"][0]["token_ids"])
        assert len(tokens[0]) == 200
        assert tokens[0] == tokens[1]
        wait_until(lambda: pool.gauge("instances") == 0, "it is at zero again")
    loads = [order.duty for order in words(pool, StartHolding) if order.duty is not None]
    assert {duty.role for duty in loads} == {Role.PREFILL, Role.DECODE}
