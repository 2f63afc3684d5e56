"""Transfers under way: which layers arrive where and when, and what breaks when a holder goes.

Every feed is a flow over the links of its path and moves one part of a layer at a time; rates
change when flows come and go, and when one catches up with what its sender itself is getting. So
there is an event per feed and layer, whatever the number of chunks. A receiver passes on what it
has while it receives, one chunk behind. Receivers get the news, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from livescale.clusters.topology import Topology
from livescale.member import inputs
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SERVING_FIRST
from livescale.sim.links.feeding import LayerPiece, all_chunks, bytes_in, pieces_of
from livescale.sim.links.flows import HoldingKey, SimFlow, SimHolding, SimReception
from livescale.sim.links.movement import Movement
from livescale.sim.links.slowdowns import Slowdowns
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromWorker, PlanId, WorkerRef

_CORRUPT_MAX = 2
"""A feed that brought a layer wrong so many times fails, as in the real reception."""


class TransferTimes(NamedTuple):
    """`wait_ns` is how long a holder may take to have (or begin to get) what it is asked for;
    after `stall_ns` without bytes a receiver reports a stall. With `load_ns` a device has all its
    layers after that time, whatever its feeds say."""

    wait_ns: int
    stall_ns: int
    load_ns: int | None = None


class Transfers:
    """All holdings and receptions of the world. Members must be in the topology while they hold,
    receive or send something. Parameters take `parameter_percent` of a NIC's way out at most. What
    workers send each other beside them is `moves.serving`; `link_sharing` says which of the two
    goes first, as in SimConfig.
    """

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        times: TransferTimes,
        parameter_percent: int = 100,
        link_sharing: str = SERVING_FIRST,
    ) -> None:
        self._clock = clock
        self._topology = topology
        self._wait_ns = times.wait_ns
        self._load_ns = times.load_ns
        self.moves = Movement(clock, topology, parameter_percent, link_sharing, self._arrived)
        self.slowdowns = Slowdowns(clock, self.moves, times.stall_ns)
        self._holdings = self.moves.holdings
        self._receiving = self.moves.receiving
        #: models whose files are wrong until then
        self._spoiled: dict[str, int] = {}
        #: loads that have failed
        self._failed: dict[HoldingKey, None] = {}
        #: by model: when a member without files was to read them last
        self._unread: dict[str, int] = {}

    # -- for members --------------------------------------------------------------------------

    def receive(
        self,
        plan: PlanId,
        key: HoldingKey,
        grid: ChunkGrid,
        feeds: tuple[Feed, ...],
        tell: Callable[[inputs.MemberInput], None],
        present_layers: range = range(0),
    ) -> None:
        """The member asks for these chunks, and `tell` gets the news of them; from now on it passes
        on what it has, at first `present_layers`, which it does not ask for."""
        assert key not in self._holdings, f"{key} is there already"
        holding = self._holdings[key] = SimHolding(grid, all_chunks(grid))
        is_timed = self._load_ns is not None and not key[0].is_agent
        reception = SimReception(plan, key, holding, tell, is_timed)
        self._receiving[key] = reception
        if present_layers and not is_timed:
            reception.begin()
            for layer in present_layers:
                holding.missing[layer] = 0
                tell(inputs.LayerCame(plan, layer))
        if self._load_ns is not None and is_timed:
            self._clock.after(self._load_ns, partial(self._load_at_once, reception))
            return
        self._ask(reception, feeds)
        self.moves.touch_all(self.moves.readers(key))

    def amend(self, key: HoldingKey, feeds: tuple[Feed, ...]) -> None:
        """What is missing comes by these feeds. Feeds that stay go on; late orders are ignored."""
        reception = self._receiving.get(key)
        if reception is None or reception.is_timed:
            return
        kept = [flow for flow in reception.flows if not flow.is_over and flow.feed in feeds]
        for flow in reception.flows:
            if flow not in kept:
                self.moves.close(flow)
        reception.flows = kept
        for flow in kept:
            # A corrupt layer may have been asked for again from one that ends here.
            first = flow.next_wanted(0)
            if first is not None and first < flow.first:
                flow.first = first
                self.moves.touch(flow)
        known = [flow.feed for flow in kept]
        self._ask(reception, tuple(feed for feed in feeds if feed not in known))

    def drop(self, key: HoldingKey) -> None:
        """The member has none of it any more: it receives nothing and sends nothing of it."""
        reception = self._receiving.get(key)
        if reception is not None:
            self._end(reception)
        for flow in self.moves.readers(key):
            if not flow.is_over:
                self._fail(flow, "was dropped there")
        self._holdings.pop(key, None)

    def node_gone(self, member: WorkerRef) -> None:
        """The member died with all it held."""
        for key in [key for key in self._holdings if key[0] == member]:
            self.drop(key)

    def missing_bytes(self, member: WorkerRef, model: str, rank: int, layer: int) -> int:
        """Bytes of a layer that the member, which receives or holds the rank, still lacks. None of
        a load that has failed: that news is on its way, behind that of its layers."""
        key = (member, model, rank)
        if key in self._failed and key not in self._holdings:
            return 0
        holding = self._holdings[key]
        missing = holding.missing[layer]
        return bytes_in(holding.grid, LayerPiece(layer, missing)) if missing else 0

    # -- faults -------------------------------------------------------------------------------

    def spoil(self, model: str, until_ns: int) -> None:
        """The model's files are wrong until then: no load that reads from storage ends well."""
        self._spoiled[model] = max(until_ns, self._spoiled.get(model, 0))

    def were_files_wrong(self, model: str, since_ns: int) -> bool:
        """The model's files were wrong at some time since then, or not where they were looked
        for."""
        return max(self._spoiled.get(model, 0), self._unread.get(model, -1) + 1) > since_ns

    def break_feed(self, choice: int) -> None:
        """One of the feeds under way fails: the number `choice`, counted round and round."""
        flows = [
            flow
            for reception in self._receiving.values()
            for flow in reception.flows
            if not flow.is_over and flow.sender is not None and flow.next_wanted(0) is not None
        ]
        if flows:
            self._fail(flows[choice % len(flows)], "its bytes were corrupt")

    def corrupt(self, choice: int) -> None:
        """The next layer that is complete on one of the receptions under way is wrong, and comes
        again from the same feeds. Counted round and round."""
        receptions = [r for r in self._receiving.values() if not r.is_timed]
        if receptions:
            receptions[choice % len(receptions)].corruptions += 1

    # -- asking -------------------------------------------------------------------------------

    def _ask(self, reception: SimReception, feeds: tuple[Feed, ...]) -> None:
        """Every chunk comes from the first feed that lists it; feeds that stay are the first."""
        claimed = [0] * len(reception.holding.missing)
        for flow in reception.flows:
            for piece in flow.pieces:
                claimed[piece.layer] |= piece.chunks
        for feed in feeds:
            pieces = []
            for piece in pieces_of(reception.holding.grid, feed.chunks):
                chunks = piece.chunks & ~claimed[piece.layer]
                claimed[piece.layer] |= chunks
                if chunks:
                    pieces.append(LayerPiece(piece.layer, chunks))
            self._start(SimFlow(reception, feed, pieces, self._clock.now_ns))
        self._complete_if_whole(reception)

    def _start(self, flow: SimFlow) -> None:
        upstream, reception = flow.feed.upstream, flow.reception
        reception.flows.append(flow)
        if isinstance(upstream, FromWorker):
            flow.sender = (upstream.worker, *reception.key[1:])
            if flow.sender not in self._holdings:
                self._clock.after(self._wait_ns, partial(self._fail_without_holder, flow))
            self.slowdowns.begins(flow, upstream.worker)
        elif not self._topology.reads_files(reception.key[0]) and not reception.is_failing:
            reception.is_failing = True
            self._unread[reception.key[1]] = self._clock.now_ns
            self._clock.after(0, partial(self._fail_load, reception, "there are no files here"))
        self.moves.add(flow)

    def _fail_without_holder(self, flow: SimFlow) -> None:
        if not flow.is_over and flow.sender not in self._holdings:
            self._fail(flow, "does not hold it")

    def _load_at_once(self, reception: SimReception) -> None:
        """All layers are there, in their order."""
        if self._receiving.get(reception.key) is not reception:
            return
        plan, tell, missing = reception.plan, reception.tell, reception.holding.missing
        tell(inputs.FirstByteCame(plan))
        for layer in range(len(missing)):
            missing[layer] = 0
            tell(inputs.LayerCame(plan, layer))
        reception.received_bytes = sum(reception.holding.grid.layer_bytes)
        self.moves.touch_all(self.moves.readers(reception.key))
        self._complete_if_whole(reception)

    # -- what comes ---------------------------------------------------------------------------

    def _arrived(self, flow: SimFlow, layer: int) -> None:
        """All that the flow brings of the layer is there."""
        reception = flow.reception
        if reception.holding.missing[layer] or layer in reception.came:
            return
        if flow.sender is None and self._clock.now_ns < self._spoiled.get(reception.key[1], 0):
            if not reception.is_failing:
                reception.is_failing = True
                reason = f"layer {layer} has another checksum"
                self._clock.after(0, partial(self._fail_load, reception, reason))
            return
        if reception.corruptions:
            reception.corruptions -= 1
            self._fetch_again(reception, layer)
            return
        reception.came[layer] = None
        reception.tell(inputs.LayerCame(reception.plan, layer))
        self._complete_if_whole(reception)

    def _complete_if_whole(self, reception: SimReception) -> None:
        if not any(reception.holding.missing) and not reception.is_failing:
            self._end(reception)
            reception.tell(inputs.AllCame(reception.plan, reception.received_bytes))

    def _fail_load(self, reception: SimReception, reason: str) -> None:
        """Nothing of it is kept: there is no other holder to ask."""
        if self._receiving.get(reception.key) is reception:
            self.drop(reception.key)
            self._failed[reception.key] = None
            reception.tell(inputs.FetchFailed(reception.plan, reason))

    def _end(self, reception: SimReception) -> None:
        del self._receiving[reception.key]
        for flow in reception.flows:
            self.moves.close(flow)

    def _fetch_again(self, reception: SimReception, layer: int) -> None:
        """Its chunks are missing again, and asked for next where they came from, but only from
        those who have all of it. A feed that was wrong twice fails."""
        reception.was_corrupt[layer] = None
        readers = self.moves.readers(reception.key)
        gave_up: dict[SimReception, SimFlow] = {}
        for reader in readers:
            if reader.piece is not None and reader.piece.layer == layer:
                self.moves.give_up(reader)
                gave_up[reader.reception] = reader
        left = all_chunks(reception.holding.grid)[layer]
        reception.holding.missing[layer] = left
        is_open = [flow for flow in reception.flows if not flow.is_over]
        wrong_twice = []
        for flow in is_open:
            chunks = flow.brought.pop(layer, 0)
            if chunks:
                left &= ~chunks
                flow.want_again(LayerPiece(layer, chunks))
                flow.corrupt[layer] = flow.corrupt.get(layer, 0) + 1
                if flow.corrupt[layer] >= _CORRUPT_MAX and flow.sender is not None:
                    wrong_twice.append(flow)
        if left:
            # Who brought these is gone; any other may bring them.
            is_open[0].want_again(LayerPiece(layer, left))
        self.moves.touch_all([*readers, *is_open])
        # Where members send to one another each may wait for another one to have it verified.
        self.slowdowns.expect_stalls(is_open)
        for flow in wrong_twice:
            if not flow.is_over:
                self._fail(flow, f"layer {layer} was corrupt for the second time")
        for reader in gave_up.values():
            # What it kept may have been the last that was missing.
            if not reader.is_over:
                self._arrived(reader, layer)

    def _fail(self, flow: SimFlow, reason: str) -> None:
        """Everything from this holder has failed; what it owed waits for `amend`."""
        upstream, reception = flow.feed.upstream, flow.reception
        assert isinstance(upstream, FromWorker)
        for other in reception.flows:
            if other.feed.upstream == upstream:
                self.moves.close(other)
        reception.tell(inputs.FeedEnded(reception.plan, upstream.worker, reason, is_stalled=False))
