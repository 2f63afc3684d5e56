"""`livescale bench stages`: its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.common.errors import UserError
from livescale.lab.bench.lines.stage_scene import StageScene
from livescale.lab.bench.lines.stages import StagesOptions, run_stages
from livescale.lab.commands.bench.bench_flags import Bench, at_least, finish, options_of, say

_STAGES_MAX, _RUN_MS_MIN, _RUN_MS_MAX, _REQUESTS_MIN = 16, 5, 1000, 50


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, StagesOptions()
    scene = defaults.scene
    add("--stages", type=int, default=scene.stages, metavar="N", help="Stages of the model.")
    words = "Step time of a stage. The slow stage takes 1.5 times as long."
    add("--run-ms", type=int, default=scene.run_ms, metavar="MS", help=words)
    add("--requests", type=int, default=scene.requests, metavar="N", help="Requests of a run.")
    words = "Runs of each policy, each with other arrivals."
    add("--plays", type=int, default=defaults.plays, metavar="N", help=words)
    add("--seed", type=int, default=defaults.seed, metavar="N", help="Seed of the arrivals.")
    add("--folder", type=Path, metavar="DIR", help="Folder of the run records.")


def _stages(arguments: argparse.Namespace) -> int:
    """Compare stages that scale separately with whole pipelines, real and simulated.

    0 when every token was right.
    """
    at_least(arguments, 1, "plays")
    at_least(arguments, _REQUESTS_MIN, "requests")
    if not 2 <= arguments.stages <= _STAGES_MAX:
        raise UserError(f"--stages must be 2 to {_STAGES_MAX}")
    if not _RUN_MS_MIN <= arguments.run_ms <= _RUN_MS_MAX:
        raise UserError(f"--run-ms must be {_RUN_MS_MIN} to {_RUN_MS_MAX}")
    scene = options_of(StageScene, arguments)
    report = run_stages(options_of(StagesOptions, arguments, scene=scene), say)
    return finish(report, arguments, is_good=report.token_mismatches == 0)


STAGES = Bench(_add_arguments, _stages)
