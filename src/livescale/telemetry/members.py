"""How a further part of a record begins: with what the controller knows of its members, as though
they joined it just then, so that the part can be read without those before.
"""

from __future__ import annotations

import msgspec

from livescale.control.controller import Controller
from livescale.control.fleet import Instance
from livescale.messages.commands import Drain
from livescale.messages.events import AgentJoined, CopyReport, InstanceReport, WorkerJoined
from livescale.telemetry.record import RECORD_VERSION, RunLine, StepLine
from livescale.types import InstanceState, WorkerRef


def opening_lines(
    controller: Controller, now_ns: int, world: str, settings: dict[str, object], start: str
) -> tuple[RunLine, StepLine]:
    """The first two lines of a further part: the models that there are now; all living workers and
    agents with what they hold (but not from whom they get it), and the instances that drain."""
    models = tuple(state.policy for state in controller.models.values())
    config = msgspec.structs.replace(controller.config, models=models)
    draining = [Drain(i.id, i.attempt) for i in controller.fleet.draining.values()]
    return (
        RunLine(RECORD_VERSION, world, config, settings, start, is_continued=True),
        StepLine(now_ns, _members(controller), tuple(draining), now_ns),
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _members(controller: Controller) -> tuple[WorkerJoined | AgentJoined, ...]:
    fleet = controller.fleet
    workers = [
        WorkerJoined(record.ref, record.device, _held(fleet.instances, record.ref, record.instance))
        for _, record in sorted(fleet.workers.items())
    ]
    agents = [
        AgentJoined(record.ref, record.host, _copies(controller, record.ref))
        for record in fleet.living_agents()
    ]
    return (*workers, *agents)


def _held(
    instances: dict[int, Instance], worker: WorkerRef, number: int | None
) -> InstanceReport | None:
    instance = instances.get(number) if number is not None else None
    if instance is None:
        return None
    rank = instance.workers.index(worker)
    return InstanceReport(
        instance.id,
        instance.model,
        instance.attempt,
        instance.watermarks.get(rank, 0),
        rank in instance.loaded_ranks,
        rank,
        instance.plan,
        pairing=instance.pairing if instance.state is InstanceState.LIVE else None,
    )


def _copies(controller: Controller, agent: WorkerRef) -> tuple[CopyReport, ...]:
    reports = []
    for model in controller.models:
        copy = controller.pool.find(model, agent)
        for rank in range(len(copy.workers)) if copy is not None else ():
            assert copy is not None
            reports.append(CopyReport(model, 0, rank in copy.complete_ranks, rank))
    return tuple(reports)
