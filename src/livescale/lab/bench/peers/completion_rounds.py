"""Rounds of streamed completions against any OpenAI-compatible server, in a process of its own.

A round keeps a number of requests in flight until all are answered, each connection asking again.
Answers are taken as bytes with the time of their first token, and read when the round is over, so
that this process takes as little as can be of cores that it shares with what it measures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import uvloop

from livescale.lab.bench.attacks.attack_bodies import http_request
from livescale.lab.bench.peers.line_server import Job, serve_lines

_ANSWER_END = b"0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_LINE_END = b"\r\n"
_EVENT = b"data: {"
_GOOD = b"HTTP/1.1 200"
_ERROR_CHARS = 300


@dataclass(slots=True)
class _Answer:
    """What came for one prompt. `error` says why nothing more comes."""

    asked_ns: int
    first_ns: int | None = None
    content: bytearray = field(default_factory=bytearray)
    error: str | None = None


class _Connection(asyncio.Protocol):
    """Asks what `next_request` gives, one after the other, until there is nothing more."""

    def __init__(self, next_request: Callable[[], tuple[bytes, int] | None]) -> None:
        self.answers: dict[int, _Answer] = {}
        self.is_over = asyncio.get_running_loop().create_future()
        self._next_request = next_request
        self._answer: _Answer | None = None
        self._transport: Any = None  # uvloop's are no asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        answer.content += data
        if answer.first_ns is None and _EVENT in answer.content:
            answer.first_ns = perf_counter_ns()
        if not answer.content.startswith(_GOOD[: len(answer.content)]):
            self._transport.abort()
        elif answer.content.endswith(_ANSWER_END):
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer.error = f"the connection was closed: {error}"
        if not self.is_over.done():
            self.is_over.set_result(None)

    def _ask(self) -> None:
        request = self._next_request()
        if request is None:
            self._answer = None
            self._transport.abort()
            return
        content, number = request
        self._answer = self.answers[number] = _Answer(perf_counter_ns())
        self._transport.write(content)


async def _play(job: Job) -> Job:
    requests = _requests(job)
    loop = asyncio.get_running_loop()
    began_ns = perf_counter_ns()
    made = [
        await loop.create_connection(
            lambda: _Connection(lambda: next(requests, None)), job["host"], job["port"]
        )
        for _ in range(job["in_flight"])
    ]
    connections = [connection for _, connection in made]
    await asyncio.wait(
        [connection.is_over for connection in connections], timeout=job["patience_s"]
    )
    elapsed_ns = perf_counter_ns() - began_ns
    for transport, _ in made:
        transport.abort()
    answers = {n: answer for its in connections for n, answer in its.answers.items()}
    read = [_read(answers.get(number)) for number in range(len(job["prompts"]))]
    return {
        "elapsed_ns": elapsed_ns,
        "token_ids": [token_ids for token_ids, _ in read],
        "errors": [error for _, error in read if error is not None],
        "ttft_ns": [a.first_ns - a.asked_ns for a in answers.values() if a.first_ns is not None],
    }


def _requests(job: Job) -> Iterator[tuple[bytes, int]]:
    """Made before the clock runs."""
    made = []
    for number, prompt in enumerate(job["prompts"]):
        body = {
            "model": job["model"],
            "prompt": prompt,
            "max_tokens": job["output_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        made.append((http_request("/v1/completions", json.dumps(body).encode()), number))
    return iter(made)


def _read(answer: _Answer | None) -> tuple[list[int], str | None]:
    """Its tokens, and what went wrong."""
    if answer is None:
        return [], "it was not asked"
    content = bytes(answer.content)
    if not content.startswith(_GOOD):
        return [], content[:_ERROR_CHARS].decode(errors="replace") or answer.error
    token_ids: list[int] = []
    error = answer.error
    for line in b"".join(_chunks(content)).split(b"\n"):
        if not line.startswith(_EVENT):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            error = str(event["error"])
        for choice in event.get("choices", []):
            token_ids += choice.get("token_ids") or []
    return token_ids, error


def _chunks(content: bytes) -> Iterator[bytes]:
    """Of a body in HTTP's chunks; one that ends early has those that are whole."""
    place = content.index(_HEAD_END) + len(_HEAD_END)
    while (stop := content.find(_LINE_END, place)) >= 0:
        size = int(content[place:stop], 16)
        first = stop + len(_LINE_END)
        yield content[first : first + size]
        place = first + size + len(_LINE_END)


def load(_: Job) -> tuple[str, Callable[[Job], Job]]:
    """Nothing to load; every further line is a round."""
    return "raw sockets", lambda job: uvloop.run(_play(job))


if __name__ == "__main__":
    serve_lines(load)
