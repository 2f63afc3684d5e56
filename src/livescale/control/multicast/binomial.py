"""The binomial pipeline and its k-way form (λScale §4.2).

Nodes are the corners of a hypercube. In step t everyone exchanges one block with the neighbour in
dimension t mod d: the source sends block t, the others the highest block that they have. Where
the nodes are no power of two some corners are two nodes, of which one sends outward and the other
receives, and which pass each other what they lack (Ganesan & Seshadri 2005). All have everything
after b + ceil(log2 N) - 1 steps.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from livescale.control.multicast.chain import FeedsOf
from livescale.control.multicast.cost import Prediction, Receiver, bytes_in_layer, shape_of
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.placing import Element
from livescale.values.chunks import CHUNK_RANGES_MAX, ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromWorker, Value
from livescale.values.units import NS_PER_S

BLOCKS = 16
"""λScale's choice for all its models (§7.5, Figure 18: 8 and 24 to 48 are worse)."""
WINDOW_CHUNKS = 2
_SNAP_PART = 4
"""A part of the blocks ends with a layer that ends within so many-th of a block."""


class BlockMove(Value, frozen=True):
    """In one step `sender` gives `receiver` a block. Both are positions; 0 is the source."""

    sender: int
    receiver: int
    block: int


Steps = tuple[tuple[BlockMove, ...], ...]


def binomial_steps(nodes: int, blocks: int) -> Steps:
    """What moves in each step among `nodes` nodes, the source included.

    In every step a node sends one block at most and receives one at most. λScale §4.2:
    blocks + ceil(log2 nodes) - 1 steps.
    """
    if nodes < 1 or blocks < 1:
        raise ValueError(f"{blocks} blocks cannot go to {nodes} nodes")
    dimensions = nodes.bit_length() - 1
    corners = [[v] for v in range(1 << dimensions)]
    for extra in range(len(corners), nodes):
        corners[extra - len(corners) + 1].append(extra)
    have: list[set[int]] = [set() for _ in range(nodes)]
    have[0] = set(range(blocks))
    steps: list[tuple[BlockMove, ...]] = []
    while any(len(held) < blocks for held in have):
        across = _across(corners, have, len(steps), dimensions)
        moves = _inside_and_across(corners, have, across)
        for move in moves:
            have[move.receiver].add(move.block)
        steps.append(tuple(moves))
    return tuple(steps)


def k_way_orders(blocks: int, k: int) -> tuple[tuple[int, ...], ...]:
    """λScale's Algorithm 1: the blocks in k parts; sub-group i begins with part i.

    So the first nodes of all sub-groups together have a whole model early. Parts are as even as
    can be: with ⌈b/k⌉ blocks each, as it is printed, the last ones are short or empty, and two
    sub-groups have the same order (b = 4, k = 3).
    """
    bounds = [blocks * i // k for i in range(k + 1)]
    parts = [tuple(range(a, b)) for a, b in itertools.pairwise(bounds)]
    return tuple(tuple(block for j in range(k) for block in parts[(i + j) % k]) for i in range(k))


def sub_groups(sources: int, targets: int) -> tuple[tuple[int, ...], ...]:
    """Positions of the targets of each source: as even as can be, neighbours together."""
    bounds = [targets * i // sources for i in range(sources + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))


def groups_at_home(sources: int, homes: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """Positions of the targets of each source, where some have to be with one source (their
    home). The others make the groups as even as can be."""
    found = [[p for p, home in enumerate(homes) if home == n] for n in range(sources)]
    rest = [p for p, home in enumerate(homes) if home is None]
    sizes = [len(positions) for positions in found]
    for _ in rest:
        sizes[sizes.index(min(sizes))] += 1
    for positions, size in zip(found, sizes, strict=True):
        more = size - len(positions)
        positions += rest[:more]
        del rest[:more]
    return tuple(map(tuple, found))


class BinomialPlan:
    """k sources each serve a sub-group with their own order of blocks. `groups` has the positions
    of each source's targets; without, all sources have targets if there are enough."""

    def __init__(
        self,
        grid: ChunkGrid,
        sources: Sequence[Element],
        targets: Sequence[Element],
        blocks: int = BLOCKS,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._grid = grid
        if groups is None:
            groups = sub_groups(min(len(sources), len(targets)), len(targets))
        used = [(sources[n], positions) for n, positions in enumerate(groups) if positions]
        self._blocks = cut_blocks(grid, blocks, len(used))
        orders = k_way_orders(len(self._blocks), len(used))
        #: per sub-group its members (the source first), and its moves with the model's own blocks
        self._groups: list[tuple[list[Element], Steps]] = []
        for (source, positions), order in zip(used, orders, strict=True):
            members = [source, *(targets[p] for p in positions)]
            steps = binomial_steps(len(members), len(self._blocks))
            self._groups.append((members, _renamed(steps, order)))

    def feeds(self) -> FeedsOf:
        """A feed per sender and receiver: its blocks in the order of the steps."""
        found: FeedsOf = {}
        for members, steps in self._groups:
            wanted: dict[int, dict[int, list[ChunkRange]]] = {}
            for step in steps:
                for move in step:
                    senders = wanted.setdefault(move.receiver, {})
                    senders.setdefault(move.sender, []).append(self._blocks[move.block])
            for position, senders in sorted(wanted.items()):
                for rank, worker in enumerate(members[position]):
                    found[worker, rank] = tuple(
                        Feed(FromWorker(members[sender][rank]), tuple(blocks), WINDOW_CHUNKS)
                        for sender, blocks in senders.items()
                    )
        return found

    def predict(self, fabric: Fabric) -> Prediction:
        """A step lasts as long as its slowest link; a layer is there with its last block."""
        arrivals: dict[Receiver, dict[int, int]] = {}
        link_bytes: list[int] = []
        sizes = [shape_of(self._grid, (block,))[0] for block in self._blocks]
        now_ns: int | None = 0
        for number in range(max(len(steps) for _, steps in self._groups)):
            moves = [
                (members[move.sender], members[move.receiver], move.block)
                for members, steps in self._groups
                if number < len(steps)
                for move in steps[number]
            ]
            step_ns = _carry(moves, sizes, fabric, link_bytes)
            now_ns = None if now_ns is None or step_ns is None else now_ns + step_ns
            for _, receiver, block in moves:
                for rank, worker in enumerate(receiver):
                    arrivals.setdefault((worker, rank), {})[block] = now_ns or 0
        parts = _blocks_by_layer(self._grid, self._blocks)
        layer_ns = {
            receiver: tuple(max((times[b] for b in part), default=0) for part in parts)
            for receiver, times in arrivals.items()
        }
        if now_ns is None:
            layer_ns = dict.fromkeys(layer_ns, ())
        return Prediction(layer_ns, link_bytes)


def cut_blocks(grid: ChunkGrid, blocks: int, parts: int = 1) -> tuple[ChunkRange, ...]:
    """The chunks in at most `blocks` runs of about the same bytes, none of them empty.

    Where one of `parts` of the blocks ends (`k_way_orders`) a layer ends, too, if one does so
    within a quarter of a block: a layer in two parts is in no target's early blocks, and teams
    would be a step later, with uneven spans.
    """
    count = min(blocks, grid.chunks, CHUNK_RANGES_MAX)
    layer_ends = list(itertools.accumulate(grid.layer_bytes))
    bounds = sorted({count * part // parts for part in range(parts + 1)})
    places = [_part_end(layer_ends, bound, count) for bound in bounds]
    edges = [0]
    for (first, last), (start, stop) in zip(
        itertools.pairwise(bounds), itertools.pairwise(places), strict=True
    ):
        for edge in range(first + 1, min(last + 1, count)):
            ahead, rest = divmod((stop - start) * (edge - first), last - first)
            layer = bisect.bisect_left(layer_ends, start + ahead + bool(rest))
            inside = start + ahead - (layer_ends[layer] - grid.layer_bytes[layer])
            chunk = grid.first[layer] + max(1, -(-inside // grid.chunk_bytes))
            edges.append(min(max(chunk, edges[-1] + 1), grid.chunks - (count - edge)))
    edges.append(grid.chunks)
    return tuple(ChunkRange(a, b) for a, b in itertools.pairwise(edges))


# -- helpers, in the order used -------------------------------------------------------------------


def _part_end(layer_ends: Sequence[int], block: int, blocks: int) -> int:
    """The byte before which so many of the blocks should be."""
    total = layer_ends[-1]
    even = total * block // blocks
    nearest = min((0, *layer_ends), key=lambda end: abs(end - even))
    return nearest if abs(nearest - even) * _SNAP_PART * blocks <= total else even


def _across(
    corners: list[list[int]], have: list[set[int]], step: int, dimensions: int
) -> dict[int, tuple[int, int]]:
    """Receiving corner -> (sending corner, block)."""
    across: dict[int, tuple[int, int]] = {}
    if not dimensions:
        return across
    held = [set().union(*(have[m] for m in members)) for members in corners]
    for sender in range(len(corners)):
        receiver = sender ^ (1 << step % dimensions)
        if receiver == 0 or not held[sender]:
            continue
        highest = max(held[sender])
        block = min(step, highest) if sender == 0 else highest
        if block not in held[receiver]:
            across[receiver] = (sender, block)
    return across


def _inside_and_across(
    corners: list[list[int]], have: list[set[int]], across: dict[int, tuple[int, int]]
) -> list[BlockMove]:
    """Who of each corner sends and receives, and what the two of a corner pass each other."""
    sent = dict(across.values())
    sends: list[int | None] = []
    receives: list[int | None] = []
    moves: list[BlockMove] = []
    for corner, members in enumerate(corners):
        senders: list[int | None] = [None]
        if corner in sent:
            senders = [m for m in members if sent[corner] in have[m]]
        receivers: list[int | None] = [*members] if corner in across else [None]
        choices = [
            (_passes(members, have, sender, receiver), sender, receiver)
            for sender in senders
            for receiver in receivers
        ]

        def worth(choice: tuple[list[BlockMove], int | None, int | None]) -> tuple[int, int]:
            passed, _, receiver = choice
            return len(passed), 0 if receiver is None else -len(have[receiver])

        passed, sender, receiver = max(choices, key=worth)
        moves += passed
        sends.append(sender)
        receives.append(receiver)
    for to, (of, block) in across.items():
        first, second = sends[of], receives[to]
        assert first is not None, f"corner {of} has no node that sends"
        assert second is not None, f"corner {to} has no node that receives"
        moves.append(BlockMove(first, second, block))
    return moves


def _passes(
    members: list[int], have: list[set[int]], sender: int | None, receiver: int | None
) -> list[BlockMove]:
    """Blocks that two nodes of a corner can pass each other beside what they send and receive."""
    found = []
    for of, to in (members, members[::-1]) if len(members) == 2 else ():
        lacking = have[of] - have[to]
        if of != sender and to != receiver and lacking:
            found.append(BlockMove(of, to, min(lacking)))
    return found


def _renamed(steps: Steps, order: Sequence[int]) -> Steps:
    """The same moves with the blocks in another order."""
    return tuple(
        tuple(BlockMove(m.sender, m.receiver, order[m.block]) for m in step) for step in steps
    )


def _carry(
    moves: Iterable[tuple[Element, Element, int]],
    sizes: Sequence[int],
    fabric: Fabric,
    link_bytes: list[int],
) -> int | None:
    """Add a step's bytes to the links; how long it takes, None if no link's rate is known."""
    carried: dict[int, int] = {}
    for sender, receiver, block in moves:
        for giver, taker in zip(sender, receiver, strict=True):
            for number in fabric.path(FromWorker(giver), taker):
                carried[number] = carried.get(number, 0) + sizes[block]
    link_bytes += [0] * (len(fabric.links) - len(link_bytes))
    times = []
    for number, size in carried.items():
        link_bytes[number] += size
        if (rate := fabric.rates[number]) is not None:
            times.append(size * NS_PER_S // rate)
    return max(times, default=None)


def _blocks_by_layer(grid: ChunkGrid, blocks: Sequence[ChunkRange]) -> list[list[int]]:
    """For every layer the blocks that hold some of it."""
    return [
        [number for number, block in enumerate(blocks) if bytes_in_layer(grid, block, layer)]
        for layer in range(len(grid.layer_bytes))
    ]
