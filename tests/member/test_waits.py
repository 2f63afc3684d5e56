"""Waits of requests: each ends in time, in order, and once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.member.waits import Waits

LONGEST = 10
stories = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "look"]), st.integers(0, 5), st.integers(0, 8))
)


@given(stories)
def test_waits_end_in_time_and_in_order_unless_a_worker_comes(
    story: list[tuple[str, int, int]],
) -> None:
    waits, now, oracle = Waits(LONGEST), 0, dict[str, int]()
    for what, number, gap in story:
        now, request = now + gap, f"r{number}"
        if what == "begin" and request not in oracle:
            oracle[request] = now + LONGEST
            waits.begin(request, now)
        elif what == "end":
            oracle.pop(request, None)
            waits.end(request)
        elif what == "look":
            over = sorted((at, place, r) for place, (r, at) in enumerate(oracle.items()))
            for at, _, due in over:
                assert waits.take_over(now) == (due if at <= now else None)
                if at > now:
                    break
                del oracle[due]
            else:
                assert waits.take_over(now) is None
        assert waits.next_ns == min(oracle.values(), default=None)


def test_a_wait_without_an_end_never_ends() -> None:
    waits = Waits(None)
    waits.begin("r", 0)
    assert waits.next_ns is None
    assert waits.take_over(1 << 60) is None
    waits.end("r")
