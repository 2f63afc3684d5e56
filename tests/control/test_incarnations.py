"""Who may join a controller: each incarnation once, whatever became of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.cluster.incarnations import Incarnations
from livescale.values.types import WorkerRef

members = st.builds(WorkerRef, st.integers(0, 2), st.integers(0, 2))


@given(st.lists(st.tuples(st.booleans(), members)))
def test_an_incarnation_joins_once_and_a_lost_one_never_again(
    story: list[tuple[bool, WorkerRef]],
) -> None:
    incarnations, joined, lost = Incarnations(), set(), set()
    for joins, member in story:
        if joins:
            assert incarnations.join(member) == (member not in joined)
            joined.add(member)
        elif member in joined:
            incarnations.lose(member)
            lost.add(member)
        assert incarnations.is_there(member) == (member in joined - lost)
        assert incarnations.is_lost(member) == (member in lost)
