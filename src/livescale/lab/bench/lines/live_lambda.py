"""`bench live --order lambda`: the chain with ZigZag, λPipe's teams, both, and what the controller
takes, on real workers.

BlitzScale §5.2 beside λScale §4.2 to §4.4, in the scene of `bench teams`: two instances serve,
prompts are queued, and six more are loaded at once. Each play is played in virtual time, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, median

from livescale.config.slo import percentile
from livescale.lab.bench.lines.team_figures import TeamPlay
from livescale.lab.bench.lines.team_play import BothPlays, PlayedScene, play_ways
from livescale.lab.bench.lines.team_scene import NO_TEAMS, TeamScene, TeamWay
from livescale.report.run.terminal import table
from livescale.values.units import NS_PER_S

_STOP = "stop"
WAYS = {
    _STOP: TeamWay(NO_TEAMS, multicast="chain"),
    "chain": TeamWay(NO_TEAMS, multicast="chain", live_order="zigzag"),
    "lambda": TeamWay("pairs"),
    "both": TeamWay("pairs", live_order="zigzag"),
    "auto": TeamWay("pairs", multicast="auto", live_order="zigzag"),
}
"""The first one is what the others are compared with."""

Say = Callable[[str], None]
_World = Callable[[BothPlays], TeamPlay]
_real, _simulated = attrgetter("real"), attrgetter("simulated")


@dataclass(frozen=True, slots=True)
class LambdaOptions:
    """Each of WAYS `plays` times, in turns. Times as in TeamScene."""

    plays: int = 1
    load_s: float = 10.0
    run_ms: int = 200


class LambdaReport(PlayedScene):
    """By way."""

    __slots__ = ()

    def as_json(self) -> dict[str, object]:
        return {
            "order": "lambda",
            "ways": {
                name: {**self._figures(name, _real), "simulated": self._figures(name, _simulated)}
                for name in self.plays
            },
            "token_mismatches": self.token_mismatches,
            "others_share": [play.others_share for plays in self.plays.values() for play in plays],
            **self.facts(),
        }

    def text(self) -> str:
        """Shares of stop-the-world on the chain, and of the load's time; simulated in brackets."""
        rows = []
        for name in self.plays:
            real, simulated = self._figures(name, _real), self._figures(name, _simulated)
            cells = [f"{real[key]:.3f} ({simulated[key]:.3f})" for key in _SHOWN]
            rows.append([name, *cells])
        worst = max(play.others_share for plays in self.plays.values() for play in plays)
        return "\n".join(
            [
                table(("way", *_SHOWN.values()), rows),
                f"{self.token_mismatches} wrong tokens",
                f"other programs took up to {worst:.0%} of the CPU time",
            ]
        )

    # -- helpers --------------------------------------------------------------------------------

    def _figures(self, name: str, of: _World) -> dict[str, float]:
        """Medians over the plays."""
        own, stop = self._times(name, of), self._times(_STOP, of)
        ratios = {
            f"{key.removesuffix('_s')}_ratio_to_stop": own[key] / stop[key]
            for key in ("ttft_mean_s", "ttft_p99_s", "load_s")
        }
        helped = [play.helped_ratio for play in map(of, self.plays[name])]
        known = [ratio for ratio in helped if ratio is not None]
        return {**ratios, "first_new_token_ratio_to_load": median(known), **own}

    def _times(self, name: str, of: _World) -> dict[str, float]:
        plays = [of(play) for play in self.plays[name]]
        return {
            "ttft_mean_s": median(fmean(play.ttft_ns) for play in plays) / NS_PER_S,
            "ttft_p99_s": median(percentile(play.ttft_ns, 99) for play in plays) / NS_PER_S,
            "load_s": median(play.load_s for play in plays),
        }


_SHOWN = {
    "ttft_mean_ratio_to_stop": "mean TTFT",
    "ttft_p99_ratio_to_stop": "p99 TTFT",
    "first_new_token_ratio_to_load": "first new token",
    "load_ratio_to_stop": "load",
    "load_s": "load s",
}


def run_lambda(options: LambdaOptions, say: Say) -> LambdaReport:
    """Play everything. Raises BenchError."""
    return LambdaReport(
        *play_ways(
            WAYS,
            options.plays,
            lambda size_bytes: TeamScene(size_bytes, options.load_s, options.run_ms),
            say,
            needs_queue=False,
        )
    )
