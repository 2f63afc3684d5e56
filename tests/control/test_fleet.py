"""Fleet: the table of moves, word by word, and what surrounds it."""

from __future__ import annotations

import pytest

from livescale.control.fleet import Fleet
from livescale.control.instance import TRANSITIONS, Instance, InvalidTransition
from livescale.messages.commands import Drain, Resume
from livescale.messages.events import (
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    WorkerLost,
)
from livescale.plans import Pairing
from livescale.topology import Device
from livescale.types import InstanceId, InstanceState, Value, WorkerRef

DEVICE = Device("cpu", "h", "l", 100, 100)
CAUSES = (
    LiveStarted,
    LoadStarted,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    Drain,
    Resume,
    Released,
    WorkerLost,
)
S = InstanceState
ALLOWED = {
    (S.STARTING, LoadStarted): S.LOADING,
    (S.STARTING, LiveStarted): S.LIVE,
    (S.STARTING, LoadFailed): S.STOPPED,
    (S.STARTING, WorkerLost): S.LOST,
    (S.LOADING, LiveStarted): S.LIVE,
    (S.LOADING, LoadStarted): S.LOADING,
    (S.LOADING, LayerArrived): S.LOADING,
    (S.LOADING, LoadCompleted): S.SERVING,
    (S.LOADING, LoadFailed): S.STOPPED,
    (S.LOADING, WorkerLost): S.LOST,
    (S.LIVE, LiveStarted): S.LIVE,
    (S.LIVE, LoadStarted): S.LIVE,
    (S.LIVE, LayerArrived): S.LIVE,
    (S.LIVE, LoadCompleted): S.SERVING,
    (S.LIVE, LoadFailed): S.STOPPED,
    (S.LIVE, WorkerLost): S.LOST,
    (S.SERVING, Drain): S.DRAINING,
    (S.SERVING, WorkerLost): S.LOST,
    (S.DRAINING, Resume): S.SERVING,
    (S.DRAINING, Released): S.STOPPED,
    (S.DRAINING, WorkerLost): S.LOST,
}


def make_fleet(state: InstanceState) -> tuple[Fleet, Instance]:
    fleet = Fleet()
    fleet.join(WorkerRef(0), DEVICE)
    instance = Instance(7, "m", (WorkerRef(0),), 3, state=state)
    instance.story.append("made for the test")
    fleet.place(instance)
    return fleet, instance


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", list(InstanceState))
def test_every_pair_of_state_and_cause(state: InstanceState, cause: type[Value]) -> None:
    fleet, instance = make_fleet(state)
    instance.empty_ranks[0] = None
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
    assert (fleet.workers[0].instance is None) is is_gone


def test_the_table_names_every_state_and_no_other_cause() -> None:
    assert list(TRANSITIONS) == list(InstanceState)
    assert {cause for moves in TRANSITIONS.values() for cause in moves} == set(CAUSES)


def test_spare_workers_have_room_and_no_instance() -> None:
    fleet, _ = make_fleet(S.SERVING)
    fleet.join(WorkerRef(2, 5), DEVICE)
    fleet.join(WorkerRef(1), Device("cpu", "h", "l", 99, 100))
    assert [record.ref for record in fleet.spare(100)] == [WorkerRef(2, 5)]
    assert [record.ref for record in fleet.spare(99)] == [WorkerRef(1), WorkerRef(2, 5)]


def test_an_incarnation_is_alive_until_it_leaves() -> None:
    fleet = Fleet()
    fleet.join(WorkerRef(0, 1), DEVICE)
    assert fleet.is_alive(WorkerRef(0, 1))
    assert not fleet.is_alive(WorkerRef(0, 0))
    fleet.leave(WorkerRef(0, 1))
    assert not fleet.is_alive(WorkerRef(0, 1))


@pytest.mark.parametrize(("is_loaded", "state"), [(True, S.SERVING), (False, S.LOADING)])
def test_a_reported_instance_is_adopted_as_it_is(is_loaded: bool, state: InstanceState) -> None:
    fleet = Fleet()
    fleet.join(WorkerRef(0), DEVICE)
    watermark = 3 if is_loaded else 1
    report = InstanceReport(9, "m", 0, watermark, is_loaded)
    instance = fleet.adopt(report, WorkerRef(0), 3, tp_size=1)
    assert instance is not None
    assert (instance.state, instance.watermark) == (state, watermark)
    assert fleet.of_model("m") == [instance]
    fleet.validate()


def test_an_instance_is_adopted_when_all_its_ranks_are_there() -> None:
    fleet = Fleet()
    for number in (0, 1, 2):
        fleet.join(WorkerRef(number), DEVICE)
    assert fleet.adopt(InstanceReport(9, "m", 0, 3, True, 1), WorkerRef(2), 3, tp_size=2) is None
    assert [record.ref.worker for record in fleet.spare(1)] == [0, 1]
    instance = fleet.adopt(InstanceReport(9, "m", 0, 2, False, 0), WorkerRef(0), 3, tp_size=2)
    assert instance is not None
    assert instance.workers == (WorkerRef(0), WorkerRef(2))
    assert (instance.state, instance.watermark) == (S.LOADING, 2)
    fleet.validate()


def load_of(instance: InstanceId, running: int) -> InstanceReported:
    return InstanceReported(instance, 0, (), running, 0, 0, 8, 0)


def test_the_load_that_rank_0_reported_counts_when_the_other_ranks_have_joined() -> None:
    """The instance does not repeat what has not changed."""
    fleet = Fleet()
    for number in (0, 1):
        fleet.join(WorkerRef(number), DEVICE)
    fleet.adopt(InstanceReport(9, "m", 0, 3, True, 0), WorkerRef(0), 3, tp_size=2)
    fleet.report_early(load_of(9, running=4))
    fleet.report_early(load_of(8, running=5))  # of an instance that is not known
    instance = fleet.adopt(InstanceReport(9, "m", 0, 3, True, 1), WorkerRef(1), 3, tp_size=2)
    assert instance is not None
    assert (instance.running, instance.is_unheard) == (4, False)


def test_a_live_instance_may_have_requests_until_it_has_reported_its_load() -> None:
    fleet = Fleet()
    fleet.join(WorkerRef(0), DEVICE)
    report = InstanceReport(9, "m", 0, 1, False, pairing=Pairing("zigzag"))
    instance = fleet.adopt(report, WorkerRef(0), 3, tp_size=1)
    assert instance is not None
    assert instance.is_unheard
    fleet.report(instance, load_of(9, running=0))
    assert not instance.is_unheard


def test_what_an_ended_instance_left_behind_is_spare_only_when_released() -> None:
    fleet = Fleet()
    for number in (0, 1):
        fleet.join(WorkerRef(number), DEVICE)
    instance = Instance(7, "m", (WorkerRef(0), WorkerRef(1)), 3, state=S.LOADING)
    fleet.place(instance)
    instance.empty_ranks[1] = None
    fleet.move(instance, LoadFailed)
    assert [record.ref.worker for record in fleet.spare(1)] == [1]
    assert list(fleet.remnants) == [(7, 0)]
    fleet.validate()
    fleet.free((7, 0))
    assert [record.ref.worker for record in fleet.spare(1)] == [0, 1]
    fleet.validate()


def test_the_story_is_bounded() -> None:
    fleet, instance = make_fleet(S.LOADING)
    for _ in range(1000):
        fleet.move(instance, LayerArrived)
    assert len(instance.story) == 32
