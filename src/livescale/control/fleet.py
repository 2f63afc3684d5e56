"""Workers and instances: who is there, and who holds what.

Rule: an instance changes state only through `Fleet.move`, by the table in `instance.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from livescale.control.instance import TRANSITIONS, Instance, InvalidTransition
from livescale.messages.events import (
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
)
from livescale.topology import Device, Host
from livescale.types import InstanceId, InstanceState, PlanId, Value, WorkerRef


@dataclass(slots=True)
class ModelTally:
    """Sums over a model's living instances, kept up as they change: a decision must not cost more
    for a large pool. `capacity` counts instances that serve or will."""

    capacity: int = 0
    queued_prefill_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_kept: int = 0
    #: requests on instances that have no place or no KV for them, how many such instances there
    #: are, and what these run
    left_out: int = 0
    full: int = 0
    full_running: int = 0

    def add(self, instance: Instance, sign: int = 1) -> None:
        """Count what the instance reported last, or (-1) count that no more."""
        self.queued_prefill_tokens += sign * instance.queued_prefill_tokens
        self.kv_blocks_used += sign * instance.kv_blocks_used
        self.kv_blocks_kept += sign * instance.kv_blocks_kept
        if instance.left_out:
            self.left_out += sign * instance.left_out
            self.full += sign
            self.full_running += sign * instance.running


@dataclass(slots=True)
class WorkerRecord:
    """A warm worker; `instance` is what it holds now (None: spare)."""

    ref: WorkerRef
    device: Device
    instance: InstanceId | None = None


@dataclass(slots=True)
class AgentRecord:
    """A living host agent."""

    ref: WorkerRef
    host: Host


@dataclass(slots=True)
class Remnant:
    """A rank of an instance that has ended otherwise: its worker must be released."""

    model: str
    worker: WorkerRef
    attempt: int
    is_released: bool = False


class Fleet:
    """All living workers and instances. Stopped and lost instances are forgotten."""

    def __init__(self) -> None:
        #: grows with every move of an instance, and when a host agent joins
        self.version = 0
        #: by worker number: at most one incarnation is alive
        self.workers: dict[int, WorkerRecord] = {}
        #: host agents by number: at most one incarnation is alive
        self.agents: dict[int, AgentRecord] = {}
        self.instances: dict[InstanceId, Instance] = {}
        self._of_model: dict[str, dict[InstanceId, Instance]] = {}
        self._tallies: dict[str, ModelTally] = {}
        #: what `serving` and `live` last said, of models for which it still holds
        self._serving: dict[str, list[tuple[InstanceId, WorkerRef]]] = {}
        self._live: dict[str, list[Instance]] = {}
        #: models whose instances or their loads changed since somebody took note
        self.touched: dict[str, None] = {}
        #: instances that drain, in the order in which they began to
        self.draining: dict[InstanceId, Instance] = {}
        #: what ended instances left on living workers, by (instance, rank)
        self.remnants: dict[tuple[InstanceId, int], Remnant] = {}
        #: ranks that were reported by workers, until all ranks of the instance are there
        self._reported: dict[InstanceId, dict[int, tuple[WorkerRef, InstanceReport]]] = {}
        #: the loads of such instances, as rank 0 reported them
        self._early_loads: dict[InstanceId, InstanceReported] = {}

    def join(self, ref: WorkerRef, device: Device) -> None:
        assert ref.worker not in self.workers, f"{ref} joins, {self.workers[ref.worker]} is alive"
        self.workers[ref.worker] = WorkerRecord(ref, device)

    def agent_joins(self, ref: WorkerRef, host: Host) -> None:
        assert ref.worker not in self.agents, f"{ref} joins, {self.agents[ref.worker]} is alive"
        self.version += 1
        self.agents[ref.worker] = AgentRecord(ref, host)

    def is_alive(self, ref: WorkerRef) -> bool:
        """A worker or agent in its current incarnation."""
        records = self.agents if ref.is_agent else self.workers
        record = records.get(ref.worker)
        return record is not None and record.ref == ref

    def living_agents(self) -> list[AgentRecord]:
        """In id order."""
        return [self.agents[number] for number in sorted(self.agents)]

    def leave(self, ref: WorkerRef) -> None:
        """The worker is gone; its instance was moved to LOST before."""
        for key in [key for key, remnant in self.remnants.items() if remnant.worker == ref]:
            self.free(key)
        for number, ranks in self._reported.items():
            for rank in [rank for rank, (worker, _) in ranks.items() if worker == ref]:
                del ranks[rank]
                self._early_loads.pop(number, None)
                self.workers[ref.worker].instance = None
        record = self.workers.pop(ref.worker)
        assert record.instance is None, f"{ref} leaves with instance {record.instance}"

    def free(self, key: tuple[InstanceId, int]) -> None:
        """The worker of a remnant is spare again."""
        self.workers[self.remnants.pop(key).worker.worker].instance = None

    def spare(self, arena_bytes: int) -> list[WorkerRecord]:
        """Workers without an instance whose arena holds the model, in id order."""
        records = (self.workers[number] for number in sorted(self.workers))
        return [r for r in records if r.instance is None and r.device.arena_bytes >= arena_bytes]

    def place(self, instance: Instance) -> None:
        """Put a new instance onto its workers."""
        for worker in instance.workers:
            record = self.workers[worker.worker]
            assert record.ref == worker, f"{instance!r} on {record.ref}"
            assert record.instance is None, f"{instance!r} on a worker with {record.instance}"
            record.instance = instance.id
        self._add(instance)

    def adopt(
        self, report: InstanceReport, worker: WorkerRef, layers: int, tp_size: int
    ) -> Instance | None:
        """Take over a rank that a worker reports from an earlier controller's life.

        Returns the instance when all its ranks are there.
        """
        ranks = self._reported.setdefault(report.instance, {})
        ranks[report.rank] = (worker, report)
        self.workers[worker.worker].instance = report.instance
        if len(ranks) < tp_size:
            return None
        del self._reported[report.instance]
        reports = [ranks[rank][1] for rank in range(tp_size)]
        is_loaded = all(r.is_loaded for r in reports)
        pairing = reports[0].pairing
        state = InstanceState.LOADING if pairing is None else InstanceState.LIVE
        if is_loaded:
            state = InstanceState.SERVING
        instance = Instance(
            report.instance,
            report.model,
            tuple(ranks[rank][0] for rank in range(tp_size)),
            layers,
            report.attempt,
            state=state,
            watermarks={r.rank: layers if r.is_loaded else r.watermark for r in reports},
            loaded_ranks={r.rank: None for r in reports if r.is_loaded},
            plan=reports[0].plan,
            pairing=pairing,
            is_unheard=is_loaded or pairing is not None,
        )
        instance.story.append(f"adopted as {state.name}")
        self._add(instance)
        load = self._early_loads.pop(report.instance, None)
        if load is not None:
            self.report(instance, load)
        return instance

    def give_back(self, report: InstanceReport, worker: WorkerRef) -> None:
        """The worker holds a rank of a model that is served no more: it is to be released."""
        self.remnants[report.instance, report.rank] = Remnant(report.model, worker, report.attempt)
        self.workers[worker.worker].instance = report.instance

    def reported_load(
        self, event: LayerArrived | LoadCompleted | LoadFailed
    ) -> tuple[PlanId, WorkerRef] | None:
        """News of a rank whose instance has not come together yet: its load, or None."""
        ranks = self._reported.get(event.instance, {})
        if event.rank not in ranks:
            return None
        worker, report = ranks[event.rank]
        if isinstance(event, LoadFailed):
            del ranks[event.rank]
            self.workers[worker.worker].instance = None
            self._give_up(event.instance)
            return report.plan, worker
        if isinstance(event, LayerArrived):
            newer = msgspec.structs.replace(report, watermark=event.watermark)
        else:
            newer = msgspec.structs.replace(report, is_loaded=True)
        ranks[event.rank] = (worker, newer)
        return report.plan, worker

    def give_up_incomplete(self) -> None:
        """Ranks whose instance did not come together become remnants."""
        for number in list(self._reported):
            self._give_up(number)

    def _give_up(self, number: InstanceId) -> None:
        self._early_loads.pop(number, None)
        for rank, (worker, report) in self._reported.pop(number).items():
            self.remnants[number, rank] = Remnant(report.model, worker, report.attempt)

    def move(self, instance: Instance, cause: type[Value]) -> None:
        """Apply the table. STOPPED and LOST instances leave the fleet, and free their workers:
        those that still hold bytes of it when they are released."""
        target = TRANSITIONS[instance.state].get(cause)
        if target is None:
            raise InvalidTransition(
                f"{instance!r} cannot take {cause.__name__}; story: {', '.join(instance.story)}"
            )
        instance.story.append(f"{cause.__name__} {instance.state.name}->{target.name}")
        if instance.state is not target:
            self.version += 1
        self._changed(instance.model)
        tally = self.tally(instance.model)
        tally.capacity -= instance.is_capacity
        instance.state = target
        tally.capacity += instance.is_capacity
        if target is InstanceState.DRAINING:
            self.draining[instance.id] = instance
        else:
            self.draining.pop(instance.id, None)
        if target in (InstanceState.STOPPED, InstanceState.LOST):
            tally.add(instance, -1)
            del self.instances[instance.id]
            del self._of_model[instance.model][instance.id]
            for rank, worker in enumerate(instance.workers):
                self.remnants[instance.id, rank] = Remnant(
                    instance.model, worker, instance.attempt, instance.is_released
                )
                if rank in instance.empty_ranks:
                    self.free((instance.id, rank))

    def report_early(self, event: InstanceReported) -> None:
        """The load of an instance whose ranks are not all there yet, if it is one."""
        if event.instance in self._reported:
            self._early_loads[event.instance] = event

    def report(self, instance: Instance, event: InstanceReported) -> None:
        """Take note of an instance's load."""
        instance.is_unheard = False
        self.touched[instance.model] = None
        tally = self.tally(instance.model)
        tally.add(instance, -1)
        instance.running = event.running
        instance.queued_prefill_tokens = event.queued_prefill_tokens
        instance.kv_blocks_used = event.kv_blocks_used
        instance.kv_blocks = event.kv_blocks
        instance.kv_blocks_kept = event.kv_blocks_kept
        instance.left_out = event.left_out
        tally.add(instance)

    def tally(self, model: str) -> ModelTally:
        return self._tallies.setdefault(model, ModelTally())

    def serving(self, model: str) -> list[tuple[InstanceId, WorkerRef]]:
        """Instances that serve, and the workers that get their requests, in id order."""
        found = self._serving.get(model)
        if found is None:
            instances = self.of_model(model)
            found = [(i.id, i.worker) for i in instances if i.state is InstanceState.SERVING]
            self._serving[model] = found
        return found

    def live(self, model: str) -> list[Instance]:
        """Instances that take requests while they load, in id order."""
        found = self._live.get(model)
        if found is None:
            found = [i for i in self.of_model(model) if i.state is InstanceState.LIVE]
            self._live[model] = found
        return found

    def source_of(self, target: Instance) -> WorkerRef | None:
        """The worker of rank 0 that pulls from a loading instance, if it is still there."""
        if target.pairing is None or target.pairing.source is None:
            return None
        source = self.instances.get(target.pairing.source_instance)
        is_there = source is not None and source.state is InstanceState.SERVING
        return target.pairing.source if is_there else None

    def of_model(self, model: str) -> list[Instance]:
        """Living instances of the model in id order."""
        return [instance for _, instance in sorted(self._of_model.get(model, {}).items())]

    def has_any(self, model: str) -> bool:
        """Some worker holds something of the model."""
        left = [remnant.model for remnant in self.remnants.values()]
        left += [r.model for ranks in self._reported.values() for _, r in ranks.values()]
        return bool(self._of_model.get(model)) or model in left

    def forget_model(self, model: str) -> None:
        """The model leaves the pool; it has no instance any more."""
        assert not self._of_model.pop(model, None), f"{model} has instances"
        self._tallies.pop(model, None)
        self._serving.pop(model, None)
        self._live.pop(model, None)

    def _changed(self, model: str) -> None:
        """One of its instances is new, or moves."""
        self.touched[model] = None
        self._serving.pop(model, None)
        self._live.pop(model, None)

    def _add(self, instance: Instance) -> None:
        self.version += 1
        self.instances[instance.id] = instance
        self._changed(instance.model)
        self.tally(instance.model).capacity += instance.is_capacity
        self._of_model.setdefault(instance.model, {})[instance.id] = instance

    def validate(self) -> None:
        """Workers and instances name each other. Raises AssertionError."""
        held = {r.ref: r.instance for r in self.workers.values() if r.instance is not None}
        named = {worker: i.id for i in self.instances.values() for worker in i.workers}
        named |= {remnant.worker: number for (number, _), remnant in self.remnants.items()}
        named |= {w: n for n, ranks in self._reported.items() for w, _ in ranks.values()}
        assert held == named, (held, named)
        for model in self._of_model:
            instances = self.of_model(model)
            fresh = ModelTally(sum(i.is_capacity for i in instances))
            for instance in instances:
                fresh.add(instance)
            assert self.tally(model) == fresh, (model, self.tally(model), fresh)
        draining = [i.id for i in self.instances.values() if i.state is InstanceState.DRAINING]
        assert sorted(self.draining) == sorted(draining)
        for instance in self.instances.values():
            assert instance.state not in (InstanceState.STOPPED, InstanceState.LOST), instance
            assert 0 <= instance.watermark <= instance.layers, instance
            if instance.state in (InstanceState.SERVING, InstanceState.DRAINING):
                assert instance.watermark == instance.layers, instance
