"""Histories of instances against other readings of the same records."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reported_records import S, reported, simulated

from livescale.clusters.topology import Device
from livescale.latency.shapes import LLAMA_3_8B
from livescale.messages.commands import StartHolding
from livescale.messages.events import (
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    HoldingReport,
    LayerArrived,
    WorkerJoined,
    WorkerLost,
)
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine
from livescale.telemetry.timeline import instances_over_time
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty
from livescale.values.types import FromStorage, HoldingId, InstanceState, LayerSpan, WorkerRef

DEVICE = Device("cpu", "host-0", "leaf-0", 1, 1)


def step(now_s: int, *messages: object) -> StepLine:
    """One step; commands are told from events by their type."""
    commands = tuple(m for m in messages if isinstance(m, StartHolding))
    events = tuple(m for m in messages if not isinstance(m, StartHolding))
    return StepLine(now_s * S, events, commands, now_s * S)  # type: ignore[arg-type]


def held(worker: int) -> HoldingId:
    return HoldingId(1, WorkerRef(worker))


def load(instance: int, worker: int, rank: int = 0, ranks: int = 1) -> StartHolding:
    """The order for one rank of an instance, which has the workers from `worker` - `rank` on."""
    feeds = (Feed(FromStorage(), (ChunkRange(0, 1),)),)
    duty = Duty(instance, tuple(WorkerRef(worker - rank + n) for n in range(ranks)))
    return StartHolding(held(worker), "m", LayerSpan(0, 3), feeds, 1, rank, duty)


@settings(max_examples=8)
@given(losses=st.integers(0, 3), seed=st.integers(0, 5))
def test_histories_agree_with_counts_and_device_time(losses: int, seed: int) -> None:
    lines = simulated(losses=losses, seed=seed)
    history = read_history(lines)
    for at_ns, count in instances_over_time(history):
        serving = [
            instance.number
            for instance in history.instances
            for state, start_ns, stop_ns in instance.stretches(history.end_ns + 1)
            if state is InstanceState.SERVING and start_ns <= at_ns < stop_ns
        ]
        assert len(serving) == count, at_ns
    run = reported("any", lines)
    stop_ns = run.started_ns + run.end_ns
    held_ns = 0
    for instance in history.instances:
        for held in instance.holdings:
            ended_ns = history.end_ns if held.ended_ns is None else held.ended_ns
            begun_ns = max(held.begun_ns, run.started_ns)
            held_ns += max(min(ended_ns, stop_ns) - begun_ns, 0)
    assert held_ns / S == pytest.approx(run.device_s)


@settings(max_examples=8)
@given(losses=st.integers(0, 3), seed=st.integers(0, 5))
def test_nobody_holds_a_worker_twice_and_loads_only_fill(losses: int, seed: int) -> None:
    history = read_history(simulated(losses=losses, seed=seed))
    spans_of: dict[int, list[tuple[int, int]]] = {}
    for instance in history.instances:
        states = instance.stretches(history.end_ns)
        for (_, _, stop_ns), (_, start_ns, _) in pairwise(states):
            assert stop_ns == start_ns
        for held in instance.holdings:
            shares = [share for _, share in held.filled]
            assert shares == sorted(shares)
            assert 0 <= shares[0] <= shares[-1] <= 1
            assert (shares[-1] == 1) == (held.whole_ns is not None)
            ended_ns = history.end_ns if held.ended_ns is None else held.ended_ns
            spans_of.setdefault(held.member.worker, []).append((held.begun_ns, ended_ns))
    for spans in spans_of.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_instances_emit_the_tokens_that_requests_got() -> None:
    lines = simulated()
    got = sum(len(line.token_ns) for line in lines if isinstance(line, RequestLine))
    history = read_history(lines)
    assert sum(instance.emitted_tokens for instance in history.instances) == got == 2000
    loaded = [instance for instance in history.instances if instance.received_bytes is not None]
    assert len(loaded) > 1
    assert {instance.received_bytes for instance in loaded} == {LLAMA_3_8B.size_bytes}


def test_an_instance_serves_when_all_its_ranks_are_loaded_and_ends_with_the_last() -> None:
    history = read_history(
        [
            step(1, load(7, 0, rank=0, ranks=2), load(7, 1, rank=1, ranks=2)),
            step(3, HoldingCompleted(held(0), 100)),
            step(4, HoldingCompleted(held(1), 200)),
            step(8, HoldingDropped(held(1))),
            step(9, HoldingDropped(held(0))),
        ]
    )
    instance = history.by_number[7]
    assert (instance.loading_ns, instance.received_bytes) == (3 * S, 300)
    assert (instance.ended_ns, instance.ending) == (9 * S, "released")
    assert [held.ended_ns for held in instance.holdings] == [9 * S, 8 * S]
    assert instance.serving_ns(20 * S) == 5 * S


@pytest.mark.parametrize(
    ("event", "ending"),
    [
        (HoldingFailed(held(0), "no memory"), "failed: no memory"),
        (WorkerLost(WorkerRef(0), "killed"), "lost"),
        (WorkerJoined(WorkerRef(0, 1), DEVICE), "lost"),
    ],
)
def test_a_load_that_ends_early_never_served(event: object, ending: str) -> None:
    lines: list[AnyLine] = [
        step(1, load(7, 0)),
        step(2, LayerArrived(held(0), 0, 1)),
        step(3, event),
        step(4, HoldingCompleted(held(0), 100)),
    ]
    instance = read_history(lines).by_number[7]
    assert (instance.ending, instance.ended_ns, instance.served_ns) == (ending, 3 * S, None)
    assert instance.stretches(9 * S) == [(InstanceState.LOADING, S, 3 * S)]


def test_a_record_that_begins_in_the_middle_knows_who_serves() -> None:
    report = HoldingReport(load(4, 2), 3, is_whole=True)
    history = read_history([step(5, WorkerJoined(WorkerRef(2), DEVICE, (report,))), step(8)])
    instance = history.by_number[4]
    assert not instance.is_ordered
    assert instance.loading_ns is None
    assert instance.stretches(history.end_ns) == [(InstanceState.SERVING, 5 * S, 8 * S)]
    assert list(history.workers) == [2]
