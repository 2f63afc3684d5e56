"""Messages between the processes of a pool, and the channel that carries them.

A frame is a 4-byte big-endian length and a msgpack body. Lengths are bounded before anything is
allocated, bodies are decoded strictly into the types below, and a channel that breaks a rule is
closed. Parameters never travel here: they go worker to worker through `transfer`.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec

from livescale.messages.commands import (
    AmendLoad,
    Dispatch,
    DropCopy,
    FailRequest,
    Release,
    StartCopy,
    StartLoad,
)
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    CapacityMeasured,
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
    FeedFailed,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LinkMeasured,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
)
from livescale.policies import ModelPolicy
from livescale.telemetry.record import RequestLine
from livescale.topology import Device, Host
from livescale.types import (
    FinishReason,
    InstanceId,
    Manifest,
    ModelSpec,
    RequestId,
    SamplingDefaults,
    SamplingParams,
    TokenLogprobs,
    Value,
    WorkerRef,
)

FRAME_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct(">I")
# Above this the sender waits for the socket: a peer that reads nothing must not fill our memory.
_BACKLOG_BYTES = 8 << 20


class WireError(Exception):
    """The peer sent something that is not a message of this channel."""


class Address(Value, frozen=True):
    """Where somebody listens."""

    host: str
    port: int


class CatalogEntry(Value, frozen=True):
    """A model of the pool, prepared once: where it lies, what it weighs, what its files hash to."""

    spec: ModelSpec
    manifest: Manifest
    directory: str
    eos_token_ids: tuple[int, ...]
    request_tokens_max: int
    sampling_defaults: SamplingDefaults = SamplingDefaults()


# -- hello: the first message of every connection ----------------------------------------------


class WorkerHello(Value, frozen=True, tag=True):
    """A worker presents itself to the controller.

    `shm_path` is where processes of its host get its memory from; None if they cannot.
    """

    secret: str
    worker: WorkerRef
    device: Device
    data_address: Address
    token_address: Address
    report: InstanceReport | None
    shm_path: str | None = None


class AgentHello(Value, frozen=True, tag=True):
    """A host agent presents itself to the controller."""

    secret: str
    agent: WorkerRef
    host: Host
    data_address: Address
    copies: tuple[CopyReport, ...]
    shm_path: str | None = None


class GatewayHello(Value, frozen=True, tag=True):
    """A gateway presents itself, to the controller or to a worker."""

    secret: str
    gateway: str


# -- controller to worker and agent --------------------------------------------------------------


class Holder(Value, frozen=True):
    """A worker or agent whose data plane can be asked for parameters. Those of one `host` may
    share memory."""

    ref: WorkerRef
    data_address: Address
    host: str
    shm_path: str | None = None


class Holders(Value, frozen=True, tag=True):
    """The living workers and agents that the controller knows: meet those that are new."""

    holders: tuple[Holder, ...]


class Order(Value, frozen=True, tag=True):
    """A command for a worker or agent with what only the world knows: the manifest, and where the
    model's files lie.

    `directory` is set only when a feed reads the model from storage.
    """

    command: StartLoad | AmendLoad | Release | StartCopy | DropCopy
    manifest: Manifest | None = None
    directory: str | None = None


class Examine(Value, frozen=True, tag=True):
    """Say what your memory holds: gateways ask the controller, which asks all members."""

    call: str


class HeldCopy(Value, frozen=True):
    """A model in a member's memory: the checksum of each layer as its bytes are now (None: not
    there yet)."""

    model: str
    checksums: tuple[str | None, ...]
    rank: int = 0


class Examined(Value, frozen=True, tag=True):
    """What a member's memory holds. The controller passes it on to who asked."""

    call: str
    member: WorkerRef
    copies: tuple[HeldCopy, ...]


class Examining(Value, frozen=True, tag=True):
    """The controller's first answer to Examine: an Examined follows from each of these that
    lives on."""

    call: str
    members: tuple[WorkerRef, ...]


class Refused(Value, frozen=True, tag=True):
    """The controller will not talk to this incarnation: it must end."""

    reason: str


# -- controller to gateway -----------------------------------------------------------------------


class Peer(Value, frozen=True):
    """A worker that a gateway can reach."""

    worker: WorkerRef
    token_address: Address


class Peers(Value, frozen=True, tag=True):
    """The living workers that the controller knows: open connections to those that are new."""

    peers: tuple[Peer, ...]


class PublishedModel(Value, frozen=True):
    """A model that is in the pool, with the limits it was published with.

    `is_leaving`: it was withdrawn; running requests finish, new ones are refused.
    """

    entry: CatalogEntry
    policy: ModelPolicy
    is_leaving: bool = False

    @property
    def instances_min(self) -> int:
        return self.policy.instances_min

    @property
    def instances_max(self) -> int:
        return self.policy.instances_max

    @property
    def priority(self) -> int:
        return self.policy.priority


class Catalog(Value, frozen=True, tag=True):
    """All models of the pool, sent to a new gateway and at every change.

    `preparing` lists (name, directory) of models whose files are being read: they are not in the
    pool yet, and may never be.
    """

    models: tuple[PublishedModel, ...]
    preparing: tuple[tuple[str, str], ...] = ()


class ModelLoad(Value, frozen=True):
    """What a model's instances reported, summed up; all but the first two only grow.

    `device_ns` is how long its instances have held devices, summed up over the devices.
    """

    kv_blocks_used: int
    kv_blocks: int
    preemptions: int = 0
    prefix_lookup_tokens: int = 0
    reused_tokens: int = 0
    handovers: int = 0
    handover_bytes: int = 0
    device_ns: int = 0


class PoolStatus(Value, frozen=True, tag=True):
    """What a gateway shows of the pool: instances per model and state, the workers, the loads.

    `copies` counts each model's complete copies in host memory. `unready` lists the models that
    have less than they should have at least: a serving instance, or, where the minimum is 0, a
    copy to start one from. The pool is ready when there are none.
    """

    instances: dict[str, dict[str, int]]
    workers: int
    loads: dict[str, ModelLoad]
    agents: int = 0
    copies: dict[str, int] = msgspec.field(default_factory=dict)
    unready: tuple[str, ...] = ()


class ModelProblem(enum.StrEnum):
    """Why a model was not added or removed."""

    INVALID = "invalid"  # the directory or a setting is wrong, or it does not fit
    EXISTS = "exists"  # a model of this name is there, or being prepared
    UNKNOWN = "unknown"  # no model of this name is there
    FAILED = "failed"  # the pool could not carry it out


class ModelAnswer(Value, frozen=True, tag=True):
    """The one answer to AddModel or RemoveModel. `problem` None: it is done.

    An added model has its host copy by then (or needs none); a removed one takes no new requests.
    """

    call: str
    name: str
    problem: ModelProblem | None = None
    reason: str = ""


# -- gateway to worker, worker to gateway --------------------------------------------------------


class Submit(Value, frozen=True, tag=True):
    """Run this attempt. `generated_ids` were emitted by earlier attempts."""

    request: RequestId
    attempt: int
    instance: InstanceId
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    sampling: SamplingParams


class Cancel(Value, frozen=True, tag=True):
    """Nobody reads this attempt any more."""

    request: RequestId
    attempt: int


class Token(Value, frozen=True, array_like=True):
    """One generated token of one attempt; the first one tells of the prompt's cached tokens."""

    request: RequestId
    attempt: int
    index: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class Tokens(Value, frozen=True, tag=True):
    """What one Run generated for this gateway."""

    tokens: tuple[Token, ...]


class AttemptTaken(Value, frozen=True, tag=True):
    """This worker runs the attempt from now on: it took it over from another one.

    A gateway that knows a newer attempt, or none, answers with Disown or Cancel.
    """

    request: RequestId
    attempt: int


class AttemptReturned(Value, frozen=True, tag=True):
    """The worker gave the attempt up: the request waits again."""

    request: RequestId
    attempt: int


class Disown(Value, frozen=True, tag=True):
    """Somebody else runs this attempt, or a newer one: forget it without a word."""

    request: RequestId
    attempt: int


class AttemptFailed(Value, frozen=True, tag=True):
    """The worker could not run the attempt; the controller hears RequestEnded(FAILED)."""

    request: RequestId
    attempt: int
    reason: str


# -- gateway to controller -----------------------------------------------------------------------


class RequestTimed(Value, frozen=True, tag=True):
    """A request is over: its line for the run record."""

    line: RequestLine


class AddModel(Value, frozen=True, tag=True):
    """Publish the model in `path`. `call` names the question; exactly one ModelAnswer follows.

    `settings` are keys of `models:` in the configuration other than path and name, as JSON has
    them; what is wrong with them is said in the answer.
    """

    call: str
    path: str
    name: str = ""
    settings: dict[str, str | int | list[str] | None] = msgspec.field(default_factory=dict)


class RemoveModel(Value, frozen=True, tag=True):
    """Withdraw the model. `call` names the question; exactly one ModelAnswer follows."""

    call: str
    name: str


WorkerEvent = (
    InstanceReported
    | BatchTaken
    | LiveStarted
    | LoadStarted
    | LayerArrived
    | LoadCompleted
    | LoadFailed
    | FeedFailed
    | LinkMeasured
    | Released
    | CapacityMeasured
    | RequestEnded
)
AgentEvent = CopyLayerArrived | CopyCompleted | CopyFailed | CopyDropped | FeedFailed | LinkMeasured
FromGateway = (
    RequestArrived
    | RequestCancelled
    | RequestEnded
    | RequestTimed
    | AddModel
    | RemoveModel
    | Examine
)
ToController = (
    WorkerHello | AgentHello | GatewayHello | WorkerEvent | AgentEvent | FromGateway | Examined
)
ToWorker = Holders | Order | Examine | Refused
ToGateway = Peers | Catalog | Dispatch | FailRequest | PoolStatus | ModelAnswer
ToExaminer = ToGateway | Examining | Examined
ToTokenServer = GatewayHello | Submit | Cancel | Disown
FromTokenServer = Tokens | AttemptTaken | AttemptReturned | AttemptFailed
AnyMessage = ToController | ToWorker | ToExaminer | ToTokenServer | FromTokenServer | AnyEvent

_encoder = msgspec.msgpack.Encoder()
Incoming = TypeVar("Incoming")


class Wire(Generic[Incoming]):
    """A connection that carries messages both ways; `incoming` is the type that it accepts.

    Iterate to receive; the iteration ends when the peer is gone or breaks the protocol
    (`error` says why). `send` never blocks; a peer that lets too much pile up is cut off.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: object,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self.error: str | None = None

    def send(self, message: AnyMessage) -> None:
        """Queue a message; a closed channel drops it (its end is told to the reader's side)."""
        if self._writer.is_closing():
            return
        body = _encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(body)) + body)
        if self._writer.transport.get_write_buffer_size() > _BACKLOG_BYTES:
            self.error = "the peer does not read"
            self._writer.transport.abort()

    async def receive(self) -> Incoming | None:
        """The next message, or None at the end of the connection."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise WireError(f"a frame of {length} bytes exceeds {FRAME_BYTES_MAX}")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (OSError, EOFError) as error:
            self.error = self.error or str(error) or "connection closed"
        except (WireError, msgspec.MsgspecError) as error:
            self.error = f"not a message of this channel: {error}"
        self.close()
        return None

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        while (message := await self.receive()) is not None:
            yield message

    def close(self) -> None:
        self._writer.close()


async def open_wire(address: Address, incoming: object) -> Wire[Incoming]:
    """Connect to a listener. Raises OSError."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    return Wire(reader, writer, incoming)
