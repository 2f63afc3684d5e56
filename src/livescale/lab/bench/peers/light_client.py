"""A light client: a few streamed completions per second, each from its request to its first token.

The yardstick of `bench attacks`, in a process of its own. Requests are sent at their times whether
earlier ones are answered or not, each on a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from time import perf_counter_ns

import uvloop

from livescale.lab.bench.attacks.attack_bodies import http_request
from livescale.lab.bench.peers.line_server import Job, serve_lines

_WAIT_S = 60.0
_ANSWER_BYTES_MAX = 1 << 20
_ERRORS_MAX = 5
_SERVER_ERROR = 500


async def _ask(job: Job, request: bytes, seen: Job) -> None:
    """One completion to its end. What it came to is in `seen`."""
    try:
        async with asyncio.timeout(_WAIT_S):
            asked_ns = perf_counter_ns()
            reader, writer = await asyncio.open_connection(
                job["host"], job["port"], limit=_ANSWER_BYTES_MAX
            )
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    seen["http_5xx"] += int(head.split(b" ", 2)[1]) >= _SERVER_ERROR
                    raise ValueError(head[:200].decode(errors="replace"))
                await reader.readuntil(b"\n\n")
                first_ns = perf_counter_ns()
                await reader.readuntil(b"data: [DONE]\n\n")
                seen["ttft_ns"].append(first_ns - asked_ns)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        seen["failed"] += 1
        if len(seen["errors"]) < _ERRORS_MAX:
            seen["errors"].append(f"{type(error).__name__}: {error}")


def completion_request(
    job: Job, rng: random.Random, tokens: int, head: bytes = b"", **more: object
) -> bytes:
    """A streamed completion of so many tokens, whole, with lines of its head and fields of its body
    `more`. It has a prompt of its own: nothing of it is in any cache."""
    body = {
        "model": job["model"],
        "prompt": [rng.randrange(2, job["vocabulary"]) for _ in range(job["prompt_tokens"])],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        **more,
    }
    return http_request("/v1/completions", json.dumps(body).encode(), head)


async def _play(job: Job, rng: random.Random) -> Job:
    """One window: `rate` requests per second for `seconds`, and until all are answered."""
    # `failed` counts all that were not answered whole.
    seen: Job = {"ttft_ns": [], "failed": 0, "http_5xx": 0, "errors": []}
    tasks = []
    begin_s = asyncio.get_running_loop().time()
    for number in range(round(job["rate"] * job["seconds"])):
        request = completion_request(job, rng, job["output_tokens"], b"connection: close\r\n")
        due_s = begin_s + (number + rng.random()) / job["rate"]
        await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
        tasks.append(asyncio.create_task(_ask(job, request, seen)))
    await asyncio.gather(*tasks)
    return seen


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """The first line has the load's shape; every further line is a window."""
    rng = random.Random(job["seed"])
    return "raw streams", lambda window: uvloop.run(_play({**job, **window}, rng))


if __name__ == "__main__":
    serve_lines(load)
