"""`bench live`: what a loading instance is worth before it is loaded, by live order.

Two worker processes, a source and a target, joined by links of at most 300 Mbit/s, once with
executors that wait and once with two that compute. The driver orders what a controller would and
asks what a gateway would. Each burst is played in virtual time, too.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from livescale.batching.contract.live_order import LIVE_ORDERS, ZIGZAG
from livescale.config.slo import percentile
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.token_checks import wrong_greedy_tokens, wrong_timed_tokens
from livescale.lab.bench.live import play_figures
from livescale.lab.bench.live.live_fleet import AskedRequest, PairFleet
from livescale.lab.bench.live.live_models import (
    LINK_BYTES_PER_S_MAX,
    PairSetting,
    cpu_setting,
    linked_setting,
    make_live_model,
    timed_setting,
)
from livescale.lab.bench.live.live_report import LiveReport
from livescale.lab.bench.live.live_runs import ALONE, STOP, Burst, PairPlay, play_burst, time_prompt
from livescale.lab.bench.live.live_twin import TwinPlay, simulate
from livescale.values.types import Manifest

KINDS = ("timed", "cpu")
ORDERS = tuple(LIVE_ORDERS)

# Enough that the target is never without a batch before most of the model is there.
_SATURATING = 2
_MEASURED_TOKENS = (384, 1152)
_DECODED_TOKENS = 4

# As in the demo: of what the source computes in the time of a load, and no more than that many.
_LINKED_WORK = 1.2
_LINKED_BATCHES_MIN, _LINKED_BATCHES_MAX = 8, 240

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LinkedOptions:
    """The demo's burst, prompts of `prompt_tokens` and short answers, on links of this rate: rows
    and KV weigh there."""

    link_bytes_per_s: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class LiveBenchOptions:
    """What is played: `batches` batches on a model of `layers` decoder layers.

    Of every kind (in `plays`: how often) at every ratio of load time to compute time. What is
    asked for once is played at `headline_ratio`, and where only some `orders` are played not at
    all. Workers that compute get batches that fit the
    ratio, or of `cpu_tokens`, whatever ratio that is. `decodes` requests decode on the source
    where their TBT is looked at. With `linked` only that burst is played, by ZigZag and by
    stop-the-world.
    """

    plays: dict[str, int]
    ratios: tuple[int, ...] = (2, 6, 12)
    headline_ratio: int = 6
    layers: int = 16
    batches: int = 8
    layer_ns: int = 40_000_000
    cpu_tokens: int | None = None
    decodes: int = 4
    linked: LinkedOptions | None = None
    orders: tuple[str, ...] = ORDERS

    @property
    def is_whole(self) -> bool:
        """What is measured once belongs to it, too."""
        return self.orders == ORDERS


def run_live(options: LiveBenchOptions, say: Say) -> LiveReport:
    """Play everything. Raises BenchError."""
    report = LiveReport(options.layers, options.batches, options.headline_ratio)
    return asyncio.run(_LiveBench(options, say, report).run())


@dataclass(slots=True)
class _LiveBench:
    options: LiveBenchOptions
    say: Say
    report: LiveReport
    #: of the present kind of workers, to be judged when nothing is measured any more
    asked: list[AskedRequest] = field(default_factory=list)

    async def run(self) -> LiveReport:
        options = self.options
        for kind, plays in options.plays.items():
            with tempfile.TemporaryDirectory(prefix="livescale-live-") as name:
                if options.linked is not None:
                    await self._run_linked(kind, plays, options.linked, Path(name))
                else:
                    await self._run_kind(kind, plays, Path(name))
        has_headline = options.is_whole and options.headline_ratio in options.ratios
        if options.linked is None and has_headline:
            self.report.mean_to_optimum = play_figures.mean_to_optimum(
                options.layers, options.batches, options.headline_ratio
            )
        return self.report

    async def _run_kind(self, kind: str, plays: int, scratch: Path) -> None:
        options = self.options
        directory, manifest = make_live_model(scratch, kind, options.layers)
        measured: Sequence[tuple[int, int]] = ()
        if kind == "cpu" and options.cpu_tokens is None:
            measured = await self._measured(directory, manifest, scratch)
        for ratio in options.ratios:
            if kind == "timed":
                setting = timed_setting(directory, manifest, ratio, options.layer_ns)
            elif options.cpu_tokens is not None:
                rate = LINK_BYTES_PER_S_MAX
                setting = PairSetting(kind, directory, manifest, rate, options.cpu_tokens)
            else:
                setting = cpu_setting(directory, manifest, ratio, measured)
            async with PairFleet(setting, scratch, pinned=kind == "cpu") as fleet:
                bursts = [Burst(order, options.batches) for order in options.orders]
                await self._run_bursts(fleet, ratio, plays, bursts)
                if ratio == options.headline_ratio and options.is_whole:
                    await self._run_once(fleet)
                    await self._run_decodes(fleet)
        self._judge_tokens(setting)

    async def _run_linked(
        self, kind: str, plays: int, linked: LinkedOptions, scratch: Path
    ) -> None:
        """A burst that is more work than the source alone has time for while the target loads."""
        setting = linked_setting(
            scratch, kind, linked.link_bytes_per_s, tokens=linked.prompt_tokens
        )
        async with PairFleet(setting, scratch, pinned=kind == "cpu") as fleet:
            await time_prompt(fleet, setting.batch_tokens)  # the first one is slow
            batch_ns = setting.decoder_layers * await time_prompt(fleet, setting.batch_tokens)
            batches = round(_LINKED_WORK * setting.load_ns / batch_ns)
            batches = min(max(batches, _LINKED_BATCHES_MIN), _LINKED_BATCHES_MAX)
            orders = (ZIGZAG.name, STOP)
            bursts = [Burst(order, batches, _DECODED_TOKENS) for order in orders]
            ratio = setting.layer_load_ns * setting.decoder_layers // batch_ns
            played = await self._run_bursts(fleet, ratio, plays, bursts)
        shares = [play_figures.source_idle_share(play) for play in played[ZIGZAG.name]]
        self.report.of_kind(kind).source_idle_shares = shares
        self._judge_tokens(setting)

    def _judge_tokens(self, setting: PairSetting) -> None:
        self.report.token_mismatches += count_mismatches(setting, self.asked)
        self.report.tokens += sum(len(asked.token_ids) for asked in self.asked)
        self.asked.clear()

    async def _measured(
        self, directory: Path, manifest: Manifest, scratch: Path
    ) -> list[tuple[int, int]]:
        """What a layer takes on this machine, for prompts of two lengths."""
        setting = PairSetting("cpu", directory, manifest, 1 << 40, max(_MEASURED_TOKENS))
        async with PairFleet(setting, scratch, pinned=True) as fleet:
            for tokens in _MEASURED_TOKENS:
                await time_prompt(fleet, tokens)  # the first one is slow
            return [(tokens, await time_prompt(fleet, tokens)) for tokens in _MEASURED_TOKENS]

    async def _run_bursts(
        self, fleet: PairFleet, ratio: int, plays: int, bursts: Sequence[Burst]
    ) -> dict[str, list[PairPlay]]:
        """One burst of every order, in turns. Returns the plays of each order."""
        played: dict[str, list[PairPlay]] = {burst.order: [] for burst in bursts}
        shares = CpuShares([os.getpid()])
        for _ in range(plays):
            for burst in bursts:
                played[burst.order].append(await play_burst(fleet, burst))
        self.report.others_share.append(shares.others())
        for burst in bursts:
            self._take(fleet.setting, ratio, played[burst.order])
        self.say(f"  {fleet.setting.kind}, ratio {ratio}: {plays} x {len(bursts)} orders")
        return played

    async def _run_once(self, fleet: PairFleet) -> None:
        """A queue that is long enough for throughput, and one that waits while loading begins."""
        options, setting = self.options, fleet.setting
        alone = await play_burst(fleet, Burst(ALONE, options.batches))
        full = await play_burst(fleet, Burst(ZIGZAG.name, _SATURATING * options.batches))
        early = [
            await play_burst(fleet, Burst(order, options.batches, from_start=True))
            for order in (ZIGZAG.name, STOP)
        ]
        (twin,) = self._take(setting, options.headline_ratio, [full], adds_row=False)
        for play in (alone, *early):
            self._take(setting, options.headline_ratio, [play])
        layers = setting.decoder_layers
        found = self.report.of_kind(setting.kind)
        found.half_load = play_figures.half_load_ratio(full, twin, alone, layers)
        found.finished_at_half_load = play_figures.finished_at_half_load(full, alone, layers)
        found.throughput = play_figures.throughput_curve(full, twin, alone, layers)
        found.set_first_help(early[0], setting)
        self.say(f"  {setting.kind}: throughput, and queues from the start of the load")

    async def _run_decodes(self, fleet: PairFleet) -> None:
        """The burst while the source decodes, with and without help."""
        gaps: dict[str, play_figures.BothWorlds] = {}
        options, setting = self.options, fleet.setting
        for order in (ALONE, ZIGZAG.name):
            burst = Burst(order, options.batches, _DECODED_TOKENS, decodes=options.decodes)
            play = await play_burst(fleet, burst)
            (twin,) = self._take(setting, options.headline_ratio, [play], adds_row=False)
            if not play.gaps_ns or not twin.gaps_ns:
                raise BenchError(f"nothing decoded on the source during {order}")
            gaps[order] = play_figures.BothWorlds(
                percentile(play.gaps_ns, 99) / 1e9, percentile(twin.gaps_ns, 99) / 1e9
            )
        self.report.of_kind(setting.kind).tbt_p99_s = gaps
        self.say(f"  {setting.kind}: {options.decodes} decodes on the source")

    def _take(
        self, setting: PairSetting, ratio: int, plays: Sequence[PairPlay], *, adds_row: bool = True
    ) -> list[TwinPlay]:
        """Simulate equal plays, and keep their row and their tokens."""
        self.asked += [asked for play in plays for asked in (*play.requests, *play.decodes)]
        twins = [simulate(play, setting) for play in plays]
        if adds_row:
            self.report.rows.append(play_figures.order_row(setting, ratio, plays, twins))
        return twins


def count_mismatches(setting: PairSetting, asked: Sequence[AskedRequest]) -> int:
    """Wrong tokens, tokens that are missing, and tokens that came twice or from the wrong worker.

    `token_checks` says what is right.
    """
    found = sum(request.strays for request in asked)
    # A request that was cancelled has as many as it has.
    found += sum(
        request.output_tokens - len(request.token_ids)
        for request in asked
        if not request.is_cancelled
    )
    outputs = [(request.prompt_ids, request.token_ids) for request in asked]
    if setting.kind == "timed":
        return found + sum(wrong_timed_tokens(setting.manifest, outputs))
    return found + sum(wrong_greedy_tokens(setting.directory, outputs))
