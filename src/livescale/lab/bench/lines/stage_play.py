"""One play of a StageScene: in a real pool of timed workers, and in virtual time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.made_models import pool_config, vocabulary_of
from livescale.lab.bench.base.token_checks import wrong_timed_tokens
from livescale.lab.bench.lines.stage_figures import StageRun, read_run
from livescale.lab.bench.lines.stage_scene import MODEL, StageScene, play_simulated
from livescale.lab.client import replayer
from livescale.load.traces import TraceRow
from livescale.runtime.models.catalog import live_limits
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.record.record import RunLine, read_record, write_record
from livescale.values.types import InstanceState

_PATIENCE_S, _POLL_S = 300.0, 0.1
_DRAIN_NS = 300_000_000_000
_PROMPT_SEED = 0


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
    return asyncio.run(_play(scene, policy, rows, directory, record))


async def stages_serve(client: httpx.AsyncClient, model: str, counts: Sequence[int]) -> None:
    """Wait until each stage has so many instances that serve. Raises BenchError."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        status = (await client.get(f"/admin/models/{model}")).json()
        by_stage = status["instances_by_stage"]
        if [its.get(InstanceState.SERVING.value, 0) for its in by_stage] == list(counts):
            return
        await asyncio.sleep(_POLL_S)
    raise BenchError(f"{counts} instances of stages did not serve within {_PATIENCE_S:.0f} s")


def pool_client(pool: Pool) -> httpx.AsyncClient:
    """For the pool's own pages."""
    return httpx.AsyncClient(base_url=pool.base_url, trust_env=False, timeout=_PATIENCE_S)


# -- helpers, in the order used -------------------------------------------------------------------


async def _play(
    scene: StageScene, policy: str, rows: Sequence[TraceRow], directory: Path, record: Path
) -> BothRuns:
    # A run of its own, also in the folder of an earlier one.
    write_record(record, [])
    model_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    spans = " ".join(f"{span.start}-{span.stop}" for span in scene.spans)
    settings = {**scene.settings(policy, model_bytes), "record": str(record)}
    models = [{"path": str(directory), "name": MODEL, "stage_spans": spans}]
    pool = Pool(pool_config(directory.parent, models, settings))
    # Those of the pool are the stages' own.
    manifest = read_manifest(directory, MODEL)
    async with pool:
        await pool.ready()
        async with pool_client(pool) as client:
            await pool.or_failure(stages_serve(client, MODEL, [1] * scene.stages))
        shares = CpuShares([os.getpid()])
        results = await pool.or_failure(
            replayer.replay(
                pool.base_url,
                MODEL,
                rows,
                prompt_ids_for=replayer.prompts_from_seed(vocabulary_of(manifest), _PROMPT_SEED),
                drain_ns_max=_DRAIN_NS,
            )
        )
        # This process and its children are the client and the whole pool.
        used, others = shares.cores_used(), shares.others()
    lines = list(read_record(record))
    controller = next(line.config for line in lines if isinstance(line, RunLine))
    devices = [seat.device for _, seat in pool.layout.seats]
    simulated = play_simulated(scene, controller, devices, rows, live_limits(pool.config))
    missing = sum(result.output_tokens - len(result.token_ids) for result in results)
    outputs = [(result.prompt_ids, result.token_ids) for result in results]
    return BothRuns(
        real=read_run(lines, scene.slo_ns, [result.timing() for result in results]),
        simulated=read_run(simulated, scene.slo_ns),
        wrong_tokens=missing + sum(wrong_timed_tokens(manifest, outputs)),
        tokens=sum(len(result.token_ids) for result in results),
        others_share=others,
        cores_used=used,
        late_p99_ns=replayer.lateness_ns(results, 99),
    )
