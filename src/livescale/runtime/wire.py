"""Messages between the processes of a pool, and the channel that carries them.

A frame is a 4-byte big-endian length and a msgpack body. Lengths are bounded before anything is
allocated, bodies are decoded strictly into the types below, and a channel that breaks a rule is
closed. Parameters never travel here: they go worker to worker through `transfer`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec

from livescale.messages.commands import Dispatch, FailRequest, Release, StartLoad, StartSend
from livescale.messages.events import (
    AnyEvent,
    CapacityMeasured,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SendEnded,
)
from livescale.telemetry.record import RequestLine
from livescale.topology import Device
from livescale.types import (
    FinishReason,
    InstanceId,
    Manifest,
    RequestId,
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


# -- hello: the first message of every connection ----------------------------------------------


class WorkerHello(Value, frozen=True, tag=True):
    """A worker presents itself to the controller."""

    secret: str
    worker: WorkerRef
    device: Device
    data_address: Address
    token_address: Address
    report: InstanceReport | None


class GatewayHello(Value, frozen=True, tag=True):
    """A gateway presents itself, to the controller or to a worker."""

    secret: str
    gateway: str


# -- controller to worker ------------------------------------------------------------------------


class Peer(Value, frozen=True):
    """A worker that others can reach."""

    worker: WorkerRef
    data_address: Address
    token_address: Address


class Peers(Value, frozen=True, tag=True):
    """The living workers that the controller knows: open connections to those that are new."""

    peers: tuple[Peer, ...]


class Order(Value, frozen=True, tag=True):
    """A command for a worker with what only the world knows: the manifest, and where files lie.

    `directory` is set only when the worker shall read the model from storage.
    """

    command: StartLoad | StartSend | Release
    manifest: Manifest | None = None
    directory: str | None = None


class Refused(Value, frozen=True, tag=True):
    """The controller will not talk to this incarnation: it must end."""

    reason: str


# -- controller to gateway -----------------------------------------------------------------------


class ModelLoad(Value, frozen=True):
    """What a model's instances reported, summed up; the last three only grow."""

    kv_blocks_used: int
    kv_blocks: int
    preemptions: int = 0
    prefix_lookup_tokens: int = 0
    reused_tokens: int = 0


class PoolStatus(Value, frozen=True, tag=True):
    """What a gateway shows of the pool: instances per model and state, the workers, the loads."""

    instances: dict[str, dict[str, int]]
    workers: int
    loads: dict[str, ModelLoad]


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
    """One generated token of one attempt."""

    request: RequestId
    attempt: int
    index: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


class Tokens(Value, frozen=True, tag=True):
    """What one Run generated for this gateway."""

    tokens: tuple[Token, ...]


class AttemptFailed(Value, frozen=True, tag=True):
    """The worker could not run the attempt; the controller hears RequestEnded(FAILED)."""

    request: RequestId
    attempt: int
    reason: str


# -- gateway to controller -----------------------------------------------------------------------


class RequestTimed(Value, frozen=True, tag=True):
    """A request is over: its line for the run record."""

    line: RequestLine


WorkerEvent = (
    InstanceReported
    | LoadStarted
    | LayerArrived
    | LoadCompleted
    | LoadFailed
    | SendEnded
    | Released
    | CapacityMeasured
    | RequestEnded
)
ToController = (
    WorkerHello | GatewayHello | WorkerEvent | RequestArrived | RequestCancelled | RequestTimed
)
ToWorker = Peers | Order | Refused
ToGateway = Peers | Dispatch | FailRequest | PoolStatus
ToTokenServer = GatewayHello | Submit | Cancel
FromTokenServer = Tokens | AttemptFailed
AnyMessage = ToController | ToWorker | ToGateway | ToTokenServer | FromTokenServer | AnyEvent

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
