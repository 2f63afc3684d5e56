"""Source and target of `bench live` as processes; the driver is their controller and gateway.

Orders and reports are the messages of a real pool, and the driver keeps a Ledger as a gateway does.
The caller decides which request goes where, and when the target loads.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.topology import Device
from livescale.config.pool import PoolConfig
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.live.live_models import PairSetting
from livescale.lab.bench.live.live_worker import WorkItem, read_work
from livescale.member.ledger import Finish, Forget, Ledger, LedgerEffect, Moved, Send
from livescale.messages import attempts, commands, events
from livescale.messages.epochs import FIRST_EPOCH, Acting
from livescale.runtime.gateway_process.token_wires import TokenWires
from livescale.runtime.wire import protocol
from livescale.runtime.wire.boot import WorkerBoot
from livescale.runtime.wire.doors import CONTROLLER_DOOR, Door
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.wire_channel import Wire
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.routes import Duty, Partner
from livescale.values.types import (
    FromStorage,
    FromWorker,
    HoldingId,
    InstanceId,
    LayerSpan,
    RequestId,
    SamplingParams,
    WorkerRef,
)

SOURCE, TARGET = WorkerRef(0), WorkerRef(1)
SOURCE_INSTANCE: InstanceId = 1

_LOCALHOST = "127.0.0.1"
_GATEWAY = "bench"
_LOST_AFTER_MS = 5000
_WAIT_S = 120.0
# So often it is asked whether the workers are still there.
_LOOK_S = 1.0
_CHUNK_BYTES = 64 << 10
# Batches in the target's line.
_LINE_MAX = 16
# Every made model has more token ids.
_PROMPT_IDS = 256


@dataclass(frozen=True, slots=True)
class Reported:
    """An event of a worker and when the driver got it."""

    at_ns: int
    worker: WorkerRef
    event: protocol.WorkerEvent


@dataclass(slots=True)
class AskedRequest:
    """One request: where it is, and what came of it. `token_ns` are when the driver got tokens."""

    request: RequestId
    prompt_ids: tuple[int, ...]
    output_tokens: int
    owner: WorkerRef
    token_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    is_over: bool = False
    is_cancelled: bool = False
    #: tokens that came twice, out of order or from another worker
    strays: int = 0


class PairFleet:
    """Two workers, of which the source has the model. Use as an async context.

    Waits raise BenchError when a worker dies, reports what it must not, or takes too long.
    """

    def __init__(self, setting: PairSetting, scratch: Path, *, pinned: bool) -> None:
        self.setting = setting
        self.reports: list[Reported] = []
        self.asked: dict[RequestId, AskedRequest] = {}
        self._scratch = scratch
        self._cpus = sorted(os.sched_getaffinity(0))[:2] if pinned else []
        self._secret = secrets.token_hex(16)
        self._processes: dict[WorkerRef, LineProcess] = {}
        self._hellos: dict[WorkerRef, protocol.MemberHello] = {}
        self._orders: dict[WorkerRef, Wire[protocol.ToController]] = {}
        self._stack = ExitStack()
        self._news = asyncio.Event()
        self._trouble: str | None = None
        self._instances = SOURCE_INSTANCE
        self._requests = 0
        self._ledger = Ledger()
        self._heartbeats = Heartbeats(_LOST_AFTER_MS)
        self._tokens = TokenWires(
            secret=self._secret,
            gateway=_GATEWAY,
            heartbeats=self._heartbeats,
            received=self._take,
            gone=lambda _: None,  # it is found out by who waits
        )
        self._draw = np.random.default_rng(setting.batch_tokens)

    async def __aenter__(self) -> PairFleet:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    # -- orders ---------------------------------------------------------------------------------

    def load_target(self, live_order: str | None, gives_to: tuple[Partner, ...] = ()) -> InstanceId:
        """The target gets the model from the source; the new instance."""
        self._instances += 1
        duty = Duty(self._instances, (TARGET,), live_order=live_order, gives_to=gives_to)
        self._load(duty, FromWorker(SOURCE))
        return self._instances

    async def release_target(self) -> None:
        """The target is empty when this returns."""
        dropped = events.HoldingDropped(HoldingId(self._instances, TARGET))
        order = commands.DropHolding(dropped.holding, "released")
        self._orders[TARGET].send(protocol.Order(order))
        await self.until(lambda: any(h.event == dropped for h in self.reports))

    def new_prompt(self, tokens: int) -> tuple[int, ...]:
        """Random ids, never the same ones: no instance has seen how it begins."""
        ids = self._draw.integers(0, _PROMPT_IDS, tokens)
        return tuple(int(token) for token in ids)

    def submit(
        self, worker: WorkerRef, prompt_ids: tuple[int, ...], output_tokens: int
    ) -> AskedRequest:
        """Send a request to the worker's instance."""
        self._requests += 1
        request = f"{_GATEWAY}-{self._requests}"
        asked = AskedRequest(request, prompt_ids, output_tokens, worker)
        self.asked[request] = asked
        instance = SOURCE_INSTANCE if worker == SOURCE else self._instances
        self._ledger.open(request)
        order = commands.Dispatch(request, 1, instance, worker)
        self._carry_out(self._ledger.dispatched(order, is_reachable=True))
        return asked

    def cancel(self, asked: AskedRequest) -> None:
        """No more of it is wanted."""
        asked.is_cancelled = True
        self._carry_out(self._ledger.cancel(asked.request))

    def forget(self) -> None:
        """Drop what was reported and asked so far."""
        self.reports.clear()
        self.asked.clear()
        self._ledger = Ledger()

    # -- what came of them ----------------------------------------------------------------------

    async def until(self, has_come: Callable[[], bool]) -> None:
        """Wait until it is so."""
        deadline_s = time.monotonic() + _WAIT_S
        while not has_come():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), _LOOK_S)
            except TimeoutError:
                for process in self._processes.values():
                    process.check_alive()
                if time.monotonic() > deadline_s:
                    raise BenchError(f"the workers took longer than {_WAIT_S:.0f} s") from None
            if self._trouble is not None:
                raise BenchError(self._trouble)

    def of_target(self, kind: type[protocol.WorkerEvent]) -> list[Reported]:
        """What the target's present instance reported of this kind."""
        return [h for h in self.reports if isinstance(h.event, kind) and h.worker == TARGET]

    @property
    def watermark(self) -> int:
        """Layers of the target's present instance that can run."""
        reported = [h.event for h in self.of_target(events.LayerArrived)]
        return max((e.watermark for e in reported if isinstance(e, events.LayerArrived)), default=0)

    def work(self, worker: WorkerRef, since_ns: int) -> list[WorkItem]:
        """The worker's Runs that began since then."""
        items = read_work(self._work_file(worker))
        return [item for item in items if item.start_ns >= since_ns]

    def _work_file(self, worker: WorkerRef) -> Path:
        return self._scratch / f"work-{worker.worker}-{self._secret[:8]}.jsonl"

    # -- helpers, in the order used -------------------------------------------------------------

    async def _start(self) -> None:
        door = Door(self._secret, CONTROLLER_DOOR, self._serve)
        server = await asyncio.start_server(door.accept, _LOCALHOST, 0)
        self._stack.callback(server.close)
        self._stack.callback(asyncio.create_task(self._heartbeats.run()).cancel)
        host, port = server.sockets[0].getsockname()[:2]
        for ref in (SOURCE, TARGET):
            self._spawn(ref, protocol.Address(host, port))
        await self.until(lambda: len(self._hellos) == len(self._processes))
        holders = protocol.Holders(tuple(hello.holder for hello in self._hellos.values()))
        for orders in self._orders.values():
            orders.send(holders)
        self._tokens.meet(protocol.Peers(tuple(self._peers())))
        self._load(Duty(SOURCE_INSTANCE, (SOURCE,)), FromStorage())
        await self.until(
            lambda: any(isinstance(h.event, events.HoldingCompleted) for h in self.reports)
        )

    def _spawn(self, ref: WorkerRef, controller: protocol.Address) -> None:
        work_file = self._work_file(ref)
        work_file.touch()
        cpu = self._cpus[ref.worker % len(self._cpus)] if self._cpus else -1
        process = bench_process(
            f"worker {ref}", "live.live_worker", str(work_file), str(cpu), threads=1
        )
        self._processes[ref] = self._stack.enter_context(process)
        process.send(msgspec.to_builtins(self._boot(ref, controller)))

    def _peers(self) -> Iterator[protocol.Peer]:
        for ref, hello in self._hellos.items():
            assert hello.token_address is not None, "of a worker"
            yield protocol.Peer(ref, hello.token_address)

    def _boot(self, ref: WorkerRef, controller: protocol.Address) -> WorkerBoot:
        setting = self.setting
        return WorkerBoot(
            secret=self._secret,
            member=ref,
            place=Device(
                kind=setting.kind,
                # Hosts of their own: parameters cross their links.
                host=f"host{ref.worker}",
                leaf="leaf",
                arena_bytes=setting.manifest.size_bytes,
                kv_bytes=setting.kv_bytes,
                uplink_bytes_per_s=setting.link_bytes_per_s,
                downlink_bytes_per_s=setting.link_bytes_per_s,
            ),
            controller=controller,
            data_host=_LOCALHOST,
            token_host=_LOCALHOST,
            shm_directory=str(self._scratch),
            pool=PoolConfig(
                block_tokens=16,
                run_tokens_max=setting.run_tokens_max,
                sequences_max=setting.sequences_max,
                oldest_prompt_percent=100,
                carrier="tcp",
            ),
            latency=setting.latency,
            live=LiveLimits(
                batches_max=_LINE_MAX,
                batch_tokens_max=setting.batch_tokens,
            ),
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        orders: Wire[protocol.ToController] = Wire(reader, writer, protocol.ToController)
        orders.send(Acting(FIRST_EPOCH))
        hello = await orders.receive()
        if not isinstance(hello, protocol.MemberHello):
            orders.close()
            return
        self._heartbeats.add(orders)
        worker = hello.holder.ref
        self._hellos[worker], self._orders[worker] = hello, orders
        self._news.set()
        async for message in orders:
            assert isinstance(message, protocol.WorkerEvent)
            self.reports.append(Reported(time.monotonic_ns(), worker, message))
            if isinstance(message, events.HoldingFailed):
                self._tell_trouble(f"worker {worker} cannot load: {message.reason}")
            self._news.set()

    def _take(self, worker: WorkerRef, message: protocol.FromTokenServer) -> None:
        if isinstance(message, protocol.Tokens):
            now_ns = time.monotonic_ns()
            for token in message.tokens:
                self._take_token(worker, token, now_ns)
        elif isinstance(message, attempts.AttemptTaken):
            self._carry_out(self._ledger.reported(worker, message))
        else:
            self._tell_trouble(f"worker {worker} gave a request up: {message}")
        self._news.set()

    def _take_token(self, worker: WorkerRef, token: protocol.Token, now_ns: int) -> None:
        accepted, effects = self._ledger.came(
            worker,
            token.request,
            token.attempt,
            index=token.index,
            count=1,
            is_last=token.finish_reason is not None,
        )
        asked = self.asked.get(token.request)
        if asked is not None and accepted:
            asked.token_ids.append(token.token_id)
            asked.token_ns.append(now_ns)
        elif asked is not None and not asked.is_over:
            asked.strays += 1
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[LedgerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                order, asked = effect.order, self.asked[effect.order.request]
                submit = protocol.Submit(
                    request=order.request,
                    attempt=order.attempt,
                    instance=order.instance,
                    prompt_ids=asked.prompt_ids,
                    generated_ids=(),
                    sampling=SamplingParams(asked.output_tokens),
                )
                self._tokens.send(order.worker, submit)
            elif isinstance(effect, Forget):
                self._tokens.send(effect.worker, effect.message)
            elif isinstance(effect, Moved) and effect.after is not None:
                self.asked[effect.request].owner = effect.after
            elif isinstance(effect, Finish):
                self.asked[effect.request].is_over = True
            elif isinstance(effect, events.RequestEnded):
                self._tell_trouble(f"tokens of {effect.request} are missing")

    def _load(self, duty: Duty, upstream: FromStorage | FromWorker) -> None:
        manifest = self.setting.manifest
        grid = ChunkGrid([entry.size_bytes for entry in manifest.layers], _CHUNK_BYTES)
        command = commands.StartHolding(
            # Every instance has a plan of its own.
            holding=HoldingId(duty.instance, duty.workers[0]),
            model=manifest.model,
            span=LayerSpan(0, len(manifest.layers)),
            feeds=(Feed(upstream, grid.all()),),
            chunk_bytes=_CHUNK_BYTES,
            duty=duty,
        )
        order = protocol.Order(command, manifest, str(self.setting.directory))
        self._orders[duty.workers[0]].send(order)

    def _tell_trouble(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._news.set()

    async def _stop(self) -> None:
        await self._tokens.close()
        self._stack.close()
