"""Guests: members that join for one model get it as one chain, and the pool relies on none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    MS,
    H,
    W,
    arrived,
    copies_of,
    copy_order,
    finished,
    host_joined,
    joined,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    plans_of,
    report,
    serves,
    step,
    whole,
)

from livescale.clusters.topology import Host
from livescale.control.controller import Controller
from livescale.messages.commands import (
    AmendHolding,
    AnyCommand,
    DropHolding,
    ModelGone,
    StartHolding,
)
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    HoldingDropped,
    HoldingFailed,
    HoldingReport,
    LayerArrived,
    MembersLeave,
    ModelRemoved,
    Tick,
    WorkerLost,
)
from livescale.values.chunks import senders
from livescale.values.types import FromStorage, FromWorker, HoldingId, WorkerRef


def guest(
    number: int, *copies: HoldingReport, wants: str = "m", reads_files: bool = False
) -> AgentJoined:
    """One that has nothing but what was told before."""
    host = Host(f"guest{number}", "leaf", 60, reads_files=reads_files, wants=wants)
    return AgentJoined(H[number], host, copies)


def serving(agents: int = 0, **values: object) -> Controller:
    """One worker serves m."""
    controller = make_controller(workers=1, agents_expected=agents, **values)
    step(controller, 0, *serves(W[0], 101))
    return controller


def feeders(orders: Sequence[StartHolding]) -> dict[WorkerRef, WorkerRef]:
    """Who gets everything from whom."""
    found = {}
    for order in orders:
        (upstream,) = senders(order.feeds)
        assert isinstance(upstream, FromWorker)
        found[order.holding.member] = upstream.worker
    return found


def test_guests_that_come_together_are_one_chain() -> None:
    controller = serving()
    commands = step(controller, 1, *(guest(number) for number in range(4)))
    assert len(plans_of(commands)) == 1
    orders = copies_of(commands)
    assert {order.reason for order in orders} == {"a guest wants it"}
    found = feeders(orders)
    assert sorted(found) == [H[number] for number in range(4)]
    assert sorted(found.values()) == sorted([W[0], *sorted(found)[:3]]), "each sends to one"


def test_one_that_comes_later_reads_from_the_end_of_the_chain() -> None:
    controller = serving()
    (first,) = copies_of(step(controller, 1, guest(0)))
    step(controller, 2, LayerArrived(first.holding, layer=0, watermark=1))
    (second,) = copies_of(step(controller, 3, guest(1)))
    assert feeders([second]) == {H[1]: H[0]}, "the source's uplink is in use"


def test_a_guest_gets_what_it_wants_and_nothing_else() -> None:
    policies = (make_policy("m", least=1), make_policy("other", least=0))
    controller = make_controller(workers=1, agents_expected=0, models=policies)
    commands = step(controller, 0, *serves(W[0], 101), guest(0), guest(1, wants="strange"))
    assert [(o.model, o.holding.member) for o in copies_of(commands)] == [("m", H[0])]
    assert copies_of(step(controller, 1, *loaded(copies_of(commands)[0].holding))) == []


def test_the_pool_makes_its_own_copy_all_the_same() -> None:
    controller = serving()
    (order,) = copies_of(step(controller, 1, guest(0)))
    step(controller, 2, *loaded(order.holding))
    (own,) = copies_of(step(controller, 3, host_joined(1)))
    assert own.holding.member == H[1]
    commands = step(controller, 4, *loaded(own.holding))
    assert not any(isinstance(command, DropHolding) for command in commands)
    assert controller.status().models["m"].host_copies == 1


def test_a_guests_copy_is_never_what_keeps_a_model_in_the_pool() -> None:
    idle_ns = 10 * MS
    policies = (make_policy("m", least=0, idle_ns=idle_ns),)
    controller = make_controller(workers=1, agents_expected=0, settle_ns=0, models=policies)
    step(controller, 0, *serves(W[0], 101))
    (order,) = copies_of(step(controller, 1, guest(0)))
    step(controller, 2, *loaded(order.holding))
    step(controller, 3, arrived("r"))
    step(controller, 4, finished("r"))
    for at_ns in (4 + idle_ns, 1001 * MS, 2001 * MS):
        commands = step(controller, at_ns, Tick())
        assert HoldingId(101, W[0]) not in [
            command.holding for command in commands if isinstance(command, DropHolding)
        ]


def test_instances_may_be_loaded_from_a_guest() -> None:
    policies = (make_policy("m", least=1),)
    controller = make_controller(workers=2, agents_expected=0, models=policies)
    step(controller, 0, *joined(W[0]), guest(0, report(copy_order(H[0], 900, None))))
    (order,) = loads_of(step(controller, 10_000 * MS, Tick()))
    assert order.feeds == whole(H[0])


def test_files_are_read_only_where_they_are_and_by_one() -> None:
    policies = (make_policy("m", least=0),)
    controller = make_controller(workers=0, agents_expected=0, settle_ns=0, models=policies)
    assert copies_of(step(controller, 0, guest(0), guest(1))) == [], "neither has them"
    (first,) = copies_of(step(controller, 1, guest(2, reads_files=True)))
    assert (first.holding.member, first.feeds) == (H[2], whole(None))
    found = feeders(copies_of(step(controller, 2, LayerArrived(first.holding, 0, 1))))
    assert sorted(found) == [H[0], H[1]]
    assert H[2] in found.values()


def test_a_source_that_dies_is_replaced() -> None:
    controller = make_controller(workers=2, agents_expected=0)
    step(controller, 0, *serves(W[0], 101), *serves(W[1], 102))
    (order,) = copies_of(step(controller, 1, guest(0)))
    (source,) = feeders([order]).values()
    other = W[1] if source == W[0] else W[0]
    commands = step(controller, 2, WorkerLost(source, "power"))
    (amended,) = [command for command in commands if isinstance(command, AmendHolding)]
    assert (amended.holding, amended.feeds) == (order.holding, whole(other))


def test_a_load_that_failed_is_tried_again_after_its_time_and_does_not_hold_up_the_pool() -> None:
    controller = serving(load_retry_ns=100)
    (order,) = copies_of(step(controller, 1, guest(0)))
    assert copies_of(step(controller, 10, HoldingFailed(order.holding, "the sender is gone"))) == []
    (own,) = copies_of(step(controller, 11, host_joined(1)))
    assert own.holding.member == H[1], "the pool makes its copy meanwhile"
    assert copies_of(step(controller, 109, Tick())) == []
    (again,) = copies_of(step(controller, 110, Tick()))
    assert again.holding.member == H[0]


def test_what_is_withdrawn_goes_from_guests_too() -> None:
    controller = serving()
    (order,) = copies_of(step(controller, 1, guest(0)))
    step(controller, 2, *loaded(order.holding))
    commands = step(controller, 3, ModelRemoved("m"))
    assert DropHolding(order.holding, "withdrawn") in commands
    commands = step(controller, 4, HoldingDropped(order.holding))
    commands += step(controller, 5, HoldingDropped(HoldingId(101, W[0])))
    commands += step(controller, 6, Tick())
    assert any(isinstance(command, ModelGone) for command in commands)


@given(st.lists(st.sampled_from(["joins", "layer", "done", "lost", "failed"]), max_size=25))
def test_whatever_befalls_guests_each_that_stays_is_asked_to_load_once_at_a_time(
    story: list[str],
) -> None:
    """And the pool's own copy is left alone."""
    controller = serving(load_retry_ns=10)
    joined_so_far, open_orders, whole_of = 0, {}, set()
    now_ns = 0
    for word in [*story, "joins", "done"]:
        now_ns += 1000
        events: list[AnyEvent] = [Tick()]
        first = next(iter(open_orders.values()), None)
        if word == "joins" and joined_so_far < len(H):
            events = [guest(joined_so_far)]
            joined_so_far += 1
        elif word == "layer" and first is not None:
            events = [LayerArrived(first.holding, 0, 1)]
        elif word == "done" and first is not None:
            events = loaded(first.holding)
            whole_of.add(open_orders.pop(first.holding.member).holding.member)
        elif word == "failed" and first is not None:
            events = [HoldingFailed(first.holding, "no way")]
            del open_orders[first.holding.member]
        elif word == "lost" and first is not None:
            events = [WorkerLost(first.holding.member, "power")]
            del open_orders[first.holding.member]
        commands: list[AnyCommand] = step(controller, now_ns, *events)
        for order in copies_of(commands):
            agent = order.holding.member
            assert agent not in open_orders, order
            assert agent not in whole_of, order
            assert FromStorage() not in senders(order.feeds)
            open_orders[agent] = order
        controller.validate()
        assert not any(isinstance(command, DropHolding) for command in commands)


def test_a_guest_is_none_of_the_agents_that_a_new_controller_waits_for() -> None:
    """Before, copies were ordered anew that a host still had."""
    policies = (make_policy("m", least=0), make_policy("n", least=0))
    controller = make_controller(1, agents_expected=2, models=policies)
    commands = step(controller, 0, *joined(W[0]), guest(2, wants="x"), host_joined(0))
    there = [report(copy_order(H[1], 50 + number, None, m)) for number, m in enumerate("mn")]
    commands += step(controller, 1, host_joined(1, *there))
    assert copies_of(commands) == []


@pytest.mark.parametrize("reads_files", [False, True])
def test_the_last_host_with_a_model_does_not_go_because_a_guest_has_it(reads_files: bool) -> None:
    """Nor because the guest has the files."""
    controller = make_controller(0, agents_expected=1, models=(make_policy(least=0),))
    (copy,) = copies_of(step(controller, 0, host_joined(0)))
    step(controller, 1, *loaded(copy.holding))
    (of_guest,) = copies_of(step(controller, 2, guest(2, reads_files=reads_files)))
    step(controller, 3, *loaded(of_guest.holding))
    step(controller, 4, MembersLeave((H[0],)))
    assert controller.status().free == ()
