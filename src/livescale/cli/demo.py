"""`livescale demo`: a burst meets a pool of three warm workers; watch it scale 1 -> 3 -> 1."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from livescale.cli.errors import UserError
from livescale.cli.loads import Load, add_load_arguments, choose_load, write_json
from livescale.client.replayer import (
    ReplayLimits,
    ReplayResult,
    lateness,
    prompts_from_seed,
    replay,
)
from livescale.config import PoolConfig, add_flags, given_flags, load_config
from livescale.engine.errors import ModelError
from livescale.engine.make import make_model
from livescale.report.run_report import RunReport
from livescale.report.summary import summarize
from livescale.runtime.supervisor import Pool, PoolFailed, describe
from livescale.settings import ConfigError
from livescale.slo import parse_slo
from livescale.telemetry.record import read_record, write_record
from livescale.telemetry.timeline import with_client_times
from livescale.traces import TraceError, clip

_NS_PER_S = 1_000_000_000
_PRESET = "medium"
# How long the pool may take to shrink again and a request to come back after the last arrival.
_SHRINK_S = 30.0
_DRAIN_S = 120
_PROGRESS_S = 5.0
# Where lengths must be clipped, this part of the model's limit is for the output.
_OUTPUT_PART = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=Path("models/demo-100mb"), help="directory")
    add_load_arguments(parser, trace=None, seconds=60, divide_lengths=16)
    parser.add_argument("--load-seconds", type=float, default=1.0, help="time that a load takes")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing failed, every token is right and the pool came back to one instance."""
    try:
        if arguments.load_seconds <= 0:
            raise UserError("--load-seconds must be positive")
        load = choose_load(arguments)
        _make_model_once(arguments.model)
        config = _choose_config(arguments, load)
        outcome = asyncio.run(_Demo(arguments, config, load).play())
    except (ConfigError, ModelError, PoolFailed, TraceError) as error:
        raise UserError(str(error)) from error
    print()
    print(outcome.text())
    if arguments.json is not None:
        write_json(arguments.json, outcome.as_json())
    return 0 if outcome.is_good else 1


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A run of the demo, judged."""

    report: RunReport
    tokens: int
    token_mismatches: int
    near_ties: int
    record: str

    @property
    def is_good(self) -> bool:
        is_small_again = self.report.instances[-1][1] == 1
        return self.report.summary.failed == 0 and self.token_mismatches == 0 and is_small_again

    def as_json(self) -> dict[str, object]:
        return {
            **self.report.as_json(),
            "tokens": self.tokens,
            "token_mismatches": self.token_mismatches,
            "near_ties": self.near_ties,
            "record": self.record,
        }

    def text(self) -> str:
        return (
            f"{self.report.text()}\n"
            f"tokens    {self.tokens} checked against transformers, wrong:"
            f" {self.token_mismatches} (near ties: {self.near_ties})\n"
            f"record    {self.record} (check it with: livescale replay {self.record})"
        )


# -- what is played -------------------------------------------------------------------------------


def _make_model_once(directory: Path) -> None:
    if not directory.exists():
        print(f"making a model of about 100 MB in {directory} …", flush=True)
        make_model(directory, _PRESET)


def _choose_config(arguments: argparse.Namespace, load: Load) -> PoolConfig:
    """The demo's settings, where the user did not choose others."""
    size_bytes = sum(file.stat().st_size for file in arguments.model.glob("*.safetensors"))
    rate = max(1 << 20, int(size_bytes / arguments.load_seconds))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    chosen: dict[str, object] = {
        "port": 0,
        "hosts": 3,
        "uplink_bytes_per_s": rate,
        "downlink_bytes_per_s": rate,
        "queue_requests_max": len(load.rows) + 1,
        "record": f"runs/demo-{stamp}.jsonl",
    }
    given = given_flags(arguments)
    return load_config(None, [str(arguments.model)], os.environ, {**chosen, **given})


# -- playing it -----------------------------------------------------------------------------------


class _Demo:
    """One run: pool, replay, drain, check."""

    def __init__(self, arguments: argparse.Namespace, config: PoolConfig, load: Load) -> None:
        self._arguments = arguments
        self._config = config
        self._load = load
        self._started_ns = 0
        self._done = 0
        self._failed = 0

    async def play(self) -> _Outcome:
        config = self._config
        pool = Pool(config)
        for line in describe(pool.models):
            print(f"model: {line}")
        if config.uplink_bytes_per_s is not None:
            load_s = pool.models[0].manifest.size_bytes / config.uplink_bytes_per_s
            print(
                f"links: capped at {config.uplink_bytes_per_s / 1e6:.1f} MB/s per worker and"
                f" direction, so that a load takes {load_s:.2f} s"
            )
        print(f"pool: {pool.site}, starting …", flush=True)
        vocabulary = msgspec.json.decode(pool.models[0].manifest.config_json)["vocab_size"]
        self._clip(pool.models[0].request_tokens_max)
        async with pool:
            await pool.ready()
            print(f"ready: {pool.base_url}/v1; replaying {self._arguments.seconds} s", flush=True)
            results = await self._replay(pool, vocabulary)
            await self._until_small(pool)
        print("checking every token against transformers …", flush=True)
        return self._judge(results)

    def _clip(self, request_tokens_max: int) -> None:
        """Shorten requests that the model cannot take, and say how many."""
        output_max = request_tokens_max // _OUTPUT_PART
        rows, clipped = clip(self._load.rows, request_tokens_max - output_max, output_max)
        if clipped:
            print(f"{clipped} requests were longer than the model's limit and are clipped to it")
            self._load = Load(self._load.name, rows)

    async def _replay(self, pool: Pool, vocabulary: int) -> list[ReplayResult]:
        self._started_ns = time.monotonic_ns()
        progress = asyncio.create_task(self._show_progress(pool))
        results: list[ReplayResult] = []

        async def play() -> None:
            results.extend(
                await replay(
                    pool.base_url,
                    pool.models[0].spec.name,
                    self._load.rows,
                    prompt_ids_for=prompts_from_seed(vocabulary, self._arguments.seed),
                    on_progress=self._count,
                    limits=ReplayLimits(drain_ns_max=_DRAIN_S * _NS_PER_S),
                )
            )

        try:
            await pool.or_failure(play())
        finally:
            progress.cancel()
        late = lateness(results)
        if late is not None:
            print(f"requests left at most {late.max_ns / 1e6:.0f} ms after they were due")
        return results

    def _count(self, result: ReplayResult) -> None:
        self._done += 1
        self._failed += not result.ok

    async def _show_progress(self, pool: Pool) -> None:
        """A line every few seconds: time, instances, requests."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                await asyncio.sleep(_PROGRESS_S)
                states = await _instances(client, pool)
                shown = ", ".join(f"{count} {state}" for state, count in states.items())
                elapsed_s = (time.monotonic_ns() - self._started_ns) / _NS_PER_S
                due = sum(1 for row in self._load.rows if row.arrival_ns < elapsed_s * _NS_PER_S)
                print(
                    f"  {elapsed_s:5.1f} s  instances: {shown or 'none'};  requests:"
                    f" {due} sent, {self._done} done, {self._failed} failed",
                    flush=True,
                )

    async def _until_small(self, pool: Pool) -> None:
        """Give the pool time to shrink to its least size."""
        least = self._config.models[0].min_replicas
        async with httpx.AsyncClient(trust_env=False) as client:
            deadline = time.monotonic() + _SHRINK_S
            while sum((await _instances(client, pool)).values()) > least:
                if time.monotonic() > deadline:
                    return
                await asyncio.sleep(0.1)

    def _judge(self, results: list[ReplayResult]) -> _Outcome:
        """Join the record with what the client saw, and hold every token against the oracle."""
        # Imported here: torch takes a second, and the processes of the pool are gone by now.
        from livescale.engine.oracle import GreedyOracle

        record = Path(str(self._config.record))
        timings = [result.timing() for result in results]
        figures = summarize(timings, parse_slo(self._config.slo))
        lines = with_client_times(read_record(record), timings, figures.slo)
        write_record(record, lines)
        answered = [(r.prompt_ids, r.token_ids) for r in results if r.token_ids]
        checks = GreedyOracle(self._arguments.model).check_many(answered)
        return _Outcome(
            report=RunReport(self._load.name, lines, figures, self._started_ns, self._config.slo),
            tokens=sum(check.tokens for check in checks),
            token_mismatches=sum(len(check.wrong) for check in checks),
            near_ties=sum(check.near_ties for check in checks),
            record=str(record),
        )


async def _instances(client: httpx.AsyncClient, pool: Pool) -> dict[str, int]:
    """Instances per state, as /metrics tells; nothing while the gateway is busy or away."""
    try:
        text = (await client.get(f"{pool.base_url}/metrics")).text
    except httpx.HTTPError:
        return {}
    states: dict[str, int] = {}
    for row in text.splitlines():
        if row.startswith("livescale_instances{"):
            state = row.split('state="')[1].split('"')[0]
            states[state] = states.get(state, 0) + int(float(row.rsplit(" ", 1)[1]))
    return states
