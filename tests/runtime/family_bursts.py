"""A burst of requests for one family of models, and the check of its answers: tests of pools that
serve every family share both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from completions import prompt

from livescale.engine.files.make import FAMILY_NAMES, Preset, make_model
from livescale.engine.oracle import GreedyOracle
from slowness import patient

#: about a megabyte each
SIZES = Preset(4, 64, 96, 4, 2, 1024)
STREAMS, TOKENS, LONG_TOKENS, READ_TOKENS = 24, 8, 90, 3
ANSWER_S = 60.0


def make_families(root: Path, sizes: Preset = SIZES, seed: int = 5) -> dict[str, Path]:
    """A model of every family, by the family's name."""
    for family in FAMILY_NAMES:
        make_model(root / family, sizes, seed=seed, family=family)
    return {family: root / family for family in FAMILY_NAMES}


def name_of(family: str) -> str:
    """What a LocalPool of all families calls the family's model: its first one is "tiny"."""
    return "tiny" if family == next(iter(FAMILY_NAMES)) else family


def entries_of(models: dict[str, Path], settings: str = "") -> str:
    """What a LocalPool of the first of these models is told of that one and of all others: each has
    these settings."""
    _, *others = models.values()
    return settings + "".join(f"  - path: {path}\n{settings}" for path in others)


@dataclass
class FamilyStream:
    """A streamed completion, and what its client does with it."""

    body: dict[str, object]
    #: the client goes when it has read so many tokens
    leaves_after: int | None = None
    token_ids: list[int] = field(default_factory=list)

    async def read(self, url: str, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"{url}/v1/completions", json=self.body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.token_ids += choice.get("token_ids") or []
                if self.leaves_after is not None and len(self.token_ids) >= self.leaves_after:
                    return


def stream_of(model: str, number: int) -> FamilyStream:
    """Every third one is sampled, every fifth one is left, every eighth one is long."""
    body = {
        "model": model,
        "prompt": prompt(number, 90 + 2 * number),
        "max_tokens": LONG_TOKENS if number % 8 == 2 else TOKENS,
        "temperature": 0.9 if number % 3 == 1 else 0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return FamilyStream(body, READ_TOKENS if number % 5 == 4 else None)


def burst(url: str, family: str) -> list[FamilyStream]:
    """Many requests at once for the family's model, read to their ends."""
    return asyncio.run(_burst(url, name_of(family)))


def check_answers(url: str, directory: Path, streams: Sequence[FamilyStream]) -> None:
    """Of the model in the directory: answers have their lengths, greedy tokens are the oracle's,
    and sampled ones those that an instance with nothing else to do gives."""
    whole = [stream for stream in streams if stream.leaves_after is None]
    assert [len(s.token_ids) for s in whole] == [s.body["max_tokens"] for s in whole]
    greedy = [stream for stream in streams if stream.body["temperature"] == 0]
    checks = GreedyOracle(directory).check_many([(s.body["prompt"], s.token_ids) for s in greedy])
    assert [check.wrong for check in checks] == [()] * len(greedy)
    sampled = [stream for stream in streams if stream.body["temperature"]]
    for stream, token_ids in zip(sampled, asyncio.run(_alone(url, sampled)), strict=True):
        assert stream.token_ids == token_ids[: len(stream.token_ids)]


async def _burst(url: str, model: str) -> list[FamilyStream]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=patient(ANSWER_S), limits=limits) as client:
        # One instance is there before the others come.
        await FamilyStream(stream_of(model, 0).body, 1).read(url, client)
        streams = [stream_of(model, number) for number in range(STREAMS)]
        await asyncio.gather(*(stream.read(url, client) for stream in streams))
    return streams


async def _alone(url: str, streams: Sequence[FamilyStream]) -> list[list[int]]:
    """The tokens of the same requests, one after the other."""
    again = [FamilyStream(stream.body) for stream in streams]
    async with httpx.AsyncClient(timeout=patient(ANSWER_S)) as client:
        for stream in again:
            await stream.read(url, client)
    return [stream.token_ids for stream in again]
