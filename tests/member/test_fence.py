"""Of several controllers only the latest counts: at members, and at the ledger of a gateway."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from member_world import BATCHER, KV_LAYER_BYTES, LAYER_BYTES, LIVE, MEMORY_BYTES, ROW_BYTES

from livescale.member.effects import Assign, Fetch, RefuseOrder
from livescale.member.fence import Fence
from livescale.member.inputs import ControllerMet, ExecutorReady, Ordered
from livescale.member.instance import ServingLimits
from livescale.member.ledger import Announce, Finish, Ledger, Send
from livescale.member.member import Member
from livescale.messages.commands import Dispatch, DropHolding, StartHolding
from livescale.messages.epochs import ControllerEpoch
from livescale.values.routes import Duty
from livescale.values.types import HoldingId, LayerSpan, Outcome, WorkerRef

WORKER = WorkerRef(0)
OLD, NEW = ControllerEpoch("pool", 3), ControllerEpoch("pool", 4)
START = StartHolding(
    holding=HoldingId(1, WORKER),
    model="m",
    span=LayerSpan(0, len(LAYER_BYTES)),
    feeds=(),
    chunk_bytes=400,
    duty=Duty(1, (WORKER,)),
)

numbers = st.integers(0, 5)
epochs = st.builds(ControllerEpoch, st.sampled_from(["", "other"]), numbers)


@given(st.lists(st.tuples(st.booleans(), epochs)))
def test_the_numbers_of_a_line_that_count_never_fall(
    story: list[tuple[bool, ControllerEpoch]],
) -> None:
    fence = Fence()
    highest: dict[str, int] = {}
    met: ControllerEpoch | None = None
    for is_met, epoch in story:
        if not is_met:
            assert fence.admits(epoch) == (met is None or epoch == met)
            continue
        later = fence.meet(epoch)
        if epoch.number < highest.get(epoch.line, 0):
            assert later == ControllerEpoch(epoch.line, highest[epoch.line])
        else:
            assert later is None
            met, highest[epoch.line] = epoch, epoch.number


# -- members --------------------------------------------------------------------------------------


def test_a_member_refuses_orders_of_a_life_that_is_over() -> None:
    worker = Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE))
    late = Ordered(START, LAYER_BYTES, "m", OLD)
    [refused] = worker.step(1, [ControllerMet(OLD), ControllerMet(NEW), late])
    assert refused == RefuseOrder(START, "the controller's epoch 3 is over: epoch 4 has been met")
    assert worker.reports == ()
    # The older life is met again over a link that came back: it stays refused.
    [refused] = worker.step(2, [ControllerMet(OLD), late])
    assert isinstance(refused, RefuseOrder)
    begun = worker.step(3, [Ordered(START, LAYER_BYTES, "m", NEW)])
    assert [type(effect) for effect in begun] == [Fetch, Assign]


def test_orders_that_wait_are_refused_when_a_later_life_is_met() -> None:
    """The later one was told that the holding is there, and goes by that."""
    worker = Member(WORKER, MEMORY_BYTES, ServingLimits("cpu", LIVE))
    worker.step(1, [ControllerMet(OLD), Ordered(START, LAYER_BYTES, "m", OLD)])
    drop = DropHolding(START.holding, "test")
    assert worker.step(2, [Ordered(drop, epoch=OLD)]) == []
    reported = worker.reports
    assert worker.step(3, [ControllerMet(NEW)]) == []
    done = worker.step(4, [ExecutorReady(1, BATCHER, KV_LAYER_BYTES, ROW_BYTES)])
    assert [e.command for e in done if isinstance(e, RefuseOrder)] == [drop]
    assert worker.reports == reported


# -- gateways -------------------------------------------------------------------------------------


def test_a_ledger_refuses_orders_of_a_life_that_is_over() -> None:
    ledger = Ledger()
    assert ledger.controller_joined(OLD) == []
    ledger.open("r")
    [told] = ledger.controller_joined(NEW)
    assert isinstance(told, Announce)
    assert ledger.controller_joined(OLD) == ()
    order = Dispatch("r", 1, 7, WORKER)
    assert ledger.dispatched(order, OLD, is_reachable=True) == ()
    assert ledger.failed("r", "no instance", OLD) == ()
    effects = ledger.dispatched(order, NEW, is_reachable=True)
    assert effects[-1] == Send(order)
    [*_, finish] = ledger.failed("r", "no instance", NEW)
    assert isinstance(finish, Finish)
    assert finish.outcome is Outcome.FAILED
