"""Limits of a model hold by themselves: a pool without requests gets to them, and then rests. What
replaces a model's policy holds as if it had been there from the beginning."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    MS,
    W,
    adopted,
    arrived,
    finished,
    loaded,
    make_controller,
    make_policy,
)

from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, DropHolding, StartHolding, WakeAt
from livescale.messages.events import (
    AnyEvent,
    HoldingCompleted,
    HoldingDropped,
    ModelChanged,
    Tick,
    WorkerJoined,
)
from livescale.values.scaling_policies import Bounds, ModelPolicy, Period, SloAim, TargetOngoing

SECOND_NS = 1_000 * MS


class Alone:
    """A controller that only the time and the answers to its own orders reach. `wakes` are the
    steps that it asked for."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.now_ns = 0
        self.wakes = 0
        self._at_ns: int | None = None

    def step(self, *events: AnyEvent) -> None:
        """Let these happen, and what follows from the answers at once."""
        waiting: Sequence[AnyEvent] = events
        while waiting:
            commands = self.controller.step(self.now_ns, waiting)
            self.controller.validate()
            asked = [c.at_ns for c in commands if isinstance(c, WakeAt)]
            self._at_ns = min([*asked, *([self._at_ns] if self._at_ns else [])], default=None)
            waiting = [event for command in commands for event in answers(command)]

    def wait(self, for_ns: int) -> None:
        """Nothing happens for so long."""
        until_ns = self.now_ns + for_ns
        while self._at_ns is not None and self._at_ns <= until_ns:
            self.now_ns, self._at_ns = self._at_ns, None
            self.wakes += 1
            self.step(Tick())
        self.now_ns = until_ns

    @property
    def instances(self) -> int:
        """That serve or will."""
        (state,) = self.controller.models.values()
        return self.controller.fleet.tally(state.entry.part).capacity


def answers(command: AnyCommand) -> list[AnyEvent]:
    """Members carry orders out at once. Nothing is said of a warm spare."""
    if isinstance(command, StartHolding) and command.spare is not None:
        return [HoldingCompleted(command.holding, 0)]
    if isinstance(command, StartHolding):
        return loaded(command.holding)
    return [HoldingDropped(command.holding)] if isinstance(command, DropHolding) else []


def begin(workers: int, instances: int, policy: ModelPolicy, **config: object) -> Alone:
    """Of so many workers the first ones serve an instance each."""
    models = (policy,)
    alone = Alone(make_controller(workers, models=models, warm_spares="recent", **config))
    alone.step(*adopted(instances), *(WorkerJoined(w, DEVICE) for w in W[instances:workers]))
    return alone


limits = st.integers(0, 6).flatmap(lambda most: st.tuples(st.integers(0, most), st.just(most)))


@given(
    instances=st.integers(1, 6),
    changes=st.lists(limits.filter(lambda pair: pair[1] > 0), min_size=1, max_size=4),
    timeout_ms=st.sampled_from([0, 30]),
)
def test_changed_limits_hold_within_a_second(
    instances: int, changes: list[tuple[int, int]], timeout_ms: int
) -> None:
    policy = make_policy(least=1, most=6)
    scaling = Bounds(scale_down_timeout_ns=timeout_ms * MS)
    alone = begin(6, instances, policy, scaling=scaling)
    alone.wait(SECOND_NS)
    for least, most in changes:
        alone.step(
            ModelChanged(msgspec.structs.replace(policy, instances_min=least, instances_max=most))
        )
        alone.wait(SECOND_NS)
        assert least <= alone.instances <= most
        # Without requests none is needed beyond the least number, and one may stay warm.
        assert alone.instances <= max(least, 1)


@given(
    instances=st.integers(1, 6),
    day=limits.filter(lambda pair: pair[1] > 0),
    night=limits.filter(lambda pair: pair[1] > 0),
)
def test_limits_of_a_schedule_hold_when_its_time_has_come(
    instances: int, day: tuple[int, int], night: tuple[int, int]
) -> None:
    period = Period(3 * SECOND_NS, 6 * SECOND_NS, *day)
    alone = begin(6, instances, make_policy("m", *night, schedule=(period,)))
    for least, most in (night, day, night):
        alone.wait(SECOND_NS)
        assert least <= alone.instances <= most
        alone.wait(2 * SECOND_NS)


@given(workers=st.integers(1, 4), more=st.integers(1, 4))
def test_what_cannot_be_wakes_nobody_again_and_again(workers: int, more: int) -> None:
    """More instances than there are workers."""
    alone = begin(workers, 0, make_policy(least=workers + more))
    alone.wait(SECOND_NS)
    assert alone.instances == workers
    before = alone.wakes
    alone.wait(3_600 * SECOND_NS)
    assert alone.wakes - before <= 2


SCALINGS = {
    "ongoing": TargetOngoing(),
    "rates": Bounds(load_window_ns=10 * SECOND_NS),
    "slo": SloAim(load_window_ns=5 * SECOND_NS),
}


@pytest.mark.parametrize("before", SCALINGS)
@pytest.mark.parametrize("after", SCALINGS)
def test_a_changed_policy_decides_as_one_that_was_there_from_the_beginning(
    before: str, after: str
) -> None:
    def play(first: str) -> list[int]:
        policy = make_policy(least=1, most=6, scaling=SCALINGS[after])
        published = msgspec.structs.replace(policy, scaling=SCALINGS[first])
        alone, counts = begin(6, 1, published), []
        alone.step(ModelChanged(policy))
        for number in range(40):
            if number < 20:
                alone.step(arrived(str(number), prompt_tokens=900))
            if 5 <= number < 25:
                alone.step(finished(str(number - 5)))
            counts.append(alone.instances)
            alone.wait(SECOND_NS)
        return counts

    assert play(before) == play(after)
