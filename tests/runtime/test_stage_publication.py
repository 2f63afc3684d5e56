"""A model in stages is published as a whole or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from livescale.config.pool import PoolConfig
from livescale.control.reports.status import ControllerStatus
from livescale.messages.commands import StartHolding
from livescale.messages.events import AnyEvent, ModelAdded, ModelRemoved
from livescale.runtime.models.publication import Publication
from livescale.runtime.wire import protocol
from livescale.telemetry.history.changes import HoldingEnded
from livescale.telemetry.history.holding_history import Ending, HoldingHistory
from livescale.values.types import HoldingId, LayerSpan, agent_ref


def ended_badly(model: str) -> HoldingEnded:
    """The copy of the model, or of a stage, to a host's memory has failed."""
    order = StartHolding(
        HoldingId(1, agent_ref(0)), model, LayerSpan(0, 1), feeds=(), chunk_bytes=1
    )
    history = HoldingHistory(order, None, 0, is_ordered=True, layer_bytes=(1,))
    history.ending, history.reason = Ending.FAILED, "a layer has another checksum"
    return HoldingEnded(history)


async def published_until_a_stage_fails(
    model: Path, failing: int
) -> tuple[protocol.ModelAnswer, list[AnyEvent], Publication]:
    """What comes of it, and what the controller was told."""
    told: list[AnyEvent] = []
    has_changed = asyncio.Event()
    publication = Publication(
        protocol.Catalog(()),
        PoolConfig(),
        lambda: ControllerStatus({}, {}, 1, 1, host_room_bytes=1 << 30),
        told.append,
        has_changed.set,
        has_agents=True,
    )
    asked = protocol.AddModel("call", str(model), "m", {"stages": 2})
    answer = asyncio.create_task(publication.answer(asked))
    while not told and not answer.done():
        await has_changed.wait()
        has_changed.clear()
    names = [event.policy.spec.name for event in told if isinstance(event, ModelAdded)]
    publication.observe([ended_badly(names[failing])])
    return await answer, told, publication


@pytest.mark.usefixtures("machine")
def test_all_stages_leave_with_one_whose_copy_fails(tiny_model: Path) -> None:
    for failing in (0, 1):
        answer, told, publication = asyncio.run(published_until_a_stage_fails(tiny_model, failing))
        assert answer.problem is protocol.ModelProblem.FAILED
        assert "another checksum" in answer.reason
        left = [event.model for event in told if isinstance(event, ModelRemoved)]
        assert sorted(left) == sorted(publication.models), "each once"
        assert all(model.is_leaving for model in publication.models.values())
