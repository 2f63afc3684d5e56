"""`bench kv`: KV and parameters on the same links, BlitzScale's Figure 12 (§5.1).

A prefill instance gives KV to a decode instance without a pause; meanwhile a further prefill
instance is loaded, by the controller's plan and by one that takes no notice of KV. Afterwards an
instance changes its role. In a scene of its own layers compute longer than their KV travels. Every
figure is a ratio within one run, but for the mutation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.kv.kv_figures import KvPlay, read_play
from livescale.lab.bench.kv.kv_scene import KvScene, SecondTokenScene
from livescale.lab.bench.kv.kv_second_tokens import SecondTokens, read_second_tokens
from livescale.lab.bench.kv.kv_simulated import play_simulated
from livescale.report.run.terminal import table
from livescale.sim.base.config import EQUAL, SERVING_FIRST
from livescale.values.types import Role

PLANNED, INTERFERING = "planned", "interfering"
"""The controller's plan; the one that takes no notice of KV."""
SHARED = "_shared"
"""Behind a plan's name: KV does not go before parameters."""
_AIMS = {
    "kv_share_of_bandwidth": "0.90 at least",
    "load_share_of_bandwidth": "0.95 at least",
    "interfering_load_ratio": "1.3 to 2",
    "equal_shares_tbt_p99_ratio": "above 1",
    "unbound_tbt_p99_ratio": "",
    "mutation_ms": "10 at most",
    "mutation_first_request_ms": "",
    "mutation_bytes": "0",
    "decode_begins_ratio": "1 at most, emulated 1.2",
    "behind_decode_begins_ratio": "",
}


@dataclass(frozen=True, slots=True)
class KvRuns:
    """What was played in one world, by name of the plan; with SHARED behind that name links were
    shared in the world's other way, which gives the figure `shared_figure`. And the scene of second
    tokens; `behind` is the same with KV that follows its request, where that was played."""

    plays: Mapping[str, KvPlay]
    shared_figure: str
    ahead: SecondTokens
    behind: SecondTokens | None = None

    def figures(self) -> dict[str, float]:
        """By name; KV's share is the smaller one of both plans, a mutation's time the longest of
        all plays. What was not measured is absent."""
        planned, interfering = self.plays[PLANNED], self.plays[INTERFERING]
        found: dict[str, float | None] = {
            "kv_share_of_bandwidth": min(planned.kv_share, interfering.kv_share),
            "load_share_of_bandwidth": 1 / planned.load_ratio,
            "interfering_load_ratio": interfering.load_ratio,
            "mutation_ms": max(play.mutation_ns for play in self.plays.values()) / 1e6,
            "mutation_first_request_ms": _ms(planned.first_request_ns),
            "mutation_bytes": planned.mutation_bytes,
            "decode_begins_ratio": self.ahead.begins_ratio(100),
        }
        if self.behind is not None:
            found["behind_decode_begins_ratio"] = self.behind.begins_ratio(100)
        shared = self.plays.get(INTERFERING + SHARED)
        if shared is not None:
            found[self.shared_figure] = shared.tbt_p99_ns / interfering.tbt_p99_ns
        return {name: value for name in _AIMS if (value := found.get(name)) is not None}

    @property
    def requests(self) -> int:
        return sum(play.requests for play in self._all())

    @property
    def failed(self) -> int:
        return sum(play.failed for play in self._all())

    @property
    def second_tokens(self) -> dict[str, SecondTokens]:
        """By how KV goes."""
        found = {"ahead": self.ahead, "behind": self.behind}
        return {name: tokens for name, tokens in found.items() if tokens is not None}

    def as_json(self) -> dict[str, object]:
        plays = {name: play.as_json() for name, play in self.plays.items()}
        seconds = {name: tokens.as_json() for name, tokens in self.second_tokens.items()}
        own = {"requests": self.requests, "failed": self.failed}
        return {**self.figures(), **own, "plays": plays, "second_tokens": seconds}

    def _all(self) -> list[KvPlay | SecondTokens]:
        return [*self.plays.values(), *self.second_tokens.values()]


@dataclass(frozen=True, slots=True)
class KvReport:
    """Figures of both worlds; `emulated` is None where there were no emulated links, else
    `wrong_tokens` of its `tokens` were not those that must come."""

    scene: KvScene
    simulated: KvRuns
    emulated: KvRuns | None = None
    tokens: int = 0
    wrong_tokens: int = 0

    @property
    def is_good(self) -> bool:
        """No request failed, and every token is right."""
        runs = [runs for runs in (self.simulated, self.emulated) if runs is not None]
        return not self.wrong_tokens and not any(run.failed for run in runs)

    def difference_percent(self) -> dict[str, float]:
        """How much larger emulated figures are than simulated ones. Those of the mutation are left
        out: they are times of messages, and when the next request comes is chance."""
        if self.emulated is None:
            return {}
        found, other = self.simulated.figures(), self.emulated.figures()
        return {
            name: 100 * (other[name] / found[name] - 1)
            for name in found
            if name in other and not name.startswith("mutation")
        }

    def text(self) -> str:
        """A row for each figure, and one for each play."""
        found, differences = self.simulated.figures(), self.difference_percent()
        other = self.emulated.figures() if self.emulated is not None else {}
        rows = [
            [name, found.get(name), other.get(name), differences.get(name), aim]
            for name, aim in _AIMS.items()
            if name in found or name in other
        ]
        lines = [table(["figure", "simulated", "emulated", "difference %", "aim"], rows), ""]
        lines += [table(_PLAY_HEADER, self._play_rows()), ""]
        lines.append(table(_SECOND_HEADER, self._second_rows()))
        if self.emulated is not None:
            lines.append(
                f"\nemulated: {self.emulated.failed} of {self.emulated.requests} requests failed;"
                f" {self.wrong_tokens} of {self.tokens} tokens are wrong"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """The figures of the simulated world, and under its name each world's own."""
        scene = self.scene
        found: dict[str, object] = {
            **self.simulated.figures(),
            "kv_permille_of_link": scene.kv_permille,
            "link_bytes_per_s": scene.bytes_per_s,
            "model_bytes": scene.spec.size_bytes,
            "kv_bytes_per_prompt": scene.prompt_tokens * scene.spec.kv_bytes_per_token,
            "simulated": self.simulated.as_json(),
        }
        if self.emulated is None:
            return found
        checks = {"tokens": self.tokens, "token_mismatches": self.wrong_tokens}
        return found | {
            "emulated": {**self.emulated.as_json(), **checks},
            "difference_percent": self.difference_percent(),
        }

    def _worlds(self) -> dict[str, KvRuns]:
        worlds = {"simulated": self.simulated, "emulated": self.emulated}
        return {world: runs for world, runs in worlds.items() if runs is not None}

    def _play_rows(self) -> list[list[object]]:
        return [
            [
                *(world, name.replace("_", ", "), play.source.value),
                *(play.load_alone_ns / 1e9, play.load_beside_ns / 1e9, play.load_ratio),
                *(play.kv_alone_ns / 1e6, play.kv_beside_ns / 1e6, play.kv_samples),
                *(play.tbt_p99_alone_ns / 1e6, play.tbt_p99_ns / 1e6),
            ]
            for world, runs in self._worlds().items()
            for name, play in runs.plays.items()
        ]

    def _second_rows(self) -> list[list[object]]:
        return [
            [
                *(world, name, tokens.layer_ns / 1e6, tokens.layer_kv_ns / 1e6),
                *(tokens.run_ns / 1e6, *(tokens.begins_ratio(q) for q in (50, 90, 100))),
                len(tokens.gaps_ns),
            ]
            for world, runs in self._worlds().items()
            for name, tokens in runs.second_tokens.items()
        ]


_PLAY_HEADER = [
    *("world", "plan", "loads from", "alone s", "beside KV s", "ratio"),
    *("KV ms", "beside load ms", "KVs", "p99 TBT ms", "beside load ms"),
]
_SECOND_HEADER = [
    *("world", "KV goes", "layer ms", "its KV ms", "Run ms"),
    *("decode begins p50", "p90", "max", "requests"),
]


def run_simulated(scene: KvScene, say: Callable[[str], None]) -> KvRuns:
    """Both plans, with serving first and with equal shares; second tokens, with KV ahead of its
    request and behind it. Raises BenchError."""
    plays = {}
    for suffix, link_sharing in (("", SERVING_FIRST), (SHARED, EQUAL)):
        for name in (PLANNED, INTERFERING):
            say(f"simulated: {name} plan, {link_sharing} …")
            lines = play_simulated(scene, avoids_serving=name == PLANNED, link_sharing=link_sharing)
            plays[name + suffix] = checked_play(name, read_play(lines))
    say("simulated: second tokens …")
    short = SecondTokenScene.beside(scene)
    ahead, behind = (
        read_second_tokens(short, play_simulated(short, kv_ahead=kv_ahead))
        for kv_ahead in (True, False)
    )
    return KvRuns(plays, "equal_shares_tbt_p99_ratio", ahead, behind)


def _ms(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns / 1e6


def checked_play(name: str, play: KvPlay) -> KvPlay:
    """The play. Raises BenchError if the plan that is to interfere did not."""
    if name == INTERFERING and play.source is not Role.PREFILL:
        raise BenchError(f"the plan that is to interfere reads from the {play.source} instance")
    return play
