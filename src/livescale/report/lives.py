"""What became of every instance, from the lines of a record: who held which worker, and when.

Both worlds write these lines; a record that begins in the middle of a run is read as far as it
goes. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from livescale.chunks import Feed
from livescale.messages.commands import Drain, Resume, StartLoad
from livescale.messages.events import (
    BatchTaken,
    CapacityMeasured,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    ModelAdded,
    Released,
    WorkerJoined,
    WorkerLost,
)
from livescale.plans import Pairing
from livescale.policies import ModelPolicy
from livescale.telemetry.record import AnyLine, RunLine, StepLine
from livescale.types import InstanceId, InstanceState, ModelSpec, WorkerRef

Stretch = tuple[InstanceState, int, int]
"""A state, and from when to when (ns)."""

_NAMES_MAX = 3


@dataclass(slots=True)
class Tenure:
    """One worker in the hands of one rank of an instance. Times are the record's.

    `filled` says how much of the rank's bytes, as a share, was there from which time on.
    `ended_ns` is None while it lasts.
    """

    worker: WorkerRef
    rank: int
    ordered_ns: int
    source: str
    filled: list[tuple[int, float]]
    received_bytes: int | None = None
    loaded_ns: int | None = None
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True)
class LayerMark:
    """What an instance said when a layer had come: how many of the first layers were there, and
    how many layers of live batches it had run."""

    at_ns: int
    watermark: int
    live_layers: int


@dataclass(slots=True)
class InstanceLife:
    """One instance from the order to load it until nothing of it is left.

    `changes` are the states that it went through, LOADING (which begins with the order), LIVE,
    SERVING and DRAINING, with the time of each. `is_whole` is False if the record begins after it
    did. `ending` says how it ended; empty while it lives. `marks` are rank 0's; `taken` are the
    batches that others took over from it while it was live, with their times.
    """

    instance: InstanceId
    model: str
    is_whole: bool
    tenures: list[Tenure] = field(default_factory=list)
    changes: list[tuple[int, InstanceState]] = field(default_factory=list)
    emitted_tokens: int = 0
    ended_ns: int | None = None
    ending: str = ""
    pairing: Pairing | None = None
    marks: list[LayerMark] = field(default_factory=list)
    taken: list[tuple[int, BatchTaken]] = field(default_factory=list)

    @property
    def live_ns(self) -> int | None:
        """When it began to take requests before everything was there."""
        return next((at for at, state in self.changes if state is InstanceState.LIVE), None)

    @property
    def served_ns(self) -> int | None:
        """When it began to serve."""
        return next((at for at, state in self.changes if state is InstanceState.SERVING), None)

    @property
    def loading_ns(self) -> int | None:
        """From the order until it served; None if it never did, or the order is not on record."""
        if self.served_ns is None or not self.is_whole:
            return None
        return self.served_ns - self.changes[0][0]

    @property
    def received_bytes(self) -> int | None:
        """Of all ranks; None as long as one has not told."""
        amounts = [t.received_bytes for t in self.tenures if t.received_bytes is not None]
        return sum(amounts) if len(amounts) == len(self.tenures) else None

    def stretches(self, until_ns: int) -> list[Stretch]:
        """Its states in order; one that lasts is cut at `until_ns`."""
        end_ns = until_ns if self.ended_ns is None else self.ended_ns
        stops = [at for at, _ in self.changes[1:]] + [end_ns]
        return [
            (state, start_ns, stop_ns)
            for (start_ns, state), stop_ns in zip(self.changes, stops, strict=True)
            if stop_ns > start_ns
        ]

    def serving_ns(self, until_ns: int) -> int:
        """How long it served; draining does not count."""
        return sum(
            stop_ns - start_ns
            for state, start_ns, stop_ns in self.stretches(until_ns)
            if state is InstanceState.SERVING
        )

    def enter(self, now_ns: int, state: InstanceState) -> None:
        """It is in this state from now on, unless it is gone or was so already."""
        if self.ended_ns is None and self.changes[-1][1] is not state:
            self.changes.append((now_ns, state))

    def end(self, now_ns: int, ending: str) -> None:
        """The first of several endings counts."""
        if self.ended_ns is None:
            self.ended_ns, self.ending = now_ns, ending


@dataclass(slots=True)
class Lives:
    """All instances of a record in order of their beginning, its workers, and its last step.

    `specs` has the sizes of every model that was ever served, `prefill_tokens_per_s` what one
    instance of it can compute: as configured, else as measured last; None where neither is known.
    """

    instances: dict[InstanceId, InstanceLife] = field(default_factory=dict)
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    prefill_tokens_per_s: dict[str, int | None] = field(default_factory=dict)
    workers: dict[int, None] = field(default_factory=dict)
    end_ns: int = 0


def read_lives(lines: Iterable[AnyLine]) -> Lives:
    """The lives of all instances of one start of a pool. A worker's next incarnation is the same
    worker."""
    reader = _Reader(Lives())
    for line in lines:
        if isinstance(line, RunLine):
            for policy in line.config.models:
                reader.know(policy)
        elif isinstance(line, StepLine):
            reader.step(line)
    return reader.lives


# -- helpers --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    """Turns steps into lives."""

    lives: Lives
    #: who holds a worker (by number) now
    held: dict[int, tuple[InstanceLife, Tenure]] = field(default_factory=dict)
    #: layers of a rank that have arrived
    arrived: dict[tuple[InstanceId, int], dict[int, None]] = field(default_factory=dict)
    #: models with a capacity that somebody set, which no measurement changes
    configured: dict[str, None] = field(default_factory=dict)

    def know(self, policy: ModelPolicy) -> None:
        """A model is served from now on."""
        name = policy.spec.name
        self.lives.specs[name] = policy.spec
        if policy.prefill_tokens_per_s is not None:
            self.configured[name] = None
            self.lives.prefill_tokens_per_s[name] = policy.prefill_tokens_per_s
        else:
            self.configured.pop(name, None)
            self.lives.prefill_tokens_per_s.setdefault(name, None)

    def step(self, line: StepLine) -> None:
        now_ns = self.lives.end_ns = line.now_ns
        for event in line.events:
            if isinstance(event, InstanceReported):
                life = self.lives.instances.get(event.instance)
                if life is not None:
                    life.emitted_tokens = max(life.emitted_tokens, event.emitted_tokens)
            elif isinstance(event, LayerArrived):
                self._fill(now_ns, event)
            elif isinstance(event, LiveStarted | BatchTaken):
                self._lived(now_ns, event)
            elif isinstance(event, LoadCompleted):
                self._loaded(now_ns, event)
            elif isinstance(event, LoadFailed | Released):
                self._freed(now_ns, event)
            elif isinstance(event, WorkerJoined):
                self._joined(now_ns, event)
            elif isinstance(event, WorkerLost):
                self._lost(now_ns, event.worker, "lost")
            elif isinstance(event, ModelAdded):
                self.know(event.policy)
            elif isinstance(event, CapacityMeasured) and event.model not in self.configured:
                self.lives.prefill_tokens_per_s[event.model] = event.prefill_tokens_per_s
        for command in line.commands:
            if isinstance(command, StartLoad):
                life = self._life(now_ns, command.instance, command.model, is_whole=True)
                life.pairing = command.pairing or life.pairing
                source = _source(command.feeds)
                tenure = Tenure(command.worker, command.rank, now_ns, source, [(now_ns, 0.0)])
                self._hold(life, tenure)
            elif isinstance(command, Drain | Resume):
                life_or_none = self.lives.instances.get(command.instance)
                if life_or_none is not None:
                    is_drain = isinstance(command, Drain)
                    state = InstanceState.DRAINING if is_drain else InstanceState.SERVING
                    life_or_none.enter(now_ns, state)

    def _life(self, now_ns: int, number: int, model: str, *, is_whole: bool) -> InstanceLife:
        life = self.lives.instances.get(number)
        if life is None:
            life = InstanceLife(number, model, is_whole)
            life.changes.append((now_ns, InstanceState.LOADING))
            self.lives.instances[number] = life
        return life

    def _hold(self, life: InstanceLife, tenure: Tenure) -> None:
        life.tenures.append(tenure)
        self.held[tenure.worker.worker] = life, tenure
        self.lives.workers[tenure.worker.worker] = None

    def _rank(self, number: InstanceId, rank: int) -> tuple[InstanceLife, Tenure] | None:
        """The instance and the rank's tenure, if it is there and still held."""
        life = self.lives.instances.get(number)
        for tenure in life.tenures if life is not None else ():
            if tenure.rank == rank and tenure.ended_ns is None:
                assert life is not None
                return life, tenure
        return None

    def _lived(self, now_ns: int, event: LiveStarted | BatchTaken) -> None:
        target = event.instance if isinstance(event, LiveStarted) else event.target
        life = self.lives.instances.get(target)
        if life is None:
            return
        if isinstance(event, BatchTaken):
            spec = self.lives.specs.get(life.model)
            # Requests that were moved when everything was there are no help of a loading one.
            if spec is None or event.next_layer < len(spec.layer_bytes):
                life.taken.append((now_ns, event))
        elif life.changes[-1][1] is InstanceState.LOADING:
            life.enter(now_ns, InstanceState.LIVE)

    def _fill(self, now_ns: int, event: LayerArrived) -> None:
        found = self._rank(event.instance, event.rank)
        if found is not None and event.rank == 0:
            found[0].marks.append(LayerMark(now_ns, event.watermark, event.live_layers))
        spec = self.lives.specs.get(found[0].model) if found else None
        if found is None or spec is None:
            return
        arrived = self.arrived.setdefault((event.instance, event.rank), {})
        arrived[event.layer] = None
        arrived.update(dict.fromkeys(range(event.watermark)))
        share = sum(spec.layer_bytes[layer] for layer in arrived) / spec.size_bytes
        found[1].filled.append((now_ns, share))

    def _loaded(self, now_ns: int, event: LoadCompleted) -> None:
        found = self._rank(event.instance, event.rank)
        if found is None:
            return
        life, tenure = found
        tenure.loaded_ns, tenure.received_bytes = now_ns, event.received_bytes
        tenure.filled.append((now_ns, 1.0))
        self.arrived.pop((event.instance, event.rank), None)
        if all(other.loaded_ns is not None for other in life.tenures):
            life.enter(now_ns, InstanceState.SERVING)

    def _freed(self, now_ns: int, event: LoadFailed | Released) -> None:
        found = self._rank(event.instance, event.rank)
        if found is None:
            return
        life, tenure = found
        self._let_go(now_ns, tenure)
        if isinstance(event, LoadFailed):
            life.end(now_ns, f"failed: {event.reason}")
        elif all(other.ended_ns is not None for other in life.tenures):
            life.end(now_ns, "released")

    def _joined(self, now_ns: int, event: WorkerJoined) -> None:
        number, report = event.worker.worker, event.report
        self.lives.workers[number] = None
        holder = self.held.get(number)
        if holder is not None and (report is None or report.instance != holder[0].instance):
            self._lost(now_ns, holder[1].worker, "lost")
            holder = None
        if report is None:
            return
        if holder is None:
            holder = self._resumed(now_ns, event.worker, report)
        life, tenure = holder
        if report.pairing is not None and life.changes[-1][1] is InstanceState.LOADING:
            life.enter(now_ns, InstanceState.LIVE)
        if report.is_loaded:
            tenure.loaded_ns = now_ns if tenure.loaded_ns is None else tenure.loaded_ns
            if all(other.loaded_ns is not None for other in life.tenures):
                life.enter(now_ns, InstanceState.SERVING)

    def _resumed(
        self, now_ns: int, worker: WorkerRef, report: InstanceReport
    ) -> tuple[InstanceLife, Tenure]:
        """An instance of which the record hears for the first time from its worker."""
        life = self._life(now_ns, report.instance, report.model, is_whole=False)
        life.pairing = report.pairing or life.pairing
        tenure = Tenure(worker, report.rank, now_ns, _source(report.feeds), [])
        self._hold(life, tenure)
        return life, tenure

    def _lost(self, now_ns: int, worker: WorkerRef, ending: str) -> None:
        holder = self.held.get(worker.worker)
        if holder is not None and holder[1].worker == worker:
            self._let_go(now_ns, holder[1])
            holder[0].end(now_ns, ending)

    def _let_go(self, now_ns: int, tenure: Tenure) -> None:
        tenure.ended_ns = now_ns
        self.held.pop(tenure.worker.worker, None)


def _source(feeds: Sequence[Feed]) -> str:
    """Who sends, each once, in few words."""
    names = list(dict.fromkeys(str(feed.upstream).removesuffix(".0") for feed in feeds))
    if len(names) > _NAMES_MAX:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return ", ".join(names) or "unknown"
