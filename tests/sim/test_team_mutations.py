"""The swarm finds bugs of teams: they are broken on purpose, and some seed must say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from livescale.batching.lines.team_side import TeamSide
from livescale.batching.lines.visitors import Visitors
from livescale.batching.runs.run import Run
from livescale.control.together import team_duties
from livescale.control.together.team_duties import Teams
from livescale.control.together.team_spans import Loading
from livescale.messages.commands import ChangeDuty
from livescale.sim.swarm.seeds import run_seed
from livescale.values.types import InstanceId, LayerSpan, Part

SEEDS = range(400)

Break = Callable[[pytest.MonkeyPatch], None]


def members_run_more_than_they_are_told(patch: pytest.MonkeyPatch) -> None:
    """All layers behind theirs, too."""
    own = Visitors.next

    def broken(self: Visitors) -> Run | None:
        run = own(self)
        if run is None or self._stage is not None:
            return run
        return msgspec.structs.replace(run, span=LayerSpan(run.span.start, self._layers))

    patch.setattr(Visitors, "next", broken)


def teams_count_with_layers_that_are_still_to_come(patch: pytest.MonkeyPatch) -> None:
    def broken(instance: InstanceId, group: int, layers: frozenset[int]) -> Loading:
        return Loading(instance, group, layers | {layer + 1 for layer in layers})

    patch.setattr(team_duties, "Loading", broken)


def instances_are_in_two_teams(patch: pytest.MonkeyPatch) -> None:
    """Those of a team are taken for free."""
    form = Teams._form

    def broken(self: Teams, part: Part) -> list[ChangeDuty]:
        before = [(instance, instance.duty) for instance in self._fleet.of_part(part)]
        for instance, duty in before:
            instance.duty = msgspec.structs.replace(duty, team=None)
        orders = form(self, part)
        for instance, duty in before:
            if instance.duty.team is None:
                instance.duty = duty
        return orders

    patch.setattr(Teams, "_form", broken)


def broken_teams_forget_their_requests(patch: pytest.MonkeyPatch) -> None:
    break_up = TeamSide._break_up

    def broken(self: TeamSide) -> None:
        returned = [*self._returned]
        break_up(self)
        self._returned = returned

    patch.setattr(TeamSide, "_break_up", broken)


class Mutation(NamedTuple):
    """What is broken, the rule that catches it, and a seed whose world shows it soon."""

    break_it: Break
    rule: str
    seed: int


#: `pytest --long -rP` prints the first seeds that show them, should worlds be drawn anew
MUTATIONS = [
    Mutation(members_run_more_than_they_are_told, "only layers that are there are run", 258),
    Mutation(
        teams_count_with_layers_that_are_still_to_come, "only layers that are there are run", 154
    ),
    Mutation(instances_are_in_two_teams, "an instance is in one team", 381),
    Mutation(broken_teams_forget_their_requests, "every (request|attempt) ends", 73),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.break_it.__name__)
def test_the_world_of_a_seed_shows_it_of_teams(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation.break_it(monkeypatch)
    outcome = run_seed(mutation.seed)
    assert re.search(mutation.rule, outcome.error), outcome.trace or "nothing is noticed"


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.break_it.__name__)
def test_some_seed_shows_it_of_teams(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """And which, when that of the table does not show it any more."""
    mutation.break_it(monkeypatch)
    broken = (outcome for outcome in map(run_seed, (mutation.seed, *SEEDS)) if outcome.error)
    found = next((o for o in broken if re.search(mutation.rule, o.error)), None)
    assert found is not None, f"no seed of {SEEDS} shows it"
    print(f"seed {found.seed}: {found.error[:160]}")
