"""A burst on one instance of a real pool: requests that are bound late go to the new ones, too."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from livescale.bench.fidelity import timed_pool
from livescale.bench.fidelity_runs import play_real
from livescale.load.traces import TraceRow

pytestmark = pytest.mark.pool

TRAIN = [TraceRow(0, 256, 16) for _ in range(24)]
WORKERS, LOAD_S = 4, 0.3


@pytest.mark.long
def test_new_instances_get_their_part_of_a_train(tmp_path: Path) -> None:
    """A load takes as long as two of the 24 prompts. One instance needs 24 of them, four together
    2 and 6; half of the way is far from both."""
    waited = {}
    for binding in ("early", "late"):
        scratch = tmp_path / binding
        scratch.mkdir()
        config = timed_pool(scratch, WORKERS, LOAD_S).config
        config = msgspec.structs.replace(config, binding=binding, live_order="stop-the-world")
        played, _ = play_real(config, TRAIN, binding, seed=0)
        assert len(played.timings) == len(TRAIN)
        waited[binding] = max(timing.ttft_ns for timing in played.timings)
    assert waited["late"] < 0.75 * waited["early"]
