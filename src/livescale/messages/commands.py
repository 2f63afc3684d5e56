"""Commands: everything the controller ever asks for, and the notices that explain it.

A command names ids and sizes; the world adds what only it knows (config, manifest, addresses,
prompts). `StartLoad`, `Release`, `StartCopy`, `DropCopy` and `Dispatch` each end in exactly one
terminal event (see `messages.events`). `AmendLoad`, `FailRequest` and `WakeAt` need no answer.
`ScaleDecided`, `PlanMade`, `Paired`, `Drain`, `Resume` and `ModelGone` are notices: they ask for
nothing and are recorded.
"""

from __future__ import annotations

from livescale.chunks import Feed
from livescale.plans import Pairing, ScalePlan
from livescale.types import InstanceId, PlanId, RequestId, Role, Value, WorkerRef


class Command(Value, frozen=True, tag=True):
    """Base of all commands."""


class StartLoad(Command, frozen=True):
    """Give `worker` the model: it gets its layers by `feeds` and passes on what it has to others.

    Chunks are those of the grid of `chunk_bytes`. `measure_capacity` asks the worker to time a
    warm-up prefill before it reports completion. With a `pairing` the instance takes requests
    while its layers arrive (live scaling), and says so with LiveStarted. `workers` are those of the
    instance, by rank.
    """

    instance: InstanceId
    attempt: int
    worker: WorkerRef
    model: str
    plan: PlanId
    feeds: tuple[Feed, ...]
    chunk_bytes: int
    measure_capacity: bool
    rank: int = 0
    pairing: Pairing | None = None
    workers: tuple[WorkerRef, ...] = ()


class StartCopy(Command, frozen=True):
    """Bring one rank of the model into the memory of `agent`'s host; `plan` names the copy."""

    model: str
    agent: WorkerRef
    plan: PlanId
    feeds: tuple[Feed, ...]
    chunk_bytes: int
    reason: str
    rank: int = 0


class DropCopy(Command, frozen=True):
    """Take the copy out of the host's memory. One that is not complete yet ends in CopyFailed."""

    model: str
    agent: WorkerRef
    plan: PlanId
    reason: str
    rank: int = 0


class AmendLoad(Command, frozen=True):
    """From now on `receiver` gets what it misses of `plan` by these feeds.

    Chunks that are there stay; feeds that are not listed any more end. Needs no answer of its own:
    the load still ends in its one terminal event.
    """

    plan: PlanId
    receiver: WorkerRef
    feeds: tuple[Feed, ...]


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
    """End the request with an error: no attempt is under way and none will be made.

    With `retry_after_ns` the reason is why its model cannot be loaded now, which is tried again
    after that time.
    """

    request: RequestId
    reason: str
    retry_after_ns: int | None = None


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


class ModelGone(Command, frozen=True):
    """Notice: nothing of a removed model is left in the cluster."""

    model: str


class PlanMade(Command, frozen=True):
    """Notice: how new instances, or host copies (no instances), get their parameters."""

    plan: ScalePlan
    instances: tuple[InstanceId, ...]


class Paired(Command, frozen=True):
    """Notice: how a new instance works before everything is there, and why (None: not at all)."""

    instance: InstanceId
    pairing: Pairing | None
    reason: str


AnyCommand = (
    StartLoad
    | AmendLoad
    | StartCopy
    | DropCopy
    | Release
    | Dispatch
    | FailRequest
    | WakeAt
    | ScaleDecided
    | PlanMade
    | Paired
    | Drain
    | Resume
    | ModelGone
)
