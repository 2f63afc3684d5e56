"""What is told of feeds and wants that wait, and when, by a clock that the test drives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_world import Recorder, grid, write_model

from livescale.transfer.formats.frames import Frame, FrameKind, WantedChunks, copy_id
from livescale.transfer.formats.orders import ReceiveOrder
from livescale.transfer.links.connection import Connection
from livescale.transfer.links.outbox import Outbox
from livescale.transfer.memory.arena import Arena
from livescale.transfer.memory.content_hashes import ContentHashes
from livescale.transfer.memory.open_writes import OpenWrites
from livescale.transfer.plane.chunk_sources import Arrival
from livescale.transfer.plane.patience import Patience
from livescale.transfer.plane.reception import Receiver, Reception
from livescale.transfer.plane.receptions import Receptions
from livescale.transfer.plane.store import Store
from livescale.values.chunks import Feed
from livescale.values.types import FromWorker, WorkerRef

ME, HOLDER = WorkerRef(0), WorkerRef(1)
MS = 1_000_000
STALL_MS = 50
ORDER_WAIT_MS = 80
#: times after a stall at which a read that has not ended counts as lost
LOST_STALLS = 5
CHUNK = 64
CHUNKS = 20


class _Line:
    """A channel that has taken so many bytes; nothing else is asked of it."""

    is_network = False
    taken_bytes = 0

    def break_off(self) -> None:
        pass


class _Receiver:
    """A data plane without threads and sockets, that receives one model of `CHUNKS` chunks."""

    def __init__(
        self, memory: Arena, is_connected: bool = True, is_introduced: bool = True
    ) -> None:
        self.now_ns = 1000 * MS
        self.recorder = Recorder()
        self.line = _Line()
        self.store = Store(ME, OpenWrites(), self._now_ns)
        self.outbox = Outbox(HOLDER, self.store.lock)
        channel: Any = self.line
        nobody: Any = None  # its threads, which are not started, would tell it of frames
        self.connection = Connection(ME, self.outbox, channel, nobody, memory.size_bytes, True)
        receptions = Receptions(ME, self.store)
        self.patience = Patience(
            receptions.all,
            self.store,
            lambda peer: is_introduced,
            stall_ns=STALL_MS * MS,
            order_wait_ns=ORDER_WAIT_MS * MS,
            now_ns=self._now_ns,
        )
        manifest = write_model(memory, [CHUNK] * CHUNKS)
        feed = Feed(FromWorker(HOLDER), grid(manifest, CHUNK).all())
        self.reception = Reception(
            Receiver(ME, memory, self.store, ContentHashes(ME)),
            ReceiveOrder(1, manifest, CHUNK, (feed,)),
            self.recorder,
            reach=lambda peer: self.connection if is_connected else None,
            tell_over=receptions.remove,
            now_ns=self._now_ns,
        )
        receptions.add(self.reception)
        self.reception.begin()

    def _now_ns(self) -> int:
        return self.now_ns

    def passes(self, milliseconds: int) -> None:
        for _ in range(milliseconds):
            self.now_ns += MS
            self.patience.look()

    def begins(self, chunk: int) -> Arrival:
        head = Frame(FrameKind.CHUNK, HOLDER, 1, chunk, chunk, CHUNK)
        arrival = self.reception.chunk_begins(self.connection, head)
        assert arrival is not None
        return arrival

    def comes(self, chunk: int) -> None:
        self.reception.chunk_ends(self.begins(chunk), CHUNK)

    def told(self, name: str) -> int:
        return [news[0] for news in self.recorder.news].count(name)


@pytest.fixture(scope="module")
def memory() -> Any:
    with Arena(CHUNK * CHUNKS) as memory:
        yield memory


@given(st.lists(st.integers(0, 3 * STALL_MS), min_size=1, max_size=CHUNKS))
def test_a_stall_is_told_once_and_the_feed_goes_on_by_itself(
    memory: Arena, gaps_ms: list[int]
) -> None:
    receiver = _Receiver(memory)
    for chunk, gap_ms in enumerate(gaps_ms):
        receiver.passes(gap_ms)
        receiver.comes(chunk)
    # What has come is seen when it is looked for next, a millisecond later.
    assert receiver.told("feed_stalled") == sum(gap_ms > STALL_MS for gap_ms in gaps_ms)
    assert receiver.told("completed") == (len(gaps_ms) == CHUNKS)
    for chunk in range(len(gaps_ms), CHUNKS):
        receiver.comes(chunk)
    receiver.recorder.check_completed(receiver.reception.order.manifest)


@given(st.lists(st.integers(1, 2 * STALL_MS), max_size=10))
def test_a_chunk_that_comes_slowly_is_no_stall(memory: Arena, gaps_ms: list[int]) -> None:
    """Any byte of it counts."""
    receiver = _Receiver(memory)
    arrival = receiver.begins(0)
    receiver.passes(1)
    for gap_ms in gaps_ms:
        receiver.line.taken_bytes += 1
        receiver.passes(gap_ms)
    assert receiver.told("feed_stalled") == sum(gap_ms > STALL_MS for gap_ms in gaps_ms)
    receiver.reception.chunk_ends(arrival, CHUNK)


def test_who_owes_nothing_does_not_stall(memory: Arena) -> None:
    receiver = _Receiver(memory)
    for chunk in range(CHUNKS):
        receiver.comes(chunk)
    receiver.passes(10 * STALL_MS)
    assert receiver.told("feed_stalled") == 0


@pytest.mark.parametrize("is_introduced", [False, True])
def test_a_holder_without_a_connection_is_waited_for_if_it_is_introduced(
    memory: Arena, is_introduced: bool
) -> None:
    receiver = _Receiver(memory, is_connected=False, is_introduced=is_introduced)
    receiver.passes(ORDER_WAIT_MS)
    assert receiver.told("feed_failed") == 0
    receiver.passes(10 * ORDER_WAIT_MS)
    assert receiver.told("feed_failed") == (not is_introduced)


def test_a_read_that_does_not_end_after_its_connection_ends_the_plan(memory: Arena) -> None:
    receiver = _Receiver(memory)
    receiver.begins(0)
    receiver.reception.connection_ended(receiver.connection, "it was lost")
    receiver.passes(LOST_STALLS * STALL_MS)
    assert receiver.told("failed") == 0
    receiver.passes(1)
    receiver.recorder.check_failed("a read of chunk 0 has not ended")


def test_a_want_waits_for_its_copy_and_no_longer(memory: Arena) -> None:
    receiver = _Receiver(memory)
    with Arena(CHUNK) as elsewhere:
        missing = write_model(elsewhere, [CHUNK], seed=1)
    wanted = WantedChunks(copy_id(missing), CHUNK, grid(missing, CHUNK).all())
    receiver.store.want(receiver.outbox, 7, wanted)
    receiver.passes(ORDER_WAIT_MS)
    assert receiver.store.has_early_wants
    receiver.passes(1)
    assert not receiver.store.has_early_wants
