"""A worker that says when each part of its start was over: the probe of `bench coldstart`.

The parts are those of `runtime/worker_process.py`, on the same WorkerThread, without a controller:
orders come as lines. Heavy imports stand inside a function because they are what is measured.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livescale.bench.peers.line_server import Job, serve_lines

if TYPE_CHECKING:
    from livescale.runtime.worker_thread import WorkerThread

_WAIT_S = 300.0
_INSTANCE = 1
_PLAN = 7


class _Probe:
    """One worker. It is its host's Reporter: everything said is kept with its time."""

    def __init__(self, job: Job) -> None:
        self.marks_ns = {"process": time.monotonic_ns()}
        self._said: queue.Queue[tuple[int, object]] = queue.Queue()
        self._start(job)

    # -- Reporter ---------------------------------------------------------------------------

    def to_controller(self, event: object) -> None:
        self._said.put((time.monotonic_ns(), event))

    def to_gateway(self, _gateway: str, message: object) -> None:
        self._said.put((time.monotonic_ns(), message))

    # -- lines ------------------------------------------------------------------------------

    def answer(self, job: Job) -> Job:
        """Do one thing."""
        answers: dict[str, Callable[[Job], Job]] = {
            "where": self._where,
            "read": self._read,
            "connect": self._connect,
            "receive": self._receive,
            "release": self._release,
        }
        return answers[job["do"]](job)

    # -- helpers, in the order used ---------------------------------------------------------

    def _start(self, job: Job) -> None:
        import torch

        from livescale.engine.executor import TorchExecutor
        from livescale.engine.warm_up import warm_up
        from livescale.latency.work import LinearLatency
        from livescale.runtime.boot import WorkerBoot
        from livescale.runtime.wire import Address
        from livescale.runtime.worker_thread import WorkerThread
        from livescale.topology import Device
        from livescale.transfer.arena import Arena
        from livescale.transfer.data_plane import DataPlane
        from livescale.types import WorkerRef

        self._mark("imports")
        torch.set_num_threads(job["threads"])
        boot = WorkerBoot(
            secret="",
            worker=WorkerRef(job["worker"]),
            device=Device("cpu", "localhost", "leaf0", job["arena_bytes"], job["kv_bytes"]),
            controller=Address("127.0.0.1", 0),
            data_host="127.0.0.1",
            token_host="127.0.0.1",
            shm_directory="",
            threads=job["threads"],
            block_tokens=job["block_tokens"],
            run_tokens_max=job["run_tokens_max"],
            sequences_max=8,
            latency=LinearLatency(0, 0),
        )
        arena = Arena(boot.device.arena_bytes)
        executor = TorchExecutor(boot.device.kv_bytes, boot.block_tokens)
        self._mark("context")
        warm_up()
        self._mark("kernels")
        self._worker = boot.worker
        self._chunk_bytes = job["chunk_bytes"]
        self._data_plane = DataPlane(boot.worker, arena)
        self._host: WorkerThread = WorkerThread(boot, arena, executor, self._data_plane, self)
        threading.Thread(target=self._host.run, daemon=True).start()
        for peer in job["peers"]:
            self._connect(peer)
        self._mark("connections")

    def _mark(self, phase: str) -> None:
        self.marks_ns[phase] = time.monotonic_ns()

    def _where(self, _: Job) -> Job:
        return {"address": self._data_plane.address, "marks_ns": self.marks_ns}

    def _connect(self, job: Job) -> Job:
        from livescale.types import WorkerRef

        peer, (host, port) = WorkerRef(job["worker"]), job["address"]
        self._data_plane.introduce(peer, (host, port))
        # Connections are made in the background; one byte waits for this one, which is measured.
        self._data_plane.probe(peer, 1)
        return {}

    def _read(self, job: Job) -> Job:
        """Take the model from its directory, to be a source."""
        from livescale.types import FromStorage

        self._load(job, FromStorage(), job["directory"])
        return {}

    def _receive(self, job: Job) -> Job:
        """Take the model from a worker and answer one request with one token."""
        from livescale.runtime.wire import Submit, Tokens
        from livescale.types import FromWorker, SamplingParams, WorkerRef

        times = {"order_ns": time.monotonic_ns()}
        times |= self._load(job, FromWorker(WorkerRef(job["source"])), None)
        ask = Submit("r", 0, _INSTANCE, tuple(job["prompt"]), (), SamplingParams(1))
        self._host.submit("g", ask)
        times["first_token_ns"], _ = self._heard(Tokens)
        return dict(times)

    def _load(self, job: Job, upstream: Any, directory: str | None) -> dict[str, int]:
        import msgspec

        from livescale.chunks import ChunkGrid, Feed
        from livescale.messages.commands import StartHolding
        from livescale.messages.events import FirstByteArrived, HoldingCompleted, HoldingFailed
        from livescale.plans import Duty
        from livescale.runtime.wire import Order
        from livescale.types import HoldingId, LayerSpan, Manifest

        manifest = msgspec.convert(job["manifest"], Manifest)
        grid = ChunkGrid([layer.size_bytes for layer in manifest.layers], self._chunk_bytes)
        command = StartHolding(
            holding=HoldingId(_PLAN, self._worker),
            model=manifest.model,
            span=LayerSpan(0, len(manifest.layers)),
            feeds=(Feed(upstream, grid.all()),),
            chunk_bytes=self._chunk_bytes,
            duty=Duty(_INSTANCE, (self._worker,)),
        )
        place = None if directory is None else str(Path(directory))
        self._host.obey(Order(command, manifest, place))
        first_byte_ns, begun = self._heard(FirstByteArrived, HoldingFailed)
        completed_ns, ended = self._heard(HoldingCompleted, HoldingFailed, known=begun)
        if isinstance(ended, HoldingFailed):
            raise RuntimeError(f"the load failed: {ended.reason}")
        return {"first_byte_ns": first_byte_ns, "completed_ns": completed_ns}

    def _release(self, _: Job) -> Job:
        from livescale.messages.commands import DropHolding
        from livescale.messages.events import HoldingDropped
        from livescale.runtime.wire import Order
        from livescale.types import HoldingId

        self._host.obey(Order(DropHolding(HoldingId(_PLAN, self._worker), "released")))
        self._heard(HoldingDropped)
        return {}

    def _heard(self, *kinds: type, known: object = None) -> tuple[int, Any]:
        """When the next word of these kinds was said, and the word (`known`, if it is one)."""
        if isinstance(known, kinds):
            return time.monotonic_ns(), known
        while True:
            at_ns, word = self._said.get(timeout=_WAIT_S)
            if isinstance(word, kinds):
                return at_ns, word


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """Start as a worker does."""
    return "a worker", _Probe(job).answer


if __name__ == "__main__":
    serve_lines(load)
