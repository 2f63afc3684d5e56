"""Small controllers for examples: one model of 60 bytes in three layers, equal workers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.control.config import ControllerConfig, ModelPolicy
from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, ScaleDecided, WakeAt
from livescale.messages.events import (
    AnyEvent,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LoadCompleted,
    LoadStarted,
    RequestArrived,
    RequestEnded,
    WorkerJoined,
)
from livescale.topology import Device
from livescale.types import InstanceId, ModelSpec, Outcome, Role, WorkerRef

MS = 1_000_000
SPEC = ModelSpec("m", (10, 20, 30), kv_bytes_per_token=1, model_tokens_max=100)
DEVICE = Device("cpu", "host", "leaf", arena_bytes=100, kv_bytes=100)
W = [WorkerRef(number) for number in range(8)]


def make_controller(workers: int, instances_max: int = 8, **config: object) -> Controller:
    """A controller that knows the model's capacity: 1000 tokens per second, 100 KV blocks."""
    policy = ModelPolicy(SPEC, 1, instances_max, prefill_tokens_per_s=1000, kv_blocks=100)
    settings = ControllerConfig((policy,), workers_expected=workers)
    return Controller(msgspec.structs.replace(settings, **config))


def step(controller: Controller, now_ns: int, *events: AnyEvent) -> list[AnyCommand]:
    """One step, checked, without what examples do not care for: wake-ups and decision values."""
    commands: Sequence[AnyCommand] = controller.step(now_ns, events)
    controller.validate()
    return [
        msgspec.structs.replace(c, values={}) if isinstance(c, ScaleDecided) else c
        for c in commands
        if not isinstance(c, WakeAt)
    ]


def scaled(before: int, after: int, reason: str) -> ScaleDecided:
    return ScaleDecided("m", Role.UNIFIED, before, after, reason, {})


def joined(*workers: WorkerRef) -> list[AnyEvent]:
    return [WorkerJoined(worker, DEVICE) for worker in workers]


def loaded(instance: InstanceId) -> list[AnyEvent]:
    """The whole news of a load."""
    return [
        LoadStarted(instance, 0),
        LayerArrived(instance, 0, 1),
        LayerArrived(instance, 0, 3),
        LoadCompleted(instance, 0, 60),
    ]


def arrived(request: str, prompt_tokens: int = 10) -> RequestArrived:
    return RequestArrived(request, "m", prompt_tokens, 5)


def finished(request: str, attempt: int = 1) -> RequestEnded:
    return RequestEnded(request, attempt, Outcome.FINISHED, 5)


def reported(instance: InstanceId, running: int = 0, queued: int = 0) -> InstanceReported:
    return InstanceReported(instance, 0, (), running, queued, 0, 100, 1)


def serving(workers: int, instances: int, **config: object) -> Controller:
    """A controller at time 0 that has adopted instances 101, 102, … on w0, w1, …"""
    controller = make_controller(workers, **config)
    step(controller, 0, *adopted(instances), *joined(*W[instances:workers]))
    return controller


def adopted(instances: int) -> list[AnyEvent]:
    """Workers w0, w1, … join and report that they serve instances 101, 102, …"""
    return [
        WorkerJoined(W[n], DEVICE, InstanceReport(101 + n, "m", 0, 3, True))
        for n in range(instances)
    ]
