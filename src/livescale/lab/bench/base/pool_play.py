"""A load on a real pool, from its start to its end, and what an operator does meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.made_models import vocabulary_of
from livescale.lab.bench.base.token_checks import Output
from livescale.lab.client import replayer
from livescale.load.traces import TraceRow
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.record.record import AnyLine, RunLine
from livescale.values.units import NS_PER_S

_PATIENCE_S, _POLL_S = 300.0, 0.1
_DRAIN_NS = 300 * NS_PER_S

Act = Callable[[httpx.AsyncClient], Awaitable[object]]
"""What is waited for, or done, by the pool's own pages."""


@dataclass(frozen=True, slots=True)
class PoolPlay:
    """What the client saw. Of the machine's CPU time, `others_share` is what other programs took;
    pool and client used `cores_used`."""

    devices: list[Device]
    results: Sequence[replayer.ReplayResult]
    cores_used: float
    others_share: float

    @property
    def tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results)

    def wrong_tokens(self, judge: Callable[[Iterable[Output]], Iterable[int]]) -> int:
        """Tokens that are missing, and those that the judge finds wrong in each output."""
        missing = sum(result.output_tokens - len(result.token_ids) for result in self.results)
        return missing + sum(judge([(r.prompt_ids, r.token_ids) for r in self.results]))


async def _nothing(_client: httpx.AsyncClient) -> None:
    pass


class Acts(NamedTuple):
    """What is done before the load, beside it, and after it while the pool still runs."""

    begin: Act = _nothing
    beside: Act = _nothing
    end: Act = _nothing


async def play_pool(
    pool: Pool,
    model: str,
    rows: Sequence[TraceRow],
    acts: Acts,
    seed: int = 0,
) -> PoolPlay:
    """Start the pool, send the rows to the model, and stop the pool; the seed draws prompts. Raises
    BenchError and PoolFailed."""
    async with pool:
        await pool.ready()
        async with httpx.AsyncClient(
            base_url=pool.base_url, trust_env=False, timeout=_PATIENCE_S
        ) as client:
            await pool.or_failure(acts.begin(client))
            shares = CpuShares([os.getpid()])
            vocabulary = vocabulary_of(pool.models[0].manifest)
            load = replayer.replay(
                pool.base_url,
                model,
                rows,
                prompt_ids_for=replayer.prompts_from_seed(vocabulary, seed),
                drain_ns_max=_DRAIN_NS,
            )
            results, _ = await pool.or_failure(asyncio.gather(load, acts.beside(client)))
            # This process and its children are the client and the whole pool.
            used, others = shares.cores_used(), shares.others()
            await pool.or_failure(acts.end(client))
    return PoolPlay([seat.device for _, seat in pool.layout.seats], results, used, others)


def until_status(model: str, is_so: Callable[[dict[str, Any]], bool], what: str) -> Act:
    """Waits until the model's page says so. Raises BenchError."""

    async def wait(client: httpx.AsyncClient) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_so((await client.get(f"/admin/models/{model}")).json()):
            if time.monotonic() > deadline_s:
                raise BenchError(f"{what} did not serve within {_PATIENCE_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    return wait


def asking_for(model: str, replicas: int, after_ns: int) -> Act:
    """Asks for so many instances after that time, as an operator does. Raises BenchError."""

    async def ask(client: httpx.AsyncClient) -> None:
        await asyncio.sleep(after_ns / NS_PER_S)
        limits = {"min_replicas": replicas, "max_replicas": replicas}
        answer = await client.patch(f"/admin/models/{model}", json=limits)
        if not answer.is_success:
            raise BenchError(f"the pool refused other limits: {answer.text}")

    return ask


def told_controller(lines: Iterable[AnyLine]) -> ControllerConfig:
    """What the controller of a record was told."""
    return next(line.config for line in lines if isinstance(line, RunLine))
