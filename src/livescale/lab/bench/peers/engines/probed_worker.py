"""The worker of `bench coldstart`: what `runtime/member_process/worker_process.py` starts, without
a controller.

The parts of its start and the WorkerThread are the same; orders come as lines.
"""

from __future__ import annotations

import queue
import threading
import time

import msgspec
import torch

from livescale.clusters.topology import Device
from livescale.config.pool import PoolConfig
from livescale.engine.executor import TorchExecutor
from livescale.engine.warm_up import warm_up
from livescale.lab.bench.peers.line_server import Job
from livescale.messages.commands import DropHolding, StartHolding
from livescale.messages.events import HoldingCompleted, HoldingDropped, HoldingFailed
from livescale.runtime.member_process.worker_thread import WorkerThread
from livescale.runtime.wire.boot import WorkerBoot
from livescale.runtime.wire.protocol import Address, Order, Submit, Tokens
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.routes import Duty
from livescale.values.types import (
    FromStorage,
    FromWorker,
    HoldingId,
    LayerSpan,
    Manifest,
    SamplingParams,
    WorkerRef,
)

_WAIT_S = 300.0
_INSTANCE = 1
_PLAN = 7


class ProbedWorker:
    """One worker. It is its own Reporter: everything that it reports is kept with its time."""

    def __init__(self, job: Job, process_ns: int) -> None:
        self._marks_ns = {"process": process_ns}
        self._mark("imports")
        self._reports: queue.Queue[tuple[int, object]] = queue.Queue()
        torch.set_num_threads(job["threads"])
        boot = WorkerBoot(
            secret="",
            member=WorkerRef(job["worker"]),
            place=Device("cpu", "localhost", "leaf0", job["arena_bytes"], job["kv_bytes"]),
            controller=Address("127.0.0.1", 0),
            data_host="127.0.0.1",
            token_host="127.0.0.1",
            shm_directory="",
            pool=PoolConfig(
                block_tokens=job["block_tokens"],
                run_tokens_max=job["run_tokens_max"],
                sequences_max=8,
            ),
        )
        arena = Arena(boot.place.arena_bytes)
        executor = TorchExecutor(boot.place.kv_bytes, boot.pool.block_tokens)
        self._mark("context")
        warm_up()
        self._mark("kernels")
        self._worker = boot.member
        self._chunk_bytes = job["chunk_bytes"]
        self._data_plane = DataPlane(boot.member, arena)
        self._host: WorkerThread = WorkerThread(boot, arena, executor, self._data_plane, self)
        threading.Thread(target=self._host.run, daemon=True).start()
        for peer in job["peers"]:
            host, port = peer["address"]
            self._data_plane.introduce(WorkerRef(peer["worker"]), (host, port))
            # Connections are made in the background; one byte waits for this one, to measure it.
            self._data_plane.probe(WorkerRef(peer["worker"]), 1)
        self._mark("connections")

    # -- Reporter ---------------------------------------------------------------------------

    def to_controller(self, event: object) -> None:
        self._reports.put((time.monotonic_ns(), event))

    def to_gateway(self, _gateway: str, message: object) -> None:
        self._reports.put((time.monotonic_ns(), message))

    # -- lines ------------------------------------------------------------------------------

    def where(self, _: Job) -> Job:
        """The address of the data plane, and when the parts of the start were over."""
        return {"address": self._data_plane.address, "marks_ns": self._marks_ns}

    def read(self, job: Job) -> Job:
        """Take the model from its directory, to be a source."""
        self._load(job, FromStorage(), job["directory"])
        return {}

    def receive(self, job: Job) -> Job:
        """Take the model from a worker and answer one request with one token."""
        order_ns = time.monotonic_ns()
        completed_ns = self._load(job, FromWorker(WorkerRef(job["source"])), None)
        ask = Submit("r", 0, _INSTANCE, tuple(job["prompt"]), (), SamplingParams(1))
        self._host.submit("g", ask)
        first_token_ns, _ = self._reported(Tokens)
        return {
            "order_ns": order_ns,
            "completed_ns": completed_ns,
            "first_token_ns": first_token_ns,
        }

    def release(self, _: Job) -> Job:
        """Forget the model."""
        self._host.obey(Order(DropHolding(HoldingId(_PLAN, self._worker), "released")))
        self._reported(HoldingDropped)
        return {}

    # -- helpers, in the order used ---------------------------------------------------------

    def _mark(self, phase: str) -> None:
        self._marks_ns[phase] = time.monotonic_ns()

    def _load(self, job: Job, upstream: FromStorage | FromWorker, directory: str | None) -> int:
        """When the model was there."""
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
        self._host.obey(Order(command, manifest, directory))
        completed_ns, ended = self._reported(HoldingCompleted, HoldingFailed)
        if isinstance(ended, HoldingFailed):
            raise RuntimeError(f"the load failed: {ended.reason}")
        return completed_ns

    def _reported(self, *kinds: type) -> tuple[int, object]:
        """The next report of these kinds, and when it came."""
        while True:
            at_ns, report = self._reports.get(timeout=_WAIT_S)
            if isinstance(report, kinds):
                return at_ns, report
