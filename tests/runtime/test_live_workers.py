"""A live pair of workers on threads, with real parcels: whoever ends a request, its tokens are
right, whatever is lost on the way, and nothing is left in any KV pool."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from thread_workers import WAIT_S, ThreadWorker, all_from, introduce_all

from livescale.batching.contract.live_messages import (
    Declined,
    Handover,
    KvLayer,
    LiveMessage,
    Offer,
    Parted,
    Pull,
)
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.attempts import AttemptReturned, AttemptTaken, Cancel
from livescale.messages.events import (
    BatchTaken,
    CapacityMeasured,
    FeedFailed,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    RequestEnded,
)
from livescale.runtime.member_process.live_parcels import Assembler, Letter, pack
from livescale.runtime.wire.protocol import Submit, Tokens
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.routes import Partner, Taker
from livescale.values.types import Outcome, SamplingParams, WorkerRef
from mean_rows import assert_close, mean_rows
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

ARENA_BYTES = 8 << 20
# A load takes about half a second, and one that must not be over too soon three times as long.
UPLINK_BYTES_PER_S, SLOW_BYTES_PER_S = 7_000_000, 2_500_000
SOURCE, TARGET = 1, 2
LIMITS = LiveLimits(batch_tokens_max=64, answer_ns=1_000_000_000)


def prompt(number: int) -> tuple[int, ...]:
    return tuple((11 * number + 3 * place) % 900 + 10 for place in range(20 + 7 * (number % 5)))


class LivePair:
    """Source and target, and a gateway that accepts tokens from owners only."""

    def __init__(
        self, directory: Path, order: str = "zigzag", limits: LiveLimits = LIMITS, **sizes: int
    ) -> None:
        self.manifest = read_manifest(directory, "tiny")
        kv_bytes = sizes.get("source_kv_bytes", 1 << 22)
        rate = {"uplink_bytes_per_s": sizes.get("uplink_bytes_per_s", UPLINK_BYTES_PER_S)}
        self.source = ThreadWorker(0, ARENA_BYTES, kv_bytes, live=limits, **rate)
        self.target = ThreadWorker(1, ARENA_BYTES, live=limits, **rate)
        self.workers = [self.source, self.target]
        introduce_all(self.workers)
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}
        self.owner: dict[str, ThreadWorker] = {}
        self.tokens: dict[str, list[int]] = {}
        #: tokens that were known of a request when it was taken over
        self.taken_with: dict[str, int] = {}
        self.ended: dict[str, Outcome] = {}
        self.words: list[tuple[ThreadWorker, object]] = []
        self.cancelled: set[str] = set()
        self.source.load(
            SOURCE, self.manifest, all_from(self.manifest, None), directory=str(directory)
        )
        self.source.heard(lambda word: isinstance(word, HoldingCompleted))
        self.order, self.partner = order, Partner(SOURCE, self.source.ref)

    def start(self) -> None:
        feeds = all_from(self.manifest, self.source.ref)
        self.target.load(
            TARGET,
            self.manifest,
            feeds,
            plan=7,
            live_order=self.order,
            gives_to=(self.partner,),
        )
        self.target.heard(lambda word: isinstance(word, LiveStarted))

    def start_whole(self) -> None:
        """The target serves, too, and knows nothing of the source."""
        self.target.load(TARGET, self.manifest, all_from(self.manifest, self.source.ref), plan=7)
        self.target.heard(lambda word: isinstance(word, HoldingCompleted))

    def ask(
        self, worker: ThreadWorker, name: str, number: int, count: int, *, embeds: bool = False
    ) -> None:
        instance = SOURCE if worker is self.source else TARGET
        self.asked[name] = (prompt(number), count)
        self.owner[name] = worker
        self.tokens[name] = []
        sampling = SamplingParams(count, embeds=embeds)
        worker.submit(Submit(name, 1, instance, prompt(number), (), sampling))

    def listen(self, until) -> None:
        """Take what the workers say until that is true."""
        deadline = time.monotonic() + patient(WAIT_S)
        while not until():
            assert time.monotonic() < deadline, (self.ended, [w.host for w in self.workers])
            for worker in self.workers:
                try:
                    word = worker.said.get(timeout=0.005)
                except queue.Empty:
                    continue
                self.words.append((worker, word))
                self._take(worker, word)

    def _take(self, worker: ThreadWorker, word: object) -> None:
        if isinstance(word, AttemptTaken):
            if word.request in self.cancelled:
                worker.host.post(Cancel(word.request, word.attempt))
            self.taken_with[word.request] = len(self.tokens[word.request])
            self.owner[word.request] = worker
            self.ended.pop(word.request, None)
        elif isinstance(word, Tokens):
            for token in word.tokens:
                if self.owner[token.request] is not worker:
                    continue
                known = len(self.tokens[token.request])
                if token.index < min(known, self.taken_with.get(token.request, 0)):
                    assert token.token_id == self.tokens[token.request][token.index]
                else:
                    assert token.index == known
                    self.tokens[token.request].append(token.token_id)
        elif isinstance(word, RequestEnded):
            assert word.worker == worker.ref
            if self.owner[word.request] is worker:
                assert word.request not in self.ended
                self.ended[word.request] = word.outcome

    def drain(self, worker: ThreadWorker) -> None:
        """What it said before it ended."""
        while not worker.said.empty():
            word = worker.said.get()
            self.words.append((worker, word))
            self._take(worker, word)

    def finish(self) -> None:
        """Every request of those who live ends, and they are at rest with empty KV pools."""

        def is_over() -> bool:
            return all(n in self.ended or w not in self.workers for n, w in self.owner.items())

        self.listen(is_over)

        def at_rest() -> bool:
            serving = [worker for worker in self.workers if worker.report is not None]
            reports = [self.last(worker, InstanceReported) for worker in serving]
            return all(r is not None and r.kv_blocks_used == r.running == 0 for r in reports)

        self.listen(at_rest)

    def last(self, worker: ThreadWorker, kind: type) -> object:
        words = [word for who, word in self.words if who is worker and isinstance(word, kind)]
        return words[-1] if words else None

    def taken(self) -> list[BatchTaken]:
        return [word for _, word in self.words if isinstance(word, BatchTaken)]

    def check(self, oracle: GreedyOracle) -> None:
        right = [name for name, outcome in self.ended.items() if outcome is Outcome.FINISHED]
        pairs = [(self.asked[name][0], self.tokens[name]) for name in right]
        assert [len(self.tokens[n]) for n in right] == [self.asked[n][1] for n in right]
        assert all(check.is_right for check in oracle.check_many(pairs))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@contextmanager
def live_pair(
    directory: Path, order: str = "zigzag", limits: LiveLimits = LIMITS, **sizes: int
) -> Iterator[LivePair]:
    pair = LivePair(directory, order, limits, **sizes)
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GreedyOracle:
    return GreedyOracle(tiny_model)


def start_when_loaded(pair: LivePair, watermark: int, count: int) -> None:
    """The target alone works until it has so many layers; then the source looks up."""
    looks_up = threading.Event()
    pair.source.host.post(lambda: looks_up.wait(patient(WAIT_S)))
    pair.start()
    for number in range(count):
        pair.ask(pair.target, f"r{number}", number, 1 + 5 * (number % 3))

    def has_come() -> bool:
        last = pair.last(pair.target, LayerArrived)
        return last is not None and last.watermark >= watermark

    pair.listen(has_come)
    looks_up.set()


@pytest.mark.parametrize("order", ["zigzag", "best-effort", "overlap"])
def test_both_share_the_work_and_every_token_is_right(
    tiny_model: Path, oracle: GreedyOracle, order: str
) -> None:
    before = threading.enumerate()
    with live_pair(tiny_model, order) as pair:
        pair.ask(pair.source, "decodes", 99, 150)
        pair.start()
        for number in range(14):
            pair.ask(pair.target, f"r{number}", number, 1 + 5 * (number % 3))
        pair.finish()
        pair.check(oracle)
        assert len(pair.ended) == 15
        assert bool(pair.taken()) == (order in ("zigzag", "best-effort"))
        taken = [request for batch in pair.taken() for request, *_ in batch.requests]
        assert sorted(taken) == sorted(n for n, w in pair.owner.items() if w is pair.source)[1:]
        report = pair.last(pair.source, InstanceReported)
        assert report.handovers == len(pair.taken())
        assert report.handover_bytes >= sum(batch.row_bytes for batch in pair.taken())
        if pair.target in pair.owner.values():
            # A request may end before the member takes in that the model is whole.
            pair.listen(lambda: pair.last(pair.target, CapacityMeasured) is not None)
        has_lane = any(t.name == "runs" for t in threading.enumerate() if t not in before)
        # Whether one Run follows another at once depends on when batches come.
        assert pair.taken() or not has_lane, "only Runs of a source follow one another"


def test_embeddings_come_from_the_instance_that_runs_the_head(tiny_model: Path) -> None:
    with live_pair(tiny_model) as pair:
        pair.start()
        for number in range(14):
            pair.ask(pair.target, f"r{number}", number, 1, embeds=True)
        pair.finish()
        assert set(pair.ended.values()) == {Outcome.FINISHED}
        assert pair.taken(), "some were finished by the source"
        sent = [word for _, word in pair.words if isinstance(word, Tokens)]
        vectors = {
            token.request: np.frombuffer(token.embedding or b"", "<f4")
            for word in sent
            for token in word.tokens
        }
    means = mean_rows(tiny_model, [prompt_ids for prompt_ids, _ in pair.asked.values()])
    assert_close(vectors, dict(zip(pair.asked, means, strict=True)))


def test_running_requests_move_and_every_token_is_right(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    limits = structs.replace(LIMITS, move_factor=1)
    with live_pair(tiny_model, limits=limits, uplink_bytes_per_s=1 << 30) as pair:
        for number in range(8):
            pair.ask(pair.source, f"r{number}", number, 300)
        pair.listen(lambda: all(pair.tokens.values()))
        pair.start()
        pair.finish()
        pair.check(oracle)
        moved = [request for batch in pair.taken() for request, *_ in batch.requests]
        assert 0 < len(moved) <= 4
        assert all(pair.owner[name] is pair.target for name in moved)
        assert all(0 < pair.taken_with[name] < 300 for name in moved)
        assert all(pair.owner[n] is pair.source for n in pair.asked if n not in moved)
        assert {batch.next_layer for batch in pair.taken()} == {len(pair.manifest.layers)}


def test_an_instance_that_drains_passes_on_what_it_has_and_every_token_is_right(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    with live_pair(tiny_model, "stop-the-world", uplink_bytes_per_s=1 << 30) as pair:
        pair.start_whole()
        for number in range(6):
            pair.ask(pair.source, f"r{number}", number, 400)
        pair.listen(lambda: all(pair.tokens.values()))
        taker = Taker(Partner(TARGET, pair.target.ref), kv_token_ps=1)
        pair.source.drain_to(SOURCE, 1, (taker,))
        pair.finish()
        pair.check(oracle)
        # On a busy machine one may look cheaper to compute anew: that one is given back.
        returned = {n for n, outcome in pair.ended.items() if outcome is Outcome.RETURNED}
        assert sorted(pair.taken_with) == sorted(pair.asked.keys() - returned)
        assert pair.taken_with
        assert all(0 < count < 400 for count in pair.taken_with.values())
        assert all(pair.ended[name] is Outcome.FINISHED for name in pair.taken_with)


@pytest.mark.parametrize("is_taker", [True, False])
def test_what_a_draining_instance_or_a_taker_has_is_not_lost_with_the_other(
    tiny_model: Path, oracle: GreedyOracle, is_taker: bool
) -> None:
    """Giver or taker dies after the first batch was taken: the other goes on with what it has."""
    with live_pair(tiny_model, "stop-the-world", uplink_bytes_per_s=1 << 30) as pair:
        pair.start_whole()
        for number in range(6):
            pair.ask(pair.source, f"r{number}", number, 400)
        pair.listen(lambda: all(pair.tokens.values()))
        # How long KV takes is not known: the first batch is of one request.
        pair.source.drain_to(SOURCE, 1, (Taker(Partner(TARGET, pair.target.ref)),))
        pair.listen(lambda: pair.taken())
        lost, other = (pair.target, pair.source) if is_taker else (pair.source, pair.target)
        lost.host.stop()
        pair.listen(lambda: not lost.is_running)
        other.host.lose_peer(lost.ref)
        pair.workers.remove(lost)
        pair.drain(lost)
        pair.finish()
        pair.check(oracle)
        kept = [name for name, owner in pair.owner.items() if owner is other]
        assert {pair.ended.get(name) for name in kept} <= {Outcome.FINISHED, Outcome.RETURNED}


@pytest.mark.parametrize("watermark", [2, 3, 4])
def test_a_batch_is_handed_over_wherever_it_is(
    tiny_model: Path, oracle: GreedyOracle, watermark: int
) -> None:
    with live_pair(tiny_model) as pair:
        start_when_loaded(pair, watermark, 10)
        pair.listen(lambda: pair.taken())
        # Layers go on arriving until the source takes a batch: what the target had by then was
        # reported before.
        pair.drain(pair.target)
        reached = pair.last(pair.target, LayerArrived).watermark
        pair.finish()
        pair.check(oracle)
        first = pair.taken()[0]
        # The newest layer may have been run of it, or not yet.
        assert watermark - 1 <= first.next_layer <= reached
        assert first.row_bytes > 0 or first.next_layer == 0
        assert pair.last(pair.target, LayerArrived).live_layers > 0


def test_a_target_that_is_released_gives_back_what_was_not_taken(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    with live_pair(tiny_model, uplink_bytes_per_s=SLOW_BYTES_PER_S) as pair:
        pair.ask(pair.source, "busy", 3, 60)
        # The source's own thread releases the target: the source pulls no more before.
        pair.source.once(BatchTaken, lambda: pair.target.release(7))
        # More than the source has taken by then.
        start_when_loaded(pair, 3, 40)
        pair.listen(lambda: pair.last(pair.target, HoldingDropped) is not None)
        pair.finish()
        pair.check(oracle)
        words = [word for worker, word in pair.words if worker is pair.target]
        order = [type(w) for w in words if isinstance(w, (HoldingFailed, HoldingDropped))]
        assert order == [HoldingFailed, HoldingDropped]
        returned = [n for n, outcome in pair.ended.items() if outcome is Outcome.RETURNED]
        assert returned
        told = [word.request for word in words if isinstance(word, AttemptReturned)]
        assert set(returned) <= set(told)


def test_whatever_a_lost_target_did_not_say_is_computed_anew(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    with live_pair(tiny_model) as pair:
        start_when_loaded(pair, 4, 12)
        pair.listen(lambda: pair.taken())
        pair.target.close()
        pair.workers.remove(pair.target)
        pair.finish()
        pair.check(oracle)
        assert set(pair.ended.values()) == {Outcome.FINISHED}


def test_a_target_whose_source_dies_finishes_what_it_has(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    with live_pair(tiny_model) as pair:
        start_when_loaded(pair, 4, 12)
        pair.listen(lambda: pair.taken())
        pair.source.host.stop()
        pair.listen(lambda: not pair.source.is_running)
        # Its bytes can still be had.
        pair.target.host.lose_peer(pair.source.ref)
        pair.workers.remove(pair.source)
        pair.drain(pair.source)
        pair.finish()
        pair.check(oracle)
        assert set(pair.ended.values()) == {Outcome.FINISHED}


def test_a_connection_that_breaks_ends_the_help_and_nothing_else(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    with live_pair(tiny_model, uplink_bytes_per_s=SLOW_BYTES_PER_S) as pair:
        start_when_loaded(pair, 3, 12)
        pair.listen(lambda: pair.taken())
        pair.source.data_plane.disconnect(pair.target.ref)
        introduce_all(pair.workers)
        pair.listen(lambda: pair.last(pair.target, FeedFailed) is not None)
        pair.target.amend(7, all_from(pair.manifest, pair.source.ref))
        pair.finish()
        pair.check(oracle)
        assert set(pair.ended.values()) == {Outcome.FINISHED}


def test_cancelled_requests_leave_no_block_anywhere(tiny_model: Path, oracle: GreedyOracle) -> None:
    with live_pair(tiny_model) as pair:
        start_when_loaded(pair, 3, 14)
        pair.listen(lambda: pair.taken())
        for number in range(0, 14, 2):
            # The gateway tells whoever it takes for the owner.
            owner = pair.owner[f"r{number}"]
            owner.host.post(Cancel(f"r{number}", 1))
            pair.cancelled.add(f"r{number}")
        pair.finish()
        pair.check(oracle)


def test_a_source_without_room_pulls_nothing(tiny_model: Path, oracle: GreedyOracle) -> None:
    kv_bytes = 16 * model_spec(read_manifest(tiny_model, "tiny")).kv_bytes_per_token * 5
    with live_pair(tiny_model, source_kv_bytes=kv_bytes) as pair:
        pair.ask(pair.source, "decodes", 0, 50)
        pair.start()
        for number in range(8):
            pair.ask(pair.target, f"r{number}", number, 12)
        pair.finish()
        pair.check(oracle)
        assert set(pair.ended.values()) == {Outcome.FINISHED}


class Forger:
    """A member that knows the secret, and says what the test says."""

    def __init__(self, victim: ThreadWorker) -> None:
        self.came: queue.Queue[Letter] = queue.Queue()
        self.plane = DataPlane(WorkerRef(9), Arena(1 << 20), on_parcel=self._hear)
        self.victim = victim.ref
        self._assembler = Assembler(lambda letter: letter.size_bytes)
        for one, other in ((victim.data_plane, self.plane), (self.plane, victim.data_plane)):
            one.introduce(other.worker, other.address)

    def _hear(self, _: WorkerRef, parcel: bytes) -> None:
        complete = self._assembler.take(parcel)
        if complete is not None:
            self.came.put(complete[0])

    def say(self, *parcels: bytes) -> None:
        for parcel in parcels:
            self.plane.post(self.victim, parcel)

    def heard(self, message: LiveMessage) -> None:
        assert self.came.get(timeout=patient(WAIT_S)).message == message


def forged(batch: BatchKey, row_bytes: int, layers: int) -> Iterator[list[bytes]]:
    """Handovers of a batch of ten tokens that cannot be."""
    right = SequenceSpec("forged", 1, prompt(0)[:10], SamplingParams(3))
    wrong = [
        (right, 1, 10 * row_bytes),  # at a layer where no batch is handed over
        (right, 9, 10 * row_bytes),
        (right, 2, 10 * row_bytes - 4),  # other rows than it has tokens
        (right, 0, 10 * row_bytes),
        (replace(right, prompt_ids=prompt(0)[:9]), 2, 9 * row_bytes),  # not what was offered
        (replace(right, prompt_ids=(1 << 20,) * 10), 2, 10 * row_bytes),  # no such token
        (replace(right, prompt_ids=(), generated_ids=(5,) * 10), 2, 10 * row_bytes),
        (replace(right, sampling=SamplingParams(1 << 40)), 2, 10 * row_bytes),
        (replace(right, sampling=SamplingParams(0)), 2, 10 * row_bytes),
    ]
    for spec, next_layer, size_bytes in wrong:
        letter = Letter(Handover(batch, (spec,), next_layer), ("g0",), size_bytes)
        yield pack(letter, [memoryview(bytes(size_bytes))])
    begun = replace(right, prompt_ids=prompt(0)[:8], generated_ids=(5, 5))
    decoding = [
        (begun, 2),  # not all layers are done
        (right, layers),  # it has not begun
        (replace(begun, prompt_ids=prompt(0)[:9]), layers),  # more than was offered
        (replace(begun, sampling=SamplingParams(2)), layers),  # it is over
    ]
    for spec, next_layer in decoding:
        yield pack(Letter(Handover(batch, (spec,), next_layer, True), ("g0",)))
    twice = Letter(Handover(batch, (right, right), 0), ("g0", "g0"))
    yield pack(twice)
    yield [b"noise"]


def test_forged_parcels_end_the_cooperation_and_not_the_worker(
    tiny_model: Path, oracle: GreedyOracle
) -> None:
    with live_pair(tiny_model) as pair:
        forger, key = Forger(pair.source), BatchKey(TARGET, 5)
        row_bytes = model_spec(pair.manifest).row_bytes_per_token
        offer = pack(Letter(Offer(SOURCE, key, (10,), (12,))))
        pair.ask(pair.source, "busy", 1, 2000)
        pair.listen(lambda: pair.last(pair.source, Tokens) is not None)
        try:
            for parcels in forged(key, row_bytes, len(pair.manifest.layers)):
                forger.say(*offer)
                forger.heard(Pull(key, kv_layers=len(pair.manifest.layers) - 2))
                forger.say(*parcels)
                forger.heard(Declined(key))
                forger.heard(Parted(None))
            # What was never asked for, and offers that no requests have.
            forger.say(*pack(Letter(KvLayer(key, 1), (), 8), [memoryview(bytes(8))]))
            forger.say(*pack(Letter(Offer(SOURCE, key, (10, 3), (12,)))))
            forger.say(*pack(Letter(Offer(SOURCE, key, (-5,), (12,)))))
            forger.say(*pack(Letter(Handover(BatchKey(7, 7), (), 0))))
            # Which of the answers comes first depends on when these came.
            answers = [forger.came.get(timeout=patient(WAIT_S)).message for _ in range(2)]
            assert Parted(None) in answers
            assert all(m in (Parted(None), Declined(BatchKey(7, 7))) for m in answers)
        finally:
            forger.plane.close()
        pair.source.host.post(Cancel("busy", 1))
        pair.cancelled.add("busy")
        pair.ask(pair.source, "after", 2, 10)
        pair.finish()
        pair.check(oracle)
