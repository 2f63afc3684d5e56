"""Workers that a new instance can have: in no instance, and not about to leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from livescale.clusters.topology import Device
from livescale.control.state.members_in_use import MembersInUse
from livescale.values.types import WorkerRef


@dataclass(slots=True)
class WorkerRecord:
    """A living worker. What is on one that `is_engine` works alone, and runs whole models."""

    ref: WorkerRef
    device: Device
    is_engine: bool = False


class IdleWorkers:
    """Those of `workers` that hold warm spares or nothing, and are not `leaving`. Only members that
    came into use, or went out of it, are looked at again; `forget` when workers come or go."""

    def __init__(
        self,
        workers: Mapping[int, WorkerRecord],
        leaving: Mapping[WorkerRef, None],
        in_use: MembersInUse,
    ) -> None:
        self._workers = workers
        self._leaving = leaving
        self._in_use = in_use
        #: by number, as of the last look (None: all are looked at)
        self._idle: dict[int, WorkerRecord] | None = None

    def forget(self) -> None:
        """A worker came, went, or wants to go."""
        self._idle = None

    def listed(self, arena_bytes: int, *, engines: bool) -> list[WorkerRecord]:
        """Those whose arena is as large, in id order. Those that are `engines` if asked for."""
        changed = self._in_use.take_changed()
        if self._idle is None:
            self._idle = {}
            changed = dict.fromkeys(record.ref for record in self._workers.values())
        for member in changed:
            record = self._workers.get(member.worker)
            if record is None or record.ref != member:
                continue
            if member in self._leaving or self._in_use.has_any_of((member,)):
                self._idle.pop(member.worker, None)
            else:
                self._idle[member.worker] = record
        idle = (self._idle[number] for number in sorted(self._idle))
        found = [record for record in idle if record.device.arena_bytes >= arena_bytes]
        return found if engines else [record for record in found if not record.is_engine]
