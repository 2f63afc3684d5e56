"""The compiled modules give what the pure ones give: the same records, byte for byte.

`LIVESCALE_COMPILED` names a directory with an unpacked wheel of `scripts/build-compiled`; without
it there is nothing to compare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import livescale

PURE = str(Path(livescale.__file__).parent.parent)
COMPILED = os.environ.get("LIVESCALE_COMPILED", "")

pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(not COMPILED, reason="LIVESCALE_COMPILED names no directory"),
]

_WORLDS = """
import hashlib, io, sys
from livescale.batching import batcher
from livescale.sim.swarm.seeds import draw_world, run_world

print(batcher.__file__.rsplit(".", 1)[1], file=sys.stderr)
for seed in range(*map(int, sys.argv[1:])):
    record = io.BytesIO()
    result = run_world(draw_world(seed), record)
    print(seed, result.actions, result.end_ns, hashlib.sha256(record.getvalue()).hexdigest())
"""


def run(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the modules of this path, in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )


def test_random_worlds_leave_the_same_records() -> None:
    """Live pairs, drains, several clients, ranks, faults and lost controllers."""
    pure, compiled = (run(path, "-P", "-c", _WORLDS, "0", "30") for path in (PURE, COMPILED))
    assert (pure.stderr.strip(), compiled.stderr.strip()) == ("py", "so")
    assert compiled.stdout == pure.stdout
    assert len(pure.stdout.splitlines()) == 30


@pytest.mark.parametrize("system", ["livescale", "zigzag", "livescale-move", "livescale-slo"])
def test_a_simulated_pool_leaves_the_same_record(system: str, tmp_path: Path) -> None:
    records = []
    for name, path in (("pure", PURE), ("compiled", COMPILED)):
        record = tmp_path / f"{name}.jsonl"
        play = ["simulate", "burst", "-c", "blitzscale-b", "--seconds", "20"]
        play += ["--strategy", system, "--record", str(record)]
        run(path, "-P", "-m", "livescale.main", *play)
        records.append(record.read_bytes())
    assert records[0] == records[1]
