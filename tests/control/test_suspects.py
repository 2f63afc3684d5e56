"""Requests by which workers end: the others of their workers keep their attempts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import W, arrived, finished, reported, serving, step

from livescale.messages.commands import AnyCommand, Dispatch, FailRequest
from livescale.messages.events import AnyEvent, MembersLeave, RequestEnded, Tick, WorkerLost
from livescale.values.types import Outcome, RequestId, WorkerRef

WORKERS = 6


class Pool:
    """A controller of six instances, and which worker has which request."""

    def __init__(self, **config: object) -> None:
        self.now_ns = 1
        self.controller = serving(WORKERS, WORKERS, instances_max=8, **{"avoid_ns": 1, **config})
        self.worker_of: dict[RequestId, WorkerRef] = {}
        self.attempt_of: dict[RequestId, int] = {}
        self.failed: list[RequestId] = []

    def step(self, *events: AnyEvent) -> list[AnyCommand]:
        self.now_ns += 10
        commands = step(self.controller, self.now_ns, *events)
        for command in commands:
            if isinstance(command, Dispatch):
                self.worker_of[command.request] = command.worker
                self.attempt_of[command.request] = command.attempt
            elif isinstance(command, FailRequest):
                self.failed.append(command.request)
        return commands

    def on(self, worker: WorkerRef) -> list[RequestId]:
        return [request for request, runs in self.worker_of.items() if runs == worker]

    def starts(self, request: RequestId) -> None:
        """Its first token is there."""
        worker = self.worker_of[request]
        report = reported(101 + worker.worker, running=1)
        started = ((request, self.attempt_of[request]),)
        self.step(msgspec.structs.replace(report, started=started))

    def leaves(self, worker: WorkerRef) -> None:
        """Its host wants to go; the worker has time for what it has."""
        self.step(MembersLeave((worker,)))

    def dies(self, worker: WorkerRef, told_first: Sequence[RequestId] = ()) -> None:
        """The worker is lost; gateways told so of these requests before."""
        events: list[AnyEvent] = [
            RequestEnded(request, self.attempt_of[request], Outcome.WORKER_LOST)
            for request in told_first
        ]
        for request in self.on(worker):
            del self.worker_of[request]
        self.step(*events, WorkerLost(worker, "gone"))


@given(
    attempts_max=st.integers(1, 4),
    others=st.integers(0, 20),
    place=st.integers(0, 20),
    order=st.randoms(use_true_random=False),
)
def test_one_request_that_ends_its_workers_fails_alone(
    attempts_max: int, others: int, place: int, order: object
) -> None:
    """However gateways and the controller come to know of it."""
    pool = Pool(request_attempts_max=attempts_max)
    names = [f"r{n}" for n in range(others)]
    names.insert(min(place, others), "poison")
    pool.step(*map(arrived, names))
    deaths = 0
    for _ in range(100):
        if "poison" in pool.failed:
            break
        if "poison" not in pool.worker_of:
            pool.step(Tick())
            # It is to be alone: what is dispatched ends sometime.
            for request, attempt in list(pool.attempt_of.items()):
                if request in pool.worker_of and request != "poison":
                    del pool.worker_of[request]
                    pool.step(finished(request, attempt))
            continue
        worker = pool.worker_of["poison"]
        beside = pool.on(worker)
        deaths += 1
        if deaths > 1 and deaths == attempts_max:
            assert beside == ["poison"], "its last attempt has no company"
        told = order.sample(beside, order.randint(0, len(beside)))  # type: ignore[attr-defined]
        pool.dies(worker, told)
    assert deaths == attempts_max
    if attempts_max > 1:
        assert pool.failed == ["poison"]


def test_requests_beside_a_suspect_keep_their_attempts() -> None:
    pool = Pool(request_attempts_max=3)
    pool.step(arrived("poison"))
    pool.dies(pool.worker_of["poison"])
    pool.step(*(arrived(f"r{n}") for n in range(40)))
    worker = pool.worker_of["poison"]
    beside = [request for request in pool.on(worker) if request != "poison"]
    assert beside
    pool.dies(worker)
    records = pool.controller.router.requests
    assert records["poison"].failures == 2
    assert [records[request].failures for request in beside] == [0] * len(beside)


def test_the_last_attempt_is_alone_until_its_first_token() -> None:
    pool = Pool(request_attempts_max=2)
    pool.step(arrived("poison"))
    pool.dies(pool.worker_of["poison"])
    worker = pool.worker_of["poison"]
    pool.step(*(arrived(f"r{n}", 300) for n in range(40)))
    assert pool.on(worker) == ["poison"]
    pool.starts("poison")
    pool.step(*(arrived(f"s{n}", 300) for n in range(10)))
    assert len(pool.on(worker)) > 1, "then others may join it"


def test_it_waits_for_an_instance_that_is_empty_and_that_becomes_one() -> None:
    """The one with the least gets no others meanwhile."""
    pool = Pool(request_attempts_max=2)
    pool.step(*(arrived(f"r{n}", 300) for n in range(12)), arrived("poison"))
    worker = pool.worker_of["poison"]
    pool.dies(worker, ["poison"])
    waiting = [r for r, record in pool.controller.router.requests.items() if record.worker is None]
    assert "poison" in waiting
    for _ in range(12):
        if "poison" in pool.worker_of:
            break
        held = {w: pool.on(w) for w in W[:WORKERS] if pool.on(w)}
        request = min(held.values(), key=len)[0]
        del pool.worker_of[request]
        pool.step(finished(request, pool.attempt_of[request]), arrived(f"later-{request}", 300))
    assert pool.on(pool.worker_of["poison"]) == ["poison"]


def test_a_worker_that_is_lost_to_gateways_alone_is_no_suspects_for_ever() -> None:
    """It lives on, and a later loss has nothing to do with what it had then."""
    pool = Pool(request_attempts_max=3)
    pool.step(arrived("a"))
    pool.dies(pool.worker_of["a"])
    worker = pool.worker_of["a"]
    pool.step(RequestEnded("a", 2, Outcome.WORKER_LOST))
    pool.step(*(arrived(f"r{n}") for n in range(40)))
    beside = [request for request in pool.on(worker) if request != "a"]
    pool.step(finished("a", pool.attempt_of["a"]))
    pool.dies(worker)
    records = pool.controller.router.requests
    assert [records[request].failures for request in beside] == [1] * len(beside)


@pytest.mark.parametrize("is_soon", [False, True])
def test_a_worker_is_a_suspects_while_its_end_may_be_seen(is_soon: bool) -> None:
    """A gateway loses the worker, with a suspect; other requests end well there, and again others
    are there when it is lost: for the same reason only if that is soon."""
    pool = Pool(request_attempts_max=4, avoid_ns=100 if is_soon else 1)
    pool.step(arrived("a"))
    pool.dies(pool.worker_of["a"])
    worker = pool.worker_of["a"]
    pool.step(*(arrived(f"r{n}") for n in range(40)))
    pool.step(RequestEnded("a", pool.attempt_of["a"], Outcome.WORKER_LOST))
    beside = pool.on(worker)
    assert beside
    for request in beside:
        del pool.worker_of[request]
    ends = [finished(request, pool.attempt_of[request]) for request in beside]
    pool.step(*ends, *(arrived(f"s{n}") for n in range(40)))
    later = pool.on(worker)
    assert later
    assert "a" not in later
    pool.dies(worker)
    records = pool.controller.router.requests
    assert [records[request].failures for request in later] == [0 if is_soon else 1] * len(later)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("is_told_first", [False, True])
def test_hosts_that_leave_before_an_answer_ends_take_no_attempt(
    is_told_first: bool, leaves: bool
) -> None:
    pool = Pool(request_attempts_max=3)
    pool.step(arrived("long"))
    for _ in range(3):
        worker = pool.worker_of["long"]
        pool.starts("long")
        if leaves:
            pool.leaves(worker)
        pool.dies(worker, ["long"] if is_told_first else [])
        pool.step(Tick())
    assert pool.failed == ([] if leaves else ["long"])
    assert ("long" in pool.worker_of) == leaves
