"""Streamed completions as tests read them, and the oracle's word on their tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx

from livescale.engine.oracle import GreedyOracle


def prompt(number: int, tokens: int) -> list[int]:
    return [(7 * number + 3 * position) % 900 + 10 for position in range(tokens)]


class Answer:
    """A streamed completion: its tokens as they come."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.error: str | None = None
        #: what the pool calls it ("": nothing came yet)
        self.request = ""

    async def read(self, url: str, client: httpx.AsyncClient, max_tokens: int) -> Answer:
        async for _ in self.stream(url, client, max_tokens):
            pass
        return self

    async def stream(
        self, url: str, client: httpx.AsyncClient, max_tokens: int
    ) -> AsyncIterator[int]:
        body = {
            "model": "tiny",
            "prompt": self.prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.request = event.get("id", "").removeprefix("cmpl-") or self.request
                    self.error = event.get("error", {}).get("message", self.error)
                    for choice in event.get("choices", []):
                        # One by one: an event has several where they came faster than they went.
                        for token_id in choice.get("token_ids") or []:
                            self.token_ids.append(token_id)
                            yield len(self.token_ids)


def check(oracle: GreedyOracle, answers: list[Answer], max_tokens: int) -> None:
    """All ended with so many tokens, all right (DESIGN.md §4): near ties are one in 10,000."""
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [len(answer.token_ids) for answer in answers] == [max_tokens] * len(answers)
    checks = oracle.check_many([(a.prompt_ids, a.token_ids) for a in answers])
    assert [check.wrong for check in checks] == [()] * len(checks)
    near_ties = sum(check.near_ties for check in checks)
    assert near_ties * 10_000 <= max_tokens * len(checks) + 9_999
