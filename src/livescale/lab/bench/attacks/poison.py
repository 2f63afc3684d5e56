"""Poison prompts and broken models beside streams of others, on a real pool that computes.

Two workers serve the streams, two are free: a model that ends the processes that load it would take
one after the other. What the pool lost follows from its run record, when it was lost from the
order in which things were done: first the prompts, then one model after the other.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import msgspec

from livescale.config.pool import PoolConfig
from livescale.engine.files.make import make_model
from livescale.lab.bench.attacks.broken_models import (
    BROKEN_MODELS,
    CONFIGURED_MODELS,
    BrokenModel,
    BrokenWay,
    copy_as_one_file,
)
from livescale.lab.bench.attacks.poison_prompts import (
    NAN_ID,
    POISON_PROMPTS,
    PRESET,
    PoisonPrompt,
    make_poisoned_model,
)
from livescale.lab.bench.attacks.poison_report import BrokenFigures, PoisonFigures, PromptFigures
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import gauge_comes_to, gauge_sum, pool_config
from livescale.lab.bench.base.token_checks import wrong_greedy_tokens
from livescale.lab.client.completion import (
    CompletionStream,
    StreamError,
    completion_body,
    error_message,
)
from livescale.runtime.supervisor.supervisor import Pool, PoolFailed
from livescale.telemetry.history.reading import CONTROLLER, Loss, read_history
from livescale.telemetry.record.record import read_record

POISON = "poison prompts and broken models"
_STEADY, _WHOLE = "steady", "whole"
_WORKERS, _SERVING = 4, 2
_OUTPUT_TOKENS = 192
_PROMPT_TOKENS = 48
_PROMPTS = 64
_PROMPTS_AT_ONCE = 8
_ASKING = 4
_SETTLE_S = 1.0
_WAIT_S = 180.0
_BACK_S = 60.0
_CLOSED = "closed"
_COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class PoisonOptions:
    """So many streams, poison prompts, and broken models of each list at most."""

    streams: int
    prompts: int
    models: int
    seed: int


def run_poison(options: PoisonOptions, scratch: Path, say: Callable[[str], None]) -> PoisonFigures:
    """Start a pool, attack it, stop it, judge the tokens. Raises BenchError."""
    make_poisoned_model(scratch / _STEADY)
    make_model(scratch / "made", PRESET)
    copy_as_one_file(scratch / "made", scratch / _WHOLE)
    configured = CONFIGURED_MODELS[: options.models]
    for number, broken in enumerate(configured):
        _spoiled(scratch, broken, f"configured-{number}")
    config = _config(scratch, len(configured))
    say(f"pool: {_WORKERS} workers that compute; starting …")
    try:
        play = asyncio.run(_start(config, options, scratch, say))
    except PoolFailed as error:
        raise BenchError(f"the pool did not live to the end: {error}") from error
    outputs = play.streams.outputs
    wrong = wrong_greedy_tokens(scratch / _STEADY, outputs)
    times = outputs.values()
    play.figures.wrong_tokens = sum(w * n for w, n in zip(wrong, times, strict=True))
    history = read_history(read_record(scratch / "run.jsonl"))
    attribute(play.figures, play.models_ns, history.losses)
    return play.figures


def attribute(figures: PoisonFigures, models_ns: Sequence[int], losses: Sequence[Loss]) -> None:
    """Each lost member is lost to what came last before it was lost: to the prompts, or to the
    broken model of the last of these times."""
    for loss in losses:
        if loss.member == CONTROLLER:
            continue
        words = f"{loss.member}: {loss.reason}"
        before = sum(at_ns <= loss.at_ns for at_ns in models_ns)
        lost_to = figures.models[before - 1] if before else figures
        lost_to.losses.append(words)


# -- helpers, in the order used -------------------------------------------------------------------


def _spoiled(scratch: Path, broken: BrokenModel, name: str) -> Path:
    """A directory with the broken model; one that is broken later is whole."""
    directory = scratch / name
    shutil.copytree(scratch / _WHOLE, directory)
    if broken.arrival is not BrokenWay.CHANGED:
        broken.spoil(directory)
    return directory


def _config(scratch: Path, configured: int) -> PoolConfig:
    """Without copies in host memory: a load reads the files, as broken as they are."""
    steady = {
        "path": str(scratch / _STEADY),
        "min_replicas": _SERVING,
        "max_replicas": _SERVING,
    }
    others = [
        {"path": str(scratch / f"configured-{number}"), "min_replicas": 0}
        for number in range(configured)
    ]
    settings = {
        "port": 0,
        "device": "cpu",
        "workers": _WORKERS,
        "arena_bytes": 8 << 20,
        "kv_bytes": 32 << 20,
        "placement": "none",
        "record": str(scratch / "run.jsonl"),
    }
    return pool_config(scratch, [steady, *others], settings)


async def _start(
    config: PoolConfig, options: PoisonOptions, scratch: Path, say: Callable[[str], None]
) -> _Play:
    limits = httpx.Limits(max_connections=None)
    async with Pool(config) as pool:
        await pool.ready()
        async with httpx.AsyncClient(
            base_url=pool.base_url, timeout=_WAIT_S, limits=limits, trust_env=False
        ) as client:
            play = _Play(options, scratch, client, _Streams(client, options))
            await pool.or_failure(play.all_of_it(say))
            await gauge_comes_to(pool, "livescale_workers", lambda n: n == _WORKERS, _BACK_S)
            play.figures.workers = int(gauge_sum(await play.metrics(), "livescale_workers"))
    return play


class _Streams:
    """Clients that stream one completion after the other. There are few prompts, so that few
    outputs have to be judged: `outputs` counts how often each came."""

    def __init__(self, client: httpx.AsyncClient, options: PoisonOptions) -> None:
        self.outputs: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        self.errors: list[str] = []
        #: that were begun
        self.requests = 0
        #: after it no further one is begun
        self.is_over = asyncio.Event()
        self._client = client
        self._count = options.streams
        rng = random.Random(f"streams:{options.seed}")
        ids = range(NAN_ID + 1, PRESET.vocab_size)
        self._prompts = [rng.choices(ids, k=_PROMPT_TOKENS) for _ in range(_PROMPTS)]

    async def run(self) -> None:
        await asyncio.gather(*(self._follow() for _ in range(self._count)))

    async def _follow(self) -> None:
        while not self.is_over.is_set():
            ids = self._prompts[self.requests % _PROMPTS]
            self.requests += 1
            try:
                self.outputs[tuple(ids), tuple(await self._stream(ids))] += 1
            except (httpx.TransportError, StreamError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    async def _stream(self, prompt_ids: list[int]) -> list[int]:
        """Raises StreamError where the answer is not a whole one."""
        stream = CompletionStream()
        body = completion_body(_STEADY, prompt_ids, _OUTPUT_TOKENS)
        async with self._client.stream("POST", _COMPLETIONS, json=body) as response:
            if response.status_code != httpx.codes.OK:
                message = error_message(await response.aread())
                raise StreamError(f"status {response.status_code}: {message}")
            async for piece in response.aiter_raw():
                stream.push(piece, time.monotonic_ns())
        stream.end(_OUTPUT_TOKENS)
        return stream.token_ids


@dataclass(slots=True)
class _Play:
    """What is sent beside the streams. `models_ns` is when each broken model came."""

    options: PoisonOptions
    scratch: Path
    client: httpx.AsyncClient
    streams: _Streams
    figures: PoisonFigures = field(init=False)
    models_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.figures = PoisonFigures(self.options.streams, workers_wanted=_WORKERS)

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text

    async def all_of_it(self, say: Callable[[str], None]) -> None:
        """Until the last stream has ended."""
        streams = asyncio.create_task(self.streams.run())
        try:
            await asyncio.sleep(_SETTLE_S)
            await self._send_prompts()
            say(f"{self.options.prompts} poison prompts sent")
            published = enumerate(BROKEN_MODELS[: self.options.models])
            configured = enumerate(CONFIGURED_MODELS[: self.options.models])
            named = [(f"published-{number}", broken) for number, broken in published]
            named += [(f"configured-{number}", broken) for number, broken in configured]
            for name, broken in named:
                await asyncio.sleep(_SETTLE_S)  # what the last one did is known
                self.figures.models.append(await self._bring(name, broken))
                say(f"{broken.arrival}, {broken.name}: {self.figures.models[-1].after_s:.1f} s")
            await asyncio.sleep(_SETTLE_S)
            self.streams.is_over.set()
            await streams
        finally:
            streams.cancel()
        figures, outputs = self.figures, self.streams.outputs
        figures.requests, figures.errors = self.streams.requests, self.streams.errors
        figures.tokens = sum(len(output) * times for (_, output), times in outputs.items())

    async def _send_prompts(self) -> None:
        """In turn, some at a time."""
        kinds = [(kind, PromptFigures(kind.name)) for kind in POISON_PROMPTS]
        self.figures.prompts = [figures for _, figures in kinds]
        numbers = count()

        async def client() -> None:
            while (number := next(numbers)) < self.options.prompts:
                kind, figures = kinds[number % len(kinds)]
                await self._send_prompt(number, kind, figures)

        await asyncio.gather(*(client() for _ in range(_PROMPTS_AT_ONCE)))

    async def _send_prompt(self, number: int, kind: PoisonPrompt, figures: PromptFigures) -> None:
        began_s = time.monotonic()
        status, answer, _ = await self._ask(kind.path, {"model": _STEADY, **kind.body(number)})
        figures.answers[answer] += 1
        figures.wrong += status not in kind.statuses
        figures.slowest_s = max(figures.slowest_s, time.monotonic() - began_s)

    async def _bring(self, name: str, broken: BrokenModel) -> BrokenFigures:
        """Publish it, if it is not there, ask for it several times at once, and withdraw it."""
        figures = BrokenFigures(broken.name, broken.arrival)
        directory = self.scratch / name
        if broken.arrival is not BrokenWay.CONFIGURED:
            _spoiled(self.scratch, broken, name)
        self.models_ns.append(time.monotonic_ns())
        began_s = time.monotonic()
        if broken.arrival is not BrokenWay.CONFIGURED:
            asked = {"path": str(directory), "min_replicas": 0}
            status, figures.published, figures.words = await self._ask("/admin/models", asked)
            if status != httpx.codes.CREATED:
                figures.after_s = time.monotonic() - began_s
                return figures
        if broken.arrival is BrokenWay.CHANGED:
            broken.spoil(directory)
        body = {"model": name, "prompt": [11, 12, 13], "max_tokens": 4}
        for _, answer, words in await asyncio.gather(
            *(self._ask(_COMPLETIONS, body) for _ in range(_ASKING))
        ):
            figures.answers[answer] += 1
            figures.words = figures.words or words
        figures.after_s = time.monotonic() - began_s
        failed = f'livescale_failed_loads_total{{model="{name}"}}'
        figures.failed_loads = int(gauge_sum(await self.metrics(), failed))
        headers = {"Content-Type": "application/json"}
        await self.client.request("DELETE", f"/admin/models/{name}", headers=headers)
        return figures

    async def _ask(self, path: str, body: Mapping[str, object]) -> tuple[int, str, str]:
        """Status, answer in short, and what an error says."""
        try:
            response = await self.client.post(path, json=body)
        except httpx.TransportError as error:
            return 0, _CLOSED, f"{type(error).__name__}: {error}"
        try:
            content = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            return 0, f"{response.status_code} that is not JSON", str(error)
        if response.status_code < httpx.codes.BAD_REQUEST:
            return response.status_code, str(response.status_code), ""
        detail = content["error"]
        answer = f"{response.status_code} {detail['code'] or detail['type']}"
        return response.status_code, answer, detail["message"]
