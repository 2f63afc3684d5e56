"""Source and target of `bench live` as processes; the driver is their controller and gateway.

Orders and reports are the messages of a real pool, and the driver keeps a Ledger as a gateway does.
The caller decides which request goes where, and when the target loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from livescale.batching.live_batch import LiveLimits
from livescale.bench.errors import BenchError
from livescale.bench.live_models import PairSetting
from livescale.bench.live_worker import WorkItem, read_work
from livescale.chunks import ChunkGrid, Feed
from livescale.interpreter import module_words
from livescale.member.ledger import Finish, Forget, Ledger, LedgerEffect, Moved, Send
from livescale.messages import attempts, commands, events
from livescale.plans import Duty, Pairing
from livescale.runtime.boot import WorkerBoot
from livescale.runtime.doors import CONTROLLER_DOOR, Door, token_door
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.wire import (
    Address,
    FromTokenServer,
    GatewayHello,
    Holders,
    MemberHello,
    Order,
    Submit,
    ToController,
    Token,
    Tokens,
    WorkerEvent,
)
from livescale.runtime.wire_channel import Wire, open_wire
from livescale.topology import Device
from livescale.types import (
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
_END_S = 10.0
_CHUNK_BYTES = 64 << 10
_LOG_TAIL_CHARS = 1500
# Every made model has more token ids.
_PROMPT_IDS = 256


@dataclass(frozen=True, slots=True)
class Heard:
    """An event of a worker and when the driver got it."""

    at_ns: int
    worker: WorkerRef
    event: WorkerEvent


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


@dataclass(slots=True)
class _Member:
    """One worker's process and wires."""

    ref: WorkerRef
    work_file: Path
    log: IO[bytes]
    process: asyncio.subprocess.Process
    hello: MemberHello | None = None
    orders: Wire[ToController] | None = None
    tokens: Wire[FromTokenServer] | None = None


class PairFleet:
    """Two workers, of which the source has the model. Use as an async context.

    Waits raise BenchError when a worker dies, says what it must not, or takes too long.
    """

    def __init__(self, setting: PairSetting, scratch: Path, *, pinned: bool) -> None:
        self.setting = setting
        self.heard: list[Heard] = []
        self.asked: dict[RequestId, AskedRequest] = {}
        self._scratch = scratch
        self._cpus = sorted(os.sched_getaffinity(0))[:2] if pinned else []
        self._secret = secrets.token_hex(16)
        self._members: dict[WorkerRef, _Member] = {}
        self._server: asyncio.Server | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._trouble: str | None = None
        self._instances = SOURCE_INSTANCE
        self._requests = 0
        self._ledger = Ledger()
        self._heartbeats = Heartbeats(_LOST_AFTER_MS)
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

    def load_target(self, pairing: Pairing | None) -> InstanceId:
        """The target gets the model from the source; the new instance."""
        self._instances += 1
        self._load(TARGET, self._instances, FromWorker(SOURCE), pairing)
        return self._instances

    async def release_target(self) -> None:
        """The target is empty when this returns."""
        wire = self._members[TARGET].orders
        assert wire is not None
        dropped = events.HoldingDropped(HoldingId(self._instances, TARGET))
        wire.send(Order(commands.DropHolding(dropped.holding, "released")))
        await self.until(lambda: any(h.event == dropped for h in self.heard))

    def new_prompt(self, tokens: int) -> tuple[int, ...]:
        """Random ids, never the same ones: no instance has seen how it begins."""
        ids = self._draw.integers(0, _PROMPT_IDS, tokens)
        return tuple(int(token) for token in ids)

    def submit(
        self, worker: WorkerRef, prompt_ids: tuple[int, ...], output_tokens: int
    ) -> AskedRequest:
        """Send a request to the worker's instance."""
        self._requests += 1
        request = f"r{self._requests}"
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
        """Drop what was heard and asked so far."""
        self.heard.clear()
        self.asked.clear()
        self._ledger = Ledger()

    # -- what came of them ----------------------------------------------------------------------

    async def until(self, has_come: Callable[[], bool]) -> None:
        """Wait until it is so."""
        deadline_s = time.monotonic() + _WAIT_S
        while not has_come():
            self._news.clear()
            left_s = deadline_s - time.monotonic()
            try:
                await asyncio.wait_for(self._news.wait(), max(left_s, 0.01))
            except TimeoutError:
                raise BenchError(f"the workers took longer than {_WAIT_S:.0f} s") from None
            if self._trouble is not None:
                raise BenchError(self._trouble)

    def of_target(self, kind: type[WorkerEvent]) -> list[Heard]:
        """What the target's present instance said of this kind."""
        return [h for h in self.heard if isinstance(h.event, kind) and h.worker == TARGET]

    def work(self, worker: WorkerRef, since_ns: int) -> list[WorkItem]:
        """The worker's Runs that began since then."""
        items = read_work(self._members[worker].work_file)
        return [item for item in items if item.start_ns >= since_ns]

    # -- helpers, in the order used -------------------------------------------------------------

    async def _start(self) -> None:
        door = Door(self._secret, CONTROLLER_DOOR, self._serve)
        self._server = await asyncio.start_server(door.accept, _LOCALHOST, 0)
        self._readers.append(asyncio.create_task(self._heartbeats.run()))
        host, port = self._server.sockets[0].getsockname()[:2]
        for ref in (SOURCE, TARGET):
            self._members[ref] = await self._spawned(ref, Address(host, port))
        await self.until(lambda: all(m.hello is not None for m in self._members.values()))
        for member in self._members.values():
            await self._meet(member)
        self._load(SOURCE, SOURCE_INSTANCE, FromStorage(), None)
        await self.until(
            lambda: any(isinstance(h.event, events.HoldingCompleted) for h in self.heard)
        )

    async def _spawned(self, ref: WorkerRef, controller: Address) -> _Member:
        name = f"worker-{ref.worker}"
        work_file = self._scratch / f"{name}-{secrets.token_hex(4)}.jsonl"
        work_file.touch()
        log = (self._scratch / f"{name}.log").open("w+b")
        cpu = self._cpus[ref.worker % len(self._cpus)] if self._cpus else -1
        process = await asyncio.create_subprocess_exec(
            *module_words("livescale.bench.live_worker", str(work_file), str(cpu)),
            stdin=asyncio.subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._boot(ref, controller)) + b"\n")
        self._readers.append(asyncio.create_task(self._watch(ref, process)))
        return _Member(ref, work_file, log, process)

    def _boot(self, ref: WorkerRef, controller: Address) -> WorkerBoot:
        setting = self.setting
        return WorkerBoot(
            secret=self._secret,
            worker=ref,
            device=Device(
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
            threads=1,
            block_tokens=16,
            run_tokens_max=setting.run_tokens_max,
            sequences_max=setting.sequences_max,
            oldest_prompt_percent=100,
            latency=setting.latency,
            carrier="tcp",
            live=LiveLimits(
                batches_max=setting.line_max,
                batch_tokens_max=setting.batch_tokens,
            ),
        )

    async def _watch(self, ref: WorkerRef, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._tell_trouble(f"worker {ref} ended with status {status}: {self._log_tail(ref)}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[ToController] = Wire(reader, writer, ToController)
        hello = await wire.receive()
        if not isinstance(hello, MemberHello):
            wire.close()
            return
        self._heartbeats.add(wire)
        worker = hello.holder.ref
        member = self._members[worker]
        member.hello, member.orders = hello, wire
        self._news.set()
        async for message in wire:
            self._hear(worker, message)

    def _hear(self, worker: WorkerRef, message: ToController) -> None:
        assert isinstance(message, WorkerEvent)
        self.heard.append(Heard(time.monotonic_ns(), worker, message))
        if isinstance(message, events.HoldingFailed):
            self._tell_trouble(f"worker {worker} cannot load: {message.reason}")
        self._news.set()

    async def _meet(self, member: _Member) -> None:
        """The worker knows the other one, and its tokens come here."""
        others = [m.hello for m in self._members.values() if m is not member]
        holders = tuple(hello.holder for hello in others if hello is not None)
        assert member.orders is not None
        assert member.hello is not None
        address = member.hello.token_address
        assert address is not None
        member.orders.send(Holders(holders))
        member.tokens = await open_wire(
            address,
            FromTokenServer,
            secret=self._secret,
            door=token_door(member.ref),
        )
        self._heartbeats.add(member.tokens)
        member.tokens.send(GatewayHello(_GATEWAY))
        self._readers.append(asyncio.create_task(self._read_tokens(member.ref, member.tokens)))

    async def _read_tokens(self, worker: WorkerRef, wire: Wire[FromTokenServer]) -> None:
        async for message in wire:
            if isinstance(message, Tokens):
                now_ns = time.monotonic_ns()
                for token in message.tokens:
                    self._take(worker, token, now_ns)
            elif isinstance(message, attempts.AttemptTaken):
                request, attempt = message.request, message.attempt
                self._carry_out(self._ledger.taken(worker, request, attempt, message.moves))
            elif isinstance(message, attempts.AttemptFailed | attempts.AttemptReturned):
                self._tell_trouble(f"worker {worker} gave a request up: {message}")
            self._news.set()

    def _take(self, worker: WorkerRef, token: Token, now_ns: int) -> None:
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
                sampling = SamplingParams(asked.output_tokens)
                submit = Submit(
                    request=order.request,
                    attempt=order.attempt,
                    instance=order.instance,
                    prompt_ids=asked.prompt_ids,
                    generated_ids=(),
                    sampling=sampling,
                )
                self._tell(order.worker, submit)
            elif isinstance(effect, Forget):
                forget = attempts.Cancel if effect.is_over else attempts.Disown
                self._tell(effect.worker, forget(effect.request, effect.attempt))
            elif isinstance(effect, Moved) and effect.after is not None:
                self.asked[effect.request].owner = effect.after
            elif isinstance(effect, Finish):
                self.asked[effect.request].is_over = True
            elif isinstance(effect, events.RequestEnded):
                self._tell_trouble(f"tokens of {effect.request} are missing")

    def _tell(self, worker: WorkerRef, message: Submit | attempts.Cancel | attempts.Disown) -> None:
        wire = self._members[worker].tokens
        assert wire is not None
        wire.send(message)

    def _load(
        self,
        worker: WorkerRef,
        instance: InstanceId,
        upstream: FromStorage | FromWorker,
        pairing: Pairing | None,
    ) -> None:
        manifest = self.setting.manifest
        grid = ChunkGrid([entry.size_bytes for entry in manifest.layers], _CHUNK_BYTES)
        command = commands.StartHolding(
            # Every instance has a plan of its own.
            holding=HoldingId(instance, worker),
            model=manifest.model,
            span=LayerSpan(0, len(manifest.layers)),
            feeds=(Feed(upstream, grid.all()),),
            chunk_bytes=_CHUNK_BYTES,
            duty=Duty(instance, (worker,), pairing=pairing),
        )
        wire = self._members[worker].orders
        assert wire is not None
        wire.send(Order(command, manifest, str(self.setting.directory)))

    def _tell_trouble(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._news.set()

    def _log_tail(self, ref: WorkerRef) -> str:
        log = self._members[ref].log
        log.seek(0)
        return log.read().decode(errors="replace").strip()[-_LOG_TAIL_CHARS:] or "its log is empty"

    async def _stop(self) -> None:
        for task in self._readers:
            task.cancel()
        for member in self._members.values():
            process = member.process
            assert process.stdin is not None
            process.stdin.close()  # its parent is gone: it ends
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            member.log.close()
        if self._server is not None:
            self._server.close()
