"""Holdings: the table of moves, word by word, and the copies that they make up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import H, W, copy_order, drop, load_order

from livescale.control.state.holdings import TRANSITIONS, Copy, Holding, HoldingState, InvalidMove
from livescale.messages.commands import DropHolding, ReleaseHolding, StartHolding
from livescale.messages.events import (
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
    WorkerLost,
)
from livescale.values.types import HoldingId, Value

S = HoldingState
CAUSES = (
    FirstByteArrived,
    LayerArrived,
    HoldingCompleted,
    HoldingFailed,
    DropHolding,
    ReleaseHolding,
    StartHolding,
    HoldingDropped,
    WorkerLost,
)
WHOLE = (S.WHOLE, S.SPARE, S.WAKING)
#: what a member may report while bytes arrive, and what becomes of the holding
NEWS = {
    FirstByteArrived: S.ARRIVING,
    LayerArrived: S.ARRIVING,
    HoldingCompleted: S.WHOLE,
    HoldingFailed: S.GONE,
}


def target_of(state: HoldingState, cause: type[Value]) -> HoldingState | None:
    """The rules: members that are lost hold nothing; bytes are ordered away once, and then only the
    last answer counts; nothing is reported of what is whole or gone, but for the start of what was
    made of a warm spare."""
    if state is S.GONE:
        return None
    if cause is WorkerLost:
        return S.GONE
    if cause is DropHolding:
        return None if state is S.LEAVING else S.LEAVING
    if cause is HoldingDropped:
        return S.GONE if state is S.LEAVING else None
    if cause is ReleaseHolding:
        return S.SPARE if state in (S.WHOLE, S.SPARE) else None
    if cause is StartHolding:
        return S.GONE if state is S.SPARE else None
    if state is S.LEAVING:
        return S.LEAVING
    if state is S.WAKING:
        return NEWS[cause] if cause in (HoldingCompleted, HoldingFailed) else None
    if cause is HoldingFailed:
        return S.GONE  # its first Run shows what it is worth
    return None if state in WHOLE else NEWS[cause]


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", list(HoldingState))
def test_every_pair_of_state_and_cause(state: HoldingState, cause: type[Value]) -> None:
    holding = Holding(load_order(7, W[0], 1, None), 1, state)
    target = target_of(state, cause)
    if target is None:
        message = rf"<Holding 1@w0.0 of m, {state.name}> cannot take {cause.__name__}"
        with pytest.raises(InvalidMove, match=message):
            holding.move(cause)
        assert (holding.state, holding.watermark) == (state, 1)
        return
    holding.move(cause)
    assert holding.state is target
    assert holding.watermark == (3 if target is S.WHOLE else 1)


def test_the_table_names_every_state_and_no_other_cause() -> None:
    assert list(TRANSITIONS) == list(HoldingState)
    assert {cause for moves in TRANSITIONS.values() for cause in moves} == set(CAUSES)


def test_a_copy_is_released_with_all_its_ranks_once() -> None:
    copy = Copy("m", (W[0], W[1]), 60, 7)
    for rank, state in enumerate((S.SPARE, S.WHOLE)):
        copy.ranks[rank] = Holding(copy_order(W[rank], 10 + rank, None, "m", rank), 3, state)
    assert copy.release() == [ReleaseHolding(HoldingId(11, W[1]))]
    assert (copy.is_spare, copy.is_complete, copy.is_loaded) == (True, True, False)
    assert copy.release() == []


states = st.sampled_from([state for state in HoldingState if state is not S.GONE])


@given(
    held=st.dictionaries(st.integers(0, 2), st.tuples(states, st.integers(0, 3))),
    is_given_up=st.booleans(),
    is_on_host=st.booleans(),
)
def test_a_copy_is_what_all_its_ranks_are_and_is_ordered_away_once(
    held: dict[int, tuple[HoldingState, int]], is_given_up: bool, is_on_host: bool
) -> None:
    members = (H[0],) * 3 if is_on_host else (W[0], W[1], W[2])
    copy = Copy("m", members, 60, None if is_on_host else 7, is_given_up=is_given_up)
    for rank, (state, watermark) in held.items():
        order = copy_order(members[rank], 10 + rank, None, "m", rank)
        copy.ranks[rank] = Holding(order, watermark, state)
    assert (copy.holder, copy.is_on_host) == (members[0], is_on_host)
    assert copy.key == (H[0] if is_on_host else 7)
    assert copy.is_there is (len(held) == 3 and not is_given_up)
    found = [state for state, _ in held.values()]
    whole = [state for state in found if state in WHOLE]
    assert copy.is_complete is (copy.is_there and len(whole) == 3)
    assert copy.is_loaded is (copy.is_there and found == [S.WHOLE] * 3)
    assert copy.is_spare is (S.SPARE in found)
    marks = [held[rank][1] if rank in held else 0 for rank in range(3)]
    assert copy.watermark == min(marks)
    staying = [rank for rank, (state, _) in held.items() if state is not S.LEAVING]
    assert copy.drop("why") == [drop(10 + rank, members[rank], "why") for rank in staying]
    assert all(holding.state is S.LEAVING for holding in copy.ranks.values())
    assert (copy.is_there, copy.drop("again")) == (False, [])
