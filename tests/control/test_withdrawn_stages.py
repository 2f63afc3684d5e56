"""A withdrawn model in stages leaves as a whole, however late its requests are announced."""

from __future__ import annotations

import msgspec
import pytest
from stories import (
    MS,
    SPEC,
    W,
    arrived,
    joined,
    load_order,
    loads_of,
    make_controller,
    make_policy,
    rejoined,
    reported,
    step,
)

from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, DropHolding, ModelGone
from livescale.messages.events import (
    HoldingDropped,
    HoldingReport,
    ModelRemoved,
    Tick,
    WorkerJoined,
)
from livescale.values.scaling_policies import Period
from livescale.values.stages import stage_specs
from livescale.values.types import LayerSpan, ModelSpec

WIDE = msgspec.structs.replace(SPEC, layer_bytes=(10, 5, 5, 5, 10), kv_bytes_per_token=3)
STAGES = stage_specs(WIDE, [LayerSpan(0, 2), LayerSpan(2, 5)])
INSTANCE = 7
ALL_GONE = [ModelGone(spec.name) for spec in STAGES]


def gone(commands: list[AnyCommand]) -> list[AnyCommand]:
    return [command for command in commands if isinstance(command, ModelGone)]


def serves_already(spec: ModelSpec) -> WorkerJoined:
    """A worker joins with the instance of an earlier life."""
    order = load_order(INSTANCE, W[0], 7, None, spec.name)
    order = msgspec.structs.replace(order, span=LayerSpan(0, spec.layers), feeds=())
    return rejoined(HoldingReport(order, spec.layers, is_whole=True))


def withdrawn(there: ModelSpec) -> tuple[Controller, list[AnyCommand]]:
    """A new life in which the model is withdrawn, and one of its stages is still served."""
    policies = tuple(make_policy(spec=spec) for spec in STAGES)
    controller = make_controller(3, models=policies, epoch=1)
    news = [ModelRemoved(spec.name) for spec in STAGES]
    return controller, step(controller, 0, *news, serves_already(there), *joined(W[1], W[2]))


@pytest.mark.parametrize("there", STAGES, ids=["first", "second"])
def test_the_stages_are_gone_together(there: ModelSpec) -> None:
    controller, _ = withdrawn(there)
    [drop] = step(controller, MS, reported(INSTANCE))
    assert isinstance(drop, DropHolding)
    assert gone(step(controller, 2 * MS, HoldingDropped(drop.holding))) == ALL_GONE


@pytest.mark.parametrize("there", STAGES, ids=["first", "second"])
def test_a_request_that_an_earlier_life_accepted_finds_all_stages(there: ModelSpec) -> None:
    """Its gateway announces it when all members have joined."""
    controller, commands = withdrawn(there)
    assert not gone(commands), "one stage is there"
    loads = loads_of(step(controller, MS, arrived("r", model=STAGES[0].name)))
    assert [load.model for load in loads] == [s.name for s in STAGES if s is not there]


def test_requests_wait_for_all_stages_until_the_schedule_allows_an_instance() -> None:
    """Before, the model wanted one instance of each stage and none, in turn."""
    closed = Period(0, 1000 * MS, 0, 0, every_ns=2000 * MS)
    policies = tuple(make_policy(spec=spec, schedule=(closed,)) for spec in STAGES)
    controller = make_controller(2, models=policies)
    news = [ModelRemoved(spec.name) for spec in STAGES]
    commands = step(controller, 0, *joined(W[0], W[1]), arrived("r", model=STAGES[0].name), *news)
    for tenth in range(1, 10):
        commands += step(controller, tenth * 100 * MS, Tick())
    assert not commands
    loads = loads_of(step(controller, 1000 * MS, Tick()))
    assert [load.model for load in loads] == [spec.name for spec in STAGES]
