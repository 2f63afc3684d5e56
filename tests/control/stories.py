"""Small controllers for examples: one model of 60 bytes in three layers, equal workers.

Chunks are of 10 bytes: the model has six.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.chunks import ChunkGrid, Feed
from livescale.control.config import ControllerConfig
from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, PlanMade, ScaleDecided, StartLoad, WakeAt
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    CopyCompleted,
    CopyLayerArrived,
    CopyReport,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LoadCompleted,
    LoadStarted,
    RequestArrived,
    RequestEnded,
    WorkerJoined,
)
from livescale.plans import ScalePlan
from livescale.policies import ModelPolicy
from livescale.topology import Device, Host
from livescale.types import (
    FromStorage,
    FromWorker,
    InstanceId,
    ModelSpec,
    Outcome,
    PlanId,
    Role,
    WorkerRef,
    agent_ref,
)

MS = 1_000_000
SPEC = ModelSpec("m", (10, 20, 30), kv_bytes_per_token=1, model_tokens_max=100)
DEVICE = Device("cpu", "host", "leaf", arena_bytes=100, kv_bytes=100)
W = [WorkerRef(number) for number in range(8)]
H = [agent_ref(number) for number in range(4)]
CHUNK_BYTES = 10
CHUNKS = ChunkGrid(SPEC.layer_bytes, CHUNK_BYTES).all()


def make_policy(name: str = "m", least: int = 1, most: int = 8, **values: object) -> ModelPolicy:
    """A model whose capacity is known: 1000 tokens per second, 100 KV blocks."""
    spec = msgspec.structs.replace(SPEC, name=name)
    policy = ModelPolicy(spec, least, most, prefill_tokens_per_s=1000, kv_blocks=100)
    return msgspec.structs.replace(policy, **values)


def make_controller(
    workers: int, instances_max: int = 8, models: tuple[ModelPolicy, ...] = (), **config: object
) -> Controller:
    """A controller of one model, or of those given, that makes chains."""
    settings = ControllerConfig(
        models or (make_policy(most=instances_max),),
        workers_expected=workers,
        multicast="chain",
        chunk_bytes=CHUNK_BYTES,
    )
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


def scaled(before: int, after: int, reason: str, model: str = "m") -> ScaleDecided:
    return ScaleDecided(model, Role.UNIFIED, before, after, reason, {})


def whole(upstream: WorkerRef | None) -> tuple[Feed, ...]:
    """Everything from one holder (None: from storage)."""
    source = FromStorage() if upstream is None else FromWorker(upstream)
    return (Feed(source, CHUNKS),)


def load_order(
    instance: InstanceId,
    worker: WorkerRef,
    plan: PlanId,
    upstream: WorkerRef | None,
    model: str = "m",
) -> StartLoad:
    """The order to load the whole model from one holder."""
    return StartLoad(
        instance=instance,
        attempt=0,
        worker=worker,
        model=model,
        plan=plan,
        feeds=whole(upstream),
        chunk_bytes=CHUNK_BYTES,
        measure_capacity=False,
        workers=(worker,),
    )


def loads_of(commands: Sequence[AnyCommand]) -> list[StartLoad]:
    return [command for command in commands if isinstance(command, StartLoad)]


def plans_of(commands: Sequence[AnyCommand]) -> list[ScalePlan]:
    return [command.plan for command in commands if isinstance(command, PlanMade)]


def host_joined(
    number: int, *copies: CopyReport, memory_bytes: int = 1000, host: str = ""
) -> AgentJoined:
    """The agent of a host of its own, or of the host that is named."""
    return AgentJoined(H[number], Host(host or f"h{number}", "leaf", memory_bytes), copies)


def copied(
    agent: WorkerRef, plan: PlanId, model: str = "m", layers: int = SPEC.layers
) -> list[AnyEvent]:
    """The whole news of a host copy."""
    arrivals = [CopyLayerArrived(model, agent, plan, layer) for layer in range(layers)]
    return [*arrivals, CopyCompleted(model, agent, plan, 60)]


def joined(*workers: WorkerRef) -> list[AnyEvent]:
    return [WorkerJoined(worker, DEVICE) for worker in workers]


def loaded(instance: InstanceId) -> list[AnyEvent]:
    """The whole news of a load."""
    return [
        LoadStarted(instance, 0),
        LayerArrived(instance, 0, 1, layer=0),
        LayerArrived(instance, 0, 1, layer=2),
        LayerArrived(instance, 0, 3, layer=1),
        LoadCompleted(instance, 0, 60),
    ]


def arrived(request: str, prompt_tokens: int = 10, model: str = "m") -> RequestArrived:
    return RequestArrived(request, model, prompt_tokens, 5)


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
    return [event for n in range(instances) for event in serves(W[n], 101 + n)]


def serves(worker: WorkerRef, instance: InstanceId, model: str = "m") -> list[AnyEvent]:
    """A worker joins and reports that it serves an instance, which has nothing to do."""
    report = InstanceReport(instance, model, 0, 3, True)
    return [WorkerJoined(worker, DEVICE, report), reported(instance)]
