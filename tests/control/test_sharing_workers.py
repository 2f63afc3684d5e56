"""Several models on few workers: who gets them, who gives way, and what the day's schedule says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    MS,
    SPEC,
    W,
    arrived,
    drop,
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
    serves,
    step,
)

from livescale.control.controller import Controller
from livescale.messages.commands import (
    AnyCommand,
    Drain,
    DropHolding,
    Resume,
    ScaleDecided,
    WakeAt,
)
from livescale.messages.events import (
    AnyEvent,
    HoldingDropped,
    HoldingReport,
    Tick,
    WorkerJoined,
)
from livescale.values.copy_strategies import NoCopies
from livescale.values.scaling_policies import DAY_NS, ModelPolicy, Period, TargetOngoing
from livescale.values.types import HoldingId, InstanceState, LayerSpan

HOUR_NS = DAY_NS // 24


def decisions(commands: Sequence[AnyCommand]) -> list[tuple[str, int, int, str]]:
    return [
        (c.model, c.from_instances, c.to_instances, c.reason)
        for c in commands
        if isinstance(c, ScaleDecided)
    ]


def pool(workers: int, *models: ModelPolicy, **config: object) -> Controller:
    """A controller whose models rely on storage, so that no last copy holds a worker."""
    settings = {"placement": NoCopies(), **config}
    controller = make_controller(workers, models=models, **settings)
    step(controller, 0, *joined(*W[:workers]))
    return controller


def test_several_instances_of_several_models_in_one_decision() -> None:
    controller = pool(5, make_policy("a", 0), make_policy("b", 0))
    flood = [arrived("r", 1700, "a"), arrived("s", 1700, "b")]
    commands = step(controller, 1, *flood)
    assert [d[:3] for d in decisions(commands)] == [("a", 0, 4), ("b", 0, 1)]
    assert [plan.model for plan in plans_of(commands)] == ["a", "b"]
    assert sorted(order.holding.member for order in loads_of(commands)) == W[:5]
    assert len(set(instances_of(loads_of(commands)))) == 5


def test_priority_comes_before_need_and_need_before_the_name() -> None:
    policies = (make_policy("a", 0), make_policy("b", 0), make_policy("c", 0, priority=1))
    controller = pool(2, *policies)
    events = [*serves(W[2], 101, "a"), arrived("r", 3000, "a"), arrived("s", 1, "b")]
    commands = step(controller, 1, *events, arrived("t", 1, "c"))
    # c has priority; b has nothing at all, a has at least one.
    assert [order.model for order in loads_of(commands)] == ["c", "b"]


def test_who_can_spare_an_instance_gives_way_at_once() -> None:
    """Without a timeout: another model needs the worker, and the load needs one only."""
    controller = make_controller(2, models=(make_policy("a", 0), make_policy("b", 0)))
    step(controller, 0, *serves(W[0], 101, "a"), *serves(W[1], 102, "a"))
    commands = step(controller, 1, arrived("r", 500, "a"), arrived("s", 10, "b"))
    assert decisions(commands) == [("a", 2, 1, "makes room for b")]
    assert isinstance(commands[1], Drain)


def test_who_needs_all_that_it_has_gives_way_to_a_higher_priority_only() -> None:
    for priority in (0, 1):
        models = (make_policy("a", 0), make_policy("b", 0, priority=priority))
        controller = make_controller(3, models=models)
        there = [*serves(W[0], 101, "a"), *serves(W[1], 102, "a"), *serves(W[2], 103, "b")]
        step(controller, 0, *there)
        commands = step(controller, 1, arrived("r", 1500, "a"), arrived("s", 1500, "b"))
        expected = [("a", 2, 1, "makes room for b")] if priority else []
        assert decisions(commands) == expected


def test_who_has_nothing_gets_one_of_an_equal_who_has_several() -> None:
    """Else a model at zero would wait for as long as others are busy."""
    controller = make_controller(2, models=(make_policy("a", 0), make_policy("b", 0)))
    step(controller, 0, *serves(W[0], 101, "a"), *serves(W[1], 102, "a"))
    commands = step(controller, 1, arrived("r", 1500, "a"), arrived("s", 10, "b"))
    assert decisions(commands) == [("a", 2, 1, "makes room for b")]
    (instance,) = [c.instance for c in commands if isinstance(c, Drain)]
    assert decisions(step(controller, 2, Tick())) == [], "and it is not taken back"
    assert controller.fleet.instances[instance].state is InstanceState.DRAINING


def test_the_last_instance_of_a_model_in_use_is_not_taken() -> None:
    models = (make_policy("a", 0), make_policy("b", 0, priority=9))
    controller = make_controller(1, models=models)
    step(controller, 0, *serves(W[0], 101, "a"))
    commands = step(controller, 1, arrived("r", 500, "a"), arrived("s", 10, "b"))
    assert decisions(commands) == []


def test_nobody_is_drained_for_half_an_instance() -> None:
    """One worker is not enough for a model of two ranks: it would be drained and resumed."""
    spec = msgspec.structs.replace(SPEC, name="pair", tp_size=2)
    pair = make_policy("pair", 0, spec=spec, priority=1)
    controller = make_controller(2, models=(make_policy("a", 1), pair))
    step(controller, 0, *serves(W[0], 101, "a"), *serves(W[1], 102, "a"))
    commands = step(controller, 1, arrived("r", 1500, "a"), arrived("s", 10, "pair"))
    assert decisions(commands) == []


def test_workers_that_are_being_gathered_are_left_to_whom_they_are_for() -> None:
    spec = msgspec.structs.replace(SPEC, name="pair", tp_size=2)
    pair = make_policy("pair", 0, spec=spec, priority=1)
    controller = make_controller(3, models=(make_policy("a", 1), pair), placement=NoCopies())
    joins = [e for n in range(3) for e in serves(W[n], 101 + n, "a")]
    step(controller, 0, *joins)
    busy = [reported(101 + n, running=1) for n in range(3)]
    events = [*busy, arrived("r", 2900, "a"), arrived("s", 10, "pair")]
    commands = step(controller, 1, *events)
    assert [d[3] for d in decisions(commands)] == ["makes room for pair"] * 2
    gone = [c.instance for c in commands if isinstance(c, Drain)]
    # The first of the two comes free: it is neither taken nor is the other resumed.
    commands = step(controller, 2, reported(gone[0]))
    (release,) = [c for c in commands if isinstance(c, DropHolding)]
    assert decisions(commands) == []
    assert step(controller, 3, HoldingDropped(release.holding)) == []
    commands = step(controller, 4, reported(gone[1]))
    last = HoldingId(gone[1], W[gone[1] - 101])
    assert drop(last.plan, last.member) in commands
    commands = step(controller, 5, HoldingDropped(last))
    assert [(order.model, order.rank) for order in loads_of(commands)] == [("pair", 0), ("pair", 1)]
    assert release.holding.member in [order.holding.member for order in loads_of(commands)]


def test_spare_workers_that_one_cannot_use_do_not_make_others_drain() -> None:
    """A first copy is read once and followed; nobody has to give way meanwhile."""
    controller = pool(5, make_policy("a", 1), make_policy("b", 3))
    before = [i.model for i in controller.fleet.instances.values()]
    assert sorted(before) == ["a", "b", "b", "b"]
    assert decisions(step(controller, 1, Tick())) == []


def test_the_schedule_of_the_day_sets_the_limits() -> None:
    day = Period(8 * HOUR_NS, 20 * HOUR_NS, 2, 3)
    policy = make_policy("m", 0, 1, schedule=(day,), idle_ns=100 * MS)
    begin_ns = 7 * DAY_NS + 8 * HOUR_NS - 500 * MS
    controller = make_controller(3, models=(policy,), placement=NoCopies(), wall_ns=begin_ns)
    wake = controller.step(0, joined(*W[:3]))
    assert wake == [WakeAt(500 * MS)], "the day begins"
    morning = step(controller, 500 * MS, Tick())
    assert decisions(morning) == [("m", 0, 2, "below_min")]
    loads = [e for order in loads_of(morning) for e in loaded(order.holding)]
    serving_now = [reported(number) for number in instances_of(loads_of(morning))]
    step(controller, 501 * MS, *loads, *serving_now)
    assert len(loads_of(step(controller, 502 * MS, arrived("r", 10**5)))) == 1, "three at most"
    evening = controller.step(500 * MS + 12 * HOUR_NS, [Tick()])
    assert [d[:2] for d in decisions(evening)] == [("m", 3)]


def test_a_target_of_ongoing_requests_counts_instances_that_load() -> None:
    policy = make_policy("m", 1, 8, scaling=TargetOngoing(2000, 900, 100 * MS))
    controller = make_controller(4, models=(policy,))
    step(controller, 0, *serves(W[0], 101), *joined(*W[1:4]))
    requests = [arrived(f"r{n}") for n in range(5)]
    commands = step(controller, 1, *requests)
    assert decisions(commands) == [("m", 1, 3, "ongoing_requests")]
    assert decisions(step(controller, 2, Tick())) == [], "what loads is counted"


def beside_spares(spares: Sequence[str]) -> list[int]:
    """Worker n has an instance of b and, behind it, a spare of the n-th model ("": none). Returns
    the workers whose instances drain when a is asked for, of which one needs all the memory."""
    specs = [
        msgspec.structs.replace(SPEC, name=name, layer_bytes=(size_bytes,))
        for name, size_bytes in (("a", 100), ("b", 50), ("c", 40))
    ]
    models = tuple(make_policy(least=0, spec=spec) for spec in specs)
    controller = make_controller(len(spares), models=models, warm_spares="recent")
    for number, spare in enumerate(spares):
        held = [load_order(101 + number, W[number], 101 + number, None, "b")]
        if spare:
            behind = load_order(201 + number, W[number], 201 + number, None, spare)
            held.append(msgspec.structs.replace(behind, offset_bytes=60))
        reports = [
            HoldingReport(
                msgspec.structs.replace(order, span=LayerSpan(0, 1), feeds=()),
                1,
                is_whole=True,
                is_spare=order.model != "b",
            )
            for order in held
        ]
        step(controller, number, WorkerJoined(W[number], DEVICE, tuple(reports)))
        step(controller, number, reported(101 + number))
    commands = step(controller, 9, arrived("r", 10, "a"))
    return [command.instance - 101 for command in commands if isinstance(command, Drain)]


def test_nobody_is_drained_beside_a_last_copy_that_takes_the_room() -> None:
    """Such an instance would be drained and resumed for as long as the other model is asked for."""
    assert beside_spares(["", ""]) == [1]
    assert beside_spares(["", "c"]) == [0], "there is no other copy of c"
    assert beside_spares(["", "c", "c"]) == [1], "the newer one of the two is enough"


def test_an_instance_gives_way_to_a_spare_that_will_wake_beside_it() -> None:
    assert beside_spares(["c", "a"]) == [1]


WITHOUT_FILES = msgspec.structs.replace(DEVICE, reads_files=False)


def serves_b(number: int, *, reads_files: bool) -> list[AnyEvent]:
    """The worker joins with an instance of b."""
    held = report(load_order(101 + number, W[number], 101 + number, None, "b"))
    device = DEVICE if reads_files else WITHOUT_FILES
    return [rejoined(held, device), reported(101 + number)]


@pytest.mark.parametrize("readers", [(), (0,), (1,), (0, 1)])
def test_who_has_the_files_gives_way_to_what_only_files_can_bring(readers: tuple[int, ...]) -> None:
    """Though a worker is idle that has none of them."""
    controller = make_controller(3, models=(make_policy("a", 0), make_policy("b", 1)))
    there = [e for n in range(2) for e in serves_b(n, reads_files=n in readers)]
    step(controller, 0, *there, WorkerJoined(W[2], WITHOUT_FILES))
    commands = step(controller, 1, arrived("r", 10, "a"))
    drained = [command.instance - 101 for command in commands if isinstance(command, Drain)]
    assert drained == list(readers[-1:])
    assert controller.lacking_workers() == (0 if readers else 1)


def test_workers_without_the_files_are_not_kept_for_what_only_files_can_bring() -> None:
    models = (make_policy("a", 1, priority=1), make_policy("b", 1))
    controller = make_controller(2, models=models)
    step(controller, 0, *serves_b(0, reads_files=False), WorkerJoined(W[1], WITHOUT_FILES))
    commands = step(controller, 1, arrived("r", 1500, "b"))
    assert [(order.model, order.holding.member) for order in loads_of(commands)] == [("b", W[1])]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3000), st.integers(0, 1)),
        min_size=2,
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_no_step_drains_and_resumes_or_goes_to_and_fro(
    arrivals: list[tuple[int, int, int]], workers: int
) -> None:
    """Under a load that does not change, a decision is not taken back by the next steps."""
    models = tuple(make_policy(f"m{n}", 0, priority=n % 2) for n in range(3))
    controller = make_controller(workers, models=models)
    joins = [e for n in range(workers) for e in serves(W[n], 101 + n, f"m{n % 3}")]
    step(controller, 0, *joins)
    events = [arrived(f"r{k}", tokens + 1, f"m{m}") for k, (m, tokens, _) in enumerate(arrivals)]
    turned: dict[int, list[str]] = {}
    for now_ns in range(1, 12):
        commands = step(controller, now_ns, *events) if now_ns == 1 else step(controller, now_ns)
        for command in commands:
            if isinstance(command, Drain | Resume):
                turned.setdefault(command.instance, []).append(type(command).__name__)
    assert all(len(words) == 1 for words in turned.values()), turned
    draining = [i for i in controller.fleet.instances.values() if i.state is InstanceState.DRAINING]
    assert len(draining) <= workers
