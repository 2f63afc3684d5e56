"""The Controller at its seam: these events, therefore these commands."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    MS,
    REMAINDER,
    SPEC,
    H,
    W,
    adopted,
    arrived,
    drop,
    finished,
    instances_of,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    plans_of,
    rejoined,
    report,
    reported,
    scaled,
    serves,
    serving,
    step,
    whole,
)

from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.control.state.holdings import InvalidMove
from livescale.control.state.instance import Instance, InvalidTransition
from livescale.messages.commands import (
    AmendHolding,
    Dispatch,
    Drain,
    FailRequest,
    PlanMade,
    Resume,
    ScaleDecided,
    StartHolding,
    WakeAt,
)
from livescale.messages.events import (
    AnyEvent,
    CapacityMeasured,
    FeedFailed,
    FirstByteArrived,
    GatewayLost,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    MembersLeave,
    ModelAdded,
    ModelRemoved,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RoleChanged,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import (
    IDS_PER_EPOCH,
    HoldingId,
    InstanceState,
    Outcome,
    Role,
    WorkerRef,
)

LOW_NS = 333 * MS


def living(controller: Controller) -> list[Instance]:
    return controller.fleet.of_part(controller.models["m"].entry.part)


def test_the_first_instance_comes_from_storage() -> None:
    controller = make_controller(workers=2)
    decided, planned, *orders = step(controller, 0, *joined(W[0], W[1]))
    assert decided == scaled(0, 1, "below_min")
    assert isinstance(planned, PlanMade)
    assert (planned.instances, planned.plan.instances) == ((2,), ((W[0],),))
    assert planned.plan.routes() == ("storage -> w0.0",)
    assert planned.plan.bytes_per_target == 60
    assert orders == [load_order(2, W[0], 1, None)]
    assert step(controller, 1, *loaded(HoldingId(1, W[0]))) == []


def test_nothing_is_placed_before_the_expected_workers_or_the_settling_time() -> None:
    controller = make_controller(workers=3, settle_ns=100)
    assert controller.step(0, joined(W[0])) == [WakeAt(100)]
    assert step(controller, 99, *joined(W[1])) == []
    assert len(step(controller, 100, Tick())) == 3
    early = make_controller(workers=2, settle_ns=100)
    assert step(early, 0, *joined(W[0])) == []
    assert len(step(early, 1, *joined(W[1]))) == 3


def test_from_one_to_three_is_one_plan_with_one_chain() -> None:
    controller = serving(workers=3, instances=1, instances_max=3)
    decided, planned, *orders = step(controller, 1, arrived("r", 2500))
    assert decided == scaled(1, 3, "prefill_backlog")
    assert isinstance(planned, PlanMade)
    assert planned.instances == (2, 3)
    assert planned.plan.routes() == ("w0.0 -> w1.0 -> w2.0",)
    assert orders == [
        load_order(2, W[1], 1, W[0]),
        load_order(3, W[2], 1, W[1]),
        Dispatch("r", 1, 101, W[0]),
    ]


def test_all_events_of_a_step_are_absorbed_before_anything_is_decided() -> None:
    together = serving(workers=4, instances=1)
    commands = step(together, 1, arrived("a", 900), arrived("b", 900), arrived("c", 800))
    assert sum(isinstance(command, PlanMade) for command in commands) == 1
    assert sum(isinstance(command, StartHolding) for command in commands) == 3


def test_two_sources_make_two_chains() -> None:
    controller = serving(workers=4, instances=2)
    commands = step(controller, 1, arrived("r", 2500))
    (plan,) = plans_of(commands)
    assert plan.routes() == ("w0.0 -> w2.0", "w1.0 -> w3.0")


def test_a_source_that_is_read_from_already_is_spared() -> None:
    controller = serving(workers=5, instances=2, instances_max=5)
    step(controller, 1, arrived("a", 1500))
    commands = step(controller, 2, arrived("b", 1500))
    assert [route for plan in plans_of(commands) for route in plan.routes()] == [
        "w1.0 -> w3.0 -> w4.0"
    ]


def test_scaling_down_drains_then_releases() -> None:
    controller = serving(workers=2, instances=2)
    assert step(controller, 1, arrived("a", 200), arrived("b", 200)) == [
        Dispatch("a", 1, 101, W[0]),
        Dispatch("b", 1, 102, W[1]),
    ]
    assert step(controller, 1 + LOW_NS, finished("a")) == [
        scaled(2, 1, "idle"),
        Drain(101),
        drop(101, W[0]),
    ]
    assert step(controller, 2 + LOW_NS, HoldingDropped(HoldingId(101, W[0]))) == []
    assert [i.id for i in living(controller)] == [102]


def test_a_draining_instance_gets_no_requests_and_keeps_those_it_has() -> None:
    controller = serving(workers=2, instances=2)
    step(controller, 1, arrived("a", 200), arrived("b", 200))
    commands = step(controller, 1 + LOW_NS, Tick())
    assert commands == [scaled(2, 1, "idle"), Drain(102)]
    assert step(controller, 2 + LOW_NS, arrived("c", 10)) == [Dispatch("c", 1, 101, W[0])]
    assert step(controller, 3 + LOW_NS, finished("b")) == [drop(102, W[1])]


def test_a_draining_instance_is_resumed_before_anything_is_loaded() -> None:
    controller = serving(workers=3, instances=2)
    step(controller, 1, arrived("a", 200), arrived("b", 200))
    step(controller, 1 + LOW_NS, Tick())
    assert step(controller, 2 + LOW_NS, arrived("c", 800)) == [
        scaled(1, 2, "token_rate"),
        Resume(102),
        Dispatch("c", 1, 101, W[0]),
    ]
    assert controller.fleet.instances[102].state is InstanceState.SERVING


def test_a_copy_that_is_read_from_is_released_only_afterwards() -> None:
    controller = serving(workers=3, instances=2, instances_max=3)
    step(controller, 1, arrived("a", 1500), arrived("b", 100))
    step(controller, 2, finished("a"))
    (holding,) = controller.loads.open
    assert (holding.member, controller.pool.reads.count(W[0])) == (W[2], 1)
    step(controller, 2000 * MS, Tick())
    low_ns = 2000 * MS + LOW_NS
    assert step(controller, low_ns, Tick()) == [scaled(3, 2, "idle"), Drain(101)]
    assert step(controller, low_ns + 1, *loaded(holding)[:-1]) == []
    assert step(controller, low_ns + 2, loaded(holding)[-1]) == [drop(101, W[0])]


def test_the_last_copy_is_kept_and_resumed() -> None:
    controller = serving(workers=2, instances=2)
    step(controller, 1, arrived("a", 200), arrived("b", 200))
    step(controller, 1 + LOW_NS, Tick())
    lost = step(controller, 2 + LOW_NS, WorkerLost(W[0], "gone"), finished("b"))
    assert lost == [
        scaled(0, 1, "below_min"),
        Resume(102),
        Dispatch("a", 2, 102, W[1]),
    ]


def test_a_drained_instance_keeps_the_last_copy_until_there_is_another() -> None:
    controller = serving(workers=3, instances=2, instances_max=3)
    step(controller, 1, arrived("a", 100), arrived("b", 100), arrived("c", 1500))
    step(controller, 2, finished("c"))
    step(controller, 2000 * MS, Tick())
    low_ns = 2000 * MS + LOW_NS
    assert step(controller, low_ns, Tick()) == [scaled(3, 2, "idle"), Drain(102)]
    # An instance still loads, so nothing has to be resumed; but no other copy is complete.
    lost = step(controller, low_ns + 1, WorkerLost(W[0], "gone"), finished("b"))
    assert lost == [AmendHolding(HoldingId(1, W[2]), whole(W[1]))]
    assert [copy.holder for copy in controller.pool.copies("m") if copy.is_complete] == [W[1]]
    failed = HoldingFailed(HoldingId(1, W[2]), "its source is gone")
    assert step(controller, low_ns + 2, failed) == [
        scaled(0, 1, "below_min"),
        Resume(102),
        Dispatch("a", 2, 102, W[1]),
    ]


def test_the_last_instance_is_never_drained() -> None:
    controller = serving(workers=2, instances=1)
    for number in range(1, 5):
        assert step(controller, number * LOW_NS, Tick()) == []


def test_requests_of_a_lost_worker_get_one_more_attempt_and_then_fail() -> None:
    controller = serving(workers=3, instances=3, instances_max=3, request_attempts_max=2)
    step(controller, 1, arrived("r", 300))
    assert step(controller, 2, WorkerLost(W[0], "out of memory")) == [Dispatch("r", 2, 102, W[1])]
    assert step(controller, 3, WorkerLost(W[1], "out of memory")) == [
        FailRequest("r", "worker w1.0 was lost: out of memory")
    ]
    assert controller.router.requests == {}


def test_a_request_that_failed_and_is_announced_again_gets_no_attempt_twice() -> None:
    """Two workers are lost at once: the gateway's news of each crosses the failure (seed 1116)."""
    controller = serving(workers=2, instances=2, instances_max=2, request_attempts_max=2)
    step(controller, 1, arrived("r", 300))
    step(controller, 2, WorkerLost(W[0], "out of memory"))
    assert FailRequest("r", "worker w1.0 was lost: gone") in step(
        controller, 3, WorkerLost(W[1], "gone")
    )
    for attempt in (1, 2):
        step(controller, 3, RequestArrived("r", "m", 300, 5, attempt=attempt))
    commands = step(controller, 4, *joined(W[2]))
    [loading] = loads_of(commands)
    assert Dispatch("r", 3, loading.duty.instance, W[2]) in step(
        controller, 5, FirstByteArrived(loading.holding), HoldingCompleted(loading.holding, 60)
    )


def test_the_gateways_word_of_a_loss_avoids_the_worker_until_the_loss_is_known() -> None:
    controller = serving(workers=1, instances=1, avoid_ns=50)
    step(controller, 1, arrived("r"))
    lost = RequestEnded("r", 1, Outcome.WORKER_LOST)
    assert [type(c) for c in controller.step(2, [lost])] == [WakeAt]
    assert step(controller, 3, Tick()) == []
    assert step(controller, 52, Tick()) == [Dispatch("r", 2, 101, W[0])]


@pytest.mark.parametrize("is_own_word", [True, False])
def test_what_only_the_gateway_says_was_returned_avoids_the_worker(is_own_word: bool) -> None:
    """The worker's own word is held up, and with it that its instance may be gone: sent there again
    the request would come back at once, for ever (seed 913)."""
    controller = serving(workers=1, instances=1, avoid_ns=50)
    step(controller, 1, arrived("r"))
    worker = W[0] if is_own_word else None
    returned = RequestEnded("r", 1, Outcome.RETURNED, 0, worker)
    again = [Dispatch("r", 2, 101, W[0])]
    assert step(controller, 2, returned) == (again if is_own_word else [])
    assert step(controller, 52, Tick()) == ([] if is_own_word else again)


def test_a_cancelled_request_is_not_tried_again() -> None:
    controller = serving(workers=2, instances=2)
    step(controller, 1, arrived("r"), arrived("never-sent", 1))
    assert step(controller, 2, RequestCancelled("r"), WorkerLost(W[0], "gone")) == []
    assert list(controller.router.requests) == ["never-sent"]


@given(sent=st.integers(0, 6), waits=st.integers(0, 6), ends=st.permutations(range(6)))
def test_a_lost_gateway_leaves_no_place_taken(sent: int, waits: int, ends: list[int]) -> None:
    """Whichever of its dispatches had reached a worker, and whatever is reported of them later."""
    controller = serving(workers=1, instances=1, sequences_max=6, dispatched_ahead_max=0)
    lost = [f"lost-{number}" for number in range(sent + waits)]
    first = step(controller, 1, *[arrived(request) for request in lost])
    kept = [f"kept-{number}" for number in range(8)]
    step(controller, 2, *[arrived(request) for request in kept])
    cancelled = [RequestCancelled(request) for request in lost[:1]]
    commands = step(controller, 3, *cancelled, GatewayLost("lost"))
    gone = len([c for c in first if isinstance(c, Dispatch)])
    given_to = [c.request for c in commands if isinstance(c, Dispatch)]
    assert given_to == kept[6 - gone : 6] if gone else not given_to
    assert [*controller.router.requests] == kept
    stale = controller.stale_events
    late = [f"lost-{number}" for number in ends if number < gone]
    step(controller, 4, *[RequestEnded(r, 1, Outcome.CANCELLED, 0, W[0]) for r in late])
    assert controller.stale_events == stale + len(late)
    assert [*controller.router.requests] == kept


def test_a_gateway_that_begins_anew_announces_what_it_still_answers_for() -> None:
    controller = serving(workers=1, instances=1)
    step(controller, 1, arrived("web-1"), RequestCancelled("web-1"))
    step(controller, 2, arrived("web-2"))
    again = msgspec.structs.replace(arrived("web-2"), attempt=0)
    assert step(controller, 3, GatewayLost("web"), again) == [Dispatch("web-2", 1, 101, W[0])]
    runs = msgspec.structs.replace(again, attempt=1, worker=W[0])
    assert step(controller, 4, GatewayLost("web"), runs) == []
    step(controller, 5, finished("web-2"))
    assert controller.router.requests == {}


def test_a_cancelled_waiting_request_is_forgotten() -> None:
    controller = make_controller(workers=1)
    step(controller, 0, arrived("r"), RequestCancelled("r"))
    assert controller.router.requests == {}


def test_a_failed_load_is_tried_again_after_its_time() -> None:
    controller = make_controller(workers=1, load_retry_ns=100)
    step(controller, 0, *joined(W[0]))
    assert controller.step(10, [HoldingFailed(HoldingId(1, W[0]), "disk")]) == [WakeAt(110)]
    assert step(controller, 109, Tick()) == []
    retried = step(controller, 110, Tick())
    assert [type(command) for command in retried] == [ScaleDecided, PlanMade, StartHolding]


@pytest.mark.parametrize("is_draining", [False, True])
def test_an_instance_whose_first_run_fails_is_a_failed_load(is_draining: bool) -> None:
    """It was reported as loaded: only computing shows that it cannot."""
    controller = serving(2, 2, load_retry_ns=100, instances_max=2)
    step(controller, 1, arrived("r"))
    if is_draining:
        step(controller, 2, MembersLeave((W[0],)))
    step(controller, 3, HoldingFailed(HoldingId(101, W[0]), "no such operation"))
    assert 101 not in controller.fleet.instances
    state = controller.models["m"]
    assert state.load_failures.in_a_row == 1
    assert 102 in controller.fleet.instances, "the other one serves on"


def test_a_plan_that_cannot_be_made_takes_no_number() -> None:
    """It is asked for in every step."""
    device = msgspec.structs.replace(DEVICE, reads_files=False)
    controller = make_controller(workers=1)
    step(controller, 0, WorkerJoined(W[0], device))
    for now_ns in range(1, 10):
        step(controller, now_ns, arrived(f"r{now_ns}"))
    assert controller.planning.last_id == 0


def test_only_one_worker_reads_storage_and_the_others_follow_in_a_chain() -> None:
    controller = make_controller(workers=3, models=(make_policy(least=3, most=3),))
    (plan,) = plans_of(step(controller, 0, *joined(*W[:3])))
    assert plan.routes() == ("storage -> w0.0 -> w1.0 -> w2.0",)


def test_who_comes_later_follows_a_copy_that_is_still_arriving() -> None:
    controller = make_controller(workers=1, models=(make_policy(least=2, most=2),))
    assert loads_of(step(controller, 0, *joined(W[0]))) == [load_order(2, W[0], 1, None)]
    assert loads_of(step(controller, 1, *joined(W[1]))) == [load_order(4, W[1], 3, W[0])]


def test_capacity_is_measured_where_it_is_not_configured() -> None:
    controller = Controller(
        ControllerConfig((ModelPolicy(SPEC, 1, 2),), workers_expected=2, warm_spares="off")
    )
    commands = step(controller, 0, *joined(W[0], W[1]))
    assert [c.measure_capacity for c in loads_of(commands)] == [True]
    step(controller, 1, arrived("flood", 10**6))
    measured = CapacityMeasured("cpu", "m", 1000, 100)
    commands = step(controller, 2, measured, *loaded(HoldingId(1, W[0])))
    assert [c.measure_capacity for c in loads_of(commands)] == [False]


def test_a_restarted_controller_adopts_and_orders_nothing() -> None:
    controller = make_controller(workers=3, epoch=1)
    running = RequestArrived("r", "m", 10, 5, attempt=1, worker=W[1])
    assert step(controller, 0, *adopted(2), running, *joined(W[2])) == []
    assert [i.id for i in living(controller)] == [101, 102]
    assert [record.id for record in controller.router.on_worker(W[1])] == ["r"]
    assert step(controller, 1, RequestEnded("r", 1, Outcome.FINISHED, 5)) == []
    assert controller.stale_events == 0


def test_a_restarted_controller_counts_lost_attempts_from_its_own_start_on() -> None:
    """Which of the earlier attempts were given back is not known."""
    controller = make_controller(workers=2, epoch=1, request_attempts_max=2)
    again = RequestArrived("r", "m", 10, 5, attempt=3)
    assert step(controller, 0, *adopted(2), again) == [Dispatch("r", 4, 101, W[0])]
    assert Dispatch("r", 5, 102, W[1]) in step(controller, 1, WorkerLost(W[0], "killed"))
    commands = step(controller, 2, WorkerLost(W[1], "killed"))
    assert [c.request for c in commands if isinstance(c, FailRequest)] == ["r"]


def test_what_a_worker_was_asked_that_is_lost_before_it_joined_goes_to_others() -> None:
    """Gateways announce that, and its connection ends before its first word has come."""
    controller = make_controller(workers=2, epoch=1)
    asked = RequestArrived("r", "m", 10, 5, attempt=1, worker=W[1])
    assert step(controller, 0, *adopted(1), asked, *joined(W[2])) == []
    assert step(controller, 1, WorkerLost(W[1], "killed")) == [Dispatch("r", 2, 101, W[0])]
    assert step(controller, 2, RequestEnded("r", 1, Outcome.WORKER_LOST, 0)) == []
    assert controller.stale_events == 1, "the gateway's own news of that is late"


def test_a_restarted_controller_adopts_a_load_under_way() -> None:
    controller = make_controller(workers=1, epoch=1)
    order = load_order(101, W[0], 7, None)
    assert step(controller, 0, rejoined(report(order, watermark=1)), arrived("r")) == []
    news = FirstByteArrived(order.holding), HoldingCompleted(order.holding, 60)
    assert step(controller, 1, *news) == [Dispatch("r", 1, 101, W[0])]


def test_ids_of_an_earlier_life_are_not_used_again() -> None:
    controller = make_controller(workers=1, epoch=1)
    commands = step(controller, 0, *joined(W[0]))
    assert instances_of(loads_of(commands)) == [IDS_PER_EPOCH + 2]


def test_an_instance_with_requests_that_nobody_announced_yet_is_not_released() -> None:
    """After a restart the workers may be back long before the gateway."""
    controller = make_controller(workers=2, epoch=1)
    step(controller, 0, *adopted(2), reported(101, running=1), reported(102, running=1))
    commands = step(controller, LOW_NS, Tick())
    assert commands == [scaled(2, 1, "idle"), Drain(102)]
    assert step(controller, LOW_NS + 1, Tick()) == []
    assert step(controller, LOW_NS + 2, reported(102, queued=7)) == []
    assert step(controller, LOW_NS + 3, reported(102)) == [drop(102, W[1])]


def test_the_next_incarnation_ends_the_one_before() -> None:
    """Its connection may be seen before the end of the old one."""
    controller = serving(workers=2, instances=2)
    step(controller, 1, arrived("r"))
    again = WorkerRef(0, 1)
    commands = step(controller, 2, *joined(again))
    assert Dispatch("r", 2, 102, W[1]) in commands
    assert controller.fleet.is_alive(again)
    assert not controller.fleet.is_alive(W[0])
    step(controller, 3, WorkerLost(W[0], "late"), *joined(W[0]))
    assert controller.fleet.is_alive(again)
    assert controller.stale_events == 2


def test_more_instances_than_allowed_are_shed_at_once() -> None:
    controller = serving(workers=4, instances=4, instances_max=2)
    serving_now = [i for i in living(controller) if i.state is InstanceState.SERVING]
    assert len(serving_now) == 2


@pytest.mark.parametrize(
    "event",
    [
        WorkerLost(WorkerRef(9), "?"),
        WorkerLost(WorkerRef(0, 3), "?"),
        WorkerJoined(W[0], DEVICE),
        LiveStarted(HoldingId(5, W[0])),
        RoleChanged(HoldingId(5, W[0]), Role.DECODE),
        FirstByteArrived(HoldingId(5, W[0])),
        LayerArrived(HoldingId(5, W[0]), 1, 2),
        HoldingCompleted(HoldingId(5, W[0]), 60),
        HoldingFailed(HoldingId(5, W[0]), "?"),
        HoldingDropped(HoldingId(5, W[0])),
        FeedFailed(HoldingId(5, W[0]), W[1], "?"),
        FeedFailed(HoldingId(5, W[0]), W[1], "?", is_stalled=True),
        LayerArrived(HoldingId(5, H[0]), 1, 2),
        HoldingCompleted(HoldingId(5, H[0]), 60),
        HoldingFailed(HoldingId(5, H[0]), "?"),
        HoldingDropped(HoldingId(5, H[0])),
        WorkerLost(H[0], "?"),
        ModelAdded(make_policy()),
        ModelRemoved("unknown-model"),
        RequestCancelled("nobody"),
        RequestEnded("nobody", 1, Outcome.FINISHED),
        RequestEnded("r", 7, Outcome.FINISHED),
        RequestArrived("x", "unknown-model", 1, 1, attempt=1, worker=W[0]),
        arrived("r"),
        CapacityMeasured("cpu", "unknown-model", 1, 1),
        reported(77),
    ],
)
def test_late_news_is_stale_and_changes_nothing(event: object) -> None:
    controller = serving(workers=1, instances=1)
    step(controller, 1, arrived("r"))
    before = repr(controller)
    assert step(controller, 2, event) == []
    assert controller.stale_events == 1
    assert repr(controller) == before


def test_a_request_whose_end_never_reached_its_gateway_is_run_again() -> None:
    controller = serving(workers=2, instances=2)
    assert step(controller, 1, arrived("r")) == [Dispatch("r", 1, 101, W[0])]
    # The worker says that it is finished and dies; its last tokens never came to the gateway.
    step(controller, 2, finished("r"))
    step(controller, 3, WorkerLost(W[0], "killed"))
    again = RequestArrived("r", "m", 10, 5, attempt=1)
    commands = step(controller, 4, RequestEnded("r", 1, Outcome.WORKER_LOST), again)
    assert commands == [Dispatch("r", 2, 102, W[1])]


def test_a_chain_is_continued_at_its_tail_while_its_source_is_read() -> None:
    controller = serving(workers=3, instances=1)
    first = step(controller, 1, arrived("a", 950))
    assert loads_of(first) == [load_order(2, W[1], 1, W[0])]
    second = step(controller, 2, arrived("b", 1500))
    assert loads_of(second) == [load_order(4, W[2], 3, W[1])]


def test_a_request_for_a_model_that_is_not_served_fails_by_name() -> None:
    """It may have waited in the gateway while its model left."""
    controller = serving(workers=1, instances=1)
    late = RequestArrived("x", "gone", 1, 1)
    assert step(controller, 1, late) == [FailRequest("x", "gone is not served")]


def test_a_move_that_cannot_be_raises_with_the_story() -> None:
    controller = serving(workers=1, instances=1)
    with pytest.raises(InvalidTransition, match=r"<Instance 101 SERVING .* adopted as SERVING"):
        controller.fleet.move(controller.fleet.instances[101], LiveStarted)


def test_a_leader_that_was_told_late_may_have_everything() -> None:
    """It says that it takes requests, which it does anyway."""
    controller = serving(workers=1, instances=1)
    assert controller.step(1, [LiveStarted(HoldingId(101, W[0]))]) == []
    assert controller.stale_events == 0


def test_bytes_that_were_not_ordered_away_cannot_be_dropped() -> None:
    controller = serving(workers=1, instances=1)
    with pytest.raises(InvalidMove, match=r"<Holding 101@w0.0 of m, WHOLE> cannot take Holding"):
        controller.step(1, [HoldingDropped(HoldingId(101, W[0]))])


def test_time_does_not_go_back() -> None:
    controller = make_controller(workers=1)
    controller.step(5, [])
    with pytest.raises(AssertionError, match="time went back from 5 to 4"):
        controller.step(4, [])


def test_a_model_that_fits_nowhere_is_not_loaded() -> None:
    small = msgspec.structs.replace(DEVICE, arena_bytes=59)
    controller = make_controller(workers=1)
    assert step(controller, 0, WorkerJoined(W[0], small)) == []


def make_pair_controller(workers: int) -> Controller:
    """A controller of a model whose instances take two workers each."""
    spec = msgspec.structs.replace(SPEC, tp_size=2)
    return make_controller(workers, models=(make_policy(most=4, spec=spec),))


def loaded_pair(plan: int, *workers: WorkerRef) -> list[AnyEvent]:
    return [event for worker in workers for event in loaded(HoldingId(plan, worker))]


def half_order(rank: int) -> StartHolding:
    return load_order(101, W[rank], 7, None, rank=rank, workers=(W[0], W[1]))


def serving_pair(workers: int) -> Controller:
    controller = make_pair_controller(workers)
    step(controller, 0, *joined(*W[:workers]))
    step(controller, 1, *loaded_pair(1, W[0], W[1]))
    return controller


def test_an_instance_takes_a_worker_per_rank_and_serves_when_all_are_loaded() -> None:
    controller = make_pair_controller(workers=3)
    commands = step(controller, 0, *joined(*W[:3]), arrived("r"))
    assert [(c.holding.member, c.rank) for c in loads_of(commands)] == [
        (W[0], 0),
        (W[1], 1),
    ]
    assert step(controller, 1, *loaded(HoldingId(1, W[0]))) == []
    assert controller.pool.count_holders("m") == 0
    assert step(controller, 2, *loaded(HoldingId(1, W[1]))) == [Dispatch("r", 1, 2, W[0])]


def test_chains_of_a_pair_join_equal_ranks() -> None:
    controller = serving_pair(workers=6)
    commands = step(controller, 2, arrived("r", 1500))
    (plan,) = plans_of(commands)
    assert plan.routes() == ("w0.0 -> w2.0 -> w4.0", "w1.0 -> w3.0 -> w5.0")
    assert [(c.duty, c.rank, c.holding.member) for c in loads_of(commands)] == [
        (Duty(4, (W[2], W[3])), 0, W[2]),
        (Duty(4, (W[2], W[3])), 1, W[3]),
        (Duty(5, (W[4], W[5])), 0, W[4]),
        (Duty(5, (W[4], W[5])), 1, W[5]),
    ]


def test_one_lost_rank_loses_the_instance_and_frees_the_others() -> None:
    controller = serving_pair(workers=2)
    assert step(controller, 2, arrived("r")) == [Dispatch("r", 1, 2, W[0])]
    assert step(controller, 3, WorkerLost(W[1], "killed")) == [drop(1, W[0], REMAINDER)]
    assert step(controller, 4, HoldingDropped(HoldingId(1, W[0]))) == []
    next_life = WorkerRef(1, 1)
    commands = step(controller, 5, *joined(next_life))
    orders = loads_of(commands)
    assert [order.holding.member for order in orders] == [W[0], next_life]
    again = step(controller, 6, *loaded_pair(orders[0].holding.plan, W[0], next_life))
    assert again == [Dispatch("r", 2, instances_of(orders)[0], W[0])]


def test_a_drained_pair_is_gone_when_both_ranks_are_dropped() -> None:
    controller = serving_pair(workers=4)
    step(controller, 2, arrived("r", 1500))
    step(controller, 3, *loaded_pair(3, W[2], W[3]), finished("r"))
    step(controller, 2000 * MS, Tick())
    commands = step(controller, 2000 * MS + LOW_NS, Tick())
    first, second = drop(3, W[2]), drop(3, W[3])
    assert commands == [scaled(2, 1, "idle"), Drain(4), first, second]
    assert step(controller, 2001 * MS + LOW_NS, HoldingDropped(first.holding)) == []
    assert controller.fleet.instances[4].state is InstanceState.DRAINING
    assert step(controller, 2002 * MS + LOW_NS, HoldingDropped(second.holding)) == []
    assert list(controller.fleet.instances) == [2]


def test_what_a_first_rank_serves_next_is_not_lost_with_the_last_rank_of_before() -> None:
    single = make_policy("n", least=0, spec=msgspec.structs.replace(SPEC, name="n"))
    pair = make_policy(least=0, spec=msgspec.structs.replace(SPEC, tp_size=2))
    controller = make_controller(2, models=(pair, single))
    step(controller, 0, *joined(*W[:2]), arrived("r"))
    step(controller, 1, *loaded_pair(1, W[0], W[1]))
    gone = step(controller, 2, finished("r"), ModelRemoved("m"))
    assert drop(1, W[0]) in gone
    step(controller, 3, HoldingDropped(HoldingId(1, W[0])))
    (load,) = loads_of(step(controller, 4, arrived("s", model="n")))
    (sent,) = step(controller, 5, *loaded(load.holding))
    assert sent == Dispatch("s", 1, load.duty.instance, W[0])
    lost = step(controller, 6, WorkerLost(W[1], "killed"))
    assert not [c for c in lost if isinstance(c, Dispatch)]
    assert controller.router.on_worker(W[0]), "it runs"


def test_a_pair_is_adopted_when_both_ranks_have_joined_whatever_they_said_meanwhile() -> None:
    controller = make_pair_controller(workers=2)
    step(controller, 0, rejoined(report(half_order(rank=0), watermark=2)))
    step(controller, 1, HoldingCompleted(HoldingId(7, W[0]), 60), arrived("r"))
    last = rejoined(report(half_order(rank=1)))
    assert step(controller, 2, last) == [Dispatch("r", 1, 101, W[0])]


def test_half_an_instance_is_given_up_when_nobody_can_have_the_other_half() -> None:
    controller = make_pair_controller(workers=2)
    assert step(controller, 0, rejoined(report(half_order(rank=0)))) == []
    assert step(controller, 1, *joined(W[1])) == [drop(7, W[0], REMAINDER)]
    commands = step(controller, 2, HoldingDropped(HoldingId(7, W[0])))
    assert [order.holding.member for order in loads_of(commands)] == [W[0], W[1]]


def test_requests_beyond_all_places_are_a_load_and_what_loads_counts() -> None:
    """Few prompt tokens, no backlog to speak of: 100 requests on an instance with 10 places."""
    controller = serving(8, 1, sequences_max=10)
    burst = [arrived(f"r{n}", 1) for n in range(30)]
    commands = step(controller, MS, *burst)
    assert commands[0] == scaled(1, 4, "waiting_requests")
    orders = loads_of(commands)
    assert len(orders) == 3
    # The need is answered: nobody loads twice for it.
    assert loads_of(step(controller, 2 * MS, reported(101, 10))) == []
    assert loads_of(step(controller, 3 * MS, *loaded(orders[0].holding))) == []


def test_nothing_goes_while_requests_wait_for_kv() -> None:
    """Two instances with hundreds of places, and blocks for three requests."""
    controller = serving(2, 2)
    step(controller, MS, *(arrived(f"r{n}", 1) for n in range(20)))
    full = [full_of(101, 3, 5), full_of(102, 3, 5)]
    for now_ms in range(2, 3000, 100):
        commands = step(controller, now_ms * MS, *full)
        assert not [c for c in commands if isinstance(c, Drain)], f"after {now_ms} ms"
    ends = [finished(f"r{n}") for n in range(20)]
    step(controller, 3000 * MS, reported(101), reported(102), *ends)
    later = [c for t in (3001, 5000, 6000) for c in step(controller, t * MS, Tick())]
    assert Drain(102) in later


def full_of(instance: int, running: int, left_out: int) -> InstanceReported:
    """It has no KV for those left out."""
    return InstanceReported(instance, (), running, 0, 10, 100, 1, left_out=left_out)


def test_the_last_that_serves_stays_while_others_load() -> None:
    """Their need is over before they are there; another model of higher priority wants a worker."""
    models = (make_policy("m"), make_policy("high", 0, priority=1))
    controller = make_controller(3, models=models)
    step(controller, 0, *serves(W[0], 101), *joined(W[1], W[2]))
    orders = loads_of(step(controller, MS, arrived("r", 1700)))
    assert len(orders) == 2
    step(controller, 2 * MS, finished("r"))
    events: list[AnyEvent]
    for now_ms in (1500, 2500, 3500):
        events = [Tick()] if now_ms < 3500 else [arrived("h", 10, "high")]
        commands = step(controller, now_ms * MS, *events)
        assert not [c for c in commands if isinstance(c, Drain)], f"at {now_ms} ms"
    commands = step(controller, 3600 * MS, *loaded(orders[0].holding))
    assert [c.instance for c in commands if isinstance(c, Drain)]
    serving_now = controller.fleet.serving(controller.models["m"].entry.part)
    assert len(serving_now) == 1
