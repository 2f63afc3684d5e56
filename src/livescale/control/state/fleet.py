"""Workers and instances: who is there, and who holds what.

Rule: an instance changes state only through `Fleet.move`, by the table in `instance.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from livescale.clusters.topology import Device, Host
from livescale.control.state.holdings import Copy
from livescale.control.state.idle_workers import IdleWorkers, WorkerRecord
from livescale.control.state.instance import TRANSITIONS, Instance, InvalidTransition
from livescale.control.state.known_cores import KnownCores
from livescale.control.state.pool import ParameterPool
from livescale.messages.events import InstanceReported
from livescale.values.routes import Hop, Partner, Route
from livescale.values.types import InstanceId, InstanceState, Part, Value, WorkerRef

# A worker that lives looks for the controller at least once in a second.
_MISSING_NS = 10_000_000_000


@dataclass(slots=True)
class Tally:
    """Sums over a part's living instances, kept up as they change: a decision must not cost more
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
class AgentRecord:
    """A living host agent."""

    ref: WorkerRef
    host: Host


class Fleet:
    """All living workers and instances. Stopped and lost instances are forgotten."""

    def __init__(self, pool: ParameterPool) -> None:
        self._pool = pool
        self.cores = KnownCores()
        #: grows with every move of an instance, and when a host agent joins
        self.version = 0
        #: by worker number: at most one incarnation is alive
        self.workers: dict[int, WorkerRecord] = {}
        #: living members that leave in order: nothing new comes to them
        self.leaving: dict[WorkerRef, None] = {}
        #: host agents by number: at most one incarnation is alive
        self.agents: dict[int, AgentRecord] = {}
        self.instances: dict[InstanceId, Instance] = {}
        self._of_part: dict[Part, dict[InstanceId, Instance]] = {}
        self._tallies: dict[Part, Tally] = {}
        #: what `serving` and `live` last returned, of parts for which it still holds
        self._serving: dict[Part, list[Route]] = {}
        self._live: dict[Part, list[Instance]] = {}
        self._waking: dict[Part, int] = {}
        #: parts whose instances or their loads changed since that was last looked at
        self.touched: dict[Part, None] = {}
        #: what `version` was when an instance of the part moved last
        self._versions: dict[Part, int] = {}
        #: instances that drain, in the order in which they began to
        self.draining: dict[InstanceId, Instance] = {}
        self._idle = IdleWorkers(self.workers, self.leaving, pool.in_use)
        #: instances of an earlier controller's life whose role is none of their model's, until that
        #: was looked at
        self.strangers: dict[InstanceId, Instance] = {}
        #: the loads of instances whose ranks have not all been reported, as rank 0 reported them
        self._early_loads: dict[InstanceId, InstanceReported] = {}

    def join(self, ref: WorkerRef, device: Device, *, is_engine: bool = False) -> None:
        assert ref.worker not in self.workers, f"{ref} joins, {self.workers[ref.worker]} is alive"
        self.workers[ref.worker] = WorkerRecord(ref, device, is_engine)
        self._idle.forget()

    def agent_joins(self, ref: WorkerRef, host: Host) -> None:
        assert ref.worker not in self.agents, f"{ref} joins, {self.agents[ref.worker]} is alive"
        self.version += 1
        self.agents[ref.worker] = AgentRecord(ref, host)

    def is_alive(self, ref: WorkerRef) -> bool:
        """A worker or agent in its current incarnation."""
        records = self.agents if ref.is_agent else self.workers
        record = records.get(ref.worker)
        return record is not None and record.ref == ref

    def is_engine(self, worker: WorkerRef) -> bool:
        """What runs there works alone, with whole models."""
        return worker.worker in self.workers and self.workers[worker.worker].is_engine

    def living_agents(self) -> list[AgentRecord]:
        """In id order."""
        return [self.agents[number] for number in sorted(self.agents)]

    def begin_leaving(self, members: Iterable[WorkerRef]) -> None:
        """These living members want to go."""
        self.version += 1
        self.leaving.update(dict.fromkeys(members))
        self._idle.forget()

    def is_leaving(self, members: Iterable[WorkerRef]) -> bool:
        """One of them wants to go."""
        return bool(self.leaving) and any(member in self.leaving for member in members)

    def leave(self, ref: WorkerRef) -> None:
        """The worker or agent is gone."""
        self.leaving.pop(ref, None)
        self._idle.forget()
        if ref.is_agent:
            del self.agents[ref.worker]
        else:
            del self.workers[ref.worker]

    def instance_on(self, worker: WorkerRef) -> Instance | None:
        """The living instance of which the worker holds a rank."""
        for holding in self._pool.on(worker):
            duty = holding.order.duty
            if duty is not None and duty.instance in self.instances:
                return self.instances[duty.instance]
        return None

    def idle(self, arena_bytes: int, *, engines: bool = True) -> list[WorkerRecord]:
        """Workers of no instance, which stay, hold warm spares or nothing, and whose arena is as
        large as the model, in id order. Those that are `engines` only if asked for."""
        return self._idle.listed(arena_bytes, engines=engines)

    def adopt(self, part: Part, copy: Copy) -> None:
        """Take over an instance from an earlier controller's life: all its ranks were reported."""
        duty = copy.ranks[0].order.duty
        assert duty is not None, f"{copy!r} is no instance's"
        for holding in copy.ranks.values():
            # Only rank 0 is sent a duty that changes.
            holding.order = msgspec.structs.replace(holding.order, duty=duty)
        state = InstanceState.LOADING if duty.live_order is None else InstanceState.LIVE
        if copy.is_loaded:
            state = InstanceState.SERVING
        instance = Instance(part, duty, copy, state)
        instance.is_unreported = state is not InstanceState.LOADING
        instance.story.append(f"adopted as {state.name}")
        self.add(instance)
        if duty.role is not part.role:
            self.strangers[instance.id] = instance
        load = self._early_loads.pop(instance.id, None)
        if load is not None:
            self.report(instance, load)

    def move(self, instance: Instance, cause: type[Value]) -> None:
        """Apply the table. STOPPED and LOST instances leave the fleet; their workers are spare when
        nothing of it is left there."""
        target = TRANSITIONS[instance.state].get(cause)
        if target is None:
            raise InvalidTransition(
                f"{instance!r} cannot take {cause.__name__}; story: {', '.join(instance.story)}"
            )
        instance.story.append(f"{cause.__name__} {instance.state.name}->{target.name}")
        if instance.state is not target:
            self.version += 1
        self._changed(instance.part)
        tally = self.tally(instance.part)
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
            del self._of_part[instance.part][instance.id]

    def report_early(self, event: InstanceReported) -> None:
        """The load of an instance whose ranks are not all there yet, if it is one."""
        if self._pool.is_incomplete(event.instance):
            self._early_loads[event.instance] = event

    def give_up_hopeless(self, now_ns: int) -> None:
        """Instances that will never be whole: the worker of a rank that was not reported is there
        without it, or has not come for a long time."""
        for copy in self._pool.incomplete():
            missing = [m for rank, m in enumerate(copy.members) if rank not in copy.ranks]
            is_late = now_ns >= copy.used_ns + _MISSING_NS
            if is_late or any(self._has_joined(member) for member in missing):
                self._pool.give_up(copy)
                if copy.instance is not None:
                    self._early_loads.pop(copy.instance, None)

    def hopeless_from_ns(self) -> int | None:
        """When the next instance is given up whose workers have not all come (None: there is no
        such instance)."""
        since_ns = [copy.used_ns for copy in self._pool.incomplete()]
        return min(since_ns) + _MISSING_NS if since_ns else None

    def _has_joined(self, ref: WorkerRef) -> bool:
        """The worker is there, in this incarnation or a later one."""
        record = self.workers.get(ref.worker)
        return record is not None and record.ref >= ref

    def report(self, instance: Instance, event: InstanceReported) -> None:
        """Take note of an instance's load."""
        instance.is_unreported = False
        self.touched[instance.part] = None
        tally = self.tally(instance.part)
        tally.add(instance, -1)
        instance.running = event.running
        instance.queued_prefill_tokens = event.queued_prefill_tokens
        instance.kv_blocks_used = event.kv_blocks_used
        instance.kv_blocks = event.kv_blocks
        instance.kv_blocks_kept = event.kv_blocks_kept
        instance.left_out = event.left_out
        instance.prefill_tokens = event.prefill_tokens
        instance.prefill_ns = event.prefill_ns
        instance.stage_counts = event.stage
        tally.add(instance)

    def tally(self, part: Part) -> Tally:
        found = self._tallies.get(part)
        if found is None:
            found = self._tallies[part] = Tally()
        return found

    def serving(self, part: Part) -> list[Route]:
        """The routes over one instance that serves, in id order."""
        found = self._serving.get(part)
        if found is None:
            instances = self.of_part(part)
            serving = [i.partner for i in instances if i.state is InstanceState.SERVING]
            found = [Route((Hop((partner,), part.span),)) for partner in serving]
            self._serving[part] = found
        return found

    def resumable(self, part: Part) -> int:
        """How many instances drain and would serve on at once if they were wanted."""
        of_part = self._of_part.get(part, {})
        draining = (of_part.get(number) for number in self.draining)
        return sum(i is not None and self.can_resume(i) for i in draining)

    def can_resume(self, instance: Instance) -> bool:
        """It drains, and could serve on."""
        is_draining = instance.state is InstanceState.DRAINING and not instance.is_released
        return is_draining and not self.is_leaving(instance.workers)

    def live(self, part: Part) -> list[Instance]:
        """Instances that take requests while they load, in id order."""
        found = self._live.get(part)
        if found is None:
            found = [i for i in self.of_part(part) if i.state is InstanceState.LIVE]
            self._live[part] = found
        return found

    def waking(self, part: Part) -> int:
        """How many instances were made of warm spares and will serve in a moment."""
        found = self._waking.get(part)
        if found is None:
            found = self._waking[part] = sum(i.is_waking for i in self.of_part(part))
        return found

    def sources_of(self, target: Instance) -> tuple[Partner, ...]:
        """The instances that pull from a loading one, those that are still there."""
        sources = [self.instances.get(partner.instance) for partner in target.duty.gives_to]
        serving = [s for s in sources if s is not None and s.state is InstanceState.SERVING]
        return tuple(source.partner for source in serving)

    def version_of(self, part: Part) -> int:
        """Grows with every move of an instance of the part."""
        return self._versions.get(part, 0)

    def of_part(self, part: Part) -> list[Instance]:
        """Living instances of the part in id order."""
        return [instance for _, instance in sorted(self._of_part.get(part, {}).items())]

    def of_parts(self, parts: Iterable[Part]) -> list[Instance]:
        """Living instances of these parts, part by part."""
        return [instance for part in parts for instance in self.of_part(part)]

    def change_part(self, instance: Instance, part: Part) -> None:
        """The instance serves another part of its model from now on: nothing is loaded for that."""
        self.version += 1
        before = instance.part
        self.tally(before).add(instance, -1)
        self.tally(before).capacity -= instance.is_capacity
        del self._of_part[before][instance.id]
        self._changed(before)
        instance.part = part
        instance.story.append(f"{before.role}->{part.role}")
        self.tally(part).add(instance)
        self.tally(part).capacity += instance.is_capacity
        self._of_part.setdefault(part, {})[instance.id] = instance
        self._changed(part)

    def forget_part(self, part: Part) -> None:
        """The part leaves the pool; it has no instance any more."""
        assert not self._of_part.pop(part, None), f"{part} has instances"
        self._tallies.pop(part, None)
        self._versions.pop(part, None)
        self._serving.pop(part, None)
        self._live.pop(part, None)
        self._waking.pop(part, None)

    def _changed(self, part: Part) -> None:
        """One of its instances is new, or moves."""
        self.touched[part] = None
        self._versions[part] = self.version
        self._serving.pop(part, None)
        self._live.pop(part, None)
        self._waking.pop(part, None)

    def add(self, instance: Instance) -> None:
        """The instance is new here. Its holdings are in the pool."""
        self.version += 1
        self.instances[instance.id] = instance
        self._changed(instance.part)
        self.tally(instance.part).capacity += instance.is_capacity
        self._of_part.setdefault(instance.part, {})[instance.id] = instance

    def validate(self) -> None:
        """What instances and their models count up agrees. Raises AssertionError."""
        for instance in self.instances.values():
            held = [holding.order.duty for holding in instance.copy.ranks.values()]
            assert held, f"{instance!r} holds nothing"
            assert all(duty == instance.duty for duty in held), (instance, held)
        for part in self._of_part:
            instances = self.of_part(part)
            fresh = Tally(sum(i.is_capacity for i in instances))
            for instance in instances:
                fresh.add(instance)
            assert self.tally(part) == fresh, (part, self.tally(part), fresh)
        draining = [i.id for i in self.instances.values() if i.state is InstanceState.DRAINING]
        assert sorted(self.draining) == sorted(draining)
        for instance in self.instances.values():
            assert instance.state not in (InstanceState.STOPPED, InstanceState.LOST), instance
            assert 0 <= instance.watermark <= instance.part.span.stop, instance
            is_loaded = instance.state in (InstanceState.SERVING, InstanceState.DRAINING)
            # The ranks of a released instance go one after the other.
            if is_loaded and not instance.is_released:
                assert instance.watermark == instance.part.span.stop, instance
