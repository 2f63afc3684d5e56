"""Names of hosts that join become numbers: never two hosts with one, and the same ones again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.cluster.host_ledger import (
    LIVES_PER_START,
    HostLedger,
    HostNumbers,
    HostRefusedError,
)

names = st.sampled_from("abcd")
#: (name, workers, clock, whether the ledger starts anew before)
admissions = st.lists(
    st.tuples(names, st.integers(0, 4), st.integers(1, 6), st.sampled_from(["", "life", "head"])),
    max_size=30,
)


@given(admissions, st.integers(0, 3))
def test_no_two_hosts_ever_share_a_number(asked: list[tuple], own: int) -> None:
    """Over new lives of the controller, which know the entries, and new heads, which know nothing:
    there every host that lives says its numbers again before strangers come."""
    ledger = HostLedger(["head"], own)
    living: dict[str, tuple[int, int, HostNumbers]] = {}
    for name, workers, clock, anew in asked:
        if anew == "life":
            ledger = HostLedger(["head"], own, ledger.entries)
        elif anew == "head":
            ledger = HostLedger(["head"], own)
            for known, (count, began, numbers) in living.items():
                assert ledger.admit(known, count, began, numbers) == numbers
        before = living.get(name)
        try:
            numbers = ledger.admit(name, workers, clock)
        except HostRefusedError:
            assert before is not None
            assert clock < before[1]
            continue
        if before is not None and clock > before[1]:
            assert numbers.first_life > before[2].first_life
        if before is not None and (workers, clock) == before[:2]:
            assert numbers == before[2]
        living[name] = workers, clock, numbers
        taken = [
            number
            for count, _, n in living.values()
            for number in range(n.first_worker, n.first_worker + count)
        ]
        agents = [n.agent for _, _, n in living.values()]
        assert len(set(taken)) == len(taken)
        assert len(set(agents)) == len(agents)
        assert min(taken, default=own) >= own
        assert min(agents, default=1) >= 1


def test_a_host_that_comes_again_has_its_numbers_and_the_next_lives() -> None:
    ledger = HostLedger(["localhost"], 3)
    assert ledger.admit("a", 2, clock_ns=10) == HostNumbers(3, 1)
    assert ledger.admit("b", 1, clock_ns=5) == HostNumbers(5, 2)
    assert ledger.admit("a", 2, clock_ns=11) == HostNumbers(3, 1, LIVES_PER_START)
    ledger.leave("a")
    assert [(e.name, e.is_here) for e in ledger.entries] == [("a", False), ("b", True)]
    assert ledger.admit("a", 1, clock_ns=12) == HostNumbers(3, 1, 2 * LIVES_PER_START)
    assert ledger.admit("a", 2, clock_ns=13) == HostNumbers(3, 1, 3 * LIVES_PER_START)
    more = ledger.admit("a", 5, clock_ns=14)
    assert more == HostNumbers(6, 3, 4 * LIVES_PER_START)


def test_an_older_start_and_a_name_of_the_pools_own_are_refused() -> None:
    ledger = HostLedger(["head"], 0)
    ledger.admit("a", 1, clock_ns=10)
    with pytest.raises(HostRefusedError, match="a later start of host a"):
        ledger.admit("a", 1, clock_ns=9)
    with pytest.raises(HostRefusedError, match="choose another --name"):
        ledger.admit("head", 1, clock_ns=1)


def test_a_new_head_takes_the_numbers_that_hosts_say_if_they_are_free() -> None:
    ledger = HostLedger(["head"], 2)
    assert ledger.admit("b", 2, 1, claimed=HostNumbers(7, 4, 5)) == HostNumbers(7, 4, 5)
    assert ledger.admit("c", 2, 1, claimed=HostNumbers(8, 5)) == HostNumbers(9, 5), "8 is b's"
    assert ledger.admit("d", 1, 1, claimed=HostNumbers(1, 9)) == HostNumbers(11, 6), (
        "1 is the head's"
    )


def test_hosts_without_workers_leave_no_trace_but_their_numbers_do_not_come_again() -> None:
    ledger = HostLedger((), 0)
    seen = []
    for start in range(50):
        name = f"guest{start}"
        seen.append(ledger.admit(name, 0, clock_ns=start).agent)
        ledger.leave(name)
    assert len(dict.fromkeys(seen)) == 50
    assert len(ledger.entries) == 1
    ledger.admit("alice", 2, clock_ns=0)
    ledger.leave("alice")
    assert "alice" in [entry.name for entry in ledger.entries], "its workers have numbers"
