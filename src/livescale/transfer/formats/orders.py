"""What a worker asks its data plane for, and whom the data plane tells.

Values and interfaces only.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

from livescale.values.chunks import Feed
from livescale.values.types import FromWorker, Manifest, PlanId, Value, WorkerRef

ABORTED = "aborted"
"""The reason that listeners get when the worker itself called `abort`."""


class TransferError(ConnectionError):
    """A peer cannot be reached or asked. The message names the worker and the address."""


class ContentChecks(enum.Enum):
    """Layers whose content hash is compared before they count as there."""

    NONE = "none"
    NETWORK = "network"  # those that came over a network, here or on their way to the holder
    ALL = "all"


class ReceiveOrder(Value, frozen=True):
    """Get the manifest's bytes from these holders, which are workers or host agents.

    `chunk_bytes` is the grid that the feeds' chunks are numbered in. `offset_bytes` is where the
    manifest's offset 0 lies in the memory. `present_layers` are there already, as the caller
    vouches; they are not asked for and not told of. Layers in
    `content_checks` must have the manifest's SHA-256; checksums are compared always.
    """

    plan: PlanId
    manifest: Manifest
    chunk_bytes: int
    feeds: tuple[Feed, ...]
    offset_bytes: int = 0
    present_layers: tuple[int, ...] = ()
    content_checks: ContentChecks = ContentChecks.NONE


class ReceiveListener(Protocol):
    """Told of one ReceiveOrder, from the data plane's threads; must not block.

    Calls never overlap. Exactly one of `completed` and `failed` is called, and nothing after it.
    A listener may call `amend` and `abort`.
    """

    def first_byte(self) -> None:
        """The first chunk is arriving."""

    def layer_arrived(self, layer: int) -> None:
        """The layer is complete in the memory and its checksum agrees. Once, in any order."""

    def completed(self, received_bytes: int) -> None:
        """All layers are there; the copy is offered to others from now on. So many bytes came into
        the memory for it: those of a chunk that had to come twice count twice."""

    def failed(self, reason: str) -> None:
        """The order is over; nothing is written into the memory for it any more."""

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        """Nothing more comes from this holder; what it owed waits for `amend`."""

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        """No byte came for `stall_s` though chunks are asked for. The feed goes on by itself if
        bytes come again; told once per stall."""


ChunkObserver = Callable[[PlanId, int, int, int], None]
"""Sees every chunk that was received in place, for tests and benchmarks; must not block. Told the
plan, the chunk, its bytes and `time.monotonic_ns()` when all of it lay in the memory."""


@dataclass(slots=True)
class BytesMoved:
    """Bytes of parameters (chunks of models, and probes) that a connection, or a data plane, has
    moved so far. Those sent are counted by one thread of a connection, those received by the other.
    `discarded_bytes` are received ones that came too late or twice, and those of probes.
    """

    parameter_sent_bytes: int = 0
    parameter_received_bytes: int = 0
    discarded_bytes: int = 0

    def __add__(self, other: BytesMoved) -> BytesMoved:
        return BytesMoved(*map(operator.add, astuple(self), astuple(other)))


def holder_of(feed: Feed) -> WorkerRef:
    """Who is asked. Raises ValueError for storage, which no data plane can ask."""
    if not isinstance(feed.upstream, FromWorker):
        raise ValueError(f"a data plane receives from workers, not from {feed.upstream}")
    return feed.upstream.worker


def check_feeds(feeds: Iterable[Feed], chunks: int) -> None:
    """Raises ValueError for a feed from storage or with chunks that the model does not have."""
    for feed in feeds:
        holder_of(feed)
        stop = max(part.stop for part in feed.chunks)
        if stop > chunks:
            raise ValueError(f"the feed from {feed.upstream} ends at {stop} of {chunks} chunks")
