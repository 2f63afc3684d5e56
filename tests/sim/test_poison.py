"""Requests that cannot be computed, or by which workers end: no other one suffers.

What is broken on purpose is seen by the rule that is named beside it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from livescale.batching.lines.visitors import Visitors
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.faulty_runs import FaultyRequest, RunFailed
from livescale.batching.runs.run import Run
from livescale.member.attempts import HostedAttempts
from livescale.sim.base import poison as poison_module
from livescale.sim.base.config import FaultConfig
from livescale.sim.swarm.seeds import draw_world, run_seed, run_world
from livescale.values.types import Outcome

Break = Callable[[pytest.MonkeyPatch], None]


def test_only_poison_fails_where_executors_raise() -> None:
    """By the rules of all worlds; and no worker ends, where there are no other faults."""
    failed = finished = 0
    for seed in range(30):
        world = draw_world(seed)
        if not world.config.faults.raising_permille:
            continue
        raising = world.config.faults.raising_permille
        faults = FaultConfig(until_ns=world.config.faults.until_ns, raising_permille=raising)
        quiet = world.changed(queue_requests_max=10_000, stays=(), changes=())
        quiet = replace(quiet, config=msgspec.structs.replace(quiet.config, faults=faults))
        for line in run_world(quiet).requests:
            finished += line.outcome is Outcome.FINISHED
            if line.outcome is Outcome.FAILED and line.error == "poison":
                failed += 1
            assert "was lost" not in (line.error or ""), f"seed {seed}: {line}"
    assert failed
    assert finished > 100


@pytest.mark.parametrize("seed", [20, 63])
def test_requests_by_which_workers_of_later_stages_end_are_given_up(seed: int) -> None:
    """Their leaders live on and give back what went through the stage: for ever, if that counted as
    no attempt."""
    world = draw_world(seed)
    assert any(policy.spec.stage is not None for policy in world.config.controller.models)
    faults = FaultConfig(until_ns=world.config.faults.until_ns, killing_permille=20)
    quiet = world.changed(queue_requests_max=10_000, stays=(), changes=())
    quiet = replace(quiet, config=msgspec.structs.replace(quiet.config, faults=faults))
    outcomes = Counter(line.outcome for line in run_world(quiet).requests)
    assert 0 < outcomes[Outcome.FAILED] <= 2
    assert outcomes[Outcome.FINISHED] > 50


def all_of_a_run_fail(patch: pytest.MonkeyPatch) -> None:
    def broken(
        run: Run, failure: RunFailed, _: Callable[[Run], None]
    ) -> tuple[list[tuple[Run, None]], list[FaultyRequest]]:
        return [], [FaultyRequest(s.request, s.attempt, str(failure)) for s in run.segments]

    patch.setattr(poison_module, "find_faulty", broken)


def what_failed_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveBatcher, "fail", lambda self, run, faulty: None)


def leaders_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Visitors, "fail", lambda self, faulty: None)


def gateways_are_not_told(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostedAttempts, attempts: Sequence[tuple[str, int, str]]) -> None:
        for request, *_ in attempts:
            self._leaves(request)

    patch.setattr(HostedAttempts, "refused", broken)


@pytest.mark.parametrize(
    ("mutation", "rule", "seed"),
    [
        (all_of_a_run_fail, "a request fails that need not", 2),
        (what_failed_goes_on, "the same tokens|nothing comes of", 2),
        (leaders_are_not_told, "the same tokens|nothing comes of", 91),
        (gateways_are_not_told, "every request ends", 2),
    ],
)
def test_a_seed_shows(
    mutation: Break, rule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    outcome = run_seed(seed)
    assert re.search(rule, outcome.error), outcome.trace or "nothing is noticed"
