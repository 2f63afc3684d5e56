"""`bench teams`: what teams of loading instances are worth (λScale §4.3), and what they cost.

A real pool of timed workers: two instances serve, prompts are queued, and six more are loaded at
once by the binomial pipeline; with teams and without, in turns. Each play is played in virtual
time, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from livescale.batching.live.live_batch import ANEW, MOVE
from livescale.control.together.teams import TEAM_STRATEGIES
from livescale.lab.bench.lines.team_figures import TeamPlay
from livescale.lab.bench.lines.team_play import BothPlays, PlayedScene, play_ways
from livescale.lab.bench.lines.team_scene import NO_TEAMS, TeamScene, TeamWay
from livescale.report.run.terminal import table

STRATEGIES = tuple(TEAM_STRATEGIES)
_ENDS = (MOVE, ANEW)

Say = Callable[[str], None]
Figure = Callable[[TeamPlay], float | None]


@dataclass(frozen=True, slots=True)
class TeamsOptions:
    """Each of `strategies`, and no teams, `plays` times in turns. Times as in TeamScene. With
    several `output_tokens` requests decode when teams end, and each strategy is played both ways:
    their KV moves, or is computed anew. The pools' run records come to `folder`, if there is one.
    """

    strategies: tuple[str, ...] = STRATEGIES
    plays: int = 1
    load_s: float = 10.0
    run_ms: int = 200
    output_tokens: int = 1
    folder: Path | None = None

    def ways(self) -> dict[str, TeamWay]:
        """By name; NO_TEAMS is the last one."""
        none = {NO_TEAMS: TeamWay(NO_TEAMS)}
        if self.output_tokens == 1:
            return {name: TeamWay(name) for name in self.strategies} | none
        both = [(name, end) for name in self.strategies for end in _ENDS]
        return {f"{name}-{end}": TeamWay(name, end) for name, end in both} | none


class TeamsReport(PlayedScene):
    """By strategy; NO_TEAMS among them."""

    __slots__ = ()

    def as_json(self) -> dict[str, object]:
        """The first strategy's figures stand at the top."""
        first = next(name for name in self.plays if name != NO_TEAMS)
        figures = self._figures(first)
        return {
            **{name: figures[name] for name in _HEADLINE if name in figures},
            "token_mismatches": self.token_mismatches,
            **self._pauses(first),
            **figures,
            "teams": first,
            "strategies": {name: self._figures(name) for name in self.plays if name != NO_TEAMS},
            **self.facts(),
        }

    def text(self) -> str:
        rows = []
        for name in self.plays:
            if name == NO_TEAMS:
                continue
            real = self._figures(name)
            simulated = real["simulated"]
            assert isinstance(simulated, dict)
            rows += [
                (f"{name}: {key}", _shown(real.get(key)), _shown(simulated.get(key)))
                for key in (*_FIGURES, _SLOWDOWN)
                if self.scene.output_tokens > 1 or key not in _DECODING
            ]
        rows.append(("token_mismatches", str(self.token_mismatches), "-"))
        return table(("figure", "pool", "simulated"), rows)

    # -- helpers --------------------------------------------------------------------------------

    def _pauses(self, first: str) -> dict[str, object]:
        """Of the strategy that is played first, both ways."""
        teams, _, end = first.rpartition("-")
        if end not in _ENDS:
            return {}
        found = {end: self._figures(f"{teams}-{end}") for end in _ENDS}
        pauses = {
            end: {q: figures.get(f"switch_pause_{q}_ms") for q in ("p50", "max")}
            for end, figures in found.items()
        }
        return {"switch_pause_ms": pauses}

    def _figures(self, name: str) -> dict[str, object]:
        """Medians over the plays; one that was never measured is absent."""
        real = self._world(name, lambda play: play.real)
        simulated = self._world(name, lambda play: play.simulated)
        deviation = {
            key: real[key] / simulated[key] - 1 for key in real if simulated.get(key) is not None
        }
        return {**real, "simulated": simulated, "sim_deviation": deviation}

    def _world(self, name: str, of: Callable[[BothPlays], TeamPlay]) -> dict[str, float]:
        with_teams = [of(play) for play in self.plays[name]]
        without = [of(play) for play in self.plays[NO_TEAMS]]
        found = {}
        for key, figure in _FIGURES.items():
            values = [value for play in with_teams if (value := figure(play)) is not None]
            if values:
                found[key] = median(values)
        load_s = median(play.load_s for play in with_teams)
        found[_SLOWDOWN] = load_s / median(play.load_s for play in without)
        return found


_SLOWDOWN = "multicast_slowdown"
_HEADLINE = ("team_throughput_ratio", "first_token_ratio_to_load", _SLOWDOWN)
_FIGURES: dict[str, Figure] = {
    "team_throughput_ratio": lambda play: play.throughput_ratio,
    "team_throughput_limit": lambda play: play.throughput_limit,
    "first_token_ratio_to_load": lambda play: play.first_token_ratio,
    "team_formed_ratio_to_load": lambda play: play.formed_ratio,
    "team_decode_ratio": lambda play: play.decode_ratio,
    "switch_pause_p50_ms": lambda play: median(play.pauses_ms) if play.pauses_ms else None,
    "switch_pause_max_ms": lambda play: max(play.pauses_ms, default=None),
}
_DECODING = ("team_decode_ratio", "switch_pause_p50_ms", "switch_pause_max_ms")
"""Not of prompts with one token to answer."""


def run_teams(options: TeamsOptions, say: Say) -> TeamsReport:
    """Play everything. Raises BenchError."""

    def scene_of(size_bytes: int) -> TeamScene:
        times = options.load_s, options.run_ms
        return TeamScene(size_bytes, *times, output_tokens=options.output_tokens)

    played = play_ways(options.ways(), options.plays, scene_of, say, folder=options.folder)
    return TeamsReport(*played)


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-"
