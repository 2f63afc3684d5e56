"""The thread of a member: what the production Member asks for, carried out in the real world.

Orders, messages and news come from other threads and wait in an inbox; between two Runs they become
inputs of the Member. Memory, its data plane and the controller are the business of this file; what
workers have besides is in `worker_thread.py`. Nothing is decided here.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import xxhash

from livescale.control.policy.residency import Resident
from livescale.member.effects import (
    AmendFetch,
    DropFetch,
    Effect,
    Fetch,
    KeepLayers,
    RefuseOrder,
    Report,
    TakeUp,
)
from livescale.member.inputs import FetchFailed, MemberInput, MemoryKept, Ordered
from livescale.member.member import Member
from livescale.messages.commands import StartHolding
from livescale.messages.epochs import FIRST_EPOCH, ControllerEpoch
from livescale.messages.events import AnyEvent
from livescale.runtime.member_process.model_fetch import ModelFetch
from livescale.runtime.member_process.preparing import Preparing
from livescale.runtime.wire.boot import AgentBoot, WorkerBoot
from livescale.runtime.wire.examination import held_copy, layer_checksum
from livescale.runtime.wire.heartbeat import WorkPulse
from livescale.runtime.wire.protocol import Examine, Examined, MayCome, Order
from livescale.transfer.formats.orders import ContentChecks, ReceiveOrder
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.types import Manifest, PlanId, WorkerRef

_log = logging.getLogger(__name__)


class MemberThread:
    """Runs one Member. `report` sends to the controller; it is called on this thread."""

    #: what computes here schedules by itself
    is_engine = False

    def __init__(
        self,
        boot: WorkerBoot | AgentBoot,
        member: Member,
        memory: Arena,
        data_plane: DataPlane,
        report: Callable[[AnyEvent | Examined], None],
        prepare: Callable[[Manifest], None] = lambda _: None,
    ) -> None:
        """`prepare` makes ready what takes long for a model that may come."""
        self.member = member
        self._boot = boot
        self._memory = memory
        self._data_plane = data_plane
        self._report = report
        self._inbox: queue.SimpleQueue[MemberInput | Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._preparing = Preparing(prepare, member, self.post)
        #: what the next step absorbs
        self._inputs: list[MemberInput] = []
        #: asked by those who answer for this thread
        self.pulse = WorkPulse(boot.pool.lost_after_ms, boot.pool.stuck_after_ms, self.post)
        #: what only the world knows of the orders of this step: the bytes, and where files lie
        self._materials: dict[PlanId, tuple[Manifest, str | None]] = {}
        self._fetches: dict[PlanId, ModelFetch] = {}
        self._carry: dict[type, Callable[[Any], object]] = {
            Report: lambda effect: self._report(effect.event),
            Fetch: self._fetch,
            TakeUp: self._take_up,
            AmendFetch: self._amend,
            DropFetch: self._drop,
            KeepLayers: self._keep_layers,
            RefuseOrder: lambda effect: _log.warning("An order was rejected: %s", effect.reason),
        }

    # -- from other threads ---------------------------------------------------------------------

    def post(self, work: MemberInput | Callable[[], object]) -> None:
        """Let the thread take this in between two Runs."""
        self._inbox.put(work)

    def obey(self, order: Order | Examine | MayCome, epoch: ControllerEpoch = FIRST_EPOCH) -> None:
        """An order of the controller in one of its lives, its question what the memory holds, or a
        model that may come."""
        if isinstance(order, Examine):
            self.post(partial(self._examine, order))
        elif isinstance(order, MayCome):
            self.post(partial(self._preparing.add, order.manifest))
        else:
            self.post(partial(self._take_order, order, epoch))

    def lose_peer(self, peer: WorkerRef) -> None:
        """The controller gave a worker up: a member without an instance has no peers."""

    def stop(self) -> None:
        """End `run` after the Run in flight."""
        self._inbox.put(None)

    # -- the main loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`. An error of the executor ends the member: its state is unknown."""
        while self._take_in():
            with self.pulse.piece():
                self._step()

    def _come_round(self) -> bool:
        """Inside a piece of work that waits: take in what comes next. False to stop."""
        self.pulse.pause()
        is_going_on = self._take_in()
        self.pulse.go_on()
        if is_going_on:
            self._step()
        else:
            self.stop()  # when the piece is over
        return is_going_on

    def _step(self) -> None:
        inputs, self._inputs = self._inputs, []
        self._carry_out(self.member.step(time.monotonic_ns(), inputs))
        self._after_step()

    def _take_in(self) -> bool:
        """Gather what waits; sleep while there is nothing to do. False to stop."""
        try:
            work = self._inbox.get(not self._inputs, self._patience_s())
            while True:
                if work is None:
                    return False
                if callable(work):
                    with self.pulse.piece():
                        work()
                else:
                    self._inputs.append(work)
                work = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _patience_s(self) -> float | None:
        wake_ns = self.member.wake_ns()
        return None if wake_ns is None else max(0, wake_ns - time.monotonic_ns()) / 1e9

    def _carry_out(self, asked: Sequence[Effect]) -> None:
        for effect in asked:
            self._carry[type(effect)](effect)

    def _after_step(self) -> None:
        """Everything that the step asked for was carried out. Orders may wait for the end of a
        Run."""
        if not self.member.waiting:
            self._materials.clear()
        self._preparing.go_on()

    # -- orders ---------------------------------------------------------------------------------

    def _take_order(self, order: Order, epoch: ControllerEpoch) -> None:
        command, manifest = order.command, order.manifest
        if not isinstance(command, StartHolding):
            self._inputs.append(Ordered(command, epoch=epoch))
            return
        assert manifest is not None, f"{self!r} is given {command.model} without its manifest"
        self._materials[command.holding.plan] = manifest, order.directory
        layer_bytes = tuple(entry.size_bytes for entry in manifest.layers)
        self._inputs.append(Ordered(command, layer_bytes, _identity(manifest), epoch))

    def _examine(self, asked: Examine) -> None:
        """Say what the memory holds, byte for byte."""
        ranks = {held.id.plan: held.order.rank for held in self.member.holdings}
        copies = tuple(
            held_copy(fetch.order.manifest, fetch.memory, fetch.present(), ranks[plan])
            for plan, fetch in self._fetches.items()
        )
        self._report(Examined(asked.call, self.member.ref, copies))

    # -- effects --------------------------------------------------------------------------------

    def _fetch(self, effect: Fetch) -> None:
        """Begin to receive or to read."""
        plan, command, offset_bytes = effect.plan, effect.order, effect.offset_bytes
        manifest, directory = self._materials[plan]
        try:
            self._memory.check_fits(manifest, offset_bytes)
            self._memory.touch(offset_bytes, manifest.size_bytes)
            memory = self._memory.view(offset_bytes, manifest.size_bytes)
            is_agent = self._boot.member.is_agent
            order = ReceiveOrder(
                plan=plan,
                manifest=manifest,
                chunk_bytes=command.chunk_bytes,
                feeds=command.feeds,
                offset_bytes=offset_bytes,
                present_layers=self._restore(manifest, memory, effect.resident),
                # A host's copy is given to many, for long: all its bytes are held against the
                # manifest's hash, once.
                content_checks=ContentChecks.ALL if is_agent else ContentChecks.NETWORK,
            )
            fetch = ModelFetch(
                order,
                memory,
                self._data_plane,
                self.post,
                directory=directory,
                storage_bytes_per_s=self._boot.storage_bytes_per_s,
            )
            self._fetches[plan] = fetch
            fetch.start()
        except ValueError as error:
            self._inputs.append(FetchFailed(plan, str(error)))

    def _restore(
        self, manifest: Manifest, memory: memoryview, resident: Resident | None
    ) -> tuple[int, ...]:
        """Put what is kept of the model to its place. Returns the layers whose checksums agree."""
        if resident is None:
            return ()
        memory[: resident.size_bytes] = self._memory.view(
            resident.offset_bytes, resident.size_bytes
        )
        kept = manifest.layers[: resident.layers]
        return tuple(e.layer for e in kept if layer_checksum(e, memory) == e.checksum)

    def _take_up(self, effect: TakeUp) -> None:
        self._fetches[effect.plan] = self._fetches.pop(effect.spare)

    def _amend(self, effect: AmendFetch) -> None:
        self._fetches[effect.plan].amend(effect.feeds)

    def _drop(self, effect: DropFetch) -> None:
        """Bytes are neither written nor read when this returns, but by reads that cannot be called
        back: the member knows where these may write until they have ended."""
        fetch = self._fetches.pop(effect.plan, None)
        if fetch is None:
            return
        fetch.stop()
        place = fetch.order.offset_bytes, fetch.order.manifest.size_bytes
        writes = self._data_plane.writes
        kept = writes.ranges(*place)
        if kept:
            # The memory stays touched: when the reads have ended, another holding may lie there.
            self._inputs.append(MemoryKept(effect.plan, kept))
            ended = MemoryKept(effect.plan, ())
            writes.when_closed(*place, lambda: self.post(ended))
        else:
            self._memory.give_back(*place)

    def _keep_layers(self, effect: KeepLayers) -> None:
        kept = effect.resident
        place = self._memory.view(kept.offset_bytes, kept.size_bytes)
        place[:] = self._memory.view(effect.offset_bytes, kept.size_bytes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.member!r}>"


def _identity(manifest: Manifest) -> str:
    """Names the bytes: fine-tunes of one model share its manifest's id."""
    checksums = "".join(entry.checksum for entry in manifest.layers)
    return f"{manifest.id}-{xxhash.xxh3_64_hexdigest(checksums.encode())}"
