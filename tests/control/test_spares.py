"""Warm spares: used again first, given up fairly, and never the last copy."""

from __future__ import annotations

import msgspec
import pytest
from stories import (
    DEVICE,
    SPEC,
    W,
    arrived,
    finished,
    joined,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    scaled,
    serves,
    step,
)

from livescale.common.regions import ALIGNMENT_BYTES
from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, DropHolding, ReleaseHolding, StartHolding
from livescale.messages.events import (
    HoldingCompleted,
    HoldingFailed,
    HoldingReport,
    ModelChanged,
    ModelRemoved,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ModelPolicy, Period
from livescale.values.types import HoldingId, InstanceState, LayerSpan, WorkerRef

WIDE = msgspec.structs.replace(DEVICE, arena_bytes=ALIGNMENT_BYTES + SPEC.size_bytes)
"""Has room for two models."""


def report_of(
    model: str,
    number: int,
    workers: tuple[WorkerRef, ...],
    rank: int = 0,
    *,
    is_spare: bool = True,
    offset_bytes: int = 0,
) -> HoldingReport:
    """What a worker that has one rank of a copy says of it."""
    order = StartHolding(
        holding=HoldingId(number, workers[rank]),
        model=model,
        span=LayerSpan(0, SPEC.layers),
        feeds=(),
        chunk_bytes=10,
        rank=rank,
        duty=Duty(number, workers),
        offset_bytes=offset_bytes,
    )
    return HoldingReport(order, SPEC.layers, is_whole=True, is_spare=is_spare)


def spare_of(
    model: str, number: int, *workers: WorkerRef, is_spare: bool = True
) -> list[WorkerJoined]:
    """Workers that join with the ranks of one copy."""
    reports = [
        report_of(model, number, workers, rank, is_spare=is_spare) for rank in range(len(workers))
    ]
    return [
        WorkerJoined(worker, DEVICE, (report,))
        for worker, report in zip(workers, reports, strict=True)
    ]


def two_spares(worker: WorkerRef, low: HoldingReport, high: HoldingReport) -> WorkerJoined:
    """A worker that joins with two spares in its memory."""
    return WorkerJoined(worker, WIDE, (low, high))


def drops_of(commands: list[AnyCommand]) -> list[HoldingId]:
    return [command.holding for command in commands if isinstance(command, DropHolding)]


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
    shown = controller.status().models["a"]
    assert (shown.starts, shown.warm_starts, shown.warm_spares) == (1, 1, 0)


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


def test_more_is_loaded_ahead_as_soon_as_a_model_may_have_more() -> None:
    """By a change of the model, or by its schedule."""
    night = Period(0, 1_000_000_000, 1, 1, every_ns=2_000_000_000)
    for policy in (make_policy("a", 1, 1), make_policy("a", 1, 3, schedule=(night,))):
        controller = ahead(3, policy)
        step(controller, 0, *serves(W[0], 101, "a"), *joined(W[1], W[2]))
        assert loads_of(step(controller, 1, Tick())) == []
        if policy.schedule:
            commands = step(controller, 1_000_000_000, Tick())
        else:
            changed = msgspec.structs.replace(policy, instances_max=3)
            commands = step(controller, 2, ModelChanged(changed))
        assert [order.holding.member for order in loads_of(commands)] == [W[1], W[2]]


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


# -- several on one worker ------------------------------------------------------------------------


def test_a_model_comes_beside_a_spare_if_both_fit() -> None:
    controller = pool(1, "a", "b")
    report = report_of("a", 1, (W[0],))
    step(controller, 0, WorkerJoined(W[0], WIDE, (report,)))
    commands = step(controller, 10, arrived("r", 10, "b"))
    (order,) = loads_of(commands)
    assert (order.offset_bytes, drops_of(commands)) == (ALIGNMENT_BYTES, [])
    step(controller, 11, HoldingCompleted(order.holding, SPEC.size_bytes))
    # The worker is taken, so that the spare is of no use but as a source.
    assert loads_of(step(controller, 12, arrived("s", 10, "a"))) == []
    step(controller, 13, finished("r"))
    released = step(controller, 2_000_000_000, Tick())
    assert [type(c) for c in released if isinstance(c, ReleaseHolding)] == [ReleaseHolding]
    (order,) = loads_of(step(controller, 2_000_000_001, Tick()))
    assert (order.model, order.spare, order.offset_bytes) == ("a", 1, 0)


def test_of_two_spares_the_one_that_was_used_longest_ago_goes() -> None:
    controller = pool(2, "a", "b", "c")
    low, high = report_of("a", 1, (W[0],)), report_of("b", 2, (W[0],), offset_bytes=ALIGNMENT_BYTES)
    step(controller, 0, two_spares(W[0], low, high))
    others = report_of("a", 3, (W[1],)), report_of("b", 4, (W[1],), offset_bytes=ALIGNMENT_BYTES)
    step(controller, 1, two_spares(W[1], *others))
    commands = step(controller, 10, arrived("r", 10, "c"))
    assert drops_of(commands) == [HoldingId(1, W[0])]
    assert [order.offset_bytes for order in loads_of(commands)] == [0]


def test_a_spare_that_lies_in_the_middle_goes_where_no_gap_is_large_enough() -> None:
    """Free bytes on both sides do not make a place."""
    page = ALIGNMENT_BYTES
    device = msgspec.structs.replace(DEVICE, arena_bytes=2 * page)
    big = msgspec.structs.replace(SPEC, name="big", layer_bytes=(page, page // 2))
    models = (make_policy("a", 0), make_policy("big", 0, spec=big))
    controller = make_controller(2, models=models, warm_spares="recent")
    for number in (0, 1):
        report = report_of("a", number + 1, (W[number],), offset_bytes=page)
        step(controller, number, WorkerJoined(W[number], device, (report,)))
    commands = step(controller, 10, arrived("r", 10, "big"))
    assert drops_of(commands) == [HoldingId(1, W[0])]
    assert [order.offset_bytes for order in loads_of(commands)] == [0]


def test_a_spare_of_several_ranks_does_not_lie_beside_an_instance() -> None:
    """It would wait for as long as that serves, and its model for all of its workers."""
    spec = msgspec.structs.replace(SPEC, name="pair", tp_size=2)
    models = (make_policy("pair", 0, spec=spec), make_policy("a", 0))
    controller = make_controller(4, models=models, warm_spares="recent")
    for number in (0, 2):
        workers = (W[number], W[number + 1])
        for rank in (0, 1):
            report = report_of("pair", number + 1, workers, rank)
            step(controller, number, WorkerJoined(workers[rank], WIDE, (report,)))
    commands = step(controller, 10, arrived("r", 10, "a"))
    assert drops_of(commands) == [HoldingId(1, W[0]), HoldingId(1, W[1])]


def test_a_model_whose_spare_went_is_looked_at_again() -> None:
    """Its policy counts spares, with those of others it has none."""
    controller = pool(2, "a", "b")
    step(controller, 0, *spare_of("a", 1, W[0]), *spare_of("a", 2, W[1]))
    shown = controller.status().models["a"]
    assert (shown.warm_spares, shown.spare_bytes) == (2, 2 * SPEC.size_bytes)
    step(controller, 10, arrived("r", 10, "b"))
    changed = controller.pool.take_changed_spares()
    assert "a" in changed
