"""Fleet: the table of moves, word by word, and what surrounds it."""

from __future__ import annotations

import msgspec
import pytest
from stories import W, load_order

from livescale.clusters.topology import Device
from livescale.control.state.fleet import Fleet
from livescale.control.state.holdings import Copy, Holding, HoldingState
from livescale.control.state.instance import TRANSITIONS, Instance, InvalidTransition
from livescale.control.state.pool import ParameterPool
from livescale.messages.commands import Drain, ReleaseHolding, Resume
from livescale.messages.events import (
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    WorkerLost,
)
from livescale.values.routes import Duty
from livescale.values.types import (
    HoldingId,
    InstanceId,
    InstanceState,
    LayerSpan,
    Part,
    Value,
    WorkerRef,
)

PART = Part("m", LayerSpan(0, 3))
DEVICE = Device("cpu", "h", "l", 100, 100)
CAUSES = (
    LiveStarted,
    FirstByteArrived,
    LayerArrived,
    HoldingCompleted,
    HoldingFailed,
    Drain,
    Resume,
    ReleaseHolding,
    HoldingDropped,
    WorkerLost,
)
S = InstanceState
ALLOWED = {
    (S.STARTING, FirstByteArrived): S.LOADING,
    (S.STARTING, LayerArrived): S.LOADING,
    (S.STARTING, LiveStarted): S.LIVE,
    (S.STARTING, HoldingCompleted): S.SERVING,
    (S.STARTING, HoldingFailed): S.STOPPED,
    (S.STARTING, WorkerLost): S.LOST,
    (S.LOADING, LiveStarted): S.LIVE,
    (S.LOADING, FirstByteArrived): S.LOADING,
    (S.LOADING, LayerArrived): S.LOADING,
    (S.LOADING, HoldingCompleted): S.SERVING,
    (S.LOADING, HoldingFailed): S.STOPPED,
    (S.LOADING, WorkerLost): S.LOST,
    (S.LIVE, LiveStarted): S.LIVE,
    (S.LIVE, FirstByteArrived): S.LIVE,
    (S.LIVE, LayerArrived): S.LIVE,
    (S.LIVE, HoldingCompleted): S.SERVING,
    (S.LIVE, HoldingFailed): S.STOPPED,
    (S.LIVE, WorkerLost): S.LOST,
    (S.SERVING, Drain): S.DRAINING,
    (S.SERVING, HoldingFailed): S.STOPPED,
    (S.SERVING, WorkerLost): S.LOST,
    (S.DRAINING, Resume): S.SERVING,
    (S.DRAINING, HoldingFailed): S.STOPPED,
    (S.DRAINING, ReleaseHolding): S.STOPPED,
    (S.DRAINING, HoldingDropped): S.STOPPED,
    (S.DRAINING, WorkerLost): S.LOST,
}


def fleet_of(workers: int) -> tuple[Fleet, ParameterPool]:
    pool = ParameterPool()
    fleet = Fleet(pool)
    for worker in W[:workers]:
        fleet.join(worker, DEVICE)
    return fleet, pool


def hold(
    pool: ParameterPool,
    duty: Duty,
    watermark: int = 0,
    state: HoldingState = HoldingState.ARRIVING,
    rank: int = 0,
) -> Copy:
    """The worker of this rank holds so many layers."""
    order = load_order(duty.instance, duty.workers[rank], 1, None, rank=rank)
    held = Holding(msgspec.structs.replace(order, duty=duty), watermark, state)
    return pool.add(held, len(duty.workers), 60)


def make_fleet(state: InstanceState) -> tuple[Fleet, Instance]:
    fleet, pool = fleet_of(1)
    duty = Duty(7, (W[0],))
    instance = Instance(PART, duty, hold(pool, duty), state)
    instance.story.append("made for the test")
    fleet.add(instance)
    return fleet, instance


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", list(InstanceState))
def test_every_pair_of_state_and_cause(state: InstanceState, cause: type[Value]) -> None:
    fleet, instance = make_fleet(state)
    target = ALLOWED.get((state, cause))
    if target is None:
        with pytest.raises(InvalidTransition) as caught:
            fleet.move(instance, cause)
        message = str(caught.value)
        assert f"<Instance 7 {state.name} of m on w0.0, 0/3 layers, 0 requests>" in message
        assert f"cannot take {cause.__name__}; story: made for the test" in message
        assert instance.state is state
        return
    fleet.move(instance, cause)
    assert instance.state is target
    assert instance.story[-1] == f"{cause.__name__} {state.name}->{target.name}"
    is_gone = target in (S.STOPPED, S.LOST)
    assert (7 in fleet.instances) is not is_gone
    assert (fleet.instance_on(W[0]) is None) is is_gone


def test_the_table_names_every_state_and_no_other_cause() -> None:
    assert list(TRANSITIONS) == list(InstanceState)
    assert {cause for moves in TRANSITIONS.values() for cause in moves} == set(CAUSES)


def test_spare_workers_have_room_and_no_instance() -> None:
    fleet, _ = make_fleet(S.SERVING)
    fleet.join(WorkerRef(2, 5), DEVICE)
    fleet.join(WorkerRef(1), Device("cpu", "h", "l", 99, 100))
    assert [record.ref for record in fleet.idle(100)] == [WorkerRef(2, 5)]
    assert [record.ref for record in fleet.idle(99)] == [WorkerRef(1), WorkerRef(2, 5)]


def test_an_incarnation_is_alive_until_it_leaves() -> None:
    fleet, _ = fleet_of(0)
    fleet.join(WorkerRef(0, 1), DEVICE)
    assert fleet.is_alive(WorkerRef(0, 1))
    assert not fleet.is_alive(WorkerRef(0, 0))
    fleet.leave(WorkerRef(0, 1))
    assert not fleet.is_alive(WorkerRef(0, 1))


@pytest.mark.parametrize(
    ("watermark", "held", "state"),
    [(3, HoldingState.WHOLE, S.SERVING), (1, HoldingState.ARRIVING, S.LOADING)],
)
def test_a_reported_instance_is_adopted_as_it_is(
    watermark: int, held: HoldingState, state: InstanceState
) -> None:
    fleet, pool = fleet_of(1)
    fleet.adopt(PART, hold(pool, Duty(9, (W[0],)), watermark, held))
    (instance,) = fleet.of_part(PART)
    assert (instance.id, instance.state, instance.watermark) == (9, state, watermark)
    fleet.validate()


def test_an_instance_is_adopted_when_all_its_ranks_are_there() -> None:
    fleet, pool = fleet_of(3)
    duty = Duty(9, (W[0], W[2]))
    assert not hold(pool, duty, 3, HoldingState.WHOLE, rank=1).is_there
    assert [record.ref.worker for record in fleet.idle(1)] == [0, 1]
    copy = hold(pool, duty, 2, rank=0)
    assert copy.is_there
    fleet.adopt(PART, copy)
    (instance,) = fleet.of_part(PART)
    assert instance.workers == (W[0], W[2])
    assert (instance.state, instance.watermark) == (S.LOADING, 2)
    fleet.validate()


def load_of(instance: InstanceId, running: int) -> InstanceReported:
    return InstanceReported(instance, (), running, 0, 0, 8, 0)


def test_the_load_that_rank_0_reported_counts_when_the_other_ranks_have_joined() -> None:
    """The instance does not repeat what has not changed."""
    fleet, pool = fleet_of(2)
    duty = Duty(9, (W[0], W[1]))
    hold(pool, duty, 3, HoldingState.WHOLE, rank=0)
    fleet.report_early(load_of(9, running=4))
    fleet.report_early(load_of(8, running=5))  # of an instance that is not known
    fleet.adopt(PART, hold(pool, duty, 3, HoldingState.WHOLE, rank=1))
    (instance,) = fleet.of_part(PART)
    assert (instance.running, instance.is_unreported) == (4, False)


def test_a_live_instance_may_have_requests_until_it_has_reported_its_load() -> None:
    fleet, pool = fleet_of(1)
    duty = Duty(9, (W[0],), live_order="zigzag")
    fleet.adopt(PART, hold(pool, duty, 1))
    (instance,) = fleet.live(PART)
    assert instance.is_unreported
    fleet.report(instance, load_of(9, running=0))
    assert not instance.is_unreported


def test_what_an_ended_instance_left_behind_is_spare_only_when_dropped() -> None:
    fleet, pool = fleet_of(2)
    duty = Duty(7, (W[0], W[1]))
    copies = [hold(pool, duty, rank=rank) for rank in (0, 1)]
    instance = Instance(PART, duty, copies[0], S.LOADING)
    fleet.add(instance)
    pool.move(copies[0].ranks[1], HoldingFailed)
    fleet.move(instance, HoldingFailed)
    assert [record.ref.worker for record in fleet.idle(1)] == [1]
    assert pool.remainders() == 1
    (order,) = pool.drop_remainders()
    assert order.holding == HoldingId(1, W[0])
    fleet.validate()
    pool.move(copies[0].ranks[0], HoldingDropped)
    assert [record.ref.worker for record in fleet.idle(1)] == [0, 1]
    assert not pool.has_any("m")


def test_the_story_is_bounded() -> None:
    fleet, instance = make_fleet(S.LOADING)
    for _ in range(1000):
        fleet.move(instance, LayerArrived)
    assert len(instance.story) == 32
