"""A burst on one instance of a real pool: requests that are bound late go to the new ones, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from livescale.bench.fidelity import timed_pool
from livescale.bench.fidelity_runs import play_real
from livescale.load.traces import TraceRow
from livescale.telemetry.record import AnyLine, RequestLine

pytestmark = pytest.mark.usefixtures("machine")

TRAIN = [TraceRow(0, 256, 16) for _ in range(24)]
WORKERS, LOAD_S = 4, 0.3


@pytest.mark.long
def test_new_instances_get_their_part_of_a_train(tmp_path: Path) -> None:
    """A load takes as long as two of the 24 prompts, so four instances share nearly all of them.
    The new ones get none that is bound early, and about three quarters of what is bound late: a
    quarter is far from both, also where loads take several times as long on busy cores."""
    part = {}
    for binding in ("early", "late"):
        scratch = tmp_path / binding
        scratch.mkdir()
        config = timed_pool(scratch, WORKERS, LOAD_S).config
        config = msgspec.structs.replace(config, binding=binding, live_order="stop-the-world")
        played, _ = play_real(config, TRAIN, binding, seed=0)
        assert len(played.timings) == len(TRAIN)
        part[binding] = part_of_new_instances(played.lines)
    assert part["early"] < 1 / 4 < part["late"]


def part_of_new_instances(lines: Sequence[AnyLine]) -> float:
    """Of the requests, those that ran on another worker than the first one of all."""
    requests = [line for line in lines if isinstance(line, RequestLine)]
    first = min(requests, key=lambda line: line.first_dispatched_ns)
    return sum(line.worker != first.worker for line in requests) / len(requests)
