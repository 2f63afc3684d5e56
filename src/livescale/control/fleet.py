"""Workers and instances: who is there, who holds what, and which moves are allowed.

Rule: an instance changes state only through `Fleet.move`, which looks the move up in
`TRANSITIONS`. A pair that is not in the table raises, with the instance's story.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from livescale.messages.commands import Drain, Resume
from livescale.messages.events import (
    InstanceReport,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    WorkerLost,
)
from livescale.topology import Device
from livescale.types import InstanceId, InstanceState, Role, Value, WorkerRef

_STORY_MAX = 32

TRANSITIONS: dict[InstanceState, dict[type[Value], InstanceState]] = {
    InstanceState.STARTING: {
        LoadStarted: InstanceState.LOADING,
        LoadFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.LOADING: {
        # An instance adopted as LOADING may report its first byte only now.
        LoadStarted: InstanceState.LOADING,
        LayerArrived: InstanceState.LOADING,
        LoadCompleted: InstanceState.SERVING,
        LoadFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    # LIVE: serves with the layers it has while the rest arrives (live scaling).
    InstanceState.LIVE: {
        LayerArrived: InstanceState.LIVE,
        LoadCompleted: InstanceState.SERVING,
        LoadFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.SERVING: {
        Drain: InstanceState.DRAINING,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.DRAINING: {
        Resume: InstanceState.SERVING,
        Released: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.STOPPED: {},
    InstanceState.LOST: {},
}

IS_LOADING = (InstanceState.STARTING, InstanceState.LOADING, InstanceState.LIVE)


class InvalidTransition(Exception):
    """An instance was asked for a move that its state does not allow."""


@dataclass(slots=True)
class Instance:
    """A worker that has been given a model, and what it last said of its load."""

    id: InstanceId
    model: str
    worker: WorkerRef
    layers: int
    attempt: int = 0
    role: Role = Role.UNIFIED
    state: InstanceState = InstanceState.STARTING
    #: complete layers 0…watermark-1
    watermark: int = 0
    #: who sends to it (None: storage, or adopted)
    upstream: WorkerRef | None = None
    #: DRAINING only: Release was ordered, there is no way back
    is_released: bool = False
    #: last InstanceReported
    running: int = 0
    queued_prefill_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_MAX))

    @property
    def is_loading(self) -> bool:
        return self.state in IS_LOADING

    @property
    def is_capacity(self) -> bool:
        """It serves or will: what the autoscaler counts."""
        return self.is_loading or self.state is InstanceState.SERVING

    def __repr__(self) -> str:
        return (
            f"<Instance {self.id} {self.state.name} of {self.model} on {self.worker},"
            f" {self.watermark}/{self.layers} layers, {self.running} requests>"
        )


@dataclass(slots=True)
class WorkerRecord:
    """A warm worker; `instance` is what it holds now (None: spare)."""

    ref: WorkerRef
    device: Device
    instance: InstanceId | None = None


class Fleet:
    """All living workers and instances. Stopped and lost instances are forgotten."""

    def __init__(self) -> None:
        #: by worker number: at most one incarnation is alive
        self.workers: dict[int, WorkerRecord] = {}
        self.instances: dict[InstanceId, Instance] = {}

    def join(self, ref: WorkerRef, device: Device) -> None:
        assert ref.worker not in self.workers, f"{ref} joins, {self.workers[ref.worker]} is alive"
        self.workers[ref.worker] = WorkerRecord(ref, device)

    def is_alive(self, ref: WorkerRef) -> bool:
        record = self.workers.get(ref.worker)
        return record is not None and record.ref == ref

    def leave(self, ref: WorkerRef) -> None:
        """The worker is gone; its instance was moved to LOST before."""
        record = self.workers.pop(ref.worker)
        assert record.instance is None, f"{ref} leaves with instance {record.instance}"

    def spare(self, arena_bytes: int) -> list[WorkerRecord]:
        """Workers without an instance whose arena holds the model, in id order."""
        records = (self.workers[number] for number in sorted(self.workers))
        return [r for r in records if r.instance is None and r.device.arena_bytes >= arena_bytes]

    def place(self, instance: Instance) -> None:
        """Put a new instance onto its worker."""
        record = self.workers[instance.worker.worker]
        assert record.ref == instance.worker, f"{instance!r} on {record.ref}"
        assert record.instance is None, f"{instance!r} on a worker with {record.instance}"
        record.instance = instance.id
        self.instances[instance.id] = instance

    def adopt(self, report: InstanceReport, worker: WorkerRef, layers: int) -> Instance:
        """Take over an instance that a worker reports from an earlier controller's life."""
        state = InstanceState.SERVING if report.is_loaded else InstanceState.LOADING
        instance = Instance(
            report.instance,
            report.model,
            worker,
            layers,
            report.attempt,
            state=state,
            watermark=report.watermark,
        )
        instance.story.append(f"adopted as {state.name}")
        self.place(instance)
        return instance

    def move(self, instance: Instance, cause: type[Value]) -> None:
        """Apply the table. STOPPED and LOST instances leave the fleet."""
        target = TRANSITIONS[instance.state].get(cause)
        if target is None:
            raise InvalidTransition(
                f"{instance!r} cannot take {cause.__name__}; story: {', '.join(instance.story)}"
            )
        instance.story.append(f"{cause.__name__} {instance.state.name}->{target.name}")
        instance.state = target
        if target in (InstanceState.STOPPED, InstanceState.LOST):
            del self.instances[instance.id]
            self.workers[instance.worker.worker].instance = None

    def of_model(self, model: str) -> list[Instance]:
        """Living instances of the model in id order."""
        return [
            self.instances[i] for i in sorted(self.instances) if self.instances[i].model == model
        ]

    def validate(self) -> None:
        """Workers and instances name each other. Raises AssertionError."""
        held = {r.instance: r.ref for r in self.workers.values() if r.instance is not None}
        assert held == {i.id: i.worker for i in self.instances.values()}, (held, self.instances)
        for instance in self.instances.values():
            assert instance.state not in (InstanceState.STOPPED, InstanceState.LOST), instance
            assert 0 <= instance.watermark <= instance.layers, instance
            if instance.state in (InstanceState.SERVING, InstanceState.DRAINING):
                assert instance.watermark == instance.layers, instance
