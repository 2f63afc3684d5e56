"""ParameterPool: the last copy cannot be dropped, nor one that is read from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import H, W, copy_order, load_order

from effort import examples
from livescale.control.state.holdings import Copy, Holding, HoldingState
from livescale.control.state.pool import LastCopyError, ParameterPool
from livescale.messages.commands import StartHolding
from livescale.messages.events import (
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
)
from livescale.values.types import HoldingId, Value, WorkerRef

MODELS = ["a", "b"]
#: where copies lie: the workers of an instance (of one rank, or of two), or a host
PLACES: list[tuple[WorkerRef, ...]] = [(W[0], W[1]), (W[2], W[3]), (H[0], H[0]), (H[1], H[1])]
READER = HoldingId(99, W[7])
WHOLE = (HoldingState.WHOLE, HoldingState.SPARE, HoldingState.WAKING)
ARRIVING = (HoldingState.ORDERED, HoldingState.ARRIVING)
NEWS: dict[str, tuple[type[Value], HoldingState]] = {
    "layer": (LayerArrived, HoldingState.ARRIVING),
    "complete": (HoldingCompleted, HoldingState.WHOLE),
    "fail": (HoldingFailed, HoldingState.GONE),
}
verbs = [
    "add",
    "add",
    "drop",
    "drop",
    "read",
    "stop",
    "lose",
    "retire",
    "give up",
    "dropped",
    "release",
    "release",
    "wake",
    *NEWS,
]
#: what is asked, of which copy (a number that is taken modulo), and of which rank
calls = st.tuples(st.sampled_from(verbs), st.integers(0, 7), st.integers(0, 1))


@dataclass
class CopyOracle:
    """What a pool must know of one copy: the state of each rank, and whether it stays."""

    members: tuple[WorkerRef, ...]
    ranks: dict[int, HoldingState] = field(default_factory=dict)
    plans: dict[int, int] = field(default_factory=dict)
    is_given_up: bool = False
    #: of its instance
    number: int = 0
    #: when it became a warm spare, which it may be no more
    used_ns: int = 0

    @property
    def is_there(self) -> bool:
        return len(self.ranks) == len(self.members) and not self.is_given_up

    @property
    def is_whole(self) -> bool:
        return self.is_there and all(state in WHOLE for state in self.ranks.values())

    @property
    def is_spare(self) -> bool:
        return self.is_there and set(self.ranks.values()) == {HoldingState.SPARE}

    def drop(self) -> list[HoldingId]:
        """What has to be ordered away."""
        self.is_given_up = True
        staying = [r for r, state in self.ranks.items() if state is not HoldingState.LEAVING]
        self.ranks |= dict.fromkeys(staying, HoldingState.LEAVING)
        return [self.id_of(rank) for rank in staying]

    def id_of(self, rank: int) -> HoldingId:
        return HoldingId(self.plans[rank], self.members[rank])


class PoolOracle:
    """What a pool must answer, with plain dictionaries of (model, holder)."""

    def __init__(self, ranks: int, keeps_last: bool) -> None:
        self.ranks = ranks
        self.keeps_last = keeps_last
        self.copies: dict[tuple[str, WorkerRef], CopyOracle] = {}
        self.reads: set[tuple[str, WorkerRef]] = set()
        self.retired: set[str] = set()
        self._plans = itertools.count(1)
        self._numbers = itertools.count(100)

    def order(self, model: str, place: tuple[WorkerRef, ...], rank: int) -> StartHolding | None:
        """The order for this rank, if it can be given."""
        members = place[: self.ranks]
        if rank >= self.ranks:
            return None
        if (model, place[0]) not in self.copies:
            self.copies[model, place[0]] = CopyOracle(members, number=next(self._numbers))
        copy = self.copies[model, place[0]]
        if rank in copy.ranks:
            return None
        copy.ranks[rank], copy.plans[rank] = HoldingState.ORDERED, next(self._plans)
        return self._order(model, copy, rank)

    def _order(self, model: str, copy: CopyOracle, rank: int) -> StartHolding:
        member, plan = copy.id_of(rank).member, copy.plans[rank]
        if member.is_agent:
            return copy_order(member, plan, None, model, rank)
        return load_order(copy.number, member, plan, None, model, rank=rank, workers=copy.members)

    def wake(self, model: str, copy: CopyOracle) -> list[StartHolding]:
        """It becomes another instance's, with other plans."""
        copy.number = next(self._numbers)
        copy.ranks = dict.fromkeys(range(self.ranks), HoldingState.WAKING)
        copy.plans = {rank: next(self._plans) for rank in copy.ranks}
        return [self._order(model, copy, rank) for rank in copy.ranks]

    def may_go_together(self) -> list[CopyOracle]:
        """Warm spares that nothing reads, but for the one that is needed and was used last."""
        spares = [(copy.used_ns, m, copy) for (m, _), copy in self.copies.items() if copy.is_spare]
        found = []
        for model in dict.fromkeys(m for _, m, _ in spares):
            own = [(at, copy) for at, name, copy in spares if name == model]
            unread = [
                (at, copy)
                for at, copy in sorted(own, key=lambda entry: (entry[0], entry[1].members))
                if not any((model, member) in self.reads for member in copy.members)
            ]
            staying = sum(c.is_whole for c in self.of_model(model)) - len(unread)
            needs_one = self.keeps_last and model not in self.retired and not staying
            found += unread[: len(unread) - needs_one] if unread else []
        return [copy for _, copy in sorted(found, key=lambda e: (e[0], e[1].members))]

    def of_model(self, model: str) -> list[CopyOracle]:
        """In the order of their holders."""
        return [copy for (name, _), copy in sorted(self.copies.items()) if name == model]

    def gone(self, key: tuple[str, WorkerRef], rank: int) -> None:
        copy = self.copies[key]
        copy.is_given_up = True
        del copy.ranks[rank]
        if not copy.ranks:
            del self.copies[key]

    def may_drop(self, model: str, copy: CopyOracle) -> bool:
        if copy.is_given_up or any((model, member) in self.reads for member in copy.members):
            return False
        is_needed = self.keeps_last and model not in self.retired and copy.is_whole
        return not is_needed or sum(c.is_whole for c in self.of_model(model)) > 1


# Short lists rarely come to a copy that is whole.
@given(st.lists(calls, min_size=20, max_size=80), st.integers(1, 2), st.booleans())
@settings(max_examples=examples(300))
def test_whatever_is_asked_a_last_or_read_copy_stays(
    asked: Iterable[tuple[str, int, int]], ranks: int, keeps_last: bool
) -> None:
    pool, oracle = ParameterPool(keeps_last), PoolOracle(ranks, keeps_last)
    for now_ns, (call, number, rank) in enumerate(asked):
        if call == "add" or not oracle.copies:
            order = oracle.order(MODELS[number % 2], PLACES[number // 2], rank)
            if order is not None:
                pool.add(Holding(order), ranks, 30)
            check(pool, oracle)
            continue
        key = sorted(oracle.copies)[number % len(oracle.copies)]
        model, copy = key[0], oracle.copies[key]
        member = copy.members[-1]
        if call == "read":
            pool.reads.begin(READER, model, member)
            oracle.reads.add((model, member))
        elif call == "stop":
            pool.reads.end(READER, model, member)
            oracle.reads.discard((model, member))
        elif call == "lose":
            lose(pool, oracle, member)
        elif call == "retire" and number == 0:  # rarely: it is for good
            pool.retire(model)
            oracle.retired.add(model)
        elif call == "give up":
            give_up_incomplete(pool, oracle)
        elif call == "release":
            if copy.is_whole and not member.is_agent and not copy.is_spare:
                release(pool, copy, now_ns)
        elif call == "wake":
            if copy.is_spare:
                pool_copy = copy_of(pool, copy)
                woken = pool.take_up(pool_copy, oracle.wake(model, copy))
                assert woken is copy_of(pool, copy)
        elif call == "drop":
            drop(pool, oracle, model, copy)
        elif rank in copy.ranks:
            report(pool, oracle, key, rank, call)
        check(pool, oracle)


def copy_of(pool: ParameterPool, copy: CopyOracle) -> Copy:
    """The pool's own."""
    (rank, *_) = copy.ranks
    holding = pool.find(copy.id_of(rank))
    assert holding is not None
    return pool.copy_of(holding)


def release(pool: ParameterPool, copy: CopyOracle, now_ns: int) -> None:
    """Its instance ends, of which all ranks have taken the model over."""
    if set(copy.ranks.values()) == {HoldingState.WHOLE}:
        orders = pool.release(copy_of(pool, copy), now_ns)
        assert [order.holding for order in orders] == [copy.id_of(rank) for rank in copy.ranks]
        copy.ranks = dict.fromkeys(copy.ranks, HoldingState.SPARE)
        copy.used_ns = now_ns


def drop(pool: ParameterPool, oracle: PoolOracle, model: str, copy: CopyOracle) -> None:
    before, actual = any(c.is_whole for c in oracle.of_model(model)), copy_of(pool, copy)
    allowed = oracle.may_drop(model, copy)
    assert pool.can_drop(actual) is allowed
    if allowed:
        assert [order.holding for order in pool.drop(actual, "?")] == copy.drop()
    else:
        with pytest.raises(LastCopyError, match=f"of {model} .* stays"):
            pool.drop(actual, "?")
    if oracle.keeps_last and before and model not in oracle.retired:
        is_left = any(c.is_whole for c in oracle.of_model(model))
        assert is_left, "by dropping the last copy never goes"


def report(
    pool: ParameterPool, oracle: PoolOracle, key: tuple[str, WorkerRef], rank: int, call: str
) -> None:
    """A member reports what it can in this state."""
    copy = oracle.copies[key]
    holding = pool.find(copy.id_of(rank))
    assert holding is not None
    is_leaving = copy.ranks[rank] is HoldingState.LEAVING
    if call == "dropped" and is_leaving:
        pool.move(holding, HoldingDropped)
        oracle.gone(key, rank)
    elif call in NEWS and is_leaving:
        pool.move(holding, NEWS[call][0])
    elif call in NEWS and can_tell(copy.ranks[rank], call):
        cause, copy.ranks[rank] = NEWS[call]
        pool.move(holding, cause)
        if copy.ranks[rank] is HoldingState.GONE:
            oracle.gone(key, rank)


def can_tell(state: HoldingState, call: str) -> bool:
    return state in ARRIVING or (state is HoldingState.WAKING and call != "layer")


def lose(pool: ParameterPool, oracle: PoolOracle, member: WorkerRef) -> None:
    pool.lose(member)
    for key, copy in list(oracle.copies.items()):
        for rank in [rank for rank in copy.ranks if copy.members[rank] == member]:
            oracle.gone(key, rank)
    oracle.reads = {read for read in oracle.reads if read[1] != member}


def give_up_incomplete(pool: ParameterPool, oracle: PoolOracle) -> None:
    """Nothing is reported any more, and what is left over goes."""
    for incomplete in pool.incomplete():
        pool.give_up(incomplete)
    for copy in oracle.copies.values():
        copy.is_given_up |= not copy.is_there and not copy.members[0].is_agent
    left = [i for c in oracle.copies.values() if c.is_given_up for i in c.drop()]
    assert sorted(order.holding for order in pool.drop_remainders()) == sorted(left)


def check(pool: ParameterPool, oracle: PoolOracle) -> None:
    for model in MODELS:
        there = [copy for copy in oracle.of_model(model) if copy.is_there]
        assert [copy.members for copy in pool.copies(model)] == [copy.members for copy in there]
        whole = [copy.members[0] for copy in there if copy.is_whole]
        assert [copy.holder for copy in pool.copies(model) if copy.is_complete] == whole
        assert pool.count_holders(model) == sum(not holder.is_agent for holder in whole)
        on_hosts = [copy.members[0] for copy in there if copy.members[0].is_agent]
        assert [copy.holder for copy in pool.host_copies(model)] == on_hosts
        for rank in range(oracle.ranks):
            found = [holding.id for holding in pool.whole(model, rank)]
            ranks = [c.id_of(rank) for c in there if c.ranks[rank] in WHOLE]
            assert found == ranks
        spares = [copy.members for copy in there if copy.is_spare]
        assert sorted(copy.members for copy in pool.spares(model)) == spares
        assert pool.has_any(model) is bool(oracle.of_model(model))
    for (model, holder), copy in oracle.copies.items():
        is_incomplete = not copy.is_there and not copy.is_given_up and not holder.is_agent
        assert pool.is_incomplete(copy.number) is is_incomplete
        assert (pool.on_host(model, holder) is not None) is holder.is_agent
        assert not copy.is_given_up or not pool.can_drop(copy_of(pool, copy))
    states = {
        copy.id_of(rank): state
        for copy in oracle.copies.values()
        for rank, state in copy.ranks.items()
    }
    ids = list(states)
    for member in dict.fromkeys(member for place in PLACES for member in place):
        held = sorted(holding.id for holding in pool.on(member))
        assert held == sorted(number for number in ids if number.member == member)
        is_idle = all(states[number] is HoldingState.SPARE for number in held)
        assert pool.in_use.has_any_of((member,)) is not is_idle
        assert pool.holds_any(member) is bool(held)
        assert pool.reads.count(member) == sum(read[1] == member for read in oracle.reads)
    given_up = [copy for copy in oracle.copies.values() if copy.is_given_up]
    workers = [c for c in given_up if not c.members[0].is_agent]
    left = {copy.id_of(rank) for copy in workers for rank in copy.ranks}
    free = [number for number, state in states.items() if state is HoldingState.SPARE]
    taken = {number.member for number in states if number not in left and number not in free}
    assert pool.remainders() == len({number.member for number in left} - taken)
    may_go = [copy.members for copy in oracle.may_go_together()]
    assert [copy.members for copy in pool.spares_to_drop()] == may_go


def test_a_model_is_forgotten_only_when_nothing_of_it_is_left() -> None:
    pool = ParameterPool()
    holding = Holding(copy_order(H[0], 1, None, "a"))
    copy = pool.add(holding, 1, 30)
    pool.retire("a")
    assert pool.drop(copy, "withdrawn")
    with pytest.raises(AssertionError, match="are left"):
        pool.forget_model("a")
    pool.move(holding, HoldingDropped)
    pool.forget_model("a")
    assert repr(pool) == "<ParameterPool empty, 0 reads>"


def test_a_copy_that_is_still_arriving_does_not_let_the_last_one_go() -> None:
    pool = ParameterPool()
    arriving = Holding(copy_order(H[0], 1, None, "a"))
    last = pool.add(Holding(load_order(2, W[0], 3, None, "a"), 3, HoldingState.WHOLE), 1, 30)
    pool.add(arriving, 1, 30)
    assert not pool.can_drop(last)
    pool.move(arriving, HoldingCompleted)
    assert pool.can_drop(last)
