"""Chunks whose connections end while they are written: each comes, and from one side at a time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from livescale.transfer.plane.chunk_sources import ChunkSources, Intake
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromWorker, WorkerRef

CHUNKS = 12
HOLDERS = 3


class _World:
    """A reception without its lock and its frames; connections are numbers."""

    def __init__(self) -> None:
        self.sources = ChunkSources(CHUNKS)
        #: (intake, chunk) that something writes
        self.under_way: list[tuple[int, int]] = []
        #: reads whose connection has ended
        self.left_behind: list[tuple[int, int]] = []
        self._connections = 0

    def feed(self, first: int, window: int) -> None:
        """All chunks, the first ones from this holder and the others from the next one."""
        cut = first % CHUNKS
        feeds = []
        for holder, part in ((first, (0, cut)), (first + 1, (cut, CHUNKS))):
            if part[0] < part[1]:
                upstream = FromWorker(WorkerRef(holder % HOLDERS))
                feeds.append(Feed(upstream, (ChunkRange(*part),), 1 + window % 4))
        self.sources.assign(tuple(feeds), now_ns=0)

    def ask(self) -> None:
        for intake in self.sources.asking():
            if intake.connection is None:
                self._connections += 1
                connection: Any = self._connections
                intake.connection = connection
            written = {chunk for _, chunk in self.left_behind}
            assert written.isdisjoint(intake.next_to_ask()), "asked for while it is written"

    def begin(self, at: int) -> None:
        """One of the chunks that were asked for begins to come."""
        asked = [
            (index, chunk)
            for index, intake in enumerate(self.sources.intakes)
            for chunk in sorted(intake.asked - intake.arriving)
            if intake.connection is not None
        ]
        if not asked:
            return
        index, chunk = asked[at % len(asked)]
        if self.sources.begin(index, chunk):
            assert chunk not in [c for _, c in self.under_way + self.left_behind]
            self.under_way.append((index, chunk))

    def land(self, at: int) -> None:
        if self.under_way:
            self.sources.end(*self.under_way.pop(at % len(self.under_way)))

    def lose(self, at: int) -> None:
        """A connection ends: what it writes is not known, and has not ended."""
        alive = [i for i in self.sources.intakes if i.connection is not None]
        if alive:
            self._lose(alive[at % len(alive)])

    def break_off(self, at: int) -> None:
        """A connection ends in the middle of what its thread has written."""
        if self.under_way:
            index, chunk = self.under_way.pop(at % len(self.under_way))
            assert not self.sources.break_off(index, chunk), "what it owes is given back at its end"
            self._lose(self.sources.intakes[index])

    def _lose(self, intake: Intake) -> None:
        index = self.sources.intakes.index(intake)
        self.sources.take_back(intake, now_ns=0)
        intake.connection = None
        lost = [read for read in self.under_way if read[0] == index]
        self.under_way = [read for read in self.under_way if read[0] != index]
        self.left_behind += lost
        waiting = self.sources.left_behind(before_ns=1)
        assert waiting == sorted(chunk for _, chunk in self.left_behind)

    def end(self, at: int) -> None:
        """A write of a connection that has gone is over, too."""
        if self.left_behind:
            assert self.sources.break_off(*self.left_behind.pop(at % len(self.left_behind)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["feed", "begin", "land", "lose", "break_off", "end"]),
            st.integers(0, 99),
        ),
        min_size=8,
        max_size=60,
    )
)
def test_every_chunk_comes_and_is_written_from_one_side_at_a_time(
    steps: list[tuple[str, int]],
) -> None:
    world = _World()
    world.feed(0, 0)
    for name, number in steps:
        world.ask()
        if name == "feed":
            world.feed(number, number)
        else:
            getattr(world, name)(number)
    # All reads end, and the last holder is left in peace.
    while world.left_behind:
        world.end(0)
    world.feed(2 * CHUNKS, 3)
    for _ in range(3 * CHUNKS):
        world.ask()
        world.begin(0)
        world.land(0)
    assert all(world.sources.is_there(chunk) for chunk in range(CHUNKS))
