"""What moves as flows over links: feeds of parameters, and what workers send each other.

State and its own arithmetic. Amounts under way are nanobytes (rate in bytes per second times
nanoseconds), so that nothing is rounded while rates change. Who gets which rate is in
`sharing.py`; what happens when, in `transfers.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from livescale.clusters.topology import LinkUse
from livescale.member import inputs
from livescale.sim.base.clock import Action
from livescale.sim.links.feeding import LayerPiece, bytes_in, lowest
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import PlanId, WorkerRef

HoldingKey = tuple[WorkerRef, str, int]
NANO = 1_000_000_000


@dataclass(slots=True, eq=False)
class SimLink:
    """One direction of a link. Its rate is None if it is not known; `permille` of it are left.
    Serving traffic comes first; parameters get `parameter_percent` of it at most."""

    use: LinkUse
    rated_bytes_per_s: int | None
    since_ns: int
    permille: int = 1000
    parameter_percent: int = 100
    #: flows that move over it now, if it has a rate
    flows: dict[Flow, None] = field(default_factory=dict)
    #: parameters, and serving traffic
    carried_nanobytes: int = 0
    served_nanobytes: int = 0
    #: what it could have carried up to `since_ns`
    allowed_nanobytes: int = 0

    @property
    def bytes_per_s(self) -> int:
        """What it carries now, at least one byte per second. Only of links that have a rate."""
        assert self.rated_bytes_per_s is not None, f"{self.use} is not limited"
        return max(1, self.rated_bytes_per_s * self.permille // 1000)

    def parameter_bytes_per_s(self, serving_bytes_per_s: int) -> int:
        """What is left for parameters beside so much serving traffic."""
        share = max(1, self.bytes_per_s * self.parameter_percent // 100)
        return max(0, min(share, self.bytes_per_s - serving_bytes_per_s))

    def slow(self, permille: int, now_ns: int) -> None:
        """From now on it carries so much of its rate (0: nothing)."""
        self.allowed_nanobytes = self.allowed_by(now_ns)
        self.since_ns = now_ns
        self.permille = permille

    def allowed_by(self, now_ns: int) -> int:
        """What it can have carried by now; 0 if it is not limited."""
        if self.rated_bytes_per_s is None or not self.permille:
            return self.allowed_nanobytes
        return self.allowed_nanobytes + self.bytes_per_s * (now_ns - self.since_ns)

    def __repr__(self) -> str:
        return f"<SimLink {self.use}, {self.rated_bytes_per_s} bytes/s, {len(self.flows)} flows>"


@dataclass(slots=True, eq=False)
class SimHolding:
    """What a member has of one rank of a model: the bits of the chunks that are missing, by
    layer."""

    grid: ChunkGrid
    missing: list[int]


@dataclass(slots=True, eq=False)
class SimReception:
    """One receiver's part of a plan. `tell` gets the news of it, as a member does. `is_timed`: its
    layers come after a fixed time instead."""

    plan: PlanId
    key: HoldingKey
    holding: SimHolding
    tell: Callable[[inputs.MemberInput], None]
    is_timed: bool = False
    flows: list[SimFlow] = field(default_factory=list)
    #: in whole chunks; what came twice counts twice
    received_bytes: int = 0
    has_begun: bool = False
    #: layers that proved right; bytes of them that another flow brings as well say nothing
    came: dict[int, None] = field(default_factory=dict)
    #: layers that shall prove corrupt when they are complete, by number of times
    corruptions: int = 0
    #: it read a layer from storage that is wrong there, and ends at once
    is_failing: bool = False
    #: wanted only from those who have all of the layer, as the real reception does
    was_corrupt: dict[int, None] = field(default_factory=dict)

    @property
    def awaits_verified(self) -> bool:
        """Something is wanted only from those who have all of a layer."""
        return any(self.holding.missing[layer] for layer in self.was_corrupt)

    def begin(self) -> None:
        """Its first byte comes. Layers that need no bytes are there with it. Idempotent."""
        if not self.has_begun:
            self.has_begun = True
            self.tell(inputs.FirstByteCame(self.plan))
            for layer, size in enumerate(self.holding.grid.layer_bytes):
                if not size:
                    self.tell(inputs.LayerCame(self.plan, layer))


@dataclass(frozen=True, slots=True)
class Feeder:
    """A flow that brings a sender what another flow passes on: `wanted` of its `brought` bytes."""

    flow: SimFlow
    wanted: int = 1
    brought: int = 1

    @property
    def bytes_per_s(self) -> int:
        return self.flow.rate * self.wanted // self.brought


@dataclass(slots=True, eq=False)
class SimFlow:
    """One feed under way. It moves one piece (a part of a layer) at a time.

    While it `is_active` it has a place on its links; `rate` is what it got there. `feeders` are
    those whose rates it is held to, because it has caught up with what they bring its sender.
    """

    reception: SimReception
    feed: Feed
    pieces: list[LayerPiece]
    at_ns: int
    #: who it comes from (None: storage)
    sender: HoldingKey | None = None
    #: known from when its sender first has something
    path: tuple[SimLink, ...] | None = None
    #: those links of the path that have a rate
    links: tuple[SimLink, ...] = ()
    #: the first piece that is not there
    first: int = 0
    #: the piece that is moved, its place among the pieces, and how much of it has moved
    piece: LayerPiece | None = None
    number: int = 0
    size_nanobytes: int = 0
    unit_nanobytes: int = 0
    moved_nanobytes: int = 0
    #: moved in the last nanosecond of the piece before
    spare_nanobytes: int = 0
    #: some of the piece has moved, or is moving
    is_begun: bool = False
    #: its sender has more whole pieces than when it was last looked for one
    has_more: bool = False
    rate: int = 0
    feeders: tuple[Feeder, ...] = ()
    #: those it is a feeder of
    holds: dict[SimFlow, None] = field(default_factory=dict)
    is_active: bool = False
    is_over: bool = False
    has_told_stall: bool = False
    #: when it is looked at next, and the clock's ticket for that
    due_ns: int | None = None
    ticket: int = 0
    #: the chunks that it brought of each layer, and how often they were wrong
    brought: dict[int, int] = field(default_factory=dict)
    corrupt: dict[int, int] = field(default_factory=dict)
    #: all chunks that it lists, by layer
    listed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for piece in self.pieces:
            self.listed[piece.layer] = self.listed.get(piece.layer, 0) | piece.chunks

    @property
    def left_nanobytes(self) -> int:
        return self.size_nanobytes - self.moved_nanobytes

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever bytes come."""
        return sum(bits.bit_count() for bits in self.brought.values()), self.moved_nanobytes

    def next_wanted(self, start: int) -> int | None:
        """The first piece from there on of which something is missing."""
        missing, pieces = self.reception.holding.missing, self.pieces
        for number in range(start, len(pieces)):
            piece = pieces[number]
            if piece.chunks & missing[piece.layer]:
                return number
        return None

    def wanted(self, number: int) -> LayerPiece:
        """What is missing of the piece of that number."""
        piece = self.pieces[number]
        return LayerPiece(piece.layer, piece.chunks & self.reception.holding.missing[piece.layer])

    def begin(self, number: int, piece: LayerPiece) -> None:
        """This is moved next. What the last nanosecond had left counts for it."""
        grid = self.reception.holding.grid
        self.piece, self.number = piece, number
        self.size_nanobytes = bytes_in(grid, piece) * NANO
        self.unit_nanobytes = min(grid.chunk_bytes * NANO, self.size_nanobytes)
        self.moved_nanobytes = 0
        self.is_begun = False
        if self.spare_nanobytes:
            spare, self.spare_nanobytes = self.spare_nanobytes, 0
            self._carry(min(spare, self.size_nanobytes))

    def advance(self, now_ns: int) -> None:
        """Count what has moved by now."""
        moved = self.rate * (now_ns - self.at_ns)
        if now_ns > self.at_ns:
            self.at_ns = now_ns
            self.spare_nanobytes = 0
        if moved:
            carried = min(moved, self.left_nanobytes)
            self.spare_nanobytes = moved - carried
            self._carry(carried)

    def give_up(self, moved_nanobytes: int, whole: int) -> None:
        """Let the piece go; what moves next is chosen anew. As many of its chunks as have moved
        stay. They are among those that the sender has: `whole`."""
        piece = self.piece
        if piece is not None:
            count = moved_nanobytes // (self.reception.holding.grid.chunk_bytes * NANO)
            if count > 0:
                self._bring(LayerPiece(piece.layer, lowest(piece.chunks & whole, count)))
            self._let_go()

    def complete(self) -> None:
        """All of the piece is in place."""
        assert self.piece is not None, f"{self!r} moves nothing"
        self._bring(self.piece)
        self._let_go()

    def want_again(self, piece: LayerPiece) -> None:
        """These chunks are missing again, and come next."""
        self.pieces.insert(self.first, piece)
        self.listed[piece.layer] = self.listed.get(piece.layer, 0) | piece.chunks
        if self.piece is not None:
            self.number += 1

    def take_back(self, moved_nanobytes: int) -> None:
        """So much has not moved: the sender did not have it."""
        self._carry(-moved_nanobytes)

    def hold_to(self, feeders: tuple[Feeder, ...]) -> None:
        """From now on the flow is held to these."""
        for feeder in self.feeders:
            feeder.flow.holds.pop(self, None)
        self.feeders = feeders
        for feeder in feeders:
            feeder.flow.holds[self] = None

    def _bring(self, piece: LayerPiece) -> None:
        reception = self.reception
        reception.received_bytes += bytes_in(reception.holding.grid, piece)
        reception.holding.missing[piece.layer] &= ~piece.chunks
        self.brought[piece.layer] = self.brought.get(piece.layer, 0) | piece.chunks

    def _let_go(self) -> None:
        self.piece = None
        self.is_begun = False
        self.size_nanobytes = self.moved_nanobytes = 0

    def _carry(self, moved_nanobytes: int) -> None:
        self.moved_nanobytes += moved_nanobytes
        for link in self.path or ():
            link.carried_nanobytes += moved_nanobytes

    def __repr__(self) -> str:
        state = "over" if self.is_over else f"{self.rate} bytes/s" if self.is_active else "waits"
        return f"<SimFlow {self.feed.upstream} to {self.reception.key[0]}, {state}>"


@dataclass(slots=True, eq=False)
class ServingFlow:
    """What one worker sends another, in order: `queue` has the size of each message and what
    happens when all of it has crossed the links. Nothing holds it but its links."""

    feeders: ClassVar[tuple[Feeder, ...]] = ()
    holds: ClassVar[dict[SimFlow, None]] = {}

    sender: WorkerRef
    receiver: WorkerRef
    path: tuple[SimLink, ...]
    links: tuple[SimLink, ...]
    at_ns: int
    queue: deque[tuple[int, Action]] = field(default_factory=deque)
    #: in the queue, and how much of that has moved
    queued_nanobytes: int = 0
    moved_nanobytes: int = 0
    rate: int = 0
    is_active: bool = False
    #: the clock's, for the end of the first message
    ticket: int | None = None

    def add(self, size_bytes: int, then: Action) -> None:
        """Queue a message behind the others. What has moved by now is counted."""
        self.queue.append((size_bytes * NANO, then))
        self.queued_nanobytes += size_bytes * NANO

    def advance(self, now_ns: int) -> None:
        """Count what has moved by now."""
        left = self.queued_nanobytes - self.moved_nanobytes
        moved = min(self.rate * (now_ns - self.at_ns), left)
        self.at_ns = now_ns
        self.moved_nanobytes += moved
        for link in self.path:
            link.served_nanobytes += moved

    def take_moved(self) -> list[Action]:
        """Take out messages of which everything has moved; returns what happens now."""
        found = []
        while self.queue and self.queue[0][0] <= self.moved_nanobytes:
            size_nanobytes, then = self.queue.popleft()
            self.queued_nanobytes -= size_nanobytes
            self.moved_nanobytes -= size_nanobytes
            found.append(then)
        return found


Flow = SimFlow | ServingFlow
