"""One play of a StageScene: in a real pool of timed workers, and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.base.made_models import pool_config
from livescale.lab.bench.base.pool_play import (
    Act,
    Acts,
    play_pool,
    told_controller,
    until_status,
)
from livescale.lab.bench.base.token_checks import wrong_timed_tokens
from livescale.lab.bench.lines.stage_figures import StageRun, read_run
from livescale.lab.bench.lines.stage_scene import MODEL, StageScene, play_simulated
from livescale.lab.client.replayer import lateness_ns
from livescale.load.traces import TraceRow
from livescale.runtime.models.catalog import live_limits
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.record.record import read_record, write_record
from livescale.values.types import InstanceState


@dataclass(frozen=True, slots=True)
class BothRuns:
    """One run of a real pool, and the same in virtual time. `late_p99_ns`: how far the client fell
    behind its own schedule; `others_share`: of the machine's CPU time, what other programs took."""

    real: StageRun
    simulated: StageRun
    wrong_tokens: int
    tokens: int
    others_share: float
    cores_used: float
    late_p99_ns: int | None

    def as_json(self) -> dict[str, object]:
        return {
            **self.real.as_json(),
            "simulated": self.simulated.as_json(),
            "others_share": self.others_share,
            "cores_used": self.cores_used,
            "client_late_p99_s": None if self.late_p99_ns is None else self.late_p99_ns / 1e9,
        }


def play_both(
    scene: StageScene, policy: str, rows: Sequence[TraceRow], directory: Path, record: Path
) -> BothRuns:
    """In a pool of its own, whose run record is written, then in the simulator with the settings of
    that pool's controller. Raises BenchError."""
    # A run of its own, also in the folder of an earlier one.
    write_record(record, [])
    model_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    spans = " ".join(f"{span.start}-{span.stop}" for span in scene.spans)
    settings = {**scene.settings(policy, model_bytes), "record": str(record)}
    models = [{"path": str(directory), "name": MODEL, "stage_spans": spans}]
    pool = Pool(pool_config(directory.parent, models, settings))
    serving = stages_serve(MODEL, [1] * scene.stages)
    played = asyncio.run(play_pool(pool, MODEL, rows, Acts(serving)))
    lines = list(read_record(record))
    simulated = play_simulated(
        scene, told_controller(lines), played.devices, rows, live_limits(pool.config)
    )
    # Those of the pool are the stages' own.
    manifest = read_manifest(directory, MODEL)
    return BothRuns(
        real=read_run(lines, scene.slo_ns, [result.timing() for result in played.results]),
        simulated=read_run(simulated, scene.slo_ns),
        wrong_tokens=played.wrong_tokens(partial(wrong_timed_tokens, manifest)),
        tokens=played.tokens,
        others_share=played.others_share,
        cores_used=played.cores_used,
        late_p99_ns=lateness_ns(played.results, 99),
    )


def stages_serve(model: str, counts: Sequence[int]) -> Act:
    """Waits until each stage has so many instances that serve."""
    return until_status(
        model,
        lambda status: (
            [its.get(InstanceState.SERVING.value, 0) for its in status["instances_by_stage"]]
            == list(counts)
        ),
        f"{counts} instances of stages",
    )
