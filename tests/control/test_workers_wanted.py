"""How many workers the models' loads need, there or not: what a cluster is scaled by."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from stories import MS, W, arrived, finished, joined, loaded, loads_of, make_controller, make_policy
from stories import step as step_checked

from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand
from livescale.messages.events import Tick
from livescale.values.copy_strategies import NoCopies
from livescale.values.scaling_policies import ModelPolicy, TargetOngoing


def make(*models: ModelPolicy, **config: object) -> Controller:
    """A controller whose models rely on storage: there may be no worker at all."""
    return make_controller(0, models=models, placement=NoCopies(), **config)


def per_instance(requests: int, name: str = "m", least: int = 0, most: int = 8) -> ModelPolicy:
    return make_policy(name, least, most, scaling=TargetOngoing(1000 * requests))


def wanted(controller: Controller) -> int:
    return controller.status().workers_wanted


def serve(controller: Controller, now_ns: int, commands: Sequence[AnyCommand]) -> None:
    """What was ordered is loaded at once."""
    for order in loads_of(list(commands)):
        step_checked(controller, now_ns, *loaded(order.holding))


def test_a_pool_without_workers_wants_those_of_its_requests_and_of_least_numbers() -> None:
    controller = make(per_instance(2, "a"), per_instance(2, "b", least=3))
    step_checked(controller, 0, Tick())
    assert wanted(controller) == 3
    step_checked(controller, MS, *(arrived(str(number), model="a") for number in range(7)))
    assert wanted(controller) == 4 + 3


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 4))
def test_what_requests_need_is_wanted_and_never_more_than_the_largest_number(
    requests: int, most: int, each: int
) -> None:
    controller = make(per_instance(each, most=most))
    step_checked(controller, 0, Tick(), *(arrived(str(number)) for number in range(requests)))
    needed = min(-(-requests // each), most)
    assert needed <= wanted(controller) <= (most if requests else 0)


def test_what_is_not_needed_any_more_is_not_wanted_before_instances_have_gone() -> None:
    controller = make(per_instance(2))
    requests = [str(number) for number in range(6)]
    commands = step_checked(controller, 0, *joined(*W[:3]), *map(arrived, requests))
    assert wanted(controller) >= 3
    serve(controller, MS, commands)
    step_checked(controller, 2 * MS, *map(finished, requests))
    assert sum(controller.status().models["m"].instances.values()) == 3
    assert wanted(controller) == 1, "the last one is kept warm"


def test_instances_that_are_loaded_ahead_are_not_wanted() -> None:
    controller = make(per_instance(2, least=1), spares_ahead=True, warm_spares="recent")
    serve(controller, MS, step_checked(controller, 0, *joined(*W[:4])))
    serve(controller, 2 * MS, step_checked(controller, 2 * MS, Tick()))
    assert sum(controller.status().models["m"].instances.values()) > 1
    assert wanted(controller) == 1
