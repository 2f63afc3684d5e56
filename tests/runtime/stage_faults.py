"""Faults of pools whose model has stages: who and what requests go through is hit.

Pipelines are read from the run record, as they were ordered last.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import httpx
from pool_thread import LocalPool, wait_until

from livescale.messages.commands import ChangeDuty, StartHolding
from livescale.messages.events import WorkerLost
from livescale.values.routes import Pipeline
from livescale.values.types import InstanceId, WorkerRef
from slowness import patient

ADDED, DRAINED = "stage_added", "stage_drained"
STAGE_FAULTS = (
    "stage_member",
    "stage_leader",
    "stage_link",
    "stage_controller",
    ADDED,
    DRAINED,
)
"""Who runs a later stage, who leads, the link of one of a pipeline, the controller; and, with no
fault, each stage gets another replica, or loses one."""
REPLICAS, FEWER = 2, 1
"""Of each stage: at rest, and before one is added, or when one is gone."""


class PipelinesSeen:
    """Pipelines as they were ordered last, of instances whose workers live."""

    def __init__(self) -> None:
        self._of: dict[InstanceId, tuple[WorkerRef, tuple[Pipeline, ...]]] = {}

    def absorb(self, words: Iterable[object]) -> None:
        """Events and commands, in order."""
        for word in words:
            if isinstance(word, ChangeDuty | StartHolding) and word.duty is not None:
                duty = word.duty
                self._of[duty.instance] = duty.workers[0], duty.pipelines
            elif isinstance(word, WorkerLost):
                self._of = {i: own for i, own in self._of.items() if own[0] != word.worker}

    def led(self) -> list[Pipeline]:
        """In the order of their numbers."""
        found = {
            pipeline.number: pipeline
            for instance, (_, pipelines) in self._of.items()
            for pipeline in pipelines
            if pipeline.leader.instance == instance
        }
        return [found[number] for number in sorted(found)]

    def victim(self, fault: str, rng: random.Random) -> WorkerRef:
        """A worker that requests go through: one that leads, or runs a later stage."""
        pipeline = rng.choice(self.led())
        if fault == "stage_leader":
            return pipeline.leader.worker
        if fault == "stage_link":
            return rng.choice(pipeline.members).partner.worker
        return rng.choice(pipeline.members[1:]).partner.worker


def set_replicas(pool: LocalPool, count: int) -> None:
    """So many of each stage from now on."""
    limits = {"min_replicas": count, "max_replicas": count}
    changed = httpx.patch(f"{pool.url}/admin/models/tiny", json=limits, timeout=patient(10))
    assert changed.status_code == 200, changed.text


def serving_by_stage(pool: LocalPool) -> list[int]:
    [model] = httpx.get(f"{pool.url}/admin/models", timeout=patient(10)).json()["data"]
    return [counts.get("serving", 0) for counts in model["instances_by_stage"]]


def wait_for_replicas(pool: LocalPool, count: int, stages: int, what: str) -> None:
    """Until so many of each stage serve, and no others."""
    wait_until(lambda: serving_by_stage(pool) == [count] * stages, what)
