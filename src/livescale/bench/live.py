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

from livescale.batching.live_order import LIVE_ORDERS, ZIGZAG
from livescale.bench.errors import BenchError
from livescale.bench.live_figures import (
    BothWorlds,
    finished_at_half_load,
    half_load_ratio,
    mean_to_optimum,
    order_row,
    throughput_curve,
)
from livescale.bench.live_fleet import AskedRequest, PairFleet
from livescale.bench.live_models import (
    LINK_BYTES_PER_S_MAX,
    PairSetting,
    cpu_setting,
    make_live_model,
    timed_setting,
)
from livescale.bench.live_report import LiveReport
from livescale.bench.live_runs import ALONE, STOP, Burst, PairPlay, play_burst, time_prompt
from livescale.bench.live_tokens import count_mismatches
from livescale.bench.live_twin import TwinPlay, simulate
from livescale.bench.machine import CpuShares
from livescale.slo import percentile
from livescale.types import Manifest

KINDS = ("timed", "cpu")
ORDERS = tuple(LIVE_ORDERS)

# Enough that the target is never without a batch before most of the model is there.
_SATURATING = 2
_MEASURED_TOKENS = (384, 1152)
_DECODED_TOKENS = 4

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LiveBenchOptions:
    """What is played: `batches` batches on a model of `layers` decoder layers.

    Of every kind (in `plays`: how often) at every ratio of load time to compute time. What is
    asked for once is played at `headline_ratio`. Workers that compute get batches that fit the
    ratio, or of `cpu_tokens`, whatever ratio that is. `decodes` requests decode on the source
    where their TBT is looked at.
    """

    plays: dict[str, int]
    ratios: tuple[int, ...] = (2, 6, 12)
    headline_ratio: int = 6
    layers: int = 16
    batches: int = 8
    layer_ns: int = 40_000_000
    cpu_tokens: int | None = None
    decodes: int = 4


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
                await self._run_kind(kind, plays, Path(name))
        if options.headline_ratio in options.ratios:
            self.report.mean_to_optimum = mean_to_optimum(
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
                await self._run_orders(fleet, ratio, plays)
                if ratio == options.headline_ratio:
                    await self._run_once(fleet)
                    await self._run_decodes(fleet)
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

    async def _run_orders(self, fleet: PairFleet, ratio: int, plays: int) -> None:
        """Every order, in turns."""
        played: dict[str, list[PairPlay]] = {order: [] for order in ORDERS}
        shares = CpuShares([os.getpid()])
        for _ in range(plays):
            for order in ORDERS:
                burst = Burst(order, self.options.batches)
                played[order].append(await play_burst(fleet, burst))
        self.report.others_share.append(shares.others())
        for order in ORDERS:
            self._take(fleet.setting, ratio, played[order])
        self.say(f"  {fleet.setting.kind}, ratio {ratio}: {plays} x {len(ORDERS)} orders")

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
        found.half_load = half_load_ratio(full, twin, alone, layers)
        found.finished_at_half_load = finished_at_half_load(full, alone, layers)
        found.throughput = throughput_curve(full, twin, alone, layers)
        found.set_first_help(early[0], setting)
        self.say(f"  {setting.kind}: throughput, and queues from the start of the load")

    async def _run_decodes(self, fleet: PairFleet) -> None:
        """The burst while the source decodes, with and without help."""
        gaps: dict[str, BothWorlds] = {}
        options, setting = self.options, fleet.setting
        for order in (ALONE, ZIGZAG.name):
            burst = Burst(order, options.batches, _DECODED_TOKENS, decodes=options.decodes)
            play = await play_burst(fleet, burst)
            (twin,) = self._take(setting, options.headline_ratio, [play], adds_row=False)
            if not play.gaps_ns or not twin.gaps_ns:
                raise BenchError(f"nothing decoded on the source during {order}")
            gaps[order] = BothWorlds(
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
            self.report.rows.append(order_row(setting, ratio, plays, twins))
        return twins
