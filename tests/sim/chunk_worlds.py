"""Small random networks, loads and serving traffic over them, and their play in the simulator."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import partial

from livescale.clusters.topology import Device, Host, Leaf, Topology
from livescale.member import inputs
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SERVING_FIRST
from livescale.sim.links.transfers import Transfers, TransferTimes
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, Upstream, WorkerRef, agent_ref

RATES = (100_000_000, 200_000_000, 300_000_000, 500_000_000, 1_000_000_000)


@dataclasses.dataclass
class Load:
    """One receiver, and when it asks."""

    receiver: WorkerRef
    feeds: tuple[Feed, ...]
    start_ns: int


@dataclasses.dataclass
class Sending:
    """Serving traffic: so many bytes from one worker to another, and when."""

    sender: WorkerRef
    receiver: WorkerRef
    size_bytes: int
    start_ns: int


@dataclasses.dataclass
class ChunkWorld:
    """A model that `sources` hold, loads of it, and what workers send each other beside that."""

    topology: Topology
    grid: ChunkGrid
    sources: list[WorkerRef]
    loads: list[Load]
    sendings: list[Sending] = dataclasses.field(default_factory=list)


class Hearer:
    """What one receiver hears."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.started_ns: int | None = None
        self.completed_ns: int | None = None
        self.layers: dict[int, int] = {}
        self.received_bytes: int | None = None
        self.failed: list[tuple[WorkerRef, bool]] = []

    def put(self, news: inputs.MemberInput) -> None:
        now_ns = self.clock.now_ns
        if isinstance(news, inputs.FirstByteCame):
            assert self.started_ns is None, "a load starts once"
            self.started_ns = now_ns
        elif isinstance(news, inputs.LayerCame):
            assert self.started_ns is not None, "layers come after the first byte"
            assert news.layer not in self.layers, "a layer arrives once"
            self.layers[news.layer] = now_ns
        elif isinstance(news, inputs.AllCame):
            assert self.completed_ns is None, "a load ends once"
            self.completed_ns = now_ns
            self.received_bytes = news.received_bytes
        else:
            assert isinstance(news, inputs.FeedEnded), news
            self.failed.append((news.upstream, news.is_stalled))


class Play:
    """The world in the simulator. Time begins when the sources are complete."""

    def __init__(
        self,
        world: ChunkWorld,
        wait_ns: int = 1 << 40,
        stall_ns: int = 1 << 40,
        load_ns: int | None = None,
        parameter_percent: int = 100,
        link_sharing: str = SERVING_FIRST,
    ) -> None:
        self.world = world
        self.clock = Clock()
        self.transfers = Transfers(
            self.clock,
            world.topology,
            TransferTimes(wait_ns, stall_ns, load_ns),
            parameter_percent,
            link_sharing,
        )
        self.hearers: dict[WorkerRef, Hearer] = {}
        #: numbers of sendings in the order in which they arrived, and when
        self.sent: dict[int, int] = {}
        for source in world.sources:
            self.ask(source, (Feed(FromStorage(), world.grid.all()),))
        self.run()
        self.start_ns = self.clock.now_ns
        for load in world.loads:
            self.clock.at(
                self.start_ns + load.start_ns,
                lambda load=load: self.ask(load.receiver, load.feeds),
            )
        for number, sending in enumerate(world.sendings):
            self.clock.at(self.start_ns + sending.start_ns, partial(self.send, number, sending))

    def ask(self, receiver: WorkerRef, feeds: tuple[Feed, ...]) -> None:
        hearer = self.hearers[receiver] = Hearer(self.clock)
        self.transfers.receive(1, (receiver, "m", 0), self.world.grid, feeds, hearer.put)

    def send(self, number: int, sending: Sending) -> None:
        self.transfers.moves.serving.send(
            sending.sender, sending.receiver, sending.size_bytes, lambda: self._arrived(number)
        )

    def _arrived(self, number: int) -> None:
        assert number not in self.sent, "what is sent arrives once"
        self.sent[number] = self.clock.now_ns - self.start_ns

    def run(self) -> None:
        while self.clock.run_next():
            pass
        self.transfers.moves.check_links()


def draw_chunk_world(rng: random.Random, is_striped: bool = False) -> ChunkWorld:
    """Members of one or two leaves; whoever receives gets its parts from those before it."""
    grid = ChunkGrid([rng.randrange(1, 30) * 100 - rng.choice((0, 0, 37)) for _ in range(4)], 100)
    workers = [WorkerRef(number) for number in range(rng.randint(3, 7))]
    topology = Topology(group_bytes_per_s=rng.choice((None, 2_000_000_000)))
    for worker in workers:
        leaf, group = rng.choice(("a", "b")), rng.choice(("", "", "g"))
        out, into = rng.choice(RATES), rng.choice(RATES)
        topology.devices[worker] = Device("d", "h", leaf, 1 << 40, 1, out, into, group)
    host = Host("h", "a", 1 << 40, *(rng.choice(RATES) for _ in range(4)))
    topology.agents[agent_ref(0)] = host
    topology.leaves["a"] = Leaf("a", rng.choice((None, *RATES)), rng.choice((None, *RATES)))
    sources = [*workers[: rng.randint(1, 2)], agent_ref(0)]
    loads: list[Load] = []
    for worker in workers[len(sources) - 1 :]:
        before: list[Upstream] = [FromWorker(w) for w in sources]
        before += [FromWorker(load.receiver) for load in loads] * 2
        feeds = draw_feeds(rng, grid, [*before, FromStorage()], is_striped)
        loads.append(Load(worker, feeds, rng.choice((0, 0, 0, rng.randrange(5_000)))))
    return ChunkWorld(topology, grid, sources, loads)


def draw_sendings(rng: random.Random, workers: Sequence[WorkerRef]) -> list[Sending]:
    """A few pairs talk, some all the time, some now and then."""
    pairs = [rng.sample(workers, 2) for _ in range(rng.randint(1, 4))]
    sendings = []
    for _ in range(rng.randint(1, 12)):
        sender, receiver = rng.choice(pairs)
        size_bytes = rng.choice((0, 1, rng.randrange(3000)))
        sendings.append(Sending(sender, receiver, size_bytes, rng.choice((0, rng.randrange(5000)))))
    return sorted(sendings, key=lambda sending: sending.start_ns)


def draw_feeds(
    rng: random.Random, grid: ChunkGrid, upstreams: list[Upstream], is_striped: bool
) -> tuple[Feed, ...]:
    """All chunks, in one feed or in parts: stripes, or runs that are asked for in order."""
    count = min(rng.choice((1, 1, 2, 3)), grid.chunks)
    window = None if is_striped else 2
    chosen = rng.sample(upstreams, min(count, len(upstreams)))
    chosen = list(dict.fromkeys(chosen))
    count = len(chosen)
    if is_striped:
        parts = [ChunkRange(number, grid.chunks, count) for number in range(count)]
    else:
        cuts = sorted(rng.sample(range(1, grid.chunks), count - 1))
        edges = [0, *cuts, grid.chunks]
        parts = [ChunkRange(edges[i], edges[i + 1]) for i in range(count)]
    return tuple(Feed(up, (part,), window) for up, part in zip(chosen, parts, strict=True))
