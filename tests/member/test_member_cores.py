"""Cores of a worker: an order, what the executor makes of it, and who is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from member_world import LIVE, MEMORY_BYTES

from livescale.member.effects import Effect, RefuseOrder, Report, UseCores
from livescale.member.inputs import ControllerMet, CoresSet, Ordered
from livescale.member.instance import ServingLimits
from livescale.member.member import Member
from livescale.messages.commands import SetCores
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import CoresChanged
from livescale.values.types import WorkerRef

WORKER = WorkerRef(3)
OLD, NEW = ControllerEpoch("pool", 3), ControllerEpoch("pool", 4)


def worker(own: int) -> Member:
    return Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE, own_cores=own))


@given(own=st.integers(1, 3), most=st.integers(1, 4), asked=st.lists(st.integers(1, 6)))
def test_each_order_ends_in_one_event_with_what_there_is(
    own: int, most: int, asked: list[int]
) -> None:
    """Of an executor that has at most so many; a next controller is told what is not as it was."""
    member = worker(own)
    for now_ns, cores in enumerate(asked, 1):
        [use] = member.step(now_ns, [Ordered(SetCores(WORKER, cores))])
        assert use == UseCores(cores)
        given_cores = min(cores, most)
        told = member.step(now_ns, [CoresSet(given_cores, asked=cores)])
        assert told == [Report(CoresChanged(WORKER, given_cores, asked=cores))]
        assert (member.cores.now, member.cores.own) == (given_cores, own)
    again: list[Effect] = member.step(99, [ControllerMet()])
    is_as_begun = member.cores.now == own
    assert again == ([] if is_as_begun else [Report(CoresChanged(WORKER, member.cores.now))])


def test_an_order_of_a_life_that_is_over_changes_nothing() -> None:
    member = worker(1)
    member.step(1, [ControllerMet(NEW)])
    order = SetCores(WORKER, 2)
    [refused] = member.step(2, [Ordered(order, epoch=OLD)])
    assert isinstance(refused, RefuseOrder)
    assert refused.command == order
    assert member.cores.now == 1
