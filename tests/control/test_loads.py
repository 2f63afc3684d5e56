"""Feeds that fail: who gets which other sender, who is to blame for a stall, and that it ends."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    MS,
    SPEC,
    H,
    W,
    adopted,
    arrived,
    copy_order,
    host_joined,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    rejoined,
    report,
    serving,
    step,
    whole,
)

from livescale.control.controller import Controller
from livescale.control.planning.loads import Loads
from livescale.control.state.holdings import Holding, HoldingState
from livescale.control.state.pool import ParameterPool
from livescale.messages.commands import AmendHolding, AnyCommand, StartHolding
from livescale.messages.events import (
    FeedFailed,
    FirstByteArrived,
    HoldingFailed,
    LayerArrived,
    Tick,
    WorkerLost,
)
from livescale.values.chunks import Feed
from livescale.values.types import HoldingId, WorkerRef

GRACE_NS = 100 * MS
SECOND_NS = 1000 * MS


def amendments(commands: Sequence[AnyCommand]) -> list[AmendHolding]:
    return [command for command in commands if isinstance(command, AmendHolding)]


def of(receiver: int) -> HoldingId:
    """What the worker gets by plan 1."""
    return HoldingId(1, W[receiver])


def chain(workers: int, **config: object) -> Controller:
    """w0 serves and feeds w1, which feeds w2, and so on; the loads belong to plan 1."""
    controller = serving(workers, 1, instances_max=workers, **config)
    (first, *rest) = loads_of(step(controller, 1, arrived("flood", 10**5)))
    assert [order.feeds for order in (first, *rest)] == [whole(W[n]) for n in range(workers - 1)]
    assert first.holding == of(1)
    return controller


def stalled(receiver: int, upstream: int) -> FeedFailed:
    return FeedFailed(of(receiver), W[upstream], "no byte came", is_stalled=True)


def broken(receiver: int, upstream: int) -> FeedFailed:
    return FeedFailed(of(receiver), W[upstream], "corrupt bytes")


def test_a_chain_closes_over_a_lost_member() -> None:
    """The one behind it is fed by its own upstream, though the source is a holder, too."""
    controller = chain(5)
    commands = step(controller, 2, WorkerLost(W[2], "power"))
    assert amendments(commands) == [AmendHolding(of(3), whole(W[1]))]


def test_who_reads_from_a_load_that_failed_gets_another_sender() -> None:
    """Else the one that failed might be told to get the model from its own readers."""
    controller = chain(3)
    commands = step(controller, 2, HoldingFailed(of(1), "no memory"))
    assert amendments(commands) == [AmendHolding(of(2), whole(W[0]))]


def test_two_lost_members_in_a_row_leave_one_way_around() -> None:
    controller = chain(5)
    commands = step(controller, 2, WorkerLost(W[2], "power"), WorkerLost(W[3], "power"))
    ((amended),) = amendments(commands)
    assert amended.holding.member == W[4]
    assert amended.feeds in (whole(W[0]), whole(W[1]))


def test_whoever_delivered_corrupt_bytes_is_not_asked_again() -> None:
    controller = make_controller(workers=2, instances_max=2, agents_expected=1)
    copy = host_joined(0, report(copy_order(H[0], 900, None)))
    step(controller, 0, *adopted(1), *joined(W[1]), copy)
    (order,) = loads_of(step(controller, 1, arrived("flood", 10**5)))
    upstreams = [feed.upstream.worker for feed in order.feeds]
    other = next(ref for ref in (W[0], H[0]) if ref not in upstreams)
    failed = [FeedFailed(order.holding, u, "corrupt bytes") for u in upstreams]
    assert amendments(step(controller, 2, failed[0])) == [AmendHolding(order.holding, whole(other))]
    again = FeedFailed(order.holding, other, "corrupt bytes")
    assert amendments(step(controller, 3, again)) == [AmendHolding(order.holding, whole(None))]
    assert amendments(step(controller, 4, again)) == [], "it was replaced: late news"


def test_a_stalled_member_is_spliced_out_and_those_behind_it_are_not_blamed() -> None:
    controller = chain(5)
    reports = [stalled(4, 3), stalled(3, 2), stalled(2, 1)]
    assert amendments(step(controller, 2, *reports)) == [], "all should have spoken first"
    commands = step(controller, 2 + GRACE_NS, Tick())
    assert amendments(commands) == [AmendHolding(of(2), whole(W[0]))]
    # Those behind may take their time: their senders have just got other feeds.
    assert amendments(step(controller, 3 + 20 * GRACE_NS, Tick())) == []


def test_who_does_not_go_on_behind_a_repaired_feed_is_looked_at_again() -> None:
    controller = chain(4)
    step(controller, 2, stalled(3, 2), stalled(2, 1))
    step(controller, 2 + GRACE_NS, Tick())
    # w2 has a layer more; w3 should have, too.
    progress = LayerArrived(of(2), layer=0, watermark=1)
    step(controller, 3 + GRACE_NS, FirstByteArrived(of(2)), progress)
    assert amendments(step(controller, 2 + 2 * GRACE_NS, Tick())) == []
    commands = step(controller, 3 + 2 * GRACE_NS, Tick())
    assert amendments(commands) == [AmendHolding(of(3), whole(W[0]))]


def test_who_goes_on_by_itself_is_forgiven() -> None:
    controller = chain(3)
    step(controller, 2, stalled(2, 1))
    step(controller, 3, FirstByteArrived(of(2)), LayerArrived(of(2), layer=0, watermark=1))
    assert amendments(step(controller, 2 + GRACE_NS, Tick())) == []


def reading(receiver: int, *feeds: Feed) -> StartHolding:
    order = load_order(101 + receiver, W[receiver], 1, None)
    return msgspec.structs.replace(order, feeds=feeds)


def test_where_receivers_feed_one_another_the_oldest_stall_is_taken_for_the_cause() -> None:
    """A binomial pipeline: nobody stands in front of all stalls."""
    controller = make_controller(workers=3, epoch=1, instances_max=3)
    loading = [
        rejoined(report(reading(receiver, *whole(W[other]), *whole(W[0])), watermark=0))
        for receiver, other in ((1, 2), (2, 1))
    ]
    step(controller, 0, *adopted(1), *loading)
    step(controller, 1, stalled(1, 2))
    step(controller, 2, stalled(2, 1))
    assert amendments(step(controller, 2 + GRACE_NS, Tick())) == []
    (amended,) = amendments(step(controller, 1 + 5 * GRACE_NS, Tick()))
    assert (amended.holding.member, amended.feeds) == (W[1], (*whole(W[0]), *whole(W[0])))


@given(
    st.permutations([stalled(1, 2), stalled(2, 1), broken(1, 0), broken(2, 0), stalled(3, 1)]),
    st.lists(st.integers(1, 3 * GRACE_NS), min_size=5, max_size=5),
)
def test_no_circle_of_stalls_lasts_whatever_was_replaced_in_it(
    troubles: list[FeedFailed], pauses_ns: list[int]
) -> None:
    """Of two receivers that feed one another each may wait for a layer that the other one has not
    verified. That either of them got another feed excuses it for a while only."""
    controller = make_controller(workers=4, epoch=1, instances_max=4)
    feeds = {1: (*whole(W[2]), *whole(W[0])), 2: (*whole(W[1]), *whole(W[0])), 3: whole(W[1])}
    loading = [
        rejoined(report(reading(receiver, *wanted), watermark=0))
        for receiver, wanted in feeds.items()
    ]
    now_ns = 0
    step(controller, now_ns, *adopted(1), *loading)
    for trouble, pause_ns in zip(troubles, pauses_ns, strict=True):
        now_ns += pause_ns
        step(controller, now_ns, trouble)
    for _ in range(40):
        now_ns += GRACE_NS
        step(controller, now_ns, Tick())
    awaited = {
        load.receiver: [*load.stalled, *load.excused]
        for load in controller.loads.open.values()
        if load.is_waiting
    }
    for receiver in awaited:
        reached = [receiver]
        for waiting in reached:
            reached += [w for w in awaited.get(waiting, ()) if w not in reached]
        assert any(w not in awaited for w in reached), f"{receiver} waits in a circle: {awaited}"


def test_senders_that_died_while_no_controller_was_there_are_replaced() -> None:
    controller = make_controller(workers=2, epoch=1)
    held = report(reading(1, *whole(WorkerRef(5))), watermark=1)
    commands = step(controller, 0, *adopted(1), rejoined(held))
    assert amendments(commands) == [AmendHolding(of(1), whole(W[0]))]


def test_loads_that_wait_for_one_another_are_given_other_feeds() -> None:
    """Two controllers that ordered one load each could bring that about. Who reads from one of the
    circle waits as well; who has another way does not."""
    controller = make_controller(workers=5, epoch=1, instances_max=5)
    feeds = {1: whole(W[2]), 2: whole(W[1]), 3: whole(W[2]), 4: whole(W[0])}
    loading = [
        rejoined(report(reading(receiver, *wanted), watermark=0))
        for receiver, wanted in feeds.items()
    ]
    commands = step(controller, 0, *adopted(1), *loading)
    amended = {order.holding.member: order.feeds for order in amendments(commands)}
    assert list(amended) == [W[1], W[2], W[3]]
    ways = {load.receiver: load.feeds for load in controller.loads.open.values()}
    for receiver in amended:
        reached, seen = receiver, set()
        while reached in ways and reached not in seen:
            seen.add(reached)
            (feed,) = ways[reached]
            reached = getattr(feed.upstream, "worker", W[0])
        assert reached == W[0], f"{receiver} waits for {reached}"


@given(st.data(), st.integers(3, 6))
def test_however_feeds_fail_nobody_waits_for_himself_and_repairs_end(
    data: st.DataObject, workers: int
) -> None:
    controller = chain(workers)
    amended = 0
    for now_ns in range(2, 60):
        reading = [
            (holding, feed.upstream.worker)
            for holding, load in controller.loads.open.items()
            for feed in load.feeds
            if str(feed.upstream) != "storage"
        ]
        if not reading:
            break
        holding, upstream = data.draw(st.sampled_from(reading))
        is_loss = data.draw(st.integers(0, 3)) == 0 and upstream != W[0]
        event = (
            WorkerLost(upstream, "power")
            if is_loss
            else FeedFailed(holding, upstream, "corrupt bytes")
        )
        amended += len(amendments(step(controller, now_ns, event)))
        check_no_circles(controller)
    # Each receiver gives up on every other member at most once.
    assert amended <= (workers - 1) * workers
    assert all(
        str(feed.upstream) == "storage"
        for load in controller.loads.open.values()
        for feed in load.feeds
    )


def check_no_circles(controller: Controller) -> None:
    loads = {holding.member: load for holding, load in controller.loads.open.items()}
    for start in loads:
        seen: list[object] = []
        at: object = start
        while at in loads:
            assert at not in seen, f"{at} waits for itself"
            seen.append(at)
            (feed,) = loads[at].feeds
            at = getattr(feed.upstream, "worker", None)


def test_a_completed_load_needs_no_repair() -> None:
    controller = chain(3)
    step(controller, 2, *loaded(of(1)), stalled(2, 1))
    assert amendments(step(controller, 3, broken(1, 0))) == []


def slow_chain(*copies: int, first_ns: int = SECOND_NS) -> Loads:
    """w1 reads from w0 (in `first_ns`, as predicted), w2 from w1 in a second; these workers have
    copies."""
    pool = ParameterPool()
    for number in copies:
        order = load_order(101 + number, W[number], 101 + number, None)
        pool.add(Holding(order, SPEC.layers, HoldingState.WHOLE), 1, SPEC.size_bytes)
    loads = Loads(pool)
    for receiver, predicted_ns in ((1, first_ns), (2, SECOND_NS)):
        loads.begin(Holding(reading(receiver, *whole(W[receiver - 1]))), predicted_ns)
    loads.blame_slow(0)
    return loads


def failed(loads: Loads) -> list[tuple[WorkerRef, WorkerRef]]:
    return [(load.receiver, lost) for load in loads.open.values() for lost in load.failed]


def test_a_slow_sender_is_replaced_once_and_those_behind_get_their_time_anew() -> None:
    loads = slow_chain(0, 5)
    late_ns = loads.blame_deadlines_ns(0, GRACE_NS)[0]
    loads.blame_slow(late_ns - 1)
    assert failed(loads) == []
    loads.blame_slow(late_ns)
    assert failed(loads) == [(W[1], W[0])]
    assert loads.blame_deadlines_ns(late_ns, GRACE_NS) == [2 * late_ns]
    loads.amend(loads.open[of(1)], whole(W[5]), late_ns)
    # Who was judged is left in peace; then the one behind may turn to somebody else.
    loads.blame_slow(2 * late_ns)
    assert failed(loads) == [(W[2], W[1])]


def test_who_reads_from_a_slow_load_that_is_in_time_waits_for_it() -> None:
    """A cache that is filled by a device which reads storage is as slow as storage."""
    loads = slow_chain(0, 5, first_ns=20 * SECOND_NS)
    due_ns, last_ns = sorted(loads.blame_deadlines_ns(0, GRACE_NS))
    loads.blame_slow(due_ns)
    assert failed(loads) == []
    assert set(loads.blame_deadlines_ns(due_ns, GRACE_NS)) == {last_ns}
    loads.blame_slow(last_ns)
    assert failed(loads) == [(W[1], W[0])]


def test_a_slow_sender_is_better_than_none() -> None:
    loads = slow_chain(0)
    late_ns = loads.blame_deadlines_ns(0, GRACE_NS)[0]
    loads.blame_slow(late_ns)
    assert failed(loads) == []
