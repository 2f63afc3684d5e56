"""Two controllers at a time, and links that reach one of them, both or none: only one acts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from effort import examples
from livescale.control.scaling.leaving import Leaving
from livescale.control.scaling.wishes import Wishes
from livescale.control.state.fleet import Fleet
from livescale.control.state.holdings import Copy
from livescale.main import main
from livescale.member.effects import RefuseOrder
from livescale.member.fence import Fence
from livescale.member.member import Member
from livescale.messages.epochs import ControllerEpoch
from livescale.sim.checkers.invariants import InvariantBroken
from livescale.sim.swarm.seeds import draw_world, run_seed
from livescale.sim.world.simulate import simulate
from livescale.values.types import WorkerRef

SEEDS = [seed for seed in range(200) if draw_world(seed).config.faults.takeovers]


@pytest.mark.more
def test_worlds_with_two_controllers_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    obey = Member._obey

    def watched(self: Member, ordered: object) -> None:
        before = len(self._effects)
        obey(self, ordered)  # type: ignore[arg-type]
        refused.extend(e for e in self._effects[before:] if isinstance(e, RefuseOrder))

    monkeypatch.setattr(Member, "_obey", watched)
    for seed in SEEDS[: examples(len(SEEDS), least=10)]:
        outcome = run_seed(seed)
        assert not outcome.error, outcome.trace
    assert refused, "some member is ordered something by a controller that is over"


def every_order_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fence, "admits", lambda self, epoch: True)


def every_controller_is_met(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Fence, epoch: ControllerEpoch) -> None:
        self.current = epoch

    patch.setattr(Fence, "meet", broken)


@pytest.mark.parametrize(
    ("mutation", "rule"),
    [
        (every_order_counts, "only the latest controller acts"),
        (every_controller_is_met, "no member reports to an older controller"),
    ],
)
def test_some_seed_catches(
    mutation: Callable[[pytest.MonkeyPatch], None], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    errors = []
    for seed in SEEDS[:20]:
        errors.append(run_seed(seed).error)
        if re.search(rule, errors[-1]):
            return
    raise AssertionError(f"no seed breaks this rule, but: {errors}")


def halves_are_given_up_at_once(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Fleet, now_ns: int) -> None:
        for copy in self._pool.incomplete():
            self._pool.give_up(copy)

    patch.setattr(Fleet, "give_up_hopeless", broken)


def copies_that_wake_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copy, "is_waking", False)


def halves_do_not_hold_their_hosts(patch: pytest.MonkeyPatch) -> None:
    may_go = Leaving._may_go

    def broken(self: Leaving, ref: WorkerRef) -> bool:
        copies = [self._pool.copy_of(holding) for holding in self._pool.on(ref)]
        halves = [copy for copy in copies if not copy.is_there and not copy.is_given_up]
        return bool(halves) or may_go(self, ref)

    patch.setattr(Leaving, "_may_go", broken)


def nobody_is_woken_for_released_workers(patch: pytest.MonkeyPatch) -> None:
    """Warm spares are free at once, and no event says so."""
    patch.setattr(Wishes, "may_be_met_now", lambda self: False)


@pytest.mark.parametrize(
    ("mutation", "rule", "seed"),
    [
        (nobody_is_woken_for_released_workers, "every request ends", 661666),
        (halves_are_given_up_at_once, "the last copy is kept", 147),
        # Such a host may hold an instance or the last copy: either rule is broken.
        (halves_do_not_hold_their_hosts, "before their host goes|when a host goes", 2957),
    ],
)
def test_a_seed_shows(
    mutation: Callable[[pytest.MonkeyPatch], None],
    rule: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutation(monkeypatch)
    assert re.search(rule, run_seed(seed).error)


def test_a_copy_that_wakes_up_is_no_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the worlds in thousands one has takeovers, hosts that leave and little memory as this
    takes; in this one three of the first twenty histories show it."""
    world = draw_world(5117)

    def histories() -> None:
        for seed in range(40):
            simulate(world.rows, world.config, seed)

    copies_that_wake_count(monkeypatch)
    with pytest.raises(InvariantBroken, match="the last copy stays when a host goes"):
        histories()


def test_a_request_that_two_workers_give_back_in_turn_waits() -> None:
    """Without that no time passes in this world, and it never ends."""
    outcome = run_seed(5032)
    assert not outcome.error, outcome.trace


def test_only_worlds_with_takeovers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--takeovers", "--seeds", "3", "--jobs", "1"]) == 0
    assert "3 of 3 seeds, 0 violations" in capsys.readouterr().out
