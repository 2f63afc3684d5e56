"""Lives of instances against other readings of the same records."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reported_records import S, reported, simulated

from livescale.chunks import ChunkRange, Feed
from livescale.latency.shapes import LLAMA_3_8B
from livescale.messages.commands import StartLoad
from livescale.messages.events import (
    InstanceReport,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    Released,
    WorkerJoined,
    WorkerLost,
)
from livescale.report.lives import read_lives
from livescale.telemetry.record import AnyLine, RequestLine, StepLine
from livescale.telemetry.timeline import instances_over_time
from livescale.topology import Device
from livescale.types import FromStorage, InstanceState, WorkerRef

DEVICE = Device("cpu", "host-0", "leaf-0", 1, 1)


def step(now_s: int, *messages: object) -> StepLine:
    """One step; commands are told from events by their type."""
    commands = tuple(m for m in messages if isinstance(m, StartLoad))
    events = tuple(m for m in messages if not isinstance(m, StartLoad))
    return StepLine(now_s * S, events, commands, now_s * S)  # type: ignore[arg-type]


def load(instance: int, worker: int, rank: int = 0) -> StartLoad:
    feeds = (Feed(FromStorage(), (ChunkRange(0, 1),)),)
    return StartLoad(instance, 1, WorkerRef(worker), "m", 1, feeds, 1, False, rank)


@settings(max_examples=8)
@given(losses=st.integers(0, 3), seed=st.integers(0, 5))
def test_lives_agree_with_counts_and_device_time(losses: int, seed: int) -> None:
    lines = simulated(losses=losses, seed=seed)
    lives = read_lives(lines)
    for at_ns, count in instances_over_time(lines):
        serving = [
            life.instance
            for life in lives.instances.values()
            for state, start_ns, stop_ns in life.stretches(lives.end_ns + 1)
            if state is InstanceState.SERVING and start_ns <= at_ns < stop_ns
        ]
        assert len(serving) == count, at_ns
    run = reported("any", lines)
    stop_ns = run.report.started_ns + run.end_ns
    held_ns = 0
    for life in lives.instances.values():
        for tenure in life.tenures:
            ended_ns = lives.end_ns if tenure.ended_ns is None else tenure.ended_ns
            begun_ns = max(tenure.ordered_ns, run.report.started_ns)
            held_ns += max(min(ended_ns, stop_ns) - begun_ns, 0)
    assert held_ns / S == pytest.approx(run.device_s)


@settings(max_examples=8)
@given(losses=st.integers(0, 3), seed=st.integers(0, 5))
def test_nobody_holds_a_worker_twice_and_loads_only_fill(losses: int, seed: int) -> None:
    lives = read_lives(simulated(losses=losses, seed=seed))
    held: dict[int, list[tuple[int, int]]] = {}
    for life in lives.instances.values():
        states = life.stretches(lives.end_ns)
        for (_, _, stop_ns), (_, start_ns, _) in pairwise(states):
            assert stop_ns == start_ns
        for tenure in life.tenures:
            shares = [share for _, share in tenure.filled]
            assert shares == sorted(shares)
            assert 0 <= shares[0] <= shares[-1] <= 1
            assert (shares[-1] == 1) == (tenure.loaded_ns is not None)
            ended_ns = lives.end_ns if tenure.ended_ns is None else tenure.ended_ns
            held.setdefault(tenure.worker.worker, []).append((tenure.ordered_ns, ended_ns))
    for spans in held.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_instances_emit_the_tokens_that_requests_got() -> None:
    lines = simulated()
    got = sum(len(line.token_ns) for line in lines if isinstance(line, RequestLine))
    lives = read_lives(lines)
    assert sum(life.emitted_tokens for life in lives.instances.values()) == got == 2000
    loaded = [life for life in lives.instances.values() if life.received_bytes is not None]
    assert len(loaded) > 1
    assert {life.received_bytes for life in loaded} == {LLAMA_3_8B.size_bytes}


def test_an_instance_serves_when_all_its_ranks_are_loaded_and_ends_with_the_last() -> None:
    lives = read_lives(
        [
            step(1, load(7, 0, rank=0), load(7, 1, rank=1)),
            step(3, LoadCompleted(7, 1, 100, rank=0)),
            step(4, LoadCompleted(7, 1, 200, rank=1)),
            step(8, Released(7, 1, rank=1)),
            step(9, Released(7, 1, rank=0)),
        ]
    )
    life = lives.instances[7]
    assert (life.loading_ns, life.received_bytes) == (3 * S, 300)
    assert (life.ended_ns, life.ending) == (9 * S, "released")
    assert [tenure.ended_ns for tenure in life.tenures] == [9 * S, 8 * S]
    assert life.serving_ns(20 * S) == 5 * S


@pytest.mark.parametrize(
    ("event", "ending"),
    [
        (LoadFailed(7, 1, "no memory"), "failed: no memory"),
        (WorkerLost(WorkerRef(0), "killed"), "lost"),
        (WorkerJoined(WorkerRef(0, 1), DEVICE), "lost"),
    ],
)
def test_a_load_that_ends_early_never_served(event: object, ending: str) -> None:
    lines: list[AnyLine] = [
        step(1, load(7, 0)),
        step(2, LayerArrived(7, 1, 1)),
        step(3, event),
        step(4, LoadCompleted(7, 1, 100)),
    ]
    life = read_lives(lines).instances[7]
    assert (life.ending, life.ended_ns, life.served_ns) == (ending, 3 * S, None)
    assert life.stretches(9 * S) == [(InstanceState.LOADING, S, 3 * S)]


def test_a_record_that_begins_in_the_middle_knows_who_serves() -> None:
    report = InstanceReport(4, "m", 1, 3, is_loaded=True)
    lives = read_lives([step(5, WorkerJoined(WorkerRef(2), DEVICE, report)), step(8)])
    life = lives.instances[4]
    assert not life.is_whole
    assert life.loading_ns is None
    assert life.stretches(lives.end_ns) == [(InstanceState.SERVING, 5 * S, 8 * S)]
    assert list(lives.workers) == [2]
