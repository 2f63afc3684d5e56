"""Members that stop and go on, or whose link is cut without a word: the swarm's rule about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from worlds import MIB, MS, Row, make_config, make_model

from livescale.control.cluster.liveness import SilenceWatch
from livescale.sim.base.config import FaultConfig
from livescale.sim.swarm.seeds import draw_world, run_seed
from livescale.sim.world.simulate import simulate
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Outcome

SEEDS = range(60)


def test_worlds_with_silent_members_are_drawn_and_come_to_rest() -> None:
    seeds = [seed for seed in SEEDS if draw_world(seed).config.faults.silences]
    assert len(seeds) > 5
    for seed in seeds:
        outcome = run_seed(seed)
        assert not outcome.error, outcome.trace


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def broken(self: SilenceWatch[Any], now_ns: int) -> tuple[Any, ...]:
        return ()

    patch.setattr(SilenceWatch, "look", broken)


def signs_of_life_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def broken(self: SilenceWatch[Any], peer: object, at_ns: int) -> None:
        return

    patch.setattr(SilenceWatch, "received", broken)


@pytest.mark.parametrize(
    ("mutation", "rule"),
    [
        (silence_is_not_noticed, "silence is noticed in time"),
        (signs_of_life_are_ignored, "only the silent are given up"),
    ],
)
def test_some_seed_catches(
    mutation: Callable[[pytest.MonkeyPatch], None], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    outcome = next((o for o in map(run_seed, SEEDS) if o.error), None)
    assert outcome is not None, f"no seed of {SEEDS} notices"
    assert re.search(rule, outcome.error), outcome.trace


@pytest.mark.long
def test_with_attempts_to_spare_nothing_fails_however_often_members_fall_silent() -> None:
    policy = ModelPolicy(make_model("m", 4, MIB), 2, 4, 10_000, 512)
    faults = FaultConfig(
        silences=20,
        silence_ns_max=400 * MS,
        lost_after_ns=100 * MS,
        rejoin_ns=50 * MS,
        until_ns=3_000 * MS,
    )
    config = make_config((policy,), 4, faults)
    controller = msgspec.structs.replace(config.controller, request_attempts_max=100)
    config = msgspec.structs.replace(config, controller=controller)
    rows = [Row(20 * MS * number, 50, 30) for number in range(150)]
    retried = 0
    for seed in range(4):
        result = simulate(rows, config, seed)
        assert [line.outcome for line in result.requests] == [Outcome.FINISHED] * len(rows)
        retried += sum(line.attempts > 1 for line in result.requests)
    assert retried
