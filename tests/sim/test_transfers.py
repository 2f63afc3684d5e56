"""Transfers feed by feed: who waits for whom, and what a broken feed breaks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.topology import Device, Topology
from livescale.member import inputs
from livescale.sim.base.clock import Clock
from livescale.sim.links.feeding import all_chunks, bytes_in, pieces_of
from livescale.sim.links.transfers import Transfers, TransferTimes
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, WorkerRef

W = [WorkerRef(number) for number in range(6)]
GRID = ChunkGrid((1000, 500, 1500), 100)
WAIT_NS = 50_000
STALL_NS = 5_000


class Member:
    """One receiver of the scene, and what it hears."""

    def __init__(self, scene: Scene, ref: WorkerRef) -> None:
        self.scene = scene
        self.ref = ref
        self.layers: dict[int, int] = {}
        self.completed_ns: int | None = None
        self.failed: list[tuple[WorkerRef, bool]] = []

    def put(self, news: inputs.MemberInput) -> None:
        now_ns = self.scene.clock.now_ns
        if isinstance(news, inputs.LayerCame):
            assert news.layer not in self.layers, "a layer arrives once"
            self.layers[news.layer] = now_ns
        elif isinstance(news, inputs.AllCame):
            assert self.completed_ns is None
            self.completed_ns = now_ns
        elif not isinstance(news, inputs.FirstByteCame):
            assert isinstance(news, inputs.FeedEnded), news
            self.failed.append((news.upstream, news.is_stalled))


class Scene:
    """Everybody sends a byte per nanosecond and can receive two; chunks have 100 bytes. W[0] holds
    the model."""

    def __init__(self) -> None:
        self.clock = Clock()
        rate = 1_000_000_000
        device = Device("sim", "host", "leaf", 1 << 30, 1 << 30, rate, 2 * rate)
        topology = Topology(dict.fromkeys(W, device), remote_storage_bytes_per_s=rate)
        self.transfers = Transfers(self.clock, topology, TransferTimes(WAIT_NS, STALL_NS))
        self.members = {ref: Member(self, ref) for ref in W}
        self.load(0, Feed(FromStorage(), GRID.all()))
        self.run()
        self.start_ns = self.clock.now_ns

    def load(self, target: int, *feeds: Feed) -> None:
        key = (W[target], "m", 0)
        self.transfers.receive(1, key, GRID, feeds, self.members[W[target]].put)

    def chain(self, *places: int) -> None:
        for ahead, behind in itertools.pairwise(places):
            self.load(behind, Feed(FromWorker(W[ahead]), GRID.all()))

    def run(self, until_ns: int | None = None) -> None:
        """Until nothing is left, or until so long after the start."""
        if until_ns is not None:
            is_over: list[bool] = []
            self.clock.at(self.start_ns + until_ns, lambda: is_over.append(True))
            while not is_over:
                self.clock.run_next()
            return
        while self.clock.run_next():
            pass

    def arrivals(self, member: int) -> list[int]:
        """When its layers arrived, from the start, in their order."""
        layers = self.members[W[member]].layers
        return [layers[layer] - self.start_ns for layer in sorted(layers)]


def test_every_member_of_a_chain_lags_one_chunk_behind_its_sender() -> None:
    """BlitzScale §5.1: (chunks + n - 1) / chunks of one copy's time."""
    scene = Scene()
    scene.chain(0, 1, 2, 3)
    scene.run()
    # The source holds its layers for longer than a chunk takes.
    assert scene.arrivals(1) == [1000, 1500, 3000]
    assert scene.arrivals(2) == [1100, 1600, 3100]
    assert scene.arrivals(3) == [1200, 1700, 3200]
    assert scene.members[W[3]].completed_ns == scene.start_ns + 3200


def test_who_joins_behind_a_receiver_catches_up() -> None:
    scene = Scene()
    scene.chain(0, 1)
    scene.run(until_ns=2500)
    scene.chain(1, 2)
    scene.run()
    # Its own link takes 3000 ns from time 2500 on.
    assert scene.arrivals(2) == [3500, 4000, 5500]


def test_stripes_take_their_share_of_the_time() -> None:
    """TARGETS B7 in kind: each of two links carries half of the bytes."""
    scene = Scene()
    scene.chain(0, 1)
    scene.run()
    scene.start_ns = scene.clock.now_ns
    halves = [ChunkRange(k, GRID.chunks, 2) for k in range(2)]
    scene.load(2, Feed(FromWorker(W[0]), (halves[0],)), Feed(FromWorker(W[1]), (halves[1],)))
    scene.run()
    # Of layer 1, which has five chunks, one gets three and the other two.
    assert scene.arrivals(2) == [500, 800, 1500]


def test_a_lost_member_fails_those_it_feeds_and_they_go_on_elsewhere() -> None:
    scene = Scene()
    scene.chain(0, 1, 2, 3)
    scene.run(until_ns=1250)
    scene.transfers.node_gone(W[2])
    assert scene.members[W[3]].failed == [(W[2], False)]
    assert scene.members[W[1]].failed == []
    scene.transfers.amend((W[3], "m", 0), (Feed(FromWorker(W[1]), GRID.all()),))
    scene.run()
    # Layer 0 was there already and is not sent again.
    assert scene.arrivals(3) == [1200, 1750, 3250]


def test_a_feed_that_stays_goes_on_when_another_is_replaced() -> None:
    scene = Scene()
    scene.chain(0, 1)
    scene.run()
    scene.start_ns = scene.clock.now_ns
    halves = [ChunkRange(k, GRID.chunks, 2) for k in range(2)]
    kept = Feed(FromWorker(W[0]), (halves[0],))
    scene.load(2, kept, Feed(FromWorker(W[1]), (halves[1],)))
    scene.run(until_ns=100)
    scene.transfers.drop((W[1], "m", 0))
    scene.transfers.amend((W[2], "m", 0), (kept, Feed(FromStorage(), (halves[1],))))
    scene.run()
    assert scene.arrivals(2) == [600, 800, 1600]


def test_who_was_said_to_hold_it_and_does_not_is_given_up() -> None:
    scene = Scene()
    scene.chain(4, 1)
    scene.run()
    assert scene.members[W[1]].failed == [(W[4], False)]
    assert scene.clock.now_ns == scene.start_ns + WAIT_NS


def test_who_comes_to_hold_it_in_time_is_waited_for() -> None:
    scene = Scene()
    scene.chain(1, 2)
    scene.run(until_ns=400)
    scene.chain(0, 1)
    scene.run()
    assert scene.members[W[2]].failed == []
    assert scene.arrivals(2) == [1500, 2000, 3500]


def test_a_frozen_member_stalls_everybody_behind_it_and_nobody_else() -> None:
    scene = Scene()
    scene.chain(0, 1, 2)
    scene.chain(0, 3)
    scene.run(until_ns=1200)
    scene.transfers.slowdowns.freeze(W[1], scene.clock.now_ns + 20_000)
    scene.run()
    assert scene.members[W[1]].failed == []
    assert scene.members[W[2]].failed == [(W[1], True)]
    assert scene.members[W[3]].failed == []
    assert scene.members[W[2]].completed_ns is not None, "it went on by itself"


@given(
    layers=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    chunk=st.integers(1, 9),
    data=st.data(),
)
def test_pieces_are_the_chunks_of_their_ranges(
    layers: list[int], chunk: int, data: st.DataObject
) -> None:
    grid = ChunkGrid(layers, chunk)
    if not grid.chunks:
        return
    start = data.draw(st.integers(0, grid.chunks - 1))
    stop = data.draw(st.integers(start + 1, grid.chunks))
    part = ChunkRange(start, stop, data.draw(st.integers(1, 5)))
    found = [0] * len(layers)
    for piece in pieces_of(grid, (part,)):
        found[piece.layer] |= piece.chunks
    expected = [0] * len(layers)
    for number in part:
        layer = grid.layer(number)
        expected[layer] |= 1 << (number - grid.first[layer])
    assert found == expected
    moved = sum(bytes_in(grid, piece) for piece in pieces_of(grid, (part,)))
    assert moved == sum(grid.place(number)[2] for number in part)
    assert all(bits & ~whole == 0 for bits, whole in zip(found, all_chunks(grid), strict=True))
