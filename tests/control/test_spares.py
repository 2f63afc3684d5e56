"""Warm spares: used again first, given up fairly, and never the last copy."""

from __future__ import annotations

import msgspec
import pytest
from stories import (
    DEVICE,
    SPEC,
    W,
    arrived,
    joined,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    scaled,
    serves,
    step,
)

from livescale.control.controller import Controller
from livescale.messages.commands import DropHolding, ReleaseHolding, StartHolding
from livescale.messages.events import (
    HoldingCompleted,
    HoldingFailed,
    HoldingReport,
    ModelRemoved,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.policies import ModelPolicy
from livescale.routes import Duty
from livescale.types import HoldingId, InstanceState, LayerSpan, WorkerRef


def spare_of(
    model: str, number: int, *workers: WorkerRef, is_spare: bool = True
) -> list[WorkerJoined]:
    """Workers that join with the ranks of one copy."""
    found = []
    for rank, worker in enumerate(workers):
        order = StartHolding(
            holding=HoldingId(number, worker),
            model=model,
            span=LayerSpan(0, SPEC.layers),
            feeds=(),
            chunk_bytes=10,
            rank=rank,
            duty=Duty(number, workers),
        )
        report = HoldingReport(order, SPEC.layers, is_whole=True, is_spare=is_spare)
        found.append(WorkerJoined(worker, DEVICE, (report,)))
    return found


def pool(workers: int, *names: str, keeping: str = "recent", **config: object) -> Controller:
    models = tuple(make_policy(name, 0) for name in names)
    return make_controller(workers, models=models, warm_spares=keeping, **config)


def test_what_drains_is_kept_and_wakes_without_feeds() -> None:
    controller = pool(1, "a")
    step(controller, 0, *serves(W[0], 101, "a"))
    released = step(controller, 100_000_000_000, *joined())
    assert [c.holding for c in released if isinstance(c, ReleaseHolding)] == [HoldingId(101, W[0])]
    assert not controller.fleet.instances
    (order,) = loads_of(step(controller, 100_000_000_001, arrived("r", 10, "a")))
    assert (order.spare, order.feeds, order.holding.member) == (101, (), W[0])
    (instance,) = controller.fleet.instances.values()
    assert instance.state is InstanceState.STARTING
    step(controller, 100_000_000_002, HoldingCompleted(order.holding, 0))
    assert instance.state is InstanceState.SERVING


def test_another_model_takes_the_spare_that_was_used_longest_ago() -> None:
    controller = pool(4, "a", "b", "c")
    old, last, new = (spare_of(m, n, W[n]) for m, n in (("a", 1), ("a", 2), ("b", 0)))
    for now_ns, events in enumerate((old, last, new, [*spare_of("b", 3, W[3])])):
        step(controller, now_ns, *events)
    commands = step(controller, 10, arrived("r", 10, "c"))
    drops = [c for c in commands if isinstance(c, DropHolding)]
    assert [(c.holding, c.reason) for c in drops] == [(HoldingId(1, W[1]), "makes room for c")]
    assert commands.index(drops[0]) < commands.index(loads_of(commands)[0])
    assert loads_of(commands)[0].holding.member == W[1]


@pytest.mark.parametrize(("keeping", "chosen"), [("recent", W[0]), ("slow-links", W[1])])
def test_what_comes_back_slowly_may_be_preferred(keeping: str, chosen: WorkerRef) -> None:
    controller = pool(4, "a", "c", keeping=keeping)
    for number, rate in enumerate((10, 1000, 10, 1000)):
        (event,) = spare_of("a", number, W[number])
        device = msgspec.structs.replace(DEVICE, downlink_bytes_per_s=rate)
        step(controller, number, msgspec.structs.replace(event, device=device))
    (order,) = loads_of(step(controller, 10, arrived("r", 10, "c")))
    assert order.holding.member == chosen


def test_the_last_copies_of_two_models_stay() -> None:
    controller = pool(2, "a", "b", "c")
    step(controller, 0, *spare_of("a", 1, W[0]), *spare_of("b", 2, W[1]))
    assert loads_of(step(controller, 10, arrived("r", 10, "c"))) == []


def test_spares_of_a_withdrawn_model_go() -> None:
    controller = pool(2, "a", "b")
    step(controller, 0, *spare_of("a", 1, W[0]), *spare_of("b", 2, W[1]))
    commands = step(controller, 10, ModelRemoved("a"))
    assert DropHolding(HoldingId(1, W[0]), "not kept") in commands


def test_a_copy_with_one_rank_released_is_no_instance() -> None:
    """The controller died between two orders; the next one gives the second."""
    spec = msgspec.structs.replace(SPEC, name="pair", tp_size=2)
    pair = make_policy("pair", 0, spec=spec)
    controller = make_controller(2, models=(pair,), warm_spares="recent")
    first, _ = spare_of("pair", 7, W[0], W[1])
    _, second = spare_of("pair", 7, W[0], W[1], is_spare=False)
    commands = step(controller, 0, first, second)
    assert ReleaseHolding(HoldingId(7, W[1])) in commands
    assert not controller.fleet.instances
    orders = loads_of(step(controller, 1, arrived("r", 10, "pair")))
    assert [(order.holding.member, order.spare) for order in orders] == [(W[0], 7), (W[1], 7)]


def test_a_lost_rank_takes_the_others_of_its_spare_with_it() -> None:
    spec = msgspec.structs.replace(SPEC, name="pair", tp_size=2)
    controller = make_controller(2, models=(make_policy("pair", 0, spec=spec),))
    step(controller, 0, *spare_of("pair", 7, W[0], W[1]))
    commands = step(controller, 1, WorkerLost(W[1], "it died"))
    assert [c.holding for c in commands if isinstance(c, DropHolding)] == [HoldingId(7, W[0])]


# -- before they are needed ------------------------------------------------------------------------


def ahead(workers: int, *policies: ModelPolicy) -> Controller:
    return make_controller(workers, models=policies, warm_spares="recent", spares_ahead=True)


def test_workers_that_hold_nothing_get_parameters_before_they_are_needed() -> None:
    """As instances that go when they are there; then nothing more is loaded, and a burst finds all
    of them."""
    controller = ahead(3, make_policy("a", 1))
    step(controller, 0, *serves(W[0], 101, "a"))
    commands = step(controller, 10, *joined(W[1], W[2]))
    orders = loads_of(commands)
    assert [order.holding.member for order in orders] == [W[1], W[2]]
    assert scaled(1, 3, "spares_ahead", "a") in commands
    now_ns = 20
    step(controller, now_ns, *(e for order in orders for e in loaded(order.holding)))
    for _ in range(4):
        now_ns += 1_000_000_000
        assert loads_of(step(controller, now_ns, Tick())) == []
    spares = [copy.holder for copy in controller.pool.spares("a")]
    assert (len(spares), len(controller.fleet.instances)) == (2, 1)
    burst = [arrived(f"r{n}", 900, "a") for n in range(9)]
    woken = loads_of(step(controller, now_ns + 1, *burst))
    assert sorted(order.holding.member for order in woken) == sorted(spares)
    assert all(order.spare is not None and not order.feeds for order in woken)


def test_of_several_models_the_one_with_few_copies_for_its_instances_comes_first() -> None:
    """One that has no instance, or as many copies as it may have instances, gets none."""
    policies = (make_policy("a", 1), make_policy("b", 1), make_policy("c", 0))
    controller = ahead(6, *policies, make_policy("d", 1, 1))
    begun = [*serves(W[0], 101, "a"), *spare_of("a", 102, W[1]), *serves(W[2], 103, "b")]
    step(controller, 0, *begun, *serves(W[3], 104, "d"))
    orders = loads_of(step(controller, 10, *joined(W[4], W[5])))
    assert [(order.model, order.holding.member) for order in orders] == [("b", W[4]), ("b", W[5])]


def test_what_failed_to_load_is_not_loaded_ahead() -> None:
    """It would block the loads that are needed."""
    controller = ahead(2, make_policy("a", 1))
    step(controller, 0, *serves(W[0], 101, "a"))
    (order,) = loads_of(step(controller, 10, *joined(W[1])))
    step(controller, 20, HoldingFailed(order.holding, "no memory"))
    assert loads_of(step(controller, 100_000_000_000, Tick())) == []


@pytest.mark.parametrize("off", [{"spares_ahead": False}, {"warm_spares": "off"}])
def test_nothing_is_loaded_ahead_unless_spares_are_kept(off: dict[str, object]) -> None:
    config = {"warm_spares": "recent", "spares_ahead": True} | off
    controller = make_controller(2, models=(make_policy("a", 1),), **config)
    step(controller, 0, *serves(W[0], 101, "a"))
    assert loads_of(step(controller, 10, *joined(W[1]))) == []
