"""What the sender of a flow has of a piece, what is just coming there and who brings it.

Looks only; nothing changes here but how far flows have got by now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from livescale.sim.links.feeding import LayerPiece, bytes_in, lowest
from livescale.sim.links.flows import NANO, Feeder, HoldingKey, SimFlow, SimHolding, SimReception
from livescale.values.chunks import ChunkGrid


@dataclass(frozen=True, slots=True)
class Supply:
    """Of one piece at its sender: what is there in whole chunks, and what is moving there.

    A chunk cannot be passed on before it is whole, so a flow follows its feeders one chunk behind.
    """

    is_whole: bool = False
    there_nanobytes: int = 0
    coming_nanobytes: int = 0
    feeders: tuple[Feeder, ...] = ()
    #: when another flow begins to be a feeder, or one ends, without any other event
    change_ns: int | None = None

    @property
    def bytes_per_s(self) -> int:
        return sum(feeder.bytes_per_s for feeder in self.feeders)

    @property
    def slack_nanobytes(self) -> int:
        """What rounding may hide: two nanoseconds' bytes, and one byte."""
        return 2 * self.bytes_per_s + NANO

    def can_begin(self, unit_nanobytes: int) -> bool:
        """The first chunk is there."""
        ahead = self.there_nanobytes + self.coming_nanobytes - unit_nanobytes
        return self.is_whole or ahead >= (-self.slack_nanobytes if self.feeders else 0)


WHOLE = Supply(is_whole=True)


class SenderStock:
    """Reads holdings and receptions by key."""

    def __init__(
        self,
        holdings: Mapping[HoldingKey, SimHolding],
        receptions: Mapping[HoldingKey, SimReception],
    ) -> None:
        self._holdings = holdings
        self._receptions = receptions

    def choose(self, flow: SimFlow, now_ns: int) -> tuple[int, LayerPiece, Supply] | None:
        """What the flow moves next; None if nothing is missing.

        A holder sends what it has of all that it was asked for, so that a later piece may go
        first. With a window it was asked for the first ones only (`Feed.window`).
        """
        grid, missing = flow.reception.holding.grid, None
        if flow.sender is not None:
            missing = self._holdings[flow.sender].missing
        first = flow.next_wanted(flow.first)
        flow.first = len(flow.pieces) if first is None else first
        best = None
        number = first
        moving = self._layers_moving_to(flow)
        while number is not None:
            piece = flow.wanted(number)
            is_there = missing is None or piece.chunks & ~missing[piece.layer]
            if best is None or piece.layer in moving or is_there:
                supply = self.of(flow, piece, now_ns)
                if supply.can_begin(min(grid.chunk_bytes, bytes_in(grid, piece)) * NANO):
                    return number, piece, supply
                if best is None or (supply.feeders and not best[2].feeders):
                    best = number, piece, supply
            number = None if flow.feed.window is not None else flow.next_wanted(number + 1)
        return best

    def choose_whole(self, flow: SimFlow, now_ns: int) -> tuple[int, LayerPiece] | None:
        """The first piece that its sender has all of; None if there is none."""
        number = flow.next_wanted(flow.first)
        while number is not None:
            piece = flow.wanted(number)
            if self.of(flow, piece, now_ns).is_whole:
                return number, piece
            number = flow.next_wanted(number + 1)
        return None

    def whole_chunks(self, flow: SimFlow, now_ns: int) -> int:
        """The bits of the chunks of its layer that a flow's sender has, or has just got."""
        piece, sender = flow.piece, flow.sender
        if piece is None or sender is None or sender not in self._holdings:
            return -1
        found = ~self._holdings[sender].missing[piece.layer]
        for other, its in self._coming(sender, piece):
            other.advance(now_ns)
            count = other.moved_nanobytes // (other.reception.holding.grid.chunk_bytes * NANO)
            found |= lowest(its.chunks, count)
        return found

    def of(self, flow: SimFlow, piece: LayerPiece, now_ns: int) -> Supply:
        """What there is of the piece for the flow."""
        if flow.sender is None:
            return WHOLE
        layer = piece.layer
        missing = self._holdings[flow.sender].missing[layer]
        lacking = piece.chunks & missing
        if layer in flow.reception.was_corrupt:
            return Supply() if missing else WHOLE
        if not lacking:
            return WHOLE
        grid = flow.reception.holding.grid
        whole, awaited = piece.chunks & ~lacking, lacking
        if flow.feed.window is not None:
            # Asked for in order: nothing counts behind the first chunk that no flow brings.
            awaited = lacking & -lacking
            whole &= awaited - 1
        there, coming = bytes_in(grid, LayerPiece(layer, whole)) * NANO, 0
        feeders: list[Feeder] = []
        change_ns: list[int] = []
        for other, its in self._coming(flow.sender, LayerPiece(layer, awaited)):
            other.advance(now_ns)
            moved, wanted = other.moved_nanobytes, its.chunks & lacking
            gap = lacking & ~its.chunks
            if flow.feed.window is not None and gap:
                wanted &= (gap & -gap) - 1
            if wanted == its.chunks:
                feeders.append(Feeder(other))
                coming += moved
                continue
            part = _Part.of(grid, its, wanted)
            turn = part.before * NANO
            if turn <= moved:
                turn += part.stretch * NANO
                if moved < turn:
                    feeders.append(part.feeder(other))
                    coming += part.moved_nanobytes(moved)
                else:
                    there += part.wanted * NANO
                    lacking &= ~wanted
            if moved < turn < other.size_nanobytes and other.rate:
                change_ns.append(-(-(turn - moved) // other.rate))
        if not lacking:
            return WHOLE
        return Supply(False, there, coming, tuple(feeders), min(change_ns, default=None))

    def trailing(self, flow: SimFlow, now_ns: int) -> tuple[Feeder, ...]:
        """Who holds a flow whose sender has all of its piece: it may have caught up with what is
        coming of the next one, and then goes on at that pace."""
        spare = flow.left_nanobytes - flow.unit_nanobytes
        if flow.sender is None or spare > flow.unit_nanobytes:
            return ()
        number = flow.next_wanted(flow.number + 1)
        if number is None:
            return ()
        supply = self.of(flow, flow.wanted(number), now_ns)
        ahead = spare + supply.there_nanobytes + supply.coming_nanobytes
        if supply.is_whole or ahead > supply.slack_nanobytes:
            return ()
        return supply.feeders

    def _coming(self, key: HoldingKey, piece: LayerPiece) -> Iterator[tuple[SimFlow, LayerPiece]]:
        """The flows that bring some of the piece there now, and what they bring."""
        reception = self._receptions.get(key)
        for other in reception.flows if reception is not None else ():
            its = other.piece
            if not other.is_active or its is None or its.layer != piece.layer:
                continue
            if its.chunks & piece.chunks:
                yield other, its

    def _layers_moving_to(self, flow: SimFlow) -> dict[int, None]:
        """Layers of which something moves to the flow's sender now."""
        reception = None if flow.sender is None else self._receptions.get(flow.sender)
        flows = reception.flows if reception is not None else ()
        return {f.piece.layer: None for f in flows if f.piece is not None and f.is_active}


@dataclass(frozen=True, slots=True)
class _Part:
    """Of what a flow moves to a sender now, the part that another flow wants there.

    It lies in a stretch of the piece, evenly: `before` bytes come first, then `stretch` bytes with
    `wanted` of them.
    """

    before: int
    stretch: int
    wanted: int

    @classmethod
    def of(cls, grid: ChunkGrid, its: LayerPiece, chunks: int) -> _Part:
        wanted = bytes_in(grid, LayerPiece(its.layer, chunks))
        whole = bytes_in(grid, its)
        lowest_bit, end = chunks & -chunks, 1 << chunks.bit_length()
        before = bytes_in(grid, LayerPiece(its.layer, its.chunks & (lowest_bit - 1)))
        upto = bytes_in(grid, LayerPiece(its.layer, its.chunks & (end - 1)))
        if (upto - before) * (wanted + 2 * grid.chunk_bytes) >= whole * wanted:
            return cls(0, whole, wanted)  # as good as everywhere
        return cls(before, upto - before, wanted)

    def feeder(self, flow: SimFlow) -> Feeder:
        divisor = gcd(self.wanted, self.stretch)
        return Feeder(flow, self.wanted // divisor, self.stretch // divisor)

    def moved_nanobytes(self, moved_nanobytes: int) -> int:
        """How much of what is wanted has moved, if so much of the piece has."""
        inside = min(max(0, moved_nanobytes - self.before * NANO), self.stretch * NANO)
        return inside * self.wanted // self.stretch
