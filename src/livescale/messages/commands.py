"""Commands: everything the controller ever asks for, and the notices that explain it.

A command names ids and sizes; the world adds what only it knows (config, manifest, addresses,
prompts). `StartLoad`, `StartSend`, `Release` and `Dispatch` each end in exactly one terminal
event (see `messages.events`). `FailRequest` and `WakeAt` need no answer. `ScaleDecided`,
`PlanMade`, `Drain` and `Resume` are notices: they ask for nothing and are recorded.
"""

from __future__ import annotations

from livescale.types import (
    InstanceId,
    PlanId,
    RequestId,
    Role,
    ScalePlan,
    Upstream,
    Value,
    WorkerRef,
)


class Command(Value, frozen=True, tag=True):
    """Base of all commands."""


class StartLoad(Command, frozen=True):
    """Give `worker` the model: receive its layers from `upstream`, forward them while receiving.

    `measure_capacity` asks the worker to time a warm-up prefill before it reports completion.
    """

    instance: InstanceId
    attempt: int
    worker: WorkerRef
    model: str
    plan: PlanId
    upstream: Upstream
    forward_to: WorkerRef | None
    measure_capacity: bool
    rank: int = 0


class StartSend(Command, frozen=True):
    """Let `source`, which holds or is receiving the whole model, send all layers to `target`."""

    plan: PlanId
    source: WorkerRef
    target: WorkerRef
    model: str


class Release(Command, frozen=True):
    """Take the model from one of the instance's workers, which stays warm.

    A load that is under way there ends in LoadFailed first.
    """

    instance: InstanceId
    attempt: int
    worker: WorkerRef
    rank: int = 0


class Dispatch(Command, frozen=True):
    """Run the request on the instance. The gateway sends the prompt to its rank 0, `worker`."""

    request: RequestId
    attempt: int
    instance: InstanceId
    worker: WorkerRef


class FailRequest(Command, frozen=True):
    """End the request with an error: no attempt is under way and none will be made."""

    request: RequestId
    reason: str


class WakeAt(Command, frozen=True):
    """Call again at this time, with Tick, if nothing happens before."""

    at_ns: int


class ScaleDecided(Command, frozen=True):
    """Notice: the wanted number of instances changed, with the values that led to it."""

    model: str
    role: Role
    from_instances: int
    to_instances: int
    reason: str
    values: dict[str, int]


class Drain(Command, frozen=True):
    """Notice: the instance gets no more requests and is released when its last one has ended."""

    instance: InstanceId
    attempt: int


class Resume(Command, frozen=True):
    """Notice: a draining instance is wanted again and serves on; nothing has to be loaded."""

    instance: InstanceId
    attempt: int


class PlanMade(Command, frozen=True):
    """Notice: how the new instances get their parameters."""

    plan: ScalePlan
    instances: tuple[InstanceId, ...]


AnyCommand = (
    StartLoad
    | StartSend
    | Release
    | Dispatch
    | FailRequest
    | WakeAt
    | ScaleDecided
    | PlanMade
    | Drain
    | Resume
)
