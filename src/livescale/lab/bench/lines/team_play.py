"""One play of a TeamScene: in a real pool of timed workers, and in virtual time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from livescale.engine.files.make import make_model
from livescale.lab.bench.base.made_models import pool_config
from livescale.lab.bench.base.pool_play import (
    Act,
    Acts,
    asking_for,
    play_pool,
    told_controller,
    until_status,
)
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
from livescale.runtime.models.catalog import live_limits
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import read_record, write_record
from livescale.values.types import InstanceState


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


def play_ways(
    ways: Mapping[str, TeamWay],
    count: int,
    scene_of: Callable[[int], TeamScene],
    say: Callable[[str], None],
    *,
    folder: Path | None = None,
    needs_queue: bool = True,
) -> tuple[TeamScene, dict[str, list[BothPlays]]]:
    """Each way so often, in turns, of the scene for a model of so many bytes. The pools' run
    records come to `folder`, if there is one. Raises BenchError."""
    plays: dict[str, list[BothPlays]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="livescale-teams-") as scratch:
        directory = Path(scratch, MODEL)
        make_model(directory, SHAPE)
        scene = scene_of(sum(file.stat().st_size for file in directory.glob("*.safetensors")))
        folder = folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, count + 1):
            for name, way in ways.items():
                record = folder / f"{name}-{number}.jsonl"
                play = play_both(scene, way, directory, record, needs_queue=needs_queue)
                plays[name].append(play)
                say(f"  {name}, {number} of {count}: {play.real.load_s:.2f} s of load")
    return scene, plays


def play_both(
    scene: TeamScene, way: TeamWay, directory: Path, record: Path, *, needs_queue: bool = True
) -> BothPlays:
    """In a pool of its own, whose run record is written, then in the simulator. With `needs_queue`
    it is an error when no prompt waits at some time of the load. Raises BenchError."""
    # A run of its own, also in the folder of an earlier one.
    write_record(record, [])
    limits = {"min_replicas": SOURCES, "max_replicas": SOURCES}
    settings = {**scene.settings(way), "record": str(record)}
    pool = Pool(pool_config(directory.parent, [{"path": str(directory), **limits}], settings))
    more = asking_for(MODEL, WORKERS, scene.ordered_ns)
    acts = Acts(_serving(SOURCES), more, _serving(WORKERS))
    played = asyncio.run(play_pool(pool, MODEL, scene.rows(), acts))
    lines = list(read_record(record))
    simulated = play_simulated(
        scene,
        told_controller(lines),
        played.devices,
        read_history(lines).measured[0].kv_blocks,
        asked_for(lines),
        live_limits(pool.config),
    )
    return BothPlays(
        real=read_play(lines, needs_queue=needs_queue),
        simulated=read_play(simulated, needs_queue=needs_queue),
        wrong_tokens=played.wrong_tokens(partial(wrong_timed_tokens, pool.models[0].manifest)),
        tokens=played.tokens,
        others_share=played.others_share,
    )


def _serving(count: int) -> Act:
    """Waits until so many instances have everything."""
    state = InstanceState.SERVING.value
    return until_status(
        MODEL, lambda status: status["instances"].get(state, 0) == count, f"{count} instances"
    )
