"""What a run record says of a played scene of `bench kv`: the same of both worlds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from livescale.config.slo import percentile
from livescale.lab.bench.base.errors import BenchError
from livescale.messages.commands import ChangeDuty, ScaleDecided, StartHolding
from livescale.messages.events import BatchTaken, HoldingCompleted, KvTaken, RoleChanged
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine
from livescale.values.types import FromWorker, HoldingId, InstanceId, Outcome, Role, WorkerRef
from livescale.values.units import NS_PER_MS, NS_PER_S


@dataclass(frozen=True, slots=True)
class KvPlay:
    """Times of one played scene, in ns. A load is from the decision until all parameters are there.

    The KV of a prompt takes what lies between the arrival of its first layer and that of its last
    one at the decode instance: medians, of requests whose KV came before the load that is `beside`,
    or while that went on. `tbt_p99_ns` is of all tokens that came while that went on,
    `tbt_p99_alone_ns` of those before. `source` is the role of the instance that the parameters
    came from. `mutation_ns` is from the decision until the instance has its new role, as it says
    itself, `first_request_ns` to the first request that it takes over (None: that took none);
    `mutation_bytes` are parameters that came to the instance since then.
    """

    load_alone_ns: int
    load_beside_ns: int
    kv_alone_ns: int
    kv_beside_ns: int
    kv_samples: int
    tbt_p99_alone_ns: int
    tbt_p99_ns: int
    source: Role
    mutation_ns: int
    first_request_ns: int | None
    mutation_bytes: int
    requests: int
    failed: int

    @property
    def kv_share(self) -> float:
        """How much of its bandwidth KV kept beside the load."""
        return self.kv_alone_ns / self.kv_beside_ns

    @property
    def load_ratio(self) -> float:
        """How many times as long the load took beside KV."""
        return self.load_beside_ns / self.load_alone_ns

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "source": self.source.value,
            "load_alone_s": self.load_alone_ns / NS_PER_S,
            "load_beside_kv_s": self.load_beside_ns / NS_PER_S,
            "load_ratio": self.load_ratio,
            "kv_alone_ms": self.kv_alone_ns / NS_PER_MS,
            "kv_beside_load_ms": self.kv_beside_ns / NS_PER_MS,
            "kv_share_of_bandwidth": self.kv_share,
            "kv_samples": self.kv_samples,
            "tbt_p99_alone_ms": self.tbt_p99_alone_ns / NS_PER_MS,
            "tbt_p99_ms": self.tbt_p99_ns / NS_PER_MS,
            "mutation_ms": self.mutation_ns / NS_PER_MS,
            "mutation_bytes": self.mutation_bytes,
            "requests": self.requests,
            "failed": self.failed,
        }
        if self.first_request_ns is not None:
            found["mutation_first_request_ms"] = self.first_request_ns / NS_PER_MS
        return found


def read_play(lines: Iterable[AnyLine]) -> KvPlay:
    """Raises BenchError where the record has not all of the scene."""
    story, requests = _Story(), []
    for line in lines:
        if isinstance(line, StepLine):
            story.step(line)
        elif isinstance(line, RequestLine):
            requests.append(line)
    alone, beside = _both(story.loads)
    timed = [line for line in requests if len(line.token_ns) > 2]
    before = [arrival_ns for at_ns, arrival_ns in story.kv if at_ns < beside.decided_ns]
    during = [arrival_ns for at_ns, arrival_ns in story.kv if beside.has(at_ns - arrival_ns, at_ns)]
    if not before or not during:
        raise BenchError(f"KV of {len(before)} requests before the load, {len(during)} during it")
    mutation = story.mutation
    if mutation is None or mutation.took_ns is None:
        raise BenchError("no instance changed its role")
    return KvPlay(
        load_alone_ns=alone.took_ns,
        load_beside_ns=beside.took_ns,
        kv_alone_ns=int(median(before)),
        kv_beside_ns=int(median(during)),
        kv_samples=len(during),
        tbt_p99_alone_ns=percentile(_gaps_ns(timed, 0, beside.decided_ns), 99),
        tbt_p99_ns=percentile(_gaps_ns(timed, beside.decided_ns, beside.ended_ns), 99),
        source=story.roles[beside.source],
        mutation_ns=mutation.took_ns,
        first_request_ns=mutation.first_request_ns,
        mutation_bytes=mutation.received_bytes,
        requests=len(requests),
        failed=sum(line.outcome is not Outcome.FINISHED for line in requests),
    )


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(slots=True)
class _Load:
    """Of a further prefill instance; `ended_ns` is 0 until it is there."""

    decided_ns: int
    source: WorkerRef
    ended_ns: int = 0

    @property
    def took_ns(self) -> int:
        return self.ended_ns - self.decided_ns

    def has(self, from_ns: int, to_ns: int) -> bool:
        """All of this time the load went on."""
        return self.decided_ns <= from_ns and to_ns <= self.ended_ns


@dataclass(slots=True)
class _Mutation:
    decided_ns: int
    instance: InstanceId
    worker: WorkerRef
    took_ns: int | None = None
    first_request_ns: int | None = None
    received_bytes: int = 0


@dataclass(slots=True)
class _Story:
    """Takes steps in; `roles` are those that workers had before the mutation, `kv` is when KV of a
    request was there, and what its arrival took."""

    loads: dict[HoldingId, _Load] = field(default_factory=dict)
    kv: list[tuple[int, int]] = field(default_factory=list)
    roles: dict[WorkerRef, Role] = field(default_factory=dict)
    mutation: _Mutation | None = None

    def step(self, line: StepLine) -> None:
        for event in line.events:
            if isinstance(event, HoldingCompleted):
                self._completed(line.now_ns, event)
            elif isinstance(event, RoleChanged):
                self._has_role(line.now_ns, event)
            elif isinstance(event, BatchTaken):
                self._taken(line.now_ns, event)
            elif isinstance(event, KvTaken):
                self.kv.append((line.now_ns, event.arrival_ns))
        decided = [c for c in line.commands if isinstance(c, ScaleDecided)]
        grows = any(d.role is Role.PREFILL and d.from_instances and _is_up(d) for d in decided)
        mutates = any(d.reason == "mutation" and d.role is Role.DECODE for d in decided)
        for command in line.commands:
            if isinstance(command, StartHolding) and command.duty is not None:
                self._started(line.now_ns, command, is_further=grows)
            elif isinstance(command, ChangeDuty) and mutates:
                self._changed(line.now_ns, command)

    def _completed(self, now_ns: int, event: HoldingCompleted) -> None:
        load, mutation = self.loads.get(event.holding), self.mutation
        if load is not None:
            load.ended_ns = now_ns
        if mutation is not None and event.holding.member == mutation.worker:
            mutation.received_bytes += event.received_bytes

    def _has_role(self, now_ns: int, event: RoleChanged) -> None:
        mutation = self.mutation
        if mutation is not None and event.holding.member == mutation.worker:
            mutation.took_ns = now_ns - mutation.decided_ns

    def _taken(self, now_ns: int, event: BatchTaken) -> None:
        mutation = self.mutation
        if mutation is None or mutation.first_request_ns is not None:
            return
        if event.instance == mutation.instance:
            mutation.first_request_ns = now_ns - mutation.decided_ns

    def _started(self, now_ns: int, order: StartHolding, *, is_further: bool) -> None:
        assert order.duty is not None
        self.roles[order.holding.member] = order.duty.role
        upstreams = [feed.upstream for feed in order.feeds]
        if is_further and order.duty.role is Role.PREFILL:
            senders = [u.worker for u in upstreams if isinstance(u, FromWorker)]
            if len(senders) != 1 or len(upstreams) != 1:
                raise BenchError(f"{order.holding} is loaded from {upstreams}, not one instance")
            self.loads[order.holding] = _Load(now_ns, senders[0])

    def _changed(self, now_ns: int, order: ChangeDuty) -> None:
        if order.duty.role is Role.DECODE and self.roles[order.holding.member] is Role.PREFILL:
            self.mutation = _Mutation(now_ns, order.duty.instance, order.holding.member)


def _is_up(decision: ScaleDecided) -> bool:
    return decision.to_instances > decision.from_instances


def _both(loads: dict[HoldingId, _Load]) -> tuple[_Load, _Load]:
    """The load beside nothing, and the one beside KV."""
    found = list(loads.values())
    if len(found) != 2 or not all(load.ended_ns for load in found):
        raise BenchError(f"not two loads of a further prefill instance, but {found}")
    return found[0], found[1]


def _gaps_ns(lines: Sequence[RequestLine], from_ns: int, to_ns: int) -> list[int]:
    """Between tokens that both came in this time."""
    return [
        after - before
        for line in lines
        for before, after in zip(line.token_ns, line.token_ns[1:], strict=False)
        if from_ns <= before and after <= to_ns
    ]
