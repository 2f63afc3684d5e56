"""Everything that a member ever asks its shell to do: the effects of `Member.step`. Values only.

A shell carries effects out in order and decides nothing. Where an effect fails, or ends, an input
says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.contract.live_messages import KvLayer, WithRows
from livescale.batching.contract.serving import KvPlaces
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run
from livescale.control.policy.residency import Resident
from livescale.member.inputs import MemberOrder, PeerMessage
from livescale.messages.attempts import AttemptFailed, AttemptReturned, AttemptTaken
from livescale.messages.commands import StartHolding
from livescale.messages.events import AnyEvent
from livescale.values.chunks import Feed
from livescale.values.types import PlanId, Value, WorkerRef


class Report(Value, frozen=True, tag=True):
    """Send the event to the controller, if one is there."""

    event: AnyEvent


class RefuseOrder(Value, frozen=True, tag=True):
    """The order was not carried out: the controller that gave it is not the latest one. The reason
    is for people."""

    command: MemberOrder
    reason: str


class Answer(Value, frozen=True, tag=True):
    """Send the gateway what became of an attempt. Where no connection leads there, an AttemptTaken
    ends in GatewayUnknown."""

    gateway: str
    answer: AttemptTaken | AttemptReturned | AttemptFailed


class Emit(Value, frozen=True, tag=True):
    """Send the gateway tokens: those of the Run that has just ended, or (`is_repeated`) tokens
    that another worker may have sent, too."""

    gateway: str
    emitted: Sequence[EmittedTokens]
    is_repeated: bool = False


class TellPeer(Value, frozen=True, tag=True):
    """Send another worker a message. With a Handover or a Visit go the rows of its name, with a
    KvLayer the KV of `places`: `size_bytes` together."""

    peer: WorkerRef
    message: PeerMessage
    gateways: tuple[str, ...] = ()
    places: KvPlaces = ()
    size_bytes: int = 0


class Refuse(Value, frozen=True, tag=True):
    """What the peer sent is not to be believed; the reason is for people."""

    peer: WorkerRef
    reason: str


class Reach(Value, frozen=True, tag=True):
    """A message to this worker is to be expected: the way there may be made ready."""

    peer: WorkerRef


class Fetch(Value, frozen=True, tag=True):
    """Bring the order's layers to `offset_bytes` of the memory by its feeds, and pass on what is
    there. The bytes of `resident` layers lie in the memory already, at their own place."""

    plan: PlanId
    offset_bytes: int
    order: StartHolding
    resident: Resident | None = None


class TakeUp(Value, frozen=True, tag=True):
    """The bytes that came by the plan `spare` are from now on what `plan` brings, by this order."""

    plan: PlanId
    spare: PlanId
    order: StartHolding


class Release(Value, frozen=True, tag=True):
    """Let the executor forget the model. Its bytes stay, and are passed on as before."""

    plan: PlanId


class AmendFetch(Value, frozen=True, tag=True):
    """Get what is missing by these feeds. Layers that are there stay."""

    plan: PlanId
    feeds: tuple[Feed, ...]


class DropFetch(Value, frozen=True, tag=True):
    """Forget the holding: afterwards its bytes are neither written nor read, by the executor
    neither. What a network card may still write is told as MemoryKept before the next step's other
    inputs."""

    plan: PlanId


class KeepLayers(Value, frozen=True, tag=True):
    """Copy the first layers of what lies from `offset_bytes` of the memory on to the resident's
    place."""

    resident: Resident
    offset_bytes: int


class Assign(Value, frozen=True, tag=True):
    """Let the executor take the model over: ends in ExecutorReady or FetchFailed."""

    plan: PlanId


class Materialize(Value, frozen=True, tag=True):
    """The executor may use this layer of its model."""

    layer: int


class Measure(Value, frozen=True, tag=True):
    """Time a prefill of so many tokens, before the model computes anything: ends in
    RateMeasured."""

    plan: PlanId
    tokens: int


class UseCores(Value, frozen=True, tag=True):
    """Let the executor compute with so many cores from its next Run on, as far as that is possible:
    ends in CoresSet."""

    cores: int


class Execute(Value, frozen=True, tag=True):
    """Run it; ends in RunEnded, before any other input. Progress is worth a report from
    `report_due_ns` on: a Run of many steps may end there. With `tells_layers` each decoder layer
    that is done is an input (LayersRan), with what else has come, as far as that is possible."""

    run: Run
    report_due_ns: int
    tells_layers: bool = False


class GiveRunUp(Value, frozen=True, tag=True):
    """The Run in flight waits for layers that do not come any more: it ends now, in RunEnded with
    a step that was given up. One that has all its layers ends as usual."""


class TakeOver(Value, frozen=True, tag=True):
    """A batch was taken over, or visits: keep the rows that came as `content`, if it has any."""

    message: WithRows
    content: int


class WriteKv(Value, frozen=True, tag=True):
    """Write one layer's KV, which came as `content`, into the blocks of the batch's requests."""

    message: KvLayer
    places: KvPlaces
    content: int


class ForgetRows(Value, frozen=True, tag=True):
    """Rows of this batch are not wanted any more."""

    batch: BatchKey


Effect = (
    Report
    | RefuseOrder
    | Answer
    | Emit
    | TellPeer
    | Refuse
    | Reach
    | Fetch
    | TakeUp
    | Release
    | AmendFetch
    | DropFetch
    | KeepLayers
    | Assign
    | Materialize
    | Measure
    | UseCores
    | Execute
    | GiveRunUp
    | TakeOver
    | WriteKv
    | ForgetRows
)
