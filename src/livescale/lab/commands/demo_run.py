"""One run of a demo: a pool of its own, a load through HTTP, and every token checked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.config.slo import percentile
from livescale.lab.client import replayer
from livescale.lab.commands.scenario import Played, TokenChecks, checked_tokens
from livescale.load.traces import TraceRow
from livescale.report.run.terminal import seconds
from livescale.runtime.supervisor.supervisor import Pool, describe
from livescale.telemetry.record.record import write_record
from livescale.telemetry.record.record_parts import RecordError
from livescale.values.types import Role
from livescale.values.units import NS_PER_S

_DRAIN_S = 120
_PROGRESS_S = 1.0
_Instances = dict[tuple[str, str], int]
"""How many instances there are by role and state, where there are any."""


class DemoRun:
    """One pool with one model, and the load that is played on it."""

    def __init__(self, config: PoolConfig) -> None:
        assert config.record is not None
        try:
            # A run of its own, also in the folder of an earlier one.
            write_record(Path(config.record), [])
        except RecordError as error:
            raise UserError(f"record {error}") from error
        self.config = config
        self._pool = Pool(config)
        self._manifest = self._pool.models[0].manifest
        self._vocabulary = msgspec.json.decode(self._manifest.config_json)["vocab_size"]
        self._started_ns = 0
        self._sent_ns: list[int] = []
        self._done = 0
        self._failed = 0
        self._ttfts_ns: list[int] = []

    @property
    def request_tokens_max(self) -> int:
        return self._pool.models[0].request_tokens_max

    @property
    def base_url(self) -> str:
        return self._pool.base_url

    def describe(self) -> str:
        """The model, the links and the pool."""
        lines = [f"model: {line}" for line in describe(self._pool.models)]
        rate = self.config.uplink_bytes_per_s
        if rate is not None:
            lines.append(
                f"links: capped at {rate / 1e6:.1f} MB/s per worker and direction, so that a load"
                f" takes {self._manifest.size_bytes / rate:.2f} s"
            )
        return "\n".join([*lines, f"pool: {self._pool.layout}, starting …"])

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[None]:
        """The pool, ready; drained and gone afterwards. Raises PoolFailed."""
        async with self._pool:
            await self._pool.ready()
            yield

    async def play(self, rows: Sequence[TraceRow], *, seed: int) -> Played:
        """Send the rows when they are due, with prompts drawn from `seed`; print progress."""
        self._started_ns = time.monotonic_ns()
        self._sent_ns = [row.arrival_ns for row in rows]
        self._done = self._failed = 0
        self._ttfts_ns = []
        progress = asyncio.create_task(self._show_progress())
        load = replayer.replay(
            self._pool.base_url,
            self._pool.models[0].spec.name,
            rows,
            prompt_ids_for=replayer.prompts_from_seed(self._vocabulary, seed),
            on_progress=self._count,
            drain_ns_max=_DRAIN_S * NS_PER_S,
        )
        try:
            results = await self._pool.or_failure(load)
        finally:
            progress.cancel()
        late_ns = replayer.lateness_ns(results, 100)
        if late_ns is not None:
            print(f"requests left at most {late_ns / 1e6:.0f} ms after they were due")
        return Played(results, self._started_ns, Path(str(self.config.record)))

    def check(self, results: Sequence[replayer.ReplayResult]) -> TokenChecks:
        """Hold every token against one forward of the model, as transformers computes it; those
        that timed devices make up against an executor that nothing disturbs."""
        return checked_tokens(Path(self.config.models[0].path), results, self.config.device)

    async def until_serving(self, limit_s: float) -> None:
        """Give the pool time to have its least size: ready it is with one instance."""
        least = self.config.models[0].instances_min

        def has_all(counts: _Instances) -> bool:
            return sum(count for (_, state), count in counts.items() if state == "serving") >= least

        await self._until(has_all, limit_s)

    async def until_small(self, limit_s: float) -> None:
        """Give the pool time to shrink to its least size."""
        least = self.config.models[0].instances_min
        await self._until(lambda counts: sum(counts.values()) <= least, limit_s)

    async def until_loaded(self, limit_s: float) -> None:
        """Give loads that are under way time to end."""
        under_way = ("starting", "loading", "live")
        await self._until(lambda counts: not any(at in under_way for _, at in counts), limit_s)

    async def _until(self, is_so: Callable[[_Instances], bool], limit_s: float) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            deadline = time.monotonic() + limit_s
            while not is_so(await self._instances(client)) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)

    # -- helpers ------------------------------------------------------------------------------

    def _count(self, result: replayer.ReplayResult) -> None:
        self._done += 1
        self._failed += not result.ok
        ttft_ns = result.timing().ttft_ns
        if ttft_ns is not None:
            self._ttfts_ns.append(ttft_ns)

    async def _show_progress(self) -> None:
        """A line a second: time, instances, requests, and TTFT of those that are done."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                await asyncio.sleep(_PROGRESS_S)
                counts = await self._instances(client)
                shown = ", ".join(
                    f"{count} {state}" if role == Role.UNIFIED else f"{count} {role} {state}"
                    for (role, state), count in counts.items()
                )
                elapsed_ns = time.monotonic_ns() - self._started_ns
                due = sum(1 for at_ns in self._sent_ns if at_ns < elapsed_ns)
                slowest = percentile(self._ttfts_ns, 99) / NS_PER_S if self._ttfts_ns else None
                print(
                    f"  {elapsed_ns / NS_PER_S:5.1f} s  instances: {shown or 'none'};  requests:"
                    f" {due} sent, {self._done} done, {self._failed} failed;"
                    f"  TTFT p99: {seconds(slowest)}",
                    flush=True,
                )

    async def _instances(self, client: httpx.AsyncClient) -> _Instances:
        """As /metrics tells; nothing while the gateway is busy or away."""
        try:
            text = (await client.get(f"{self._pool.base_url}/metrics")).text
        except httpx.HTTPError:
            return {}
        counts: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name == "livescale_instances" else ():
                counts[sample.labels["role"], sample.labels["state"]] += int(sample.value)
        return +counts
