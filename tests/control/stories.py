"""Small controllers for examples: one model of 60 bytes in three layers, equal workers.

Chunks are of 10 bytes: the model has six.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.clusters.topology import Device, Host
from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.messages.commands import (
    AnyCommand,
    DropHolding,
    PlanMade,
    ScaleDecided,
    StartHolding,
    WakeAt,
)
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    FirstByteArrived,
    HoldingCompleted,
    HoldingReport,
    InstanceReported,
    LayerArrived,
    RequestArrived,
    RequestEnded,
    WorkerJoined,
)
from livescale.messages.scale_plan import ScalePlan
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import (
    FromStorage,
    FromWorker,
    HoldingId,
    InstanceId,
    LayerSpan,
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
REMAINDER = "the copy can never be whole"
CHUNKS = ChunkGrid(SPEC.layer_bytes, CHUNK_BYTES).all()


def make_policy(name: str = "m", least: int = 1, most: int = 8, **values: object) -> ModelPolicy:
    """A model whose capacity is known: 1000 tokens per second, 100 KV blocks."""
    spec = msgspec.structs.replace(SPEC, name=name)
    policy = ModelPolicy(spec, least, most, prefill_tokens_per_s=1000, kv_blocks=100)
    return msgspec.structs.replace(policy, **values)


def make_controller(
    workers: int, instances_max: int = 8, models: tuple[ModelPolicy, ...] = (), **config: object
) -> Controller:
    """A controller of one model, or of those given, that makes chains. Released workers keep
    nothing, if the `config` does not say otherwise."""
    settings = ControllerConfig(
        models or (make_policy(most=instances_max),),
        workers_expected=workers,
        multicast="chain",
        chunk_bytes=CHUNK_BYTES,
        warm_spares="off",
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
    *,
    rank: int = 0,
    workers: tuple[WorkerRef, ...] = (),
) -> StartHolding:
    """The order to load the whole model, or one rank of it, from one holder."""
    order = copy_order(worker, plan, upstream, model, rank)
    return msgspec.structs.replace(order, duty=Duty(instance, workers or (worker,)))


def copy_order(
    agent: WorkerRef, plan: PlanId, upstream: WorkerRef | None, model: str = "m", rank: int = 0
) -> StartHolding:
    """The order to bring the whole model, or one rank of it, from one holder to a host's memory."""
    return StartHolding(
        holding=HoldingId(plan, agent),
        model=model,
        span=LayerSpan(0, SPEC.layers),
        feeds=whole(upstream),
        chunk_bytes=CHUNK_BYTES,
        rank=rank,
    )


def drop(plan: PlanId, member: WorkerRef, reason: str = "drained") -> DropHolding:
    return DropHolding(HoldingId(plan, member), reason)


def report(order: StartHolding, watermark: int = SPEC.layers) -> HoldingReport:
    """A member has so many layers of what it was ordered to get."""
    is_whole = watermark == order.span.stop
    kept = msgspec.structs.replace(order, feeds=()) if is_whole else order
    return HoldingReport(kept, watermark, is_whole)


def loads_of(commands: Sequence[AnyCommand]) -> list[StartHolding]:
    """Orders to workers."""
    return [c for c in commands if isinstance(c, StartHolding) and c.duty is not None]


def copies_of(commands: Sequence[AnyCommand]) -> list[StartHolding]:
    """Orders to agents."""
    return [c for c in commands if isinstance(c, StartHolding) and c.duty is None]


def instances_of(orders: Sequence[StartHolding]) -> list[InstanceId]:
    return [order.duty.instance for order in orders if order.duty is not None]


def plans_of(commands: Sequence[AnyCommand]) -> list[ScalePlan]:
    return [command.plan for command in commands if isinstance(command, PlanMade)]


def host_joined(
    number: int, *copies: HoldingReport, memory_bytes: int = 1000, host: str = ""
) -> AgentJoined:
    """The agent of a host of its own, or of the host that is named."""
    return AgentJoined(H[number], Host(host or f"h{number}", "leaf", memory_bytes), copies)


def joined(*workers: WorkerRef) -> list[AnyEvent]:
    return [WorkerJoined(worker, DEVICE) for worker in workers]


def rejoined(held: HoldingReport, device: Device = DEVICE) -> WorkerJoined:
    """The worker joins with what it holds."""
    return WorkerJoined(held.order.holding.member, device, (held,))


def loaded(holding: HoldingId) -> list[AnyEvent]:
    """The whole news of a load, or of a copy."""
    first: list[AnyEvent] = [] if holding.member.is_agent else [FirstByteArrived(holding)]
    return [
        *first,
        LayerArrived(holding, layer=0, watermark=1),
        LayerArrived(holding, layer=2, watermark=1),
        LayerArrived(holding, layer=1, watermark=3),
        HoldingCompleted(holding, 60),
    ]


def arrived(request: str, prompt_tokens: int = 10, model: str = "m") -> RequestArrived:
    return RequestArrived(request, model, prompt_tokens, 5)


def finished(request: str, attempt: int = 1) -> RequestEnded:
    return RequestEnded(request, attempt, Outcome.FINISHED, 5)


def reported(instance: InstanceId, running: int = 0, queued: int = 0) -> InstanceReported:
    return InstanceReported(instance, (), running, queued, 0, 100, 1)


def serving(workers: int, instances: int, **config: object) -> Controller:
    """A controller at time 0 that has adopted instances 101, 102, … on w0, w1, …"""
    controller = make_controller(workers, **config)
    step(controller, 0, *adopted(instances), *joined(*W[instances:workers]))
    return controller


def adopted(instances: int) -> list[AnyEvent]:
    """Workers w0, w1, … join and report that they serve instances 101, 102, …"""
    return [event for n in range(instances) for event in serves(W[n], 101 + n)]


def serves(worker: WorkerRef, instance: InstanceId, model: str = "m") -> list[AnyEvent]:
    """A worker joins and reports that it serves an instance, which has nothing to do. Its plan has
    the same number."""
    held = report(load_order(instance, worker, instance, None, model))
    return [rejoined(held), reported(instance)]
