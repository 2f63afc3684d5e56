"""What a loading worker makes of partners that say little, or what is not theirs to say."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from thread_workers import WAIT_S, ThreadWorker, all_from, introduce_all

from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    KvLayer,
    KvWanted,
    LiveMessage,
    Offer,
    Parted,
    Pull,
    Settled,
    Taken,
)
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.run import BatchKey
from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.attempts import (
    AttemptReturned,
)
from livescale.messages.events import HoldingCompleted, LiveStarted, RequestEnded
from livescale.runtime.member_process.live_parcels import Assembler, Letter, pack
from livescale.runtime.member_process.peer_lines import LineEvents, PeerLines
from livescale.runtime.wire.protocol import (
    Submit,
    Tokens,
)
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.routes import Partner
from livescale.values.types import Outcome, SamplingParams, WorkerRef
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

SOURCE, TARGET = 1, 2
# Nothing in these tests is to wait for an answer that does not come.
LIMITS = LiveLimits(batch_tokens_max=64, answer_ns=1_000_000_000_000)
SLOW_BYTES_PER_S = 2_500_000


class PartnerPlane:
    """The data plane of a partner that says what the test says."""

    def __init__(self, number: int, other: DataPlane) -> None:
        self.ref = WorkerRef(number)
        self.came: queue.Queue[LiveMessage] = queue.Queue()
        self.offers: deque[Offer] = deque()
        self.plane = DataPlane(self.ref, Arena(1 << 16), on_parcel=self._hear)
        self._other = other.worker
        self._assembler = Assembler(lambda letter: letter.size_bytes)
        for one, peer in ((other, self.plane), (self.plane, other)):
            one.introduce(peer.worker, peer.address)

    def _hear(self, _: WorkerRef, parcel: bytes) -> None:
        complete = self._assembler.take(parcel)
        if complete is not None:
            message = complete[0].message
            if isinstance(message, Offer) and message.tokens:
                self.offers.append(message)
            self.came.put(message)

    def say(self, *messages: LiveMessage) -> None:
        for message in messages:
            self.plane.post(self._other, pack(Letter(message))[0])

    def heard(self, is_wanted: Callable[[LiveMessage], bool]) -> LiveMessage:
        while not is_wanted(message := self.came.get(timeout=patient(WAIT_S))):
            pass
        return message

    def pull(self) -> Handover:
        """The next batch that is offered. What is offered beside it is kept for the next call."""
        if not self.offers:
            self.heard(lambda message: isinstance(message, Offer) and message.tokens != ())
        offer = self.offers.popleft()
        self.say(Pull(offer.batch))
        answer = self.heard(lambda message: isinstance(message, Handover))
        assert isinstance(answer, Handover)
        return answer

    def close(self) -> None:
        self.plane.close()


class HelpingTarget:
    """A worker that loads for a partner's sake, from a third one, with requests to share."""

    def __init__(self, directory: Path, requests: int) -> None:
        manifest = read_manifest(directory, "tiny")
        self.holder = ThreadWorker(0, 8 << 20, uplink_bytes_per_s=SLOW_BYTES_PER_S)
        self.worker = ThreadWorker(1, 8 << 20, live=LIMITS)
        introduce_all([self.holder, self.worker])
        self.partner = PartnerPlane(8, self.worker.data_plane)
        self.stranger = PartnerPlane(9, self.worker.data_plane)
        self.holder.load(SOURCE, manifest, all_from(manifest, None), directory=str(directory))
        self.holder.heard(lambda word: isinstance(word, HoldingCompleted))
        gives_to = (Partner(SOURCE, self.partner.ref),)
        feeds = all_from(manifest, self.holder.ref)
        self.worker.load(TARGET, manifest, feeds, plan=7, live_order="zigzag", gives_to=gives_to)
        self.worker.heard(lambda word: isinstance(word, LiveStarted))
        self.asked = {
            f"r{n}": (tuple((11 * n + 3 * place) % 900 + 10 for place in range(30 + n)), 1 + n % 4)
            for n in range(requests)
        }
        for name, (prompt_ids, count) in self.asked.items():
            self.worker.submit(Submit(name, 1, TARGET, prompt_ids, (), SamplingParams(count)))
        self.tokens: dict[str, list[int]] = {name: [] for name in self.asked}
        self.ended: dict[str, Outcome] = {}
        self.returned: list[str] = []

    def listen(self, count: int) -> None:
        """Until so many requests have ended."""
        while len(self.ended) < count:
            word = self.worker.said.get(timeout=patient(WAIT_S))
            if isinstance(word, Tokens):
                for token in word.tokens:
                    self.tokens[token.request].append(token.token_id)
            elif isinstance(word, AttemptReturned):
                self.returned.append(word.request)
            elif isinstance(word, RequestEnded):
                assert word.worker == self.worker.ref
                self.ended[word.request] = word.outcome

    def check(self, oracle: GreedyOracle, returned: list[str]) -> None:
        """These were given back, and all others have their right tokens."""
        assert self.returned == returned
        for name, outcome in self.ended.items():
            assert outcome is (Outcome.RETURNED if name in returned else Outcome.FINISHED)
        pairs = [(self.asked[n][0], self.tokens[n]) for n in self.asked if n not in returned]
        assert [len(tokens) for _, tokens in pairs] == [
            count for name, (_, count) in self.asked.items() if name not in returned
        ]
        assert all(check.is_right for check in oracle.check_many(pairs))

    def close(self) -> None:
        for plane in (self.partner, self.stranger):
            plane.close()
        for worker in (self.worker, self.holder):
            worker.close()


@pytest.fixture
def target(tiny_model: Path) -> Iterator[HelpingTarget]:
    helping = HelpingTarget(tiny_model, 8)
    yield helping
    helping.close()


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GreedyOracle:
    return GreedyOracle(tiny_model)


@pytest.mark.parametrize("is_told", [False, True])
def test_what_a_partner_took_and_told_nobody_is_given_back(
    target: HelpingTarget, oracle: GreedyOracle, is_told: bool
) -> None:
    """Its connection ends, or the controller says that it is lost."""
    taken = target.partner.pull()
    target.partner.say(Taken(taken.batch), Settled(taken.batch))
    other = target.partner.pull()  # never taken: the target's
    assert other.batch != taken.batch
    if is_told:
        target.worker.host.lose_peer(target.partner.ref)
    else:
        target.partner.close()
    target.listen(len(target.asked))
    target.check(oracle, [spec.request for spec in taken.requests])


def test_only_who_was_given_a_batch_can_take_it(
    target: HelpingTarget, oracle: GreedyOracle
) -> None:
    given = target.partner.pull().batch
    next_one = BatchKey(TARGET, given.number + 1)
    for batch in (given, next_one):
        target.stranger.say(KvWanted(batch, 1), Taken(batch), Settled(batch), Declined(batch))
        target.stranger.say(Pull(batch), Parted(TARGET))
        for _ in ("its KV", "the batch"):
            assert target.stranger.came.get(timeout=patient(WAIT_S)) == Gone(batch)
    # It is the partner's to say; and who parts wants nothing that is on its way, either.
    target.partner.say(Parted(TARGET))
    target.listen(len(target.asked))
    target.check(oracle, [])


def test_parcels_that_wait_are_bounded(tiny_model: Path) -> None:
    """Those that find no room are as if lost on the way; then there is room again."""
    plane = DataPlane(WorkerRef(1), Arena(1 << 16))
    posted: queue.Queue[Callable[[], object]] = queue.Queue()
    came: list[WorkerRef] = []
    refused: list[WorkerRef] = []
    lines = PeerLines(
        plane,
        LineEvents(
            expected=lambda peer, letter: 0,
            came=lambda peer, letter, content, came_ns: came.append(peer),
            lost=lambda peer, is_refused: refused.append(peer),
            is_taking=lambda peer: False,
        ),
        patience_s=1.0,
        post=posted.put,
        waiting_bytes_max=5000,
    )
    peers = [WorkerRef(number) for number in (8, 9)]
    [parcel] = pack(Letter(Offer(SOURCE, BatchKey(TARGET, 1), (7,), (9,))))
    come = plane.on_parcel
    assert come is not None
    try:
        for _ in range(2):
            for peer in peers:
                for _ in range(10):
                    come(peer, parcel)
            # Four find room; of each peer it is noted once that others did not.
            assert posted.qsize() == 6
            while not posted.empty():
                posted.get()()
        for peer in peers:
            come(peer, parcel)
        while not posted.empty():
            posted.get()()
        assert came == [peers[0]] * 8 + peers
        assert refused == peers * 2
    finally:
        lines.close()
        plane.close()


def test_what_follows_a_batch_is_opened_when_the_batch_was_taken_in() -> None:
    """Only then is it known how many bytes are to be expected. Other peers do not wait, and what
    came from one that is lost is no message any more."""
    plane = DataPlane(WorkerRef(1), Arena(1 << 16))
    taking: set[WorkerRef] = set()
    opened: list[tuple[WorkerRef, LiveMessage]] = []

    def came(peer: WorkerRef, letter: Letter, content: bytearray, came_ns: int) -> None:
        opened.append((peer, letter.message))
        if isinstance(letter.message, Taken):  # in a batch's place: it needs no rows
            taking.add(peer)

    lines = PeerLines(
        plane,
        LineEvents(
            expected=lambda peer, letter: 0,
            came=came,
            lost=lambda peer, is_refused: None,
            is_taking=taking.__contains__,
        ),
        patience_s=1.0,
        post=lambda work: work(),
        waiting_bytes_max=5000,
    )
    first, second = WorkerRef(8), WorkerRef(9)
    batch, kv = Taken(BatchKey(TARGET, 1)), KvLayer(BatchKey(TARGET, 1), 1)
    come = plane.on_parcel
    assert come is not None
    try:
        for message in (batch, kv, batch, kv):
            come(first, pack(Letter(message))[0])
        come(second, pack(Letter(kv))[0])
        assert opened == [(first, batch), (second, kv)]
        taking.clear()
        lines.open_waiting()
        assert opened[2:] == [(first, kv), (first, batch)]
        lines.lose(first)
        taking.clear()
        lines.open_waiting()
        assert len(opened) == 4
        for _ in range(4):  # nothing of what is gone is counted as waiting
            come(first, pack(Letter(kv))[0])
        assert opened[4:] == [(first, kv)] * 4
    finally:
        lines.close()
        plane.close()
