"""Transfers under way: which layers arrive where and when, and what breaks when a holder goes.

Every feed is followed layer by layer: a part of a layer is there when the link has carried it and
the sender has had it for the time of one chunk. Receivers are told, nothing is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from livescale.chunks import ChunkGrid, Feed
from livescale.sim.clock import Clock
from livescale.sim.feeding import LayerPiece, all_chunks, bytes_in, pieces_of
from livescale.topology import Direction, Topology
from livescale.types import FromStorage, FromWorker, PlanId, WorkerRef

HoldingKey = tuple[WorkerRef, str, int]
_UNLIMITED = 1 << 62


class SimLoadListener(Protocol):
    """Hears of one receiver's plan."""

    def load_started(self, plan: PlanId) -> None: ...

    def layer_arrived(self, plan: PlanId, layer: int) -> None: ...

    def load_completed(self, plan: PlanId) -> None: ...

    def feed_failed(
        self, plan: PlanId, upstream: WorkerRef, reason: str, is_stalled: bool
    ) -> None: ...


@dataclass(slots=True)
class _Holding:
    """What a member has of one rank of a model: chunks that are missing per layer, and which came
    when (chunks, time)."""

    grid: ChunkGrid
    missing: list[int]
    came: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def came_ns(self, piece: LayerPiece) -> int | None:
        """Since when all of these chunks are there (None: some are not)."""
        if self.missing[piece.layer] & piece.chunks:
            return None
        return max(at for chunks, at in self.came[piece.layer] if chunks & piece.chunks)


@dataclass(slots=True)
class _Flow:
    """One feed under way."""

    feed: Feed
    pieces: list[LayerPiece]
    at: int = 0
    #: when the link is free for the piece that is next
    free_ns: int = 0
    is_over: bool = False
    is_moving: bool = False
    has_told_stall: bool = False


@dataclass(slots=True)
class _Reception:
    plan: PlanId
    key: HoldingKey
    listener: SimLoadListener
    flows: list[_Flow]
    has_begun: bool = False


class Transfers:
    """All holdings and receptions of the world.

    `wait_ns` is how long a holder may take to have (or begin to get) what it is asked for;
    `stall_ns` how long a receiver waits for bytes before it says so.
    """

    def __init__(self, clock: Clock, topology: Topology, wait_ns: int, stall_ns: int) -> None:
        self._clock = clock
        self._topology = topology
        self._wait_ns = wait_ns
        self._stall_ns = stall_ns
        self._holdings: dict[HoldingKey, _Holding] = {}
        self._receptions: dict[tuple[PlanId, WorkerRef], _Reception] = {}
        #: members from which nothing comes until then
        self._frozen: dict[WorkerRef, int] = {}

    # -- for members --------------------------------------------------------------------------

    def receive(
        self,
        plan: PlanId,
        key: HoldingKey,
        grid: ChunkGrid,
        feeds: tuple[Feed, ...],
        listener: SimLoadListener,
    ) -> None:
        """The member asks for these chunks; from now on it passes on what it has."""
        assert key not in self._holdings, f"{key} is there already"
        self._holdings[key] = _Holding(grid, all_chunks(grid))
        reception = _Reception(plan, key, listener, [])
        self._receptions[plan, key[0]] = reception
        self._ask(reception, feeds)
        self._wake_readers(key)

    def amend(self, plan: PlanId, receiver: WorkerRef, feeds: tuple[Feed, ...]) -> None:
        """What is missing comes by these feeds. Feeds that stay go on; late orders are ignored."""
        reception = self._receptions.get((plan, receiver))
        if reception is None:
            return
        running = [flow for flow in reception.flows if not flow.is_over and flow.feed in feeds]
        for flow in reception.flows:
            flow.is_over = flow.is_over or flow not in running
        reception.flows = running
        kept = [flow.feed for flow in running]
        self._ask(reception, tuple(feed for feed in feeds if feed not in kept))

    def drop(self, key: HoldingKey) -> None:
        """The member has none of it any more: it receives nothing and sends nothing of it."""
        self._holdings.pop(key, None)
        for reception in [r for r in self._receptions.values() if r.key == key]:
            self._end(reception)
        self._fail_readers(key, "was dropped there")

    def node_gone(self, member: WorkerRef) -> None:
        """The member died with all it held."""
        for key in [key for key in self._holdings if key[0] == member]:
            self.drop(key)

    # -- faults -------------------------------------------------------------------------------

    def freeze(self, member: WorkerRef, until_ns: int) -> None:
        """Nothing leaves the member until then, though its connections stand."""
        self._frozen[member] = max(until_ns, self._frozen.get(member, 0))
        self._expect_stalls(member)
        self._clock.at(until_ns, lambda: self._thaw(member))

    def break_feed(self, choice: int) -> None:
        """One of the feeds under way fails: the number `choice`, counted round and round."""
        flows = [
            (reception, flow)
            for reception in self._receptions.values()
            for flow in reception.flows
            if not flow.is_over and isinstance(flow.feed.upstream, FromWorker)
        ]
        if flows:
            reception, flow = flows[choice % len(flows)]
            self._fail(reception, flow, "its bytes were corrupt")

    # -- helpers, in the order used -----------------------------------------------------------

    def _ask(self, reception: _Reception, feeds: tuple[Feed, ...]) -> None:
        holding = self._holdings[reception.key]
        for feed in feeds:
            flow = _Flow(feed, pieces_of(holding.grid, feed.chunks), free_ns=self._clock.now_ns)
            reception.flows.append(flow)
            self._go_on(reception, flow)
            if not flow.is_over and isinstance(feed.upstream, FromWorker):
                self._await_holder(reception, flow)
        self._complete_if_whole(reception)

    def _await_holder(self, reception: _Reception, flow: _Flow) -> None:
        sender = self._sender(reception, flow)
        if sender is not None and sender not in self._holdings:

            def look_again() -> None:
                if not flow.is_over and sender not in self._holdings:
                    self._fail(reception, flow, "does not hold it")

            self._clock.after(self._wait_ns, look_again)

    def _go_on(self, reception: _Reception, flow: _Flow) -> None:
        """Begin the next piece that is still missing, if its sender has it."""
        if flow.is_over or flow.is_moving:
            return
        holding = self._holdings[reception.key]
        while flow.at < len(flow.pieces):
            piece = flow.pieces[flow.at]
            missing = piece.chunks & holding.missing[piece.layer]
            if missing:
                break
            flow.at += 1
        else:
            flow.is_over = True
            return
        ready_ns = self._ready_ns(reception, flow, LayerPiece(piece.layer, missing))
        if ready_ns is None:
            return
        carried = bytes_in(holding.grid, LayerPiece(piece.layer, missing))
        rate = self._rate(reception, flow)
        done_ns = max(flow.free_ns + -(-carried * 1_000_000_000 // rate), ready_ns)
        if not reception.has_begun:
            reception.has_begun = True
            # Told at the latest with the first layer; a first byte of its own is not modelled.
            reception.listener.load_started(reception.plan)
        flow.is_moving = True
        self._clock.at(max(done_ns, self._clock.now_ns), lambda: self._arrive(reception, flow))

    def _ready_ns(self, reception: _Reception, flow: _Flow, piece: LayerPiece) -> int | None:
        """When the sender can have passed the piece on; None while it lacks some of it."""
        sender = self._sender(reception, flow)
        if sender is None:
            return 0
        holding = self._holdings.get(sender)
        came_ns = holding.came_ns(piece) if holding is not None else None
        if holding is None or came_ns is None or sender[0] in self._frozen:
            return None
        size = min(holding.grid.chunk_bytes, sum(holding.grid.layer_bytes))
        return came_ns + -(-size * 1_000_000_000 // self._rate(reception, flow))

    def _rate(self, reception: _Reception, flow: _Flow) -> int:
        upstream, topology, receiver = flow.feed.upstream, self._topology, reception.key[0]
        if isinstance(upstream, FromStorage):
            return topology.remote_storage_bytes_per_s or _UNLIMITED
        rates = (
            topology.nic_bytes_per_s(upstream.worker, Direction.OUT),
            topology.nic_bytes_per_s(receiver, Direction.IN),
        )
        return min(rate or _UNLIMITED for rate in rates)

    def _sender(self, reception: _Reception, flow: _Flow) -> HoldingKey | None:
        upstream = flow.feed.upstream
        if isinstance(upstream, FromStorage):
            return None
        return (upstream.worker, *reception.key[1:])

    def _arrive(self, reception: _Reception, flow: _Flow) -> None:
        flow.is_moving = False
        sender = self._sender(reception, flow)
        if flow.is_over or (sender is not None and sender[0] in self._frozen):
            return
        holding = self._holdings[reception.key]
        piece = flow.pieces[flow.at]
        flow.free_ns = self._clock.now_ns
        flow.has_told_stall = False
        flow.at += 1
        new = holding.missing[piece.layer] & piece.chunks
        holding.missing[piece.layer] &= ~piece.chunks
        if new:
            holding.came.setdefault(piece.layer, []).append((new, self._clock.now_ns))
            if not holding.missing[piece.layer]:
                reception.listener.layer_arrived(reception.plan, piece.layer)
            self._wake_readers(reception.key)
        if self._holdings.get(reception.key) is holding:
            self._go_on(reception, flow)
            self._complete_if_whole(reception)

    def _complete_if_whole(self, reception: _Reception) -> None:
        place = (reception.plan, reception.key[0])
        if self._receptions.get(place) is not reception:
            return
        if not any(self._holdings[reception.key].missing):
            self._end(reception)
            reception.listener.load_completed(reception.plan)

    def _end(self, reception: _Reception) -> None:
        self._receptions.pop((reception.plan, reception.key[0]), None)
        for flow in reception.flows:
            flow.is_over = True

    def _wake_readers(self, key: HoldingKey) -> None:
        for reception, flow in self._flows_from(key[0]):
            if self._sender(reception, flow) == key:
                self._go_on(reception, flow)

    def _flows_from(self, member: WorkerRef) -> list[tuple[_Reception, _Flow]]:
        return [
            (reception, flow)
            for reception in list(self._receptions.values())
            for flow in reception.flows
            if not flow.is_over and flow.feed.upstream == FromWorker(member)
        ]

    def _fail_readers(self, key: HoldingKey, reason: str) -> None:
        for reception, flow in self._flows_from(key[0]):
            if self._sender(reception, flow) == key:
                self._fail(reception, flow, reason)

    def _fail(self, reception: _Reception, flow: _Flow, reason: str) -> None:
        upstream = flow.feed.upstream
        assert isinstance(upstream, FromWorker)
        for other in reception.flows:
            if other.feed.upstream == upstream:
                other.is_over = True
        reception.listener.feed_failed(reception.plan, upstream.worker, reason, False)

    def _expect_stalls(self, member: WorkerRef) -> None:
        """Everybody who gets bytes from the member, maybe through others, says so if none come."""
        ahead, seen = [member], {member: None}
        while ahead:
            for reception, flow in self._flows_from(ahead.pop()):
                self._expect_stall(reception, flow)
                if reception.key[0] not in seen:
                    seen[reception.key[0]] = None
                    ahead.append(reception.key[0])

    def _expect_stall(self, reception: _Reception, flow: _Flow) -> None:
        at, upstream = flow.at, flow.feed.upstream
        assert isinstance(upstream, FromWorker)

        def look() -> None:
            if flow.is_over or flow.at != at or flow.is_moving or flow.has_told_stall:
                return
            flow.has_told_stall = True
            reception.listener.feed_failed(reception.plan, upstream.worker, "no bytes come", True)

        self._clock.after(self._stall_ns, look)

    def _thaw(self, member: WorkerRef) -> None:
        if self._frozen.get(member, 0) > self._clock.now_ns:
            return
        self._frozen.pop(member, None)
        for reception, flow in self._flows_from(member):
            flow.free_ns = self._clock.now_ns
            self._go_on(reception, flow)
