"""Runs in a lane: one after the other, on one other thread."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.runtime.member_process.run_lane import RunLane


@given(st.lists(st.booleans(), max_size=12))
def test_results_come_in_the_order_of_runs(puts: list[bool]) -> None:
    """True: a Run is put; False: a result is taken, if there is one."""
    lane: RunLane[tuple[int, int]] = RunLane()
    put = taken = 0
    threads = []
    for is_put in [*puts, *[False] * len(puts)]:
        if is_put:
            lane.put(partial(_where, put))
            put += 1
        elif lane.is_busy:
            number, thread = lane.take()
            assert number == taken
            taken += 1
            threads.append(thread)
    assert taken == put
    assert not lane.is_busy
    assert len({*threads, threading.get_ident()}) == 1 + bool(put)
    lane.close()


def test_what_a_run_raises_is_raised_where_its_result_is_taken() -> None:
    lane: RunLane[int] = RunLane()
    lane.put(lambda: 1)
    lane.put(lambda: 1 // 0)
    assert lane.take() == 1
    with pytest.raises(ZeroDivisionError):
        lane.take()
    lane.close()


def _where(number: int) -> tuple[int, int]:
    return number, threading.get_ident()
