"""The ledger of a gateway: one owner at a time, each token once, nobody told twice.

Properties over any news in any order first, then the cases that were decided one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.member.ledger import (
    FORGETS_MAX,
    Announce,
    Finish,
    Forget,
    Ledger,
    LedgerEffect,
    Moved,
    Send,
)
from livescale.messages.attempts import (
    AttemptFailed,
    AttemptReturned,
    AttemptTaken,
    Cancel,
    Disown,
)
from livescale.messages.commands import Dispatch
from livescale.messages.events import RequestCancelled, RequestEnded
from livescale.values.types import Outcome, RequestId, WorkerRef

A, B = WorkerRef(0), WorkerRef(1)

# -- any news in any order ------------------------------------------------------------------------

REQUESTS = st.sampled_from(["r", "s"])
WORKERS = st.sampled_from([A, B, WorkerRef(1, 1)])
#: the current attempt or one before
AGES = st.sampled_from([0, 0, 0, 1])
NEWS = st.one_of(
    st.tuples(st.just("open"), REQUESTS),
    st.tuples(st.just("cancel"), REQUESTS),
    st.tuples(st.just("failed"), REQUESTS),
    st.tuples(st.just("joined")),
    st.tuples(st.just("dispatched"), REQUESTS, WORKERS, st.booleans()),
    st.tuples(st.just("taken"), REQUESTS, WORKERS, AGES, st.integers(1, 3)),
    # Where they begin relative to the next index, and how many there are.
    st.tuples(
        *(st.just("came"), REQUESTS, WORKERS, AGES),
        *(st.integers(-2, 1), st.integers(1, 3), st.booleans()),
    ),
    st.tuples(st.sampled_from(["returned", "broke"]), REQUESTS, WORKERS, AGES),
    st.tuples(st.just("gone"), WORKERS),
)


@dataclass
class Witness:
    """What can be seen of a ledger from its effects alone."""

    owner: dict[RequestId, WorkerRef | None] = field(default_factory=dict)
    attempt: dict[RequestId, int] = field(default_factory=dict)
    tokens: dict[RequestId, int] = field(default_factory=dict)
    told: set[tuple[WorkerRef, RequestId, int]] = field(default_factory=set)

    def see(self, effects: Sequence[LedgerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Moved):
                assert self.owner[effect.request] == effect.before != effect.after
                self.owner[effect.request] = effect.after
            elif isinstance(effect, Send):
                order = effect.order
                assert self.owner[order.request] == order.worker
            elif isinstance(effect, Forget):
                key = effect.worker, effect.message.request, effect.message.attempt
                assert key not in self.told, "once is enough"
                self.told.add(key)
            elif isinstance(effect, Announce):
                assert effect.owner == self.owner[effect.request]
                assert effect.attempt == self.attempt[effect.request]
            elif isinstance(effect, Finish):
                assert effect.attempts == self.attempt[effect.request]
                assert effect.tokens == self.tokens[effect.request]
                assert effect.owner == self.owner.pop(effect.request), "a request ends once"
            elif isinstance(effect, RequestEnded) and effect.request in self.owner:
                assert effect.attempt == self.attempt[effect.request]
        for effect in effects:
            if isinstance(effect, Forget):
                told = effect.message
                current = self.owner.get(told.request), self.attempt.get(told.request)
                assert current != (effect.worker, told.attempt), (
                    "a worker forgets nothing of its own"
                )
                is_over = isinstance(told, Cancel)
                assert is_over == (told.request not in self.owner)


class Teller:
    """Tells a ledger news, and looks at all that comes of it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.witness = Witness()
        self.effects: list[LedgerEffect] = []
        self.opened = 0
        #: ids are never used twice
        self.ids: dict[str, RequestId] = {}

    def tell(self, what: str, *details) -> None:
        effects = getattr(self, f"_{what}")(*details)
        self.effects += effects
        self.witness.see(effects)
        known = {entry.request: entry.owner for entry in self.ledger}
        assert known == self.witness.owner

    def _open(self, name: str) -> Sequence[LedgerEffect]:
        self.opened += 1
        request = self.ids[name] = f"{name}{self.opened}"
        seen = self.witness
        seen.owner[request], seen.attempt[request], seen.tokens[request] = None, 0, 0
        effects = self.ledger.open(request)
        assert effects == [Announce(request, 0, None, 0)]
        return effects

    def _cancel(self, name: str) -> Sequence[LedgerEffect]:
        return self.ledger.cancel(self.ids.get(name, name))

    def _failed(self, name: str) -> Sequence[LedgerEffect]:
        return self.ledger.failed(self.ids.get(name, name), "no model")

    def _joined(self) -> Sequence[LedgerEffect]:
        return self.ledger.controller_joined()

    def _dispatched(
        self, name: str, worker: WorkerRef, is_reachable: bool
    ) -> Sequence[LedgerEffect]:
        request = self.ids.get(name, name)
        attempt = self.witness.attempt.get(request, 0) + 1
        if request in self.witness.owner:
            self.witness.attempt[request] = attempt
        effects = self.ledger.dispatched(
            Dispatch(request, attempt, 1, worker), is_reachable=is_reachable
        )
        is_sent = is_reachable and request in self.witness.owner
        assert sum(isinstance(e, Send) for e in effects) == is_sent
        assert sum(isinstance(e, RequestEnded) for e in effects) == (not is_sent)
        return effects

    def _taken(self, name: str, worker: WorkerRef, age: int, moves: int) -> Sequence[LedgerEffect]:
        request = self.ids.get(name, name)
        attempt = self.witness.attempt.get(request, 1) - age
        self.witness.told.discard((worker, request, attempt))
        return self.ledger.reported(worker, AttemptTaken(request, attempt, moves))

    def _came(
        self, name: str, worker: WorkerRef, age: int, shift: int, count: int, is_last: bool
    ) -> Sequence[LedgerEffect]:
        request = self.ids.get(name, name)
        attempt = self.witness.attempt.get(request, 1) - age
        known = self.witness.tokens.get(request, 0)
        index = max(0, known + shift)
        is_owners = (worker, attempt) == (
            self.witness.owner.get(request),
            self.witness.attempt.get(request),
        )
        accepted, effects = self.ledger.came(
            worker, request, attempt, index=index, count=count, is_last=is_last
        )
        fits = is_owners and index <= known
        assert accepted == (max(0, index + count - known) if fits else 0)
        if accepted:
            self.witness.tokens[request] += accepted
        finished = [e for e in effects if isinstance(e, Finish)]
        assert bool(finished) == (fits and is_last and accepted > 0)
        return effects

    def _returned(self, name: str, worker: WorkerRef, age: int) -> Sequence[LedgerEffect]:
        request = self.ids.get(name, name)
        attempt = self.witness.attempt.get(request, 1) - age
        return self.ledger.reported(worker, AttemptReturned(request, attempt))

    def _broke(self, name: str, worker: WorkerRef, age: int) -> Sequence[LedgerEffect]:
        request = self.ids.get(name, name)
        attempt = self.witness.attempt.get(request, 1) - age
        return self.ledger.reported(worker, AttemptFailed(request, attempt, "too long"))

    def _gone(self, worker: WorkerRef) -> Sequence[LedgerEffect]:
        effects = self.ledger.worker_gone(worker)
        assert worker not in [entry.owner for entry in self.ledger]
        told = {key for key in self.witness.told if key[0] == worker}
        self.witness.told -= told
        ends = [e for e in effects if isinstance(e, RequestEnded)]
        assert {(e.request, e.attempt) for e in ends if e.outcome is Outcome.CANCELLED} == {
            (request, attempt) for _, request, attempt in told if request not in self.witness.owner
        }, "what it was to forget, and may never have had, has ended"
        return effects


@given(st.lists(NEWS, max_size=40))
@settings(max_examples=examples(1000))
def test_any_news_leaves_one_owner_and_takes_each_token_once(story: list[tuple]) -> None:
    tellers = Teller(), Teller()
    for news in story:
        for teller in tellers:
            teller.tell(*news)
    assert tellers[0].effects == tellers[1].effects
    teller = tellers[0]
    # Every request has one end, whatever there was before.
    for entry in list(teller.ledger):
        effects = teller.ledger.cancel(entry.request)
        teller.effects += effects
        teller.witness.see(effects)
    ended = [e.request for e in teller.effects if isinstance(e, Finish)]
    assert len(ended) == len(set(ended)) == teller.opened
    assert list(teller.ledger) == []
    assert teller.ledger.cancel("r1") == ()


# -- cases ----------------------------------------------------------------------------------------


def run_by(worker: WorkerRef, tokens: int = 0) -> Ledger:
    """The first attempt of r is run there, and so many tokens have come."""
    ledger = Ledger()
    ledger.open("r")
    order = Dispatch("r", 1, 7, worker)
    assert ledger.dispatched(order, is_reachable=True) == [Moved("r", None, worker), Send(order)]
    if tokens:
        assert ledger.came(worker, "r", 1, index=0, count=tokens, is_last=False) == (tokens, ())
    return ledger


def finish(
    outcome: Outcome, *, attempts: int, owner: WorkerRef | None, tokens: int, reason: str = ""
) -> Finish:
    return Finish("r", outcome, attempts, owner, tokens, reason)


def test_a_request_is_opened_once() -> None:
    with pytest.raises(ValueError, match="r is in the ledger"):
        run_by(A).open("r")


def test_a_dispatch_that_crosses_the_end_was_cancelled() -> None:
    """However the request ended: the controller has been told, or is not interested."""
    ledger = run_by(A)
    ledger.came(A, "r", 1, index=0, count=2, is_last=True)
    told = ledger.dispatched(Dispatch("r", 2, 7, B), is_reachable=True)
    assert told == [RequestEnded("r", 2, Outcome.CANCELLED)]


def test_a_dispatch_to_a_worker_without_a_connection_is_answered() -> None:
    ledger = run_by(A)
    told = ledger.dispatched(Dispatch("r", 2, 7, B), is_reachable=False)
    assert told == [
        Forget(A, Disown("r", 1)),
        Moved("r", A, None),
        RequestEnded("r", 2, Outcome.WORKER_LOST),
    ]


@pytest.mark.parametrize(
    ("index", "count", "is_last"), [(3, 1, False), (3, 1, True), (0, 1, True), (0, 2, True)]
)
def test_after_a_gap_or_an_early_end_the_request_waits_again(
    index: int, count: int, is_last: bool
) -> None:
    accepted, told = run_by(A, tokens=2).came(A, "r", 1, index=index, count=count, is_last=is_last)
    assert accepted == 0
    assert told == [
        Forget(A, Disown("r", 1, 0)),
        Moved("r", A, None),
        RequestEnded("r", 1, Outcome.RETURNED),
        Announce("r", 1, None, 0),
    ]


def test_of_tokens_that_are_repeated_the_new_ones_are_accepted() -> None:
    ledger = run_by(A, tokens=2)
    assert ledger.reported(B, AttemptTaken("r", 1, 1)) == [Moved("r", A, B)]
    entry = ledger.get("r")
    assert entry is not None
    assert entry.repeated_max == 2
    assert ledger.came(B, "r", 1, index=0, count=1, is_last=False) == (0, ())
    assert ledger.came(B, "r", 1, index=1, count=3, is_last=False) == (2, ())
    accepted, told = ledger.came(B, "r", 1, index=4, count=1, is_last=True)
    assert (accepted, told) == (1, [finish(Outcome.FINISHED, attempts=1, owner=B, tokens=5)])


def test_a_request_that_the_controller_fails_is_forgotten_by_its_worker() -> None:
    """The controller has given up an attempt that another worker had taken over."""
    assert run_by(A, tokens=2).failed("r", "w0.0 was lost") == [
        Forget(A, Cancel("r", 1)),
        finish(Outcome.FAILED, attempts=1, owner=A, tokens=2, reason="w0.0 was lost"),
    ]


def test_a_cancelled_attempt_ends_with_the_connection_that_it_was_sent_on() -> None:
    """The worker may have never had it: no word of its own ends the attempt."""
    ledger = run_by(A)
    ledger.cancel("r")
    assert ledger.worker_gone(B) == []
    assert ledger.worker_gone(A) == [RequestEnded("r", 1, Outcome.CANCELLED)]
    assert ledger.worker_gone(A) == []


def test_what_waited_too_long_ends_as_it_is_told() -> None:
    ledger = Ledger()
    ledger.open("r")
    assert ledger.cancel("r", Outcome.FAILED, "it waited") == [
        RequestCancelled("r"),
        finish(Outcome.FAILED, attempts=0, owner=None, tokens=0, reason="it waited"),
    ]
    assert ledger.cancel("r") == ()


def test_a_later_controller_is_told_of_ends_too() -> None:
    """The worker may have told only the one before."""
    ledger = run_by(A)
    ledger.open("s")
    joined = ledger.controller_joined()
    assert joined == [Announce("r", 1, A, 0), Announce("s", 0, None, 0)]
    assert ledger.came(A, "r", 1, index=0, count=3, is_last=True) == (
        3,
        [
            RequestEnded("r", 1, Outcome.FINISHED, 3),
            finish(Outcome.FINISHED, attempts=1, owner=A, tokens=3),
        ],
    )
    # Of a request that waits no attempt ends.
    assert [type(effect) for effect in ledger.failed("s", "no")] == [Finish]


def test_of_what_was_taken_over_a_later_controller_is_told_the_end() -> None:
    """It dispatched the attempt itself; who took that over may still be with the one before."""
    for controllers in (1, 2):
        ledger = Ledger()
        for _ in range(controllers):
            ledger.controller_joined()
        ledger.open("r")
        ledger.dispatched(Dispatch("r", 1, 7, A), is_reachable=True)
        ledger.reported(B, AttemptTaken("r", 1, 1))
        _, effects = ledger.came(B, "r", 1, index=0, count=3, is_last=True)
        told = [RequestEnded("r", 1, Outcome.FINISHED, 3)] if controllers > 1 else []
        assert effects == [*told, finish(Outcome.FINISHED, attempts=1, owner=B, tokens=3)]


def test_the_taker_with_more_moves_owns_the_attempt() -> None:
    ledger = run_by(A)
    assert ledger.reported(A, AttemptTaken("r", 1, 2)) == []
    assert ledger.reported(B, AttemptTaken("r", 1, 1)) == ()
    assert ledger.came(B, "r", 1, index=0, count=1, is_last=False) == (
        0,
        [Forget(B, Disown("r", 1, 2))],
    )
    # A newer attempt counts anew.
    ledger.dispatched(Dispatch("r", 2, 7, A), is_reachable=True)
    assert ledger.reported(B, AttemptTaken("r", 2, 1)) == [Moved("r", A, B)]


def test_a_worker_is_told_to_forget_once_until_it_takes_the_attempt_over() -> None:
    ledger = run_by(A)
    told = Forget(B, Disown("r", 1, 0))
    assert ledger.came(B, "r", 1, index=0, count=1, is_last=False) == (0, [told])
    assert ledger.came(B, "r", 1, index=1, count=1, is_last=False) == (0, [])
    assert ledger.reported(B, AttemptTaken("r", 1, 1)) == [Moved("r", A, B)]
    assert ledger.reported(A, AttemptTaken("r", 1, 2)) == [Moved("r", B, A)]
    again = Forget(B, Disown("r", 1, 2))
    assert ledger.came(B, "r", 1, index=2, count=1, is_last=False) == (0, [again])


def test_what_workers_were_told_is_remembered_for_a_while() -> None:
    ledger = Ledger()

    def is_told(number: int) -> bool:
        return bool(ledger.came(A, f"r{number}", 1, index=0, count=1, is_last=False)[1])

    assert all(is_told(number) for number in range(FORGETS_MAX))
    assert not is_told(0)
    assert is_told(FORGETS_MAX)
    assert is_told(0)
    assert not is_told(2)
