"""Everything that a member is ever told: the inputs of `Member.step`. Values only.

Orders come from the controller, attempts from gateways, messages from peers, and news from what the
member started itself: transfers, its executor, its memory. `plan` names a holding, of which a plan
brings one to a member; news of a holding that is gone are late, and nothing follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.engine_step import EngineStep
from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import SequenceSpec
from livescale.messages.attempts import Cancel, Disown
from livescale.messages.commands import (
    AmendHolding,
    ChangeDuty,
    DropHolding,
    ReleaseHolding,
    SetCores,
    StartHolding,
)
from livescale.messages.epochs import FIRST_EPOCH, ControllerEpoch
from livescale.values.types import InstanceId, PlanId, RequestId, StageOf, Value, WorkerRef

MemberOrder = StartHolding | AmendHolding | ChangeDuty | ReleaseHolding | DropHolding | SetCores


def receiver_of(order: MemberOrder) -> WorkerRef:
    """The member that the order is for."""
    return order.worker if isinstance(order, SetCores) else order.holding.member


class RankLayers(Value, frozen=True, tag=True):
    """Message to rank 0 of a live instance: a rank has layers 0…watermark-1, and those `beyond`."""

    instance: InstanceId
    rank: int
    watermark: int
    beyond: tuple[int, ...] = ()


PeerMessage = LiveMessage | RankLayers


class Ordered(Value, frozen=True, tag=True):
    """An order of the controller in its life `epoch`. A StartHolding has the sizes of its span's
    layers, and an `identity` that equals another one's when all bytes are the same."""

    command: MemberOrder
    layer_bytes: tuple[int, ...] = ()
    identity: str = ""
    epoch: ControllerEpoch = FIRST_EPOCH


class ControllerMet(Value, frozen=True, tag=True):
    """A life of the controller was met that may know nothing of the member but its report. Orders
    of other lives that have not been carried out by then are refused."""

    epoch: ControllerEpoch = FIRST_EPOCH


class FirstByteCame(Value, frozen=True, tag=True):
    """Bytes of the holding begin to arrive."""

    plan: PlanId


class LayerCame(Value, frozen=True, tag=True):
    """A layer is complete and verified. In any order, each layer once."""

    plan: PlanId
    layer: int


class AllCame(Value, frozen=True, tag=True):
    """Every layer is there. `received_bytes` as in HoldingCompleted."""

    plan: PlanId
    received_bytes: int


class FetchFailed(Value, frozen=True, tag=True):
    """The holding can never be whole: its files, its memory or its executor refuse."""

    plan: PlanId
    reason: str


class FeedEnded(Value, frozen=True, tag=True):
    """Nothing (more) comes from this holder; what is there stays. `is_stalled`: it may come yet."""

    plan: PlanId
    upstream: WorkerRef
    reason: str
    is_stalled: bool


class MemoryKept(Value, frozen=True, tag=True):
    """What may still be written of the bytes that a holding had which is gone, as (offset, size):
    reads that cannot be called back are under way into it. Empty when they have ended."""

    plan: PlanId
    ranges: tuple[tuple[int, int], ...]


class ExecutorReady(Value, frozen=True, tag=True):
    """The executor has taken the model over, with KV for so many blocks. One position takes
    `kv_layer_bytes` of KV in one layer, and `row_bytes` as a hidden row. What it has taken over may
    be a `stage` of a model."""

    plan: PlanId
    limits: BatcherConfig
    kv_layer_bytes: int
    row_bytes: int
    stage: StageOf | None = None


class RunEnded(Value, frozen=True, tag=True):
    """The Run that was ordered last is over: per sampling segment a token per step. Its last step
    took `elapsed_ns`. What came of one that was a step of an engine is its `step`. Of the `faulty`
    requests nothing came: tokens of theirs say nothing."""

    token_ids: Sequence[Sequence[int]]
    elapsed_ns: int
    step: EngineStep | None = None
    faulty: tuple[FaultyRequest, ...] = ()


class LayersRan(Value, frozen=True, tag=True):
    """The first Run in flight, of which that was to be told, has done the layers below `stop`."""

    stop: int


class RateMeasured(Value, frozen=True, tag=True):
    """What `Measure` found."""

    plan: PlanId
    prefill_tokens_per_s: int


class CoresSet(Value, frozen=True, tag=True):
    """The executor computes with so many cores from its next Run on; it was `asked` for so many."""

    cores: int
    asked: int


class Submitted(Value, frozen=True, tag=True):
    """A gateway asks for an attempt on an instance."""

    gateway: str
    instance: InstanceId
    spec: SequenceSpec


class GatewayGone(Value, frozen=True, tag=True):
    """No connection leads to this gateway any more."""

    gateway: str


class GatewayUnknown(Value, frozen=True, tag=True):
    """No connection leads to the gateway of an attempt that was taken over."""

    gateway: str
    request: RequestId
    attempt: int


class PeerSent(Value, frozen=True, tag=True):
    """A message of another worker. `size_bytes` of rows or KV came along, and lie with the shell
    under the number `content` until the end of the step. A Handover names the gateway of each of
    its requests ("": the request is not wanted any more). `came_ns`: when the last byte was here,
    which may be long before the member takes the message in (None: that is not known)."""

    peer: WorkerRef
    message: PeerMessage
    gateways: tuple[str, ...] = ()
    size_bytes: int = 0
    content: int = 0
    came_ns: int | None = None


class PeerLost(Value, frozen=True, tag=True):
    """Another worker, or the way to it, is gone. With `is_refused` the way stands: what came from
    there is no message."""

    peer: WorkerRef
    is_refused: bool = False


HoldingNews = (
    FirstByteCame | LayerCame | AllCame | FetchFailed | FeedEnded | ExecutorReady | RateMeasured
)

MemberInput = (
    Ordered
    | ControllerMet
    | HoldingNews
    | LayersRan
    | RunEnded
    | CoresSet
    | MemoryKept
    | Submitted
    | Cancel
    | Disown
    | GatewayGone
    | GatewayUnknown
    | PeerSent
    | PeerLost
)
