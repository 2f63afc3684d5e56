"""When a controller steps: no more often than the gap allows, and never later than it asked for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.cluster.next_step import NextStep
from livescale.messages.events import ModelRemoved, Tick

GAP = 10
news = st.tuples(st.just("event"), st.integers(0, 25))
asked = st.tuples(st.just("wake"), st.integers(0, 25))
plays = st.lists(st.tuples(news | asked, st.integers(0, 40)), max_size=40)
"""Each a wait, what comes then, and of a WakeAt how much later the call is wanted."""


class Clockwork:
    """Begins every step exactly when it is due, as the simulator does."""

    def __init__(self) -> None:
        self.next_step = NextStep(GAP)
        self.now = 0
        #: of each step its time and its events
        self.steps: list[tuple[int, list[object]]] = []

    def run_until(self, end: int) -> None:
        while (due := self.next_step.due_ns) is not None and due <= end:
            self.now = max(self.now, due)
            self.steps.append((self.now, [*self.next_step.begin(self.now)]))
        self.now = end


@given(plays)
def test_steps_keep_their_gap_and_every_event_comes_once_and_in_time(
    play: list[tuple[tuple[str, int], int]],
) -> None:
    clockwork, came, wanted = Clockwork(), [], []
    for number, ((kind, amount), later) in enumerate(play):
        clockwork.run_until(clockwork.now + amount)
        if kind == "event":
            event = ModelRemoved(f"m{number}")
            came.append((clockwork.now, event))
            clockwork.next_step.push(event)
        else:
            wanted.append((clockwork.now, clockwork.now + later))
            clockwork.next_step.wake_at(clockwork.now + later)
    clockwork.run_until(clockwork.now + 10_000)
    times = [at for at, _ in clockwork.steps]
    assert all(after - before >= GAP for before, after in pairwise(times))
    absorbed = [(at, event) for at, all_of_it in clockwork.steps for event in all_of_it]
    given_out = [(at, event) for at, event in absorbed if event != Tick()]
    assert [event for _, event in given_out] == [event for _, event in came]
    for (at, _), (since, _) in zip(given_out, came, strict=True):
        assert since <= at <= since + GAP, "no event waits for longer than the gap"
    for since, until in wanted:
        # What is later than another call that waits may be dropped, for the sake of that one.
        assert any(since <= at <= until + GAP for at in times), (since, until)
    assert clockwork.next_step.due_ns is None


def test_the_earliest_call_counts_and_a_later_one_is_asked_for_again() -> None:
    next_step = NextStep(GAP)
    next_step.wake_at(500)
    next_step.wake_at(100)
    next_step.wake_at(300)
    assert next_step.due_ns == 100
    assert next_step.begin(100) == [Tick()]
    assert next_step.due_ns is None


def test_a_step_that_an_event_brings_is_the_call_only_when_its_time_has_come() -> None:
    next_step, event = NextStep(GAP), ModelRemoved("m")
    next_step.wake_at(100)
    next_step.push(event)
    assert next_step.due_ns == 0
    assert next_step.begin(95) == [event]
    assert next_step.due_ns == 105, "asked for at 100, and the gap is over at 105"
    next_step.push(event)
    assert next_step.begin(105) == [event], "something else has come meanwhile"
    assert next_step.due_ns is None
