"""Two controllers at a time, and links that reach one of them, both or none: only one acts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from effort import examples
from livescale.member.effects import RefuseOrder
from livescale.member.fence import Fence
from livescale.member.member import Member
from livescale.messages.epochs import ControllerEpoch
from livescale.sim.swarm.seeds import draw_world, run_seed

SEEDS = [seed for seed in range(200) if draw_world(seed).config.faults.takeovers]


def test_worlds_with_two_controllers_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    obey = Member._obey

    def watched(self: Member, ordered: object) -> None:
        before = len(self._effects)
        obey(self, ordered)  # type: ignore[arg-type]
        refused.extend(e for e in self._effects[before:] if isinstance(e, RefuseOrder))

    monkeypatch.setattr(Member, "_obey", watched)
    for seed in SEEDS[: examples(len(SEEDS))]:
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
    found = [outcome.error for outcome in map(run_seed, SEEDS[:20]) if outcome.error]
    assert any(re.search(rule, error) for error in found), found
