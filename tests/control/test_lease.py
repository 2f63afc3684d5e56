"""The lease: whatever is late or lost, two candidates never both believe to hold it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.cluster.lease import LeaseClaim, LeaseRecord, LeaseTerms

TERM_NS = 1_000_000
TERMS = LeaseTerms(TERM_NS, drift_permille=50)


@dataclass
class Store:
    """Replaces the record for a writer that names its version; keeps all that it ever was."""

    record: LeaseRecord | None = None
    version: int = 0
    history: list[LeaseRecord] = field(default_factory=list)

    def write(self, record: LeaseRecord, version: str) -> str | None:
        if version != str(self.version):
            return None
        self.version += 1
        self.record = record
        self.history.append(record)
        return str(self.version)


class World:
    """Candidates, each with a clock of its own that runs fast or slow, and one store."""

    def __init__(self, seed: int, candidates: int, delay_ns_max: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.store = Store()
        self.delay_ns_max = delay_ns_max
        self._order = itertools.count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.candidates = [Candidate(self, f"c{number}") for number in range(candidates)]
        self.overlaps: list[tuple[str, str]] = []
        self.held: list[str] = []

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_ns + delay_ns, next(self._order), action))

    def delay(self) -> int:
        """Mostly short, now and then longer than a term."""
        most = self.delay_ns_max if self.rng.random() < 0.2 else self.delay_ns_max // 20
        return self.rng.randint(0, max(most, 1))

    def run(self, until_ns: int) -> None:
        while self._agenda and self.now_ns < until_ns:
            self.now_ns, _, action = heapq.heappop(self._agenda)
            action()
            holders = [c.name for c in self.candidates if c.claim.holds(c.clock_ns())]
            self.overlaps += itertools.combinations(holders, 2)
            self.held += holders


class Candidate:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        rng = world.rng
        self.rate = 1 + rng.choice([-1, 1]) * rng.uniform(0, 0.045)
        self.offset_ns = rng.randrange(10**12)
        self.claim = LeaseClaim(name, TERMS)
        world.after(rng.randrange(TERM_NS), self.turn)

    def clock_ns(self) -> int:
        return self.offset_ns + int(self.world.now_ns * self.rate)

    def turn(self) -> None:
        """Read or write; sometimes it is stopped for longer than a term before it goes on."""
        world, claim = self.world, self.claim
        wanted = claim.wanted(self.clock_ns())
        if wanted is None or world.rng.random() < 0.3:
            world.after(world.delay(), self._read_at_store)
        else:
            world.after(world.delay(), partial(self._write_at_store, *wanted, self.clock_ns()))

    def _next(self) -> None:
        stopped = self.world.rng.random() < 0.1
        self.world.after(
            self.world.rng.randrange(3 * TERM_NS if stopped else TERM_NS // 4), self.turn
        )

    def _read_at_store(self) -> None:
        record, version = self.world.store.record, str(self.world.store.version)

        def answer() -> None:
            self.claim.read(record, version, self.clock_ns())
            self._next()

        self.world.after(self.world.delay(), answer)

    def _write_at_store(self, record: LeaseRecord, version: str, sent_ns: int) -> None:
        new = self.world.store.write(record, version)
        is_lost = self.world.rng.random() < 0.1

        def answer() -> None:
            if new is None or is_lost:
                self.claim.missed()
            else:
                self.claim.written(record, new, sent_ns)
            self._next()

        self.world.after(self.world.delay(), answer)


@given(
    seed=st.integers(0, 1 << 32),
    candidates=st.integers(2, 4),
    delay_ns_max=st.sampled_from([0, TERM_NS // 10, TERM_NS, 3 * TERM_NS]),
)
def test_two_never_both_believe_to_hold_it(seed: int, candidates: int, delay_ns_max: int) -> None:
    world = World(seed, candidates, delay_ns_max)
    world.run(60 * TERM_NS)
    assert world.overlaps == []
    epochs = [record.epoch for record in world.store.history]
    assert epochs == sorted(epochs)
    holders: dict[int, set[str]] = {}
    for record in world.store.history:
        holders.setdefault(record.epoch, set()).add(record.holder)
    assert all(len(names - {""}) == 1 for names in holders.values()), "an epoch has one holder"


def test_one_holds_it_most_of_the_time_and_others_take_over() -> None:
    taken = set()
    for seed in range(20):
        world = World(seed, 2, TERM_NS // 10)
        world.run(100 * TERM_NS)
        assert world.held
        taken.add(len(set(world.held)))
    assert taken == {1, 2} or taken == {2}


def test_what_is_given_back_is_taken_at_once() -> None:
    old, new = LeaseClaim("old", TERMS), LeaseClaim("new", TERMS, epoch_min=9)
    old.read(None, "", 0)
    wanted = old.wanted(0)
    assert wanted == (LeaseRecord("old", 1), "")
    old.written(LeaseRecord("old", 1), "1", 0)
    assert old.holds(TERMS.believed_ns - 1)
    assert not old.holds(TERMS.believed_ns)
    new.read(LeaseRecord("old", 1), "1", 10)
    assert new.wanted(20) is None
    assert old.given_back() == (LeaseRecord("", 1), "1")
    assert not old.holds(1)
    new.read(LeaseRecord("", 1), "2", 30)
    assert new.wanted(30) == (LeaseRecord("new", 9), "2")
