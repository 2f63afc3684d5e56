"""Workers with an engine that runs whole models, and passes nothing: pairs, teams, roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from clusters import W as WORKERS
from clusters import copies, request, singles
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    SPEC,
    W,
    adopted,
    arrived,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    rejoined,
    report,
    reported,
    step,
)

from livescale.control.multicast.planner import make_plan
from livescale.control.state.config import PairRule
from livescale.control.together.pairing import choose_pairings
from livescale.messages.commands import AnyCommand, ChangeDuty, Drain, Paired
from livescale.messages.events import AnyEvent, HoldingReport, LayerArrived, WorkerJoined
from livescale.values.routes import Partner
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.stages import stage_specs
from livescale.values.types import HoldingId, LayerSpan, Role, WorkerRef

LIVE: dict[str, Any] = {
    "live_order": "zigzag",
    "live_over_ns": 0,
    "pairs": PairRule(block_tokens=None),
}

WIDE = msgspec.structs.replace(SPEC, layer_bytes=(10, 5, 5, 5, 10), kv_bytes_per_token=3)
IN_STAGES = tuple(
    make_policy(spec=spec, least=0)
    for spec in stage_specs(WIDE, [LayerSpan(0, 2), LayerSpan(2, 5)])
)
WITH_ROLES = make_policy(
    least=0, roles=tuple(RoleLimits(role, 0, 2) for role in (Role.PREFILL, Role.DECODE))
)


def engines(*workers: WorkerRef) -> list[AnyEvent]:
    return [WorkerJoined(worker, DEVICE, is_engine=True) for worker in workers]


def pairings_of(commands: Sequence[AnyCommand]) -> list[tuple[str | None, tuple[Partner, ...]]]:
    duties = [order.duty for order in loads_of(list(commands)) if order.duty is not None]
    return [(duty.live_order, duty.gives_to) for duty in duties]


def test_a_loading_engine_works_alone_and_a_plain_worker_helps() -> None:
    for target, order in ((joined(W[1]), "zigzag"), (engines(W[1]), "overlap")):
        controller = make_controller(2, instances_max=2, **LIVE)
        step(controller, 0, *adopted(1), *target)
        commands = step(controller, 1, arrived("a", 800), arrived("b", 800))
        helped = (Partner(101, W[0]),) if order == "zigzag" else ()
        assert pairings_of(commands) == [(order, helped)]
        (reason,) = [c.reason for c in commands if isinstance(c, Paired)]
        assert (reason == "alone: its engine passes nothing") == (order == "overlap")


def test_an_engine_takes_nothing_over_from_one_that_loads() -> None:
    controller = make_controller(2, instances_max=2, **LIVE)
    order = load_order(101, W[0], 101, None)
    held = HoldingReport(order, order.span.stop, is_whole=True)
    serves = WorkerJoined(W[0], DEVICE, (held,), is_engine=True)
    step(controller, 0, serves, reported(101), *joined(W[1]))
    commands = step(controller, 1, arrived("a", 800), arrived("b", 800))
    assert pairings_of(commands) == [("zigzag", ())], "it works alone"


@given(
    targets=st.integers(1, 6),
    overloaded=st.integers(0, 6),
    are_engines=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_partners_are_for_those_who_can_pass_work_on(
    targets: int, overloaded: int, are_engines: list[bool]
) -> None:
    asked = request(copies(WORKERS[0]), WORKERS[1 : 1 + targets], layers=(1 << 20,) * 8)
    plan = make_plan(asked, singles(1 + targets), "chain")
    whole = [w for w, is_one in zip(WORKERS[1 : 1 + targets], are_engines, strict=False) if is_one]
    needy = [Partner(300 + n, WORKERS[30 + n]) for n in range(overloaded)]
    choices = choose_pairings(plan, "zigzag", 0, needy, engines=whole)
    for (worker,), choice in zip(plan.instances, choices, strict=True):
        assert choice.live_order == ("overlap" if worker in whole else "zigzag")
        assert not choice.gives_to or worker not in whole
    helped = sorted(partner for choice in choices for partner in choice.gives_to)
    assert helped == needy[: targets - len(whole)], "those who need it most, once each"


@pytest.mark.parametrize("are_engines", [False, True])
def test_engines_are_in_no_team(are_engines: bool) -> None:
    spec = msgspec.structs.replace(SPEC, layer_bytes=(10, 20, 20, 10))
    policy = make_policy(least=2, spec=spec)
    controller = make_controller(2, models=(policy,), teams="cover", multicast="binomial")
    commands = step(controller, 0, *(engines if are_engines else joined)(W[0], W[1]))
    first, second = [order.holding for order in loads_of(commands)]
    assert first.plan == second.plan
    came = [(first, 0, 1), (first, 1, 2), (second, 2, 0), (second, 3, 0)]
    told = step(controller, 2, *(LayerArrived(*news) for news in came))
    teams = [c.duty.team for c in told if isinstance(c, ChangeDuty)]
    assert len(teams) == (0 if are_engines else 2)


def test_instances_with_roles_come_to_workers_that_can_pass_kv_on() -> None:
    roles = tuple(RoleLimits(role, 1, 2) for role in (Role.PREFILL, Role.DECODE))
    policy = make_policy(least=2, most=4, roles=roles)
    controller = make_controller(3, models=(policy,))
    commands = step(controller, 0, *engines(W[0]), *joined(W[1], W[2]))
    assert [order.holding.member for order in loads_of(commands)] == [W[1], W[2]]


def test_a_model_without_roles_comes_to_an_engine_as_to_any_worker() -> None:
    controller = make_controller(1)
    commands = step(controller, 0, *engines(W[0]))
    (order,) = loads_of(commands)
    assert order.holding == HoldingId(1, W[0])
    assert step(controller, 1, *loaded(order.holding)) == []


@pytest.mark.parametrize(
    ("asking", "give_way"),
    [((make_policy(least=0),), 1), ((WITH_ROLES,), 0), (IN_STAGES, 0)],
    ids=["whole", "roles", "stages"],
)
def test_engines_give_way_only_to_models_that_can_run_there(
    asking: tuple[ModelPolicy, ...], give_way: int
) -> None:
    controller = make_controller(3, models=(*asking, make_policy("other", 1)))
    for number in range(3):
        held = report(load_order(101 + number, W[number], 101 + number, None, "other"))
        there = msgspec.structs.replace(rejoined(held), is_engine=True)
        step(controller, number, there, reported(101 + number))
    commands = step(controller, 3, arrived("r", model=asking[0].spec.name))
    assert sum(isinstance(command, Drain) for command in commands) == give_way
