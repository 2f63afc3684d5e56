"""A burst on one instance of a real pool: requests that are bound late go to the new ones, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from livescale.lab.bench.pools.fidelity import timed_pool
from livescale.lab.bench.pools.fidelity_runs import play_real
from livescale.load.traces import TraceRow
from livescale.telemetry.record.record import AnyLine, RequestLine
from slowness import patient_ms

pytestmark = pytest.mark.usefixtures("machine")

TRAIN = [TraceRow(0, 256, 16) for _ in range(24)]
WORKERS, LOAD_S, TRIES = 4, 0.3, 5


@pytest.mark.long
def test_new_instances_get_their_part_of_a_train(tmp_path: Path) -> None:
    """A load takes as long as two of the 24 prompts, so four instances share nearly all of them.
    The new ones get none that is bound early, and about three quarters of what is bound late: a
    quarter is far from both. On busy cores a load may last as long as the train: what is bound late
    has some tries."""
    assert part_of_new_instances(played(tmp_path, "early", 0)) < 1 / 4
    for number in range(TRIES):
        if part_of_new_instances(played(tmp_path, "late", number)) > 1 / 4:
            return
    raise AssertionError("the new instances never got their part")


def played(scratch: Path, binding: str, number: int) -> Sequence[AnyLine]:
    """The record of the train on a pool of its own."""
    own = scratch / f"{binding}-{number}"
    own.mkdir()
    config = timed_pool(own, WORKERS, LOAD_S).config
    config = msgspec.structs.replace(
        config,
        binding=binding,
        live_order="stop-the-world",
        lost_after_ms=patient_ms(config.lost_after_ms),
    )
    run, _ = play_real(config, TRAIN, binding, seed=0)
    assert len(run.timings) == len(TRAIN)
    return run.lines


def part_of_new_instances(lines: Sequence[AnyLine]) -> float:
    """Of the requests, those that ran on another worker than the first one of all."""
    requests = [line for line in lines if isinstance(line, RequestLine)]
    first = min(requests, key=lambda line: line.first_dispatched_ns)
    return sum(line.worker != first.worker for line in requests) / len(requests)
