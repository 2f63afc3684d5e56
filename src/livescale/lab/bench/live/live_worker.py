"""A worker of `bench live`: the product's worker process, on one CPU, with its Runs written down.

`python -m livescale.lab.bench.live.live_worker FILE CPU`: FILE gets one line per Run when it
is over, as WorkItem reads it; CPU is where the process stays (-1: anywhere).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from livescale.batching.runs.run import Run
from livescale.engine.base.run_result import InstanceExecutor, RunResult
from livescale.runtime.member_process import worker_process
from livescale.values.types import LayerSpan, Manifest, RequestId, Value

# torch.Tensor or bytearray: torch is the engine's.
Rows = Any


class WorkItem(Value, frozen=True, array_like=True):
    """One Run of one worker, on the monotonic clock that all processes share.

    `layers` are decoder layers; `requests` those whose prompts it computed (none: only decodes),
    `tokens` how many tokens that were.
    """

    start_ns: int
    stop_ns: int
    layers: tuple[int, int]
    requests: tuple[RequestId, ...]
    tokens: int
    decodes: int

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]


def read_work(file: Path) -> list[WorkItem]:
    """All Runs of a worker so far."""
    return [msgspec.json.decode(line, type=WorkItem) for line in file.read_bytes().splitlines()]


class WatchedExecutor:
    """An executor whose Runs are written down."""

    def __init__(self, inner: InstanceExecutor, descriptor: int) -> None:
        self._inner = inner
        self._descriptor = descriptor
        #: of the assigned model, head included
        self._stop = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        self._stop = manifest.span.stop
        self._inner.assign(manifest, arena)

    def run(
        self,
        run: Run,
        hidden: Rows | None = None,
        layer_ran: Callable[[int], None] | None = None,
    ) -> RunResult:
        start_ns = time.monotonic_ns()
        result = self._inner.run(run, hidden, layer_ran)
        stop_ns = time.monotonic_ns()
        os.write(self._descriptor, msgspec.json.encode(self._item(run, start_ns, stop_ns)) + b"\n")
        return result

    def _item(self, run: Run, start_ns: int, stop_ns: int) -> WorkItem:
        prompts = [segment for segment in run.segments if segment.token_count > 1]
        return WorkItem(
            start_ns,
            stop_ns,
            _decoder_layers(run.span, self._stop),
            tuple(segment.request for segment in prompts),
            sum(segment.token_count for segment in prompts),
            len(run.segments) - len(prompts),
        )


def _decoder_layers(span: LayerSpan, stop: int) -> tuple[int, int]:
    """Decoder layers of a span, from 0: the embedding and the head are none."""
    return max(span.start - 1, 0), min(span.stop, stop - 1) - 1


def main() -> None:
    """Be a worker until standard input ends."""
    file, cpu = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format=f"worker[{os.getpid()}] %(message)s")
    if int(cpu) >= 0:
        os.sched_setaffinity(0, {int(cpu)})
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    worker_process.main(lambda inner: cast(InstanceExecutor, WatchedExecutor(inner, descriptor)))
    # As the other children: nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    main()
