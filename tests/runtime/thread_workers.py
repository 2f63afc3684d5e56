"""Workers without processes: WorkerThreads, joined by real sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.topology import Device
from livescale.config.pool import PoolConfig
from livescale.engine.base.compute_cores import ComputeCores
from livescale.engine.base.run_result import InstanceExecutor
from livescale.engine.executor import TorchExecutor
from livescale.messages.commands import (
    AmendHolding,
    ChangeDuty,
    DropHolding,
    ReleaseHolding,
    StartHolding,
)
from livescale.messages.events import HoldingReport
from livescale.runtime.member_process.worker_thread import WorkerThread
from livescale.runtime.wire.boot import WorkerBoot
from livescale.runtime.wire.protocol import (
    Address,
    FromTokenServer,
    Order,
    Submit,
    WorkerEvent,
)
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.routes import Duty, Partner, Taker
from livescale.values.types import (
    FromStorage,
    FromWorker,
    HoldingId,
    LayerSpan,
    Manifest,
    WorkerRef,
)
from slowness import patient

WAIT_S = 60.0
CHUNK_BYTES = 64 << 10


def grid_of(manifest: Manifest) -> ChunkGrid:
    return ChunkGrid([layer.size_bytes for layer in manifest.layers], CHUNK_BYTES)


def all_from(manifest: Manifest, upstream: WorkerRef | None) -> tuple[Feed, ...]:
    """Everything from this holder, or from storage."""
    source = FromStorage() if upstream is None else FromWorker(upstream)
    return (Feed(source, grid_of(manifest).all()),)


class ThreadWorker:
    """One worker on a thread; everything it says lands in `said`."""

    def __init__(
        self,
        number: int,
        arena_bytes: int,
        kv_bytes: int = 1 << 22,
        live: LiveLimits | None = None,
        resident_bytes: int = 0,
        executor: InstanceExecutor | None = None,
        **data_plane: Any,
    ) -> None:
        self.ref = WorkerRef(number)
        self.said: queue.Queue[object] = queue.Queue()
        self._once: dict[type, Callable[[], None]] = {}
        boot = WorkerBoot(
            secret="",
            member=self.ref,
            place=Device("cpu", "localhost", "leaf0", arena_bytes, kv_bytes),
            controller=Address("127.0.0.1", 0),
            data_host="127.0.0.1",
            token_host="127.0.0.1",
            shm_directory="",
            pool=PoolConfig(
                block_tokens=16,
                run_tokens_max=64,
                sequences_max=8,
                resident_bytes=resident_bytes,
            ),
            live=live or LiveLimits(batch_tokens_max=64),
        )
        self.arena = Arena(arena_bytes)
        options = PlaneOptions(host_name="localhost", **data_plane)
        self.data_plane = DataPlane(self.ref, self.arena, options)
        if executor is None:
            executor = TorchExecutor(kv_bytes, boot.pool.block_tokens, cores=ComputeCores(number))
        self.host = WorkerThread(boot, self.arena, executor, self.data_plane, self)
        self._thread = threading.Thread(target=self.host.run, daemon=True)
        self._thread.start()

    def to_controller(self, event: WorkerEvent) -> None:
        self._once.pop(type(event), lambda: None)()
        self.said.put(event)

    def to_gateway(self, gateway: str, message: FromTokenServer) -> None:
        self.said.put(message)

    def load(
        self,
        instance: int,
        manifest: Manifest,
        feeds: tuple[Feed, ...],
        directory: str | None = None,
        plan: int = 1,
        live_order: str | None = None,
        gives_to: tuple[Partner, ...] = (),
        offset_bytes: int = 0,
    ) -> None:
        reads_storage = any(isinstance(feed.upstream, FromStorage) for feed in feeds)
        command = StartHolding(
            holding=HoldingId(plan, self.ref),
            model=manifest.model,
            span=LayerSpan(0, len(manifest.layers)),
            feeds=feeds,
            chunk_bytes=CHUNK_BYTES,
            duty=Duty(instance, (self.ref,), live_order=live_order, gives_to=gives_to),
            measure_capacity=reads_storage or live_order is not None,
            offset_bytes=offset_bytes,
        )
        self.host.obey(Order(command, manifest, directory))

    def amend(self, plan: int, feeds: tuple[Feed, ...]) -> None:
        self.host.obey(Order(AmendHolding(HoldingId(plan, self.ref), feeds)))

    def keep(self, plan: int) -> None:
        """The instance ends, and its bytes stay."""
        self.host.obey(Order(ReleaseHolding(HoldingId(plan, self.ref))))

    def wake(self, instance: int, manifest: Manifest, *, spare: int, plan: int) -> None:
        """The bytes that came by the plan `spare` are an instance's again."""
        command = StartHolding(
            holding=HoldingId(plan, self.ref),
            model=manifest.model,
            span=LayerSpan(0, len(manifest.layers)),
            feeds=(),
            chunk_bytes=CHUNK_BYTES,
            duty=Duty(instance, (self.ref,)),
            spare=spare,
        )
        self.host.obey(Order(command, manifest))

    def drain_to(self, instance: int, plan: int, takers: tuple[Taker, ...]) -> None:
        duty = Duty(instance, (self.ref,), drains_to=takers)
        self.host.obey(Order(ChangeDuty(HoldingId(plan, self.ref), duty)))

    def release(self, plan: int) -> None:
        self.host.obey(Order(DropHolding(HoldingId(plan, self.ref), "released")))

    def submit(self, message: Submit) -> None:
        self.host.submit("g0", message)

    def heard(self, wanted: Callable[[object], bool]) -> list[object]:
        """Everything said up to and including the first word that is wanted."""
        words = []
        while True:
            word = self.said.get(timeout=patient(WAIT_S))
            words.append(word)
            if wanted(word):
                return words

    def once(self, kind: type, react: Callable[[], None]) -> None:
        """React to the next event of the kind, on the worker's thread."""
        self._once[kind] = react

    @property
    def report(self) -> HoldingReport | None:
        """What a controller that it meets is told."""
        return next(iter(self.host.member.reports), None)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self.host.stop()
        self._thread.join(patient(WAIT_S))
        self.data_plane.close()


def introduce_all(members: list[ThreadWorker]) -> None:
    for a in members:
        for b in members:
            if a is not b:
                a.data_plane.introduce(b.ref, b.data_plane.address, b.data_plane.shm_path)
