"""One play of a TeamScene: in a real pool of timed workers, and in virtual time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from livescale.engine.files.make import make_model
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.made_models import pool_config, vocabulary_of
from livescale.lab.bench.base.token_checks import wrong_timed_tokens
from livescale.lab.bench.lines.team_figures import TeamPlay, asked_for, read_play
from livescale.lab.bench.lines.team_scene import (
    MODEL,
    SHAPE,
    SOURCES,
    TARGETS,
    WORKERS,
    TeamScene,
    TeamWay,
    play_simulated,
)
from livescale.lab.client import replayer
from livescale.runtime.models.catalog import live_limits
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import RunLine, read_record, write_record
from livescale.values.types import InstanceState
from livescale.values.units import NS_PER_S

_MODEL_PATH = f"/admin/models/{MODEL}"
_PATIENCE_S, _POLL_S = 300.0, 0.1
_DRAIN_NS = 300_000_000_000
_SEED = 0


@dataclass(frozen=True, slots=True)
class BothPlays:
    """One play of a real pool, and the same in virtual time."""

    real: TeamPlay
    simulated: TeamPlay
    wrong_tokens: int
    tokens: int
    others_share: float

    def as_json(self) -> dict[str, object]:
        return {
            **self.real.as_json(),
            "simulated": self.simulated.as_json(),
            "others_share": self.others_share,
        }


@dataclass(frozen=True, slots=True)
class PlayedScene:
    """What was played of a scene, by name of the way: what both benches of teams report."""

    scene: TeamScene
    plays: dict[str, list[BothPlays]]

    @property
    def token_mismatches(self) -> int:
        """Over all plays."""
        return sum(play.wrong_tokens for plays in self.plays.values() for play in plays)

    def facts(self) -> dict[str, object]:
        """The scene and each play, as JSON."""
        scene, plays = self.scene, self.plays
        return {
            "tokens": sum(play.tokens for of in plays.values() for play in of),
            "sources": SOURCES,
            "targets": TARGETS,
            "model_bytes": scene.size_bytes,
            "link_bytes_per_s": scene.bytes_per_s,
            "run_ms": scene.run_ms,
            "prompt_tokens": scene.prompt_tokens,
            "output_tokens": scene.output_tokens,
            "prompts": len(scene.rows()),
            "plays": {name: [play.as_json() for play in of] for name, of in plays.items()},
        }


def made_model(scratch: Path) -> tuple[Path, int]:
    """A directory with the scene's model, and how many bytes it has."""
    directory = scratch / MODEL
    make_model(directory, SHAPE)
    return directory, sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def play_both(
    scene: TeamScene, way: TeamWay, directory: Path, record: Path, *, needs_queue: bool = True
) -> BothPlays:
    """In a pool of its own, whose run record is written, then in the simulator. With `needs_queue`
    it is an error when no prompt waits at some time of the load. Raises BenchError."""
    return asyncio.run(_play(scene, way, directory, record, needs_queue))


# -- helpers, in the order used -------------------------------------------------------------------


async def _play(
    scene: TeamScene, way: TeamWay, directory: Path, record: Path, needs_queue: bool
) -> BothPlays:
    # A run of its own, also in the folder of an earlier one.
    write_record(record, [])
    limits = {"min_replicas": SOURCES, "max_replicas": SOURCES}
    settings = {**scene.settings(way), "record": str(record)}
    pool = Pool(pool_config(directory.parent, [{"path": str(directory), **limits}], settings))
    manifest = pool.models[0].manifest
    async with pool:
        await pool.ready()
        await pool.or_failure(_serving(pool, SOURCES))
        shares = CpuShares([os.getpid()])
        results, _ = await pool.or_failure(
            asyncio.gather(_replay(pool, scene), _ask_for_more(pool, scene))
        )
        others = shares.others()
        await pool.or_failure(_serving(pool, WORKERS))
    lines = list(read_record(record))
    controller = next(line.config for line in lines if isinstance(line, RunLine))
    simulated = play_simulated(
        scene,
        controller,
        [seat.device for _, seat in pool.layout.seats],
        read_history(lines).measured[0].kv_blocks,
        asked_for(lines),
        live_limits(pool.config),
    )
    outputs = [(result.prompt_ids, result.token_ids) for result in results]
    missing = sum(result.output_tokens - len(result.token_ids) for result in results)
    return BothPlays(
        real=read_play(lines, needs_queue=needs_queue),
        simulated=read_play(simulated, needs_queue=needs_queue),
        wrong_tokens=missing + sum(wrong_timed_tokens(manifest, outputs)),
        tokens=sum(len(result.token_ids) for result in results),
        others_share=others,
    )


async def _serving(pool: Pool, count: int) -> None:
    """Wait until so many instances have everything. Raises BenchError."""
    deadline_s = time.monotonic() + _PATIENCE_S
    async with _client(pool) as client:
        while time.monotonic() < deadline_s:
            model = (await client.get(_MODEL_PATH)).json()
            if model["instances"].get(InstanceState.SERVING.value, 0) == count:
                return
            await asyncio.sleep(_POLL_S)
    raise BenchError(f"{count} instances did not serve within {_PATIENCE_S:.0f} s")


async def _replay(pool: Pool, scene: TeamScene) -> Sequence[replayer.ReplayResult]:
    model = pool.models[0]
    return await replayer.replay(
        pool.base_url,
        model.spec.name,
        scene.rows(),
        prompt_ids_for=replayer.prompts_from_seed(vocabulary_of(model.manifest), _SEED),
        drain_ns_max=_DRAIN_NS,
    )


async def _ask_for_more(pool: Pool, scene: TeamScene) -> None:
    """As an operator does. Raises BenchError."""
    await asyncio.sleep(scene.ordered_ns / NS_PER_S)
    limits = {"min_replicas": WORKERS, "max_replicas": WORKERS}
    async with _client(pool) as client:
        answer = await client.patch(_MODEL_PATH, json=limits)
    if not answer.is_success:
        raise BenchError(f"the pool refused other limits: {answer.text}")


def _client(pool: Pool) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=pool.base_url, trust_env=False, timeout=_PATIENCE_S)
