"""How many threads compute, by how long they wait for each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.engine.base.team_size import SPELL_RUNS, SPELL_RUNS_MAX, WINDOW_RUNS, TeamSize


def play(size: TeamSize, runs: int, waited: float) -> list[int]:
    """The threads of each of the Runs, whose threads wait for that share of their time when all
    compute."""
    active = []
    for _ in range(runs):
        active.append(size.active)
        took_ns = 1_000_000 * size.active
        size.ran(took_ns, int(took_ns * waited) if size.active == size.threads else 0)
    return active


@given(st.integers(1, 16), st.floats(0, 0.39), st.integers(1, 500))
def test_threads_that_wait_little_all_compute(threads: int, waited: float, runs: int) -> None:
    assert set(play(TeamSize(threads), runs, waited)) == {threads}


@given(st.integers(2, 16), st.floats(0.41, 1))
def test_fewer_compute_what_is_left_and_all_are_tried_again(threads: int, waited: float) -> None:
    size = TeamSize(threads)
    active = play(size, WINDOW_RUNS + SPELL_RUNS + WINDOW_RUNS + 2 * SPELL_RUNS + 1, waited)
    fewer = max(1, round(threads * (1 - int(1_000_000 * threads * waited) / (1_000_000 * threads))))
    assert fewer < threads
    spells = [(threads, WINDOW_RUNS), (fewer, SPELL_RUNS)]
    spells += [(threads, WINDOW_RUNS), (fewer, 2 * SPELL_RUNS), (threads, 1)]
    assert active == [count for count, runs in spells for _ in range(runs)]


def test_spells_grow_to_a_bound_and_begin_anew_when_cores_are_free() -> None:
    size = TeamSize(2)
    lengths = []
    for _ in range(8):
        assert play(size, WINDOW_RUNS, 0.6) == [2] * WINDOW_RUNS
        runs = 0
        while size.active == 1:
            play(size, 1, 0.0)
            runs += 1
        lengths.append(runs)
    assert lengths == [min(SPELL_RUNS << n, SPELL_RUNS_MAX) for n in range(8)]
    play(size, WINDOW_RUNS, 0.1)
    assert play(size, 2 * WINDOW_RUNS, 0.6)[WINDOW_RUNS:] == [1] * WINDOW_RUNS
    assert play(size, SPELL_RUNS - WINDOW_RUNS + 1, 0.6)[-1] == 2
