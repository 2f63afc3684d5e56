"""Plans know which links rows and KV cross, and stay away from them where others are as good."""

from __future__ import annotations

import msgspec
import pytest
from stories import (
    DEVICE,
    W,
    adopted,
    arrived,
    joined,
    loaded,
    loads_of,
    make_controller,
    plans_of,
    reported,
    step,
)

from livescale.clusters.topology import Leaf
from livescale.control.controller import Controller
from livescale.control.state.config import ANY_PAIR
from livescale.messages.commands import AnyCommand, StartHolding
from livescale.messages.events import AnyEvent, InstanceReported, WorkerJoined, WorkerLost
from livescale.messages.scale_plan import ScalePlan
from livescale.values.routes import Partner
from livescale.values.types import HoldingId

RATE = 1000
SIZE_BYTES = 60


def controller_of(
    instances: int, workers: int, leaf_of: str = "", avoids_serving: bool = True
) -> Controller:
    """Instances 101, 102, … serve on w0, w1, …; the others are spare. A letter of `leaf_of` names
    each worker's leaf, whose links to the spine are as fast as a NIC."""
    letters = leaf_of or "a" * workers
    leaves = tuple(Leaf(name, RATE, RATE) for name in dict.fromkeys(letters))
    controller = make_controller(
        workers,
        live_order="zigzag",
        live_over_ns=0,
        pairs=ANY_PAIR,
        leaves=leaves,
        avoids_serving=avoids_serving,
    )
    events = [*adopted(instances), *joined(*W[instances:workers])]
    step(controller, 0, *(on_leaf(event, letters) for event in events))
    return controller


def on_leaf(event: AnyEvent, letters: str) -> AnyEvent:
    if not isinstance(event, WorkerJoined):
        return event
    leaf = letters[event.worker.worker]
    device = msgspec.structs.replace(
        DEVICE, leaf=leaf, uplink_bytes_per_s=RATE, downlink_bytes_per_s=RATE
    )
    return msgspec.structs.replace(event, device=device)


def full(kv_blocks_used: int) -> InstanceReported:
    """What instance 101 has in memory asks for more instances."""
    return msgspec.structs.replace(reported(101, running=1), kv_blocks_used=kv_blocks_used)


def planned(controller: Controller, now_ns: int, *events: AnyEvent) -> ScalePlan:
    (plan,) = plans_of(step(controller, now_ns, *events))
    return plan


def met(plan: ScalePlan) -> dict[str, int]:
    return {str(use.link): use.serving_bytes for use in plan.links if use.serving_bytes}


def is_helped(order: StartHolding) -> bool:
    """The order begins an instance that works for instance 101 meanwhile."""
    return order.duty is not None and order.duty.gives_to == (Partner(101, W[0]),)


@pytest.mark.parametrize("is_served_first", [True, False])
def test_of_two_that_are_arriving_the_one_that_sends_no_rows_is_read(
    is_served_first: bool,
) -> None:
    """Two loads are under way, one of which helps an instance: whichever began first."""
    controller = controller_of(2, 5)
    busy = [arrived("a", 100)]
    first = step(controller, 1, *(busy if is_served_first else []), full(180))
    second = step(controller, 2, *([] if is_served_first else busy), full(270))
    orders = loads_of([*first, *second])
    helps = [order.holding.member for order in orders if is_helped(order)]
    assert helps == [W[2] if is_served_first else W[3]]
    plan = planned(controller, 3, full(350))
    assert plan.routes() == (f"{W[3] if is_served_first else W[2]} -> {W[4]}",)
    assert plan.serving_bytes == 0


@pytest.mark.parametrize("avoids_serving", [True, False])
def test_a_plan_tells_what_serves_what_it_meets_and_what_it_avoided(avoids_serving: bool) -> None:
    """The first of two that are arriving helps an instance; the other one could be read, too. A
    planner that is not told reads the first."""
    controller = controller_of(2, 5, avoids_serving=avoids_serving)
    step(controller, 1, arrived("a", 100), full(180))
    step(controller, 2, full(270))
    plan = planned(controller, 3, full(350))
    assert [str(link) for link in plan.serving] == ["w2.0 nic out", "w0.0 nic in"]
    if avoids_serving:
        assert plan.routes() == ("w3.0 -> w4.0",)
        assert plan.serving_bytes == 0
        assert plan.avoided == plan.serving
    else:
        assert plan.routes() == ("w2.0 -> w4.0",)
        assert met(plan) == {"w2.0 nic out": SIZE_BYTES}
        assert [str(link) for link in plan.avoided] == ["w0.0 nic in"]


def pair_across_leaves() -> tuple[Controller, HoldingId]:
    """Instance 2 on w1, under leaf b, reads from w0 under leaf a, and helps instance 101 there."""
    controller = controller_of(1, 2, "aba")
    commands = step(controller, 1, arrived("a", 100), full(90))
    (order,) = loads_of(commands)
    assert is_helped(order)
    assert planned_links(commands) == {}
    return controller, order.holding


def planned_links(commands: list[AnyCommand]) -> dict[str, int]:
    (plan,) = plans_of(commands)
    return met(plan)


def joins(letters: str, number: int) -> AnyEvent:
    return on_leaf(joined(W[number])[0], letters)


def test_bytes_that_go_the_way_of_rows_are_counted_on_every_link() -> None:
    """Rows cost less than a second reader at w0, which would take half of its uplink."""
    controller, _ = pair_across_leaves()
    plan = planned(controller, 2, joins("aba", 2), full(180))
    assert plan.routes() == ("w1.0 -> w2.0",)
    assert met(plan) == {
        "w1.0 nic out": SIZE_BYTES,
        "b spine out": SIZE_BYTES,
        "a spine in": SIZE_BYTES,
    }
    assert plan.serving_bytes == 3 * SIZE_BYTES


@pytest.mark.parametrize("is_source_lost", [False, True])
def test_a_pair_that_is_over_is_in_nobodys_way(is_source_lost: bool) -> None:
    controller, holding = pair_across_leaves()
    over = [WorkerLost(W[0], "gone")] if is_source_lost else loaded(holding)
    spare = [joins("abab", 2), joins("abab", 3)]
    plan = planned(controller, 2, *over, *spare, arrived("b", 3000))
    assert any(route.startswith("w1.0") for route in plan.routes()), "it is read as others are"
    assert met(plan) == {}


def test_a_target_that_helps_nobody_has_links_that_nobody_serves_over() -> None:
    controller = controller_of(1, 2)
    step(controller, 1, full(90))
    plan = planned(controller, 2, joins("aaa", 2), full(180))
    assert plan.routes() == ("w1.0 -> w2.0",)
    assert met(plan) == {}
