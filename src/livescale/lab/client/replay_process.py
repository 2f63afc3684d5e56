"""The replayer as a process of its own, for a client that sits on another (emulated) machine than
the program that wants its results.

One JSON line comes in, a `ReplayJob`, and one goes out: a list of `ReplayResult`. It ends at once
when its input does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import msgspec

from livescale.lab.client.replayer import prompts_from_seed, replay
from livescale.load.traces import TraceRow
from livescale.values.types import Value


class ReplayJob(Value, frozen=True):
    """What is sent where. Prompts are drawn from `seed`, from so large a `vocabulary`; the last
    answer may come so many seconds after the last request was due."""

    base_url: str
    model: str
    rows: tuple[TraceRow, ...]
    vocabulary: int
    seed: int
    drain_s: int = 120


def main() -> int:
    """Read the job, do it, write what came of it."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReplayJob)
    threading.Thread(target=_end_with_input, daemon=True).start()
    results = asyncio.run(
        replay(
            job.base_url,
            job.model,
            job.rows,
            prompt_ids_for=prompts_from_seed(job.vocabulary, job.seed),
            drain_ns_max=job.drain_s * 1_000_000_000,
        )
    )
    sys.stdout.buffer.write(msgspec.json.encode({"results": results}) + b"\n")
    sys.stdout.buffer.flush()
    return 0


def _end_with_input() -> None:
    """The process that gave the job is gone, or wants no answer."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
