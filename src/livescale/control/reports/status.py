"""What a controller's owner may know of its state: a value, computed when asked."""

from __future__ import annotations

import msgspec

from livescale.control.planning.host_copies import HostCopies
from livescale.control.scaling.wishes import Wishes
from livescale.control.state.fleet import Fleet
from livescale.control.state.model_state import ModelState
from livescale.control.state.pool import ParameterPool
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import InstanceId, InstanceState, Role, Value, WorkerRef


class InstanceSummary(Value, frozen=True):
    """A living instance: its devices, one per rank, what it last reported of its KV blocks, and the
    role of the part that it serves."""

    model: str
    state: InstanceState
    devices: int
    kv_blocks_used: int
    kv_blocks: int
    role: Role = Role.UNIFIED


class ModelSummary(Value, frozen=True):
    """A model of the pool: its living instances by state, those of each role apart (`by_role`), and
    its complete copies on hosts.

    `warm_spares` on devices are no instance's, and take `spare_bytes`. Of `starts` of instances so
    many were `warm_starts`: they found their parameters in place. Both count from the controller's
    start.
    `problem` is why it cannot be loaded, or kept in host memory, now (None: it can); `is_failing`
    is True if its last load to devices, or to host memory, failed; `failed_loads` counts both.
    """

    policy: ModelPolicy
    instances: dict[str, int]
    host_copies: int
    problem: str | None
    is_failing: bool
    failed_loads: int
    warm_spares: int = 0
    spare_bytes: int = 0
    starts: int = 0
    warm_starts: int = 0
    by_role: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class ControllerStatus(Value, frozen=True):
    """Models by name, living instances by id, how many members are alive, and the most bytes that
    one host's memory has left for copies (0: there is no host). The models' loads need
    `workers_wanted`, there or not. Of the members that leave, `free` ones may go."""

    models: dict[str, ModelSummary]
    instances: dict[InstanceId, InstanceSummary]
    workers: int
    agents: int
    host_room_bytes: int
    workers_wanted: int = 0
    free: tuple[WorkerRef, ...] = ()


def status_of(
    fleet: Fleet,
    pool: ParameterPool,
    models: dict[str, ModelState],
    host_copies: HostCopies,
    wishes: Wishes,
    free: tuple[WorkerRef, ...],
) -> ControllerStatus:
    """The status of the controller that owns these parts; `free` members that leave may go."""
    rooms = {
        record.ref: record.host.memory_bytes
        for record in fleet.living_agents()
        if not record.host.is_guest
    }
    states: dict[str, dict[str, int]] = {name: {} for name in models}
    by_role: dict[str, dict[str, dict[str, int]]] = {name: {} for name in models}
    for instance in fleet.instances.values():
        of_role = by_role[instance.model].setdefault(instance.part.role, {})
        for counts in (states[instance.model], of_role):
            counts[instance.state] = counts.get(instance.state, 0) + 1
    shown: dict[str, ModelSummary] = {}
    for name, state in models.items():
        loads, copies = state.load_failures, host_copies.failures(name)
        on_hosts, spares = pool.host_copies(name), pool.spares(name)
        for copy in on_hosts:
            rooms[copy.holder] -= copy.size_bytes
        shown[name] = ModelSummary(
            policy=state.policy,
            instances=states[name],
            host_copies=sum(copy.is_complete for copy in on_hosts),
            problem=loads.problem or (copies.problem if copies is not None else None),
            is_failing=bool(loads.in_a_row or (copies is not None and copies.in_a_row)),
            failed_loads=loads.total + (copies.total if copies is not None else 0),
            warm_spares=len(spares),
            spare_bytes=sum(copy.size_bytes for copy in spares),
            starts=state.starts,
            warm_starts=state.warm_starts,
            by_role=by_role[name],
        )
    return ControllerStatus(
        models=shown,
        instances={
            number: InstanceSummary(
                model=i.model,
                state=i.state,
                devices=len(i.workers),
                kv_blocks_used=i.kv_blocks_used,
                kv_blocks=i.kv_blocks,
                role=i.part.role,
            )
            for number, i in fleet.instances.items()
        },
        workers=len(fleet.workers),
        agents=len(fleet.agents),
        host_room_bytes=max(rooms.values(), default=0),
        workers_wanted=sum(wish.workers for wish in wishes.by_part.values()),
        free=free,
    )
