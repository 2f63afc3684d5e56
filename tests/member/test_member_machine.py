"""Workers as Members: any orders, requests, layers, messages and losses, in any order.

What must hold of every step is in the witnesses; here everything also ends.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from member_player import Player
from member_world import BATCHER, KV_LAYER_BYTES, LAYER_BYTES, LIVE, MEMORY_BYTES, ROW_BYTES

from effort import examples
from livescale.batching.contract.live_messages import Handover, KvLayer, Offer, Pull
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.member.effects import (
    Answer,
    Assign,
    DropFetch,
    Effect,
    Execute,
    Fetch,
    Measure,
    Report,
    TellPeer,
    WriteKv,
)
from livescale.member.inputs import (
    AllCame,
    ExecutorReady,
    FetchFailed,
    LayerCame,
    Ordered,
    PeerSent,
    RankLayers,
    RateMeasured,
    RunEnded,
    Submitted,
)
from livescale.member.instance import ServingLimits
from livescale.member.member import Member
from livescale.messages.attempts import AttemptReturned
from livescale.messages.commands import DropHolding, StartHolding
from livescale.messages.events import CapacityMeasured, KvTaken
from livescale.sim.checkers.live import live_batcher_of
from livescale.values.routes import Duty
from livescale.values.types import HoldingId, LayerSpan, PlanId, SamplingParams, WorkerRef

KINDS = (
    *(
        "pair",
        "pair",
        "load",
        "layer",
        "layer",
        "layer",
        "layer",
        "layers",
        "submit",
        "burst",
        "apart",
    ),
    *("run", "run", "run", "deliver", "deliver", "deliver", "step", "step", "step", "again"),
    *("cancel", "disown", "gone", "meet", "amend", "feed", "wait"),
    *("release", "fail", "refuse", "cut", "die", "keep", "keep", "wake", "drain", "drain"),
    *("role", "role", "split", "split"),
)
PLACES = st.integers(0, 11)
MOVES = st.tuples(st.sampled_from(KINDS), PLACES, PLACES, st.booleans())


@given(st.lists(MOVES, max_size=60))
@settings(max_examples=examples(800))
# A source that takes the first offer for no message tells its target, which it does not know yet.
@example(
    [
        ("pair", 0, 0, True),
        ("release", 4, 4, False),
        ("apart", 6, 11, False),
        ("die", 0, 8, True),
        ("pair", 11, 3, False),
        ("again", 10, 5, False),
        ("step", 0, 9, True),
        ("refuse", 9, 6, True),
    ]
)
# The last layer and a request come in one step.
@example(
    [
        ("pair", 0, 0, False),
        ("release", 0, 0, True),
        ("layers", 1, 0, False),
        ("submit", 0, 0, False),
    ]
)
# The last layer comes in the step in which a source takes all that no layer was run of.
@example([("pair", 5, 0, False), ("layer", 3, 2, True)])
# A request, for what becomes an instance, comes while a Run of the one before is in flight.
@example(
    [
        ("split", 3, 0, False),
        ("keep", 0, 0, False),
        ("wake", 0, 0, False),
        ("submit", 1, 0, False),
    ]
)
# A source is gone, and its worker is another instance's second rank: that has no work to share.
@example(
    [
        ("load", 0, 0, False),
        ("pair", 0, 3, False),
        ("fail", 2, 0, False),
        ("pair", 0, 0, False),
        ("pair", 3, 3, False),
    ]
)
def test_whatever_happens_every_order_and_every_attempt_ends_once(moves: list) -> None:
    Player().play(moves).end()


#: an instance of one rank or of two gets everything, is kept, and is used again
_KEPT = (
    *(("layers", 0, 0, True), ("layers", 1, 0, True), ("run", 0, 3, True)),
    *(("keep", 0, 0, False), ("wake", 0, 1, False)),
)


@pytest.mark.parametrize("model", [0, 4, 9])
def test_a_warm_spare_is_used_again(model: int) -> None:
    player = Player().play([("load", 0, model, True), *_KEPT])
    assert player.woken == 1
    player.end()


@given(st.sampled_from([0, 4, 9]), st.lists(MOVES, max_size=30))
@settings(max_examples=examples(300), derandomize=True)
def test_whatever_happens_to_a_warm_spare_every_order_ends_once(model: int, moves: list) -> None:
    Player().play([("load", 0, model, True), *_KEPT, *moves]).end()


_REPLAY = """
import pickle, sys
from member_world import LIVE, MEMORY_BYTES
from livescale.member.member import Member
from livescale.member.instance import ServingLimits
for ref, steps in pickle.load(open(sys.argv[1], "rb")):
    member = Member(ref, MEMORY_BYTES, ServingLimits("cpu", LIVE, 1500, 200))
    for now_ns, inputs, steps_max in steps:
        print(member.step(now_ns, inputs, steps_max), member.reports, member.wake_ns())
"""


@pytest.mark.usefixtures("machine")
def test_processes_with_different_hash_seeds_do_the_same(tmp_path: Path) -> None:
    """All that the workers of a few worlds took in is replayed by two other processes."""
    records = []
    for seed in range(6):
        chance = random.Random(seed)
        moves = [
            (
                chance.choice(KINDS),
                chance.randrange(12),
                chance.randrange(12),
                chance.random() < 0.5,
            )
            for _ in range(40)
        ]
        world = Player().play([("pair", 0, seed % 2, True), *moves]).end().world
        records += [(ref, [step[:3] for step in steps]) for ref, steps in world.records.items()]
    assert sum(len(inputs) for _, steps in records for _, inputs, _ in steps) > 300
    record = tmp_path / "inputs"
    record.write_bytes(pickle.dumps(records))
    told = []
    for seed in ("1", "2"):
        paths = os.pathsep.join(sys.path)
        around = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        command = [sys.executable, "-c", _REPLAY, str(record)]
        told.append(subprocess.run(command, env=around, check=True, capture_output=True).stdout)
    assert told[0] == told[1]
    assert b"Execute" in told[0]


def test_a_rate_that_was_measured_of_a_model_that_is_gone_completes_nothing() -> None:
    """The next model was ordered while the rate was measured."""
    worker = lone_worker()
    release = Ordered(DropHolding(HoldingId(1, WORKER), "released"))
    (*_, measure) = arrive(worker, 1)
    assert measure == Measure(1, BATCHER.run_tokens_max)
    worker.step(3, [release, Ordered(load_order(2), LAYER_BYTES, "m")])
    assert worker.step(4, [RateMeasured(1, 77), ready(2)]) == []
    assert [report.is_whole for report in worker.reports] == [False]
    assert arrive(worker, 2)[-1] == Measure(2, BATCHER.run_tokens_max)


@pytest.mark.parametrize("has_work", [False, True])
def test_a_live_instance_is_measured_if_it_has_had_no_work(has_work: bool) -> None:
    """What is measured writes over KV; where a prompt came first, its Run must do."""
    worker = Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE))
    live = msgspec.structs.replace(load_order(1), duty=Duty(1, (WORKER,), live_order="zigzag"))
    worker.step(1, [Ordered(live, LAYER_BYTES, "m")])
    prompt = SequenceSpec("r", 1, (5, 6), SamplingParams(3))
    worker.step(1, [ready(1), *([Submitted("g0", 1, prompt)] if has_work else [])])
    assert (Measure(1, BATCHER.run_tokens_max) in arrive(worker, 1)) == (not has_work)
    assert [report.is_whole for report in worker.reports] == [has_work]
    told = worker.step(3, [] if has_work else [RateMeasured(1, 77)])
    rates = [e.event for e in told if isinstance(e, Report)]
    assert (CapacityMeasured("cpu", "m", 77, BATCHER.kv_blocks) in rates) == (not has_work)
    assert [report.is_whole for report in worker.reports] == [True]


@pytest.mark.parametrize("takes_over", [True, False])
def test_what_comes_while_the_executor_takes_a_model_over_waits(takes_over: bool) -> None:
    """A request behind the order in the same step is for the instance that is about to be."""
    worker = Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE))
    order = Ordered(load_order(1), LAYER_BYTES, "m")
    spec = SequenceSpec("r", 1, (5, 6), SamplingParams(3))
    asked = worker.step(1, [order, Submitted("g0", 1, spec)])
    assert [type(effect) for effect in asked] == [Fetch, Assign]
    came = worker.step(2, [ready(1) if takes_over else FetchFailed(1, "no")])
    returned = Answer("g0", AttemptReturned("r", 1))
    assert (returned in came) == (not takes_over)
    open_requests = worker.instance.serving.requests() if worker.instance is not None else []
    assert open_requests == ([("r", 1)] if takes_over else [])


@pytest.mark.parametrize("is_ordered", [True, False])
def test_layers_of_another_rank_count_though_they_come_before_the_instance(
    is_ordered: bool,
) -> None:
    other = WorkerRef(1)
    worker = Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE))
    order = Ordered(load_order(1, (WORKER, other)), LAYER_BYTES, "m")
    # A late message of an earlier instance says nothing of this one.
    late = PeerSent(other, RankLayers(0, 1, 3))
    news = [late, PeerSent(other, RankLayers(1, 1, len(LAYER_BYTES)))]
    worker.step(1, [order, *news] if is_ordered else [*news, order])
    worker.step(1, [ready(1)])
    arrive(worker, 1)
    assert worker.instance is not None
    assert live_batcher_of(worker.instance).is_full


def test_an_instance_goes_when_no_run_of_it_is_in_flight() -> None:
    """Two layers of a batch that was taken over follow one another: what is theirs stays until the
    second has ended, and no third one is begun."""
    target, key = WorkerRef(1), BatchKey(7, 1)
    worker = lone_worker()
    arrive(worker, 1)
    worker.step(3, [RateMeasured(1, 77)])
    effects = worker.step(4, [PeerSent(target, Offer(1, key, (4,), (5,)))])
    assert TellPeer(target, Pull(key, kv_layers=LIVE.kv_layers_ahead)) in effects
    handover = Handover(key, (SequenceSpec("r", 1, (5, 6, 7, 8), SamplingParams(2)),), 2)
    effects = worker.step(5, [PeerSent(target, handover, ("g0",), 4 * ROW_BYTES)])
    runs = [effect.run.span for effect in effects if isinstance(effect, Execute)]
    assert runs == [LayerSpan(2, 3), LayerSpan(3, 5)]
    kv_came = PeerSent(target, KvLayer(key, 1), (), 4 * KV_LAYER_BYTES)
    release = Ordered(DropHolding(HoldingId(1, WORKER), "released"))
    effects = worker.step(6, [RunEnded([], 9), kv_came, release])
    taken = KvTaken(1, WORKER, (("r", 1),), 1, 4 * KV_LAYER_BYTES, took_ns=2, arrival_ns=0)
    assert effects[1] == Report(taken)
    assert [type(effect) for effect in (effects[0], effects[2])] == [WriteKv, TellPeer]
    assert not any(isinstance(effect, DropFetch | Execute) for effect in effects)
    effects = worker.step(7, [RunEnded([(3,)], 9)])
    assert Answer("g0", AttemptReturned("r", 1)) in effects
    assert DropFetch(1) in effects
    assert not any(isinstance(effect, Execute) for effect in effects)
    assert worker.waiting == []


# -- what the cases are made of -------------------------------------------------------------------

WORKER = WorkerRef(0)


def load_order(instance: int, workers: tuple[WorkerRef, ...] = (WORKER,)) -> StartHolding:
    """The instance comes by the plan of its number."""
    return StartHolding(
        holding=HoldingId(instance, WORKER),
        model="m",
        span=LayerSpan(0, len(LAYER_BYTES)),
        feeds=(),
        chunk_bytes=400,
        duty=Duty(instance, workers),
        measure_capacity=len(workers) == 1,
    )


def ready(plan: PlanId) -> ExecutorReady:
    return ExecutorReady(plan, BATCHER, KV_LAYER_BYTES, ROW_BYTES)


def arrive(worker: Member, plan: PlanId) -> list[Effect]:
    """Every layer comes."""
    layers = [LayerCame(plan, layer) for layer in range(len(LAYER_BYTES))]
    return worker.step(2, [*layers, AllCame(plan, sum(LAYER_BYTES))])


def lone_worker() -> Member:
    """A worker with the first holding ordered and assigned."""
    worker = Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE))
    worker.step(1, [Ordered(load_order(1), LAYER_BYTES, "m")])
    worker.step(1, [ready(1)])
    return worker
