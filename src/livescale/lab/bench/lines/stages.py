"""`bench stages`: what stages that scale by themselves are worth (QUART), and simulated.

A line of stages, one of them 1.5 times as slow as the others, in a real pool of timed workers. The
same burst comes to stages that scale by their own queues, and to whole pipelines. Each play is
played in virtual time, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from livescale.engine.files.make import make_model
from livescale.lab.bench.lines.stage_figures import StageRun, together
from livescale.lab.bench.lines.stage_play import BothRuns, play_both
from livescale.lab.bench.lines.stage_scene import MODEL, OWN, POLICIES, UNIFORM, StageScene
from livescale.lab.bench.lines.stage_tokens import REPLICAS, TOKEN_STAGES_MAX, stage_tokens
from livescale.report.run.terminal import table

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StagesOptions:
    """Each policy `plays` times in turns, both with the same arrivals, which are others in each
    turn. The pools' run records come to `folder`, if there is one."""

    scene: StageScene = field(default_factory=StageScene)
    plays: int = 1
    seed: int = 0
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class StagesReport:
    """`plays` by policy. Tokens are those of all plays, and of a pool that computes."""

    scene: StageScene
    plays: dict[str, list[BothRuns]]
    computed_wrong: int
    computed_tokens: int

    @property
    def token_mismatches(self) -> int:
        """Wrong and missing ones."""
        return self.computed_wrong + sum(play.wrong_tokens for play in self._all)

    def as_json(self) -> dict[str, object]:
        real, simulated = self._world(_real), self._world(_simulated)
        off = {policy: _off(real[policy], simulated[policy]) for policy in POLICIES}
        return {
            RATIO: _ratio(real),
            "stages_grown": list(real[OWN].grown),
            "sim_deviation": max((its[GOODPUT] for its in off.values()), key=abs),
            "token_mismatches": self.token_mismatches,
            "policies": {policy: real[policy].as_json() for policy in POLICIES},
            "simulated": {
                RATIO: _ratio(simulated),
                "stages_grown": list(simulated[OWN].grown),
                "policies": {policy: simulated[policy].as_json() for policy in POLICIES},
            },
            "sim_deviations": {RATIO: _ratio(real) / _ratio(simulated) - 1, "policies": off},
            **self.scene.facts(),
            "tokens": self.computed_tokens + sum(play.tokens for play in self._all),
            "computed_tokens": self.computed_tokens,
            "plays": {policy: [play.as_json() for play in of] for policy, of in self.plays.items()},
        }

    def text(self) -> str:
        real, simulated = self._world(_real), self._world(_simulated)
        rows: list[tuple[object, ...]] = []
        for policy in POLICIES:
            off = _off(real[policy], simulated[policy])
            for name, figure in _FIGURES.items():
                values = figure(real[policy]), figure(simulated[policy])
                rows.append((f"{policy}: {name}", *map(_shown, values), f"{off[name]:+.1%}"))
            grown = [_grown_text(of[policy], self.scene.stages) for of in (real, simulated)]
            rows.append((f"{policy}: stages that grew", *grown, ""))
        ratios = _ratio(real), _ratio(simulated)
        rows.append((RATIO, *map(_shown, ratios), f"{ratios[0] / ratios[1] - 1:+.1%}"))
        rows.append(("token_mismatches", str(self.token_mismatches), "-", ""))
        others = max(play.others_share for play in self._all)
        return "\n".join(
            [
                table(("figure", "pool", "simulated", "deviation"), rows),
                f"stage {self.scene.slow_stage} is the slow one; other programs took {others:.0%}"
                " of the CPU time at most",
            ]
        )

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _all(self) -> list[BothRuns]:
        return [play for plays in self.plays.values() for play in plays]

    def _world(self, of: Callable[[BothRuns], StageRun]) -> dict[str, StageRun]:
        return {policy: together(map(of, plays)) for policy, plays in self.plays.items()}


_real, _simulated = attrgetter("real"), attrgetter("simulated")
RATIO, GOODPUT = "goodput_per_device_ratio_to_uniform", "good_per_device_s"
_FIGURES: dict[str, Callable[[StageRun], float]] = {
    GOODPUT: lambda run: run.good_per_device_s,
    "good": lambda run: run.good,
    "device_s": lambda run: run.device_s,
    "ttft_p50_s": lambda run: run.ttft_s(50),
    "ttft_p99_s": lambda run: run.ttft_s(99),
}


def run_stages(options: StagesOptions, say: Say) -> StagesReport:
    """Play everything. Raises BenchError."""
    scene = options.scene
    plays: dict[str, list[BothRuns]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory(prefix="livescale-stages-") as name:
        scratch = Path(name)
        folder = scratch if options.folder is None else options.folder
        folder.mkdir(parents=True, exist_ok=True)
        make_model(scratch / MODEL, scene.shape)
        for number in range(options.plays):
            rows = scene.rows(options.seed + number)
            for policy in POLICIES:
                record = folder / f"{policy}-{number + 1}.jsonl"
                plays[policy].append(play_both(scene, policy, rows, scratch / MODEL, record))
                real = plays[policy][-1].real
                say(
                    f"  {policy}, {number + 1} of {options.plays}: {real.good} of {real.requests}"
                    f" within the SLO, {real.device_s:.0f} s of devices"
                )
        stages = min(scene.stages, TOKEN_STAGES_MAX)
        say(f"  tokens: {stages} stages that compute, each from one instance to {REPLICAS}")
        wrong, tokens = stage_tokens(scratch, stages)
    return StagesReport(scene, plays, wrong, tokens)


# -- helpers, in the order used -------------------------------------------------------------------


def _ratio(runs: dict[str, StageRun]) -> float:
    return runs[OWN].good_per_device_s / runs[UNIFORM].good_per_device_s


def _off(real: StageRun, simulated: StageRun) -> dict[str, float]:
    """How much more there is in the pool, by figure."""
    return {name: figure(real) / figure(simulated) - 1 for name, figure in _FIGURES.items()}


def _shown(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _grown_text(run: StageRun, stages: int) -> str:
    """Such as "3 to 2": the stage, and how many instances it came to."""
    counts = {stage: most for stage, (most, _) in run.grown.items()}
    if len(counts) == stages and len({*counts.values()}) == 1:
        return f"all to {counts[0]}"
    return ", ".join(f"{stage} to {most}" for stage, most in counts.items()) or "none"
