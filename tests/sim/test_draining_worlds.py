"""Draining instances in whole worlds: their requests end elsewhere, and soon."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from worlds import MS, Row

from livescale.latency.shapes import LLAMA_3_8B
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.simulate import simulate
from livescale.values.types import Outcome

_S = 1000 * MS


def burst(drain: str, gap_ns: int = 0) -> SimResult:
    """A burst of prompts with answers of about ten seconds, for which four instances come."""
    config = SimConfig.default(LLAMA_3_8B, workers=4)
    controller = msgspec.structs.replace(config.controller, drain=drain)
    live = msgspec.structs.replace(config.live, gap_ns=gap_ns)
    config = msgspec.structs.replace(config, controller=controller, live=live, load_ns=0)
    rows = [Row(30 * _S + number * 30 * MS, 1500, 600) for number in range(40)]
    return simulate(rows, config, 1)


def drained_ns(result: SimResult) -> int:
    """Time of instances that drain."""
    total, last_ns, count = 0, 0, 0
    for now in result.instances:
        total += count * (now.now_ns - last_ns)
        last_ns, count = now.now_ns, now.draining
    return total


def gaps_ns(result: SimResult) -> list[int]:
    """Between the tokens of each request, the longest last."""
    times = [line.token_ns for line in result.requests]
    return sorted(b - a for line in times for a, b in pairwise(line))


def test_instances_are_soon_empty_and_nobody_pauses_for_long() -> None:
    finish, move = burst("finish"), burst("move")
    for result in (finish, move):
        assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
        assert all(len(line.token_ns) == 600 for line in result.requests)
    assert drained_ns(finish) > 5 * _S
    assert drained_ns(move) <= 0.25 * drained_ns(finish)
    assert all(line.attempts == 1 for line in move.requests), "with their KV"
    # A Run full of prompts is what decodes wait for anyway.
    assert gaps_ns(move)[-1] <= 2 * gaps_ns(finish)[-1]


@pytest.mark.parametrize("gap_ms", [1, 5])
def test_what_cannot_move_in_time_stays(gap_ms: int) -> None:
    """KV of 1500 tokens takes 16 ms."""
    result = burst("move", gap_ns=gap_ms * MS)
    assert drained_ns(result) > 5 * _S
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
