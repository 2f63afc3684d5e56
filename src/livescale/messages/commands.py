"""Commands: everything the controller ever asks for, and the notices that explain it.

A command names ids and sizes; the world adds what only it knows (config, manifest, addresses,
prompts). `StartHolding`, `DropHolding`, `SetCores` and `Dispatch` each end in exactly one terminal
event (see `messages.events`). `AmendHolding`, `ChangeDuty`, `ReleaseHolding`, `FailRequest` and
`WakeAt` need no answer.
`ScaleDecided`, `CoresDecided`, `PlanMade`, `Paired`, `Drain`, `Resume` and `ModelGone` are notices:
they ask for nothing and are recorded.
"""

from __future__ import annotations

from livescale.messages.scale_plan import ScalePlan
from livescale.values.chunks import Feed
from livescale.values.routes import Duty, Partner
from livescale.values.types import (
    HoldingId,
    InstanceId,
    LayerSpan,
    PlanId,
    RequestId,
    Role,
    Value,
    WorkerRef,
)


class Command(Value, frozen=True, tag=True):
    """Base of all commands."""


class StartHolding(Command, frozen=True):
    """Get the layers of `span` of one rank of the model by `feeds`, and pass on to others what is
    there (ends in HoldingCompleted or HoldingFailed).

    Chunks are those of the grid of `chunk_bytes`. A worker is told its `duty`; `measure_capacity`
    asks that worker to time a warm-up prefill before it reports completion. A host agent only
    holds the bytes (no duty). `reason` says why they are wanted there.

    With `spare` nothing is fetched: the bytes are those of the member's warm spare that came by
    this plan, and that is no holding of its own any more. A worker's bytes lie from `offset_bytes`
    of its memory on; an agent finds a place itself.
    """

    holding: HoldingId
    model: str
    span: LayerSpan
    feeds: tuple[Feed, ...]
    chunk_bytes: int
    rank: int = 0
    duty: Duty | None = None
    measure_capacity: bool = False
    reason: str = ""
    spare: PlanId | None = None
    offset_bytes: int = 0


class AmendHolding(Command, frozen=True):
    """From now on the member gets what it misses of the holding by these feeds.

    Chunks that are there stay; feeds that are not listed any more end. Needs no answer of its own:
    the holding still ends in its one terminal event.
    """

    holding: HoldingId
    feeds: tuple[Feed, ...]


class ReleaseHolding(Command, frozen=True):
    """Take the duty away from a worker's whole holding: the instance ends, the bytes stay as a warm
    spare, and are passed on to others as before. Needs no answer: a worker obeys in order.
    """

    holding: HoldingId


class ChangeDuty(Command, frozen=True):
    """From now on this is the duty of the instance; its rank 0 is told. It differs from the last
    one in `drains_to`: to whom a draining instance passes its requests (to none: it keeps what it
    has); or a loading instance loses the partners of `gives_to`, and works alone; or in `role` and
    `decodes_at`: it prefills or decodes (a new role is reported: RoleChanged)."""

    holding: HoldingId
    duty: Duty


class DropHolding(Command, frozen=True):
    """Take the bytes out of the member's memory (ends in HoldingDropped).

    A holding that is not complete yet ends in HoldingFailed first; a worker stays warm.
    """

    holding: HoldingId
    reason: str


class SetCores(Command, frozen=True):
    """From its next Run on the worker computes with so many cores of its host (ends in
    CoresChanged, which says how many it has: a device may have no use for them)."""

    worker: WorkerRef
    cores: int


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


class CoresDecided(Command, frozen=True):
    """Notice: instances of the model should have so many cores each, with the values that led to
    it. A SetCores goes to each worker that has others and may have these."""

    model: str
    from_cores: int
    to_cores: int
    reason: str
    values: dict[str, int]


class Drain(Command, frozen=True):
    """Notice: the instance gets no more requests and is released when its last one has ended."""

    instance: InstanceId


class Resume(Command, frozen=True):
    """Notice: a draining instance is wanted again and serves on; nothing has to be loaded."""

    instance: InstanceId


class ModelGone(Command, frozen=True):
    """Notice: nothing of a removed model is left in the cluster."""

    model: str


class PlanMade(Command, frozen=True):
    """Notice: how new instances, or host copies (no instances), get their parameters."""

    plan: ScalePlan
    instances: tuple[InstanceId, ...]


class Paired(Command, frozen=True):
    """Notice: in which order a new instance works before everything is there (None: not at all),
    to whom it gives requests, and why."""

    instance: InstanceId
    live_order: str | None
    gives_to: tuple[Partner, ...]
    reason: str


AnyCommand = (
    StartHolding
    | AmendHolding
    | ReleaseHolding
    | ChangeDuty
    | DropHolding
    | SetCores
    | Dispatch
    | FailRequest
    | WakeAt
    | ScaleDecided
    | CoresDecided
    | PlanMade
    | Paired
    | Drain
    | Resume
    | ModelGone
)
