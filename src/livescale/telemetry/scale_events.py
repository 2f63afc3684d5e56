"""Scale events pieced together from a controller's steps: decided, planned, loaded, used."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.chunks import Feed
from livescale.messages.commands import (
    AmendLoad,
    AnyCommand,
    Dispatch,
    Drain,
    FailRequest,
    Paired,
    PlanMade,
    Release,
    Resume,
    ScaleDecided,
    StartLoad,
)
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestArrived,
    RequestCancelled,
    WorkerJoined,
    WorkerLost,
)
from livescale.telemetry.record import LoadPhases, ScaleLine
from livescale.types import InstanceId, RequestId, WorkerRef


class ScaleTracker:
    """Watches steps; `finished` scale events are handed out as ScaleLines in order of completion.

    A scale-up is finished when each of its instances has served a token, failed, was lost or was
    released unused; a scale-down when its instances were released, resumed or lost.
    """

    def __init__(self) -> None:
        self._open: list[ScaleLine] = []
        #: instances of open events that are still awaited, per event
        self._awaited: list[dict[InstanceId, None]] = []
        #: where the ranks of living instances are: a Drain does not say it
        self._worker_of: dict[tuple[InstanceId, int], WorkerRef] = {}
        #: how living instances work while they load
        self._pairings: dict[InstanceId, str] = {}
        #: ranks whose first layer is noted
        self._has_layers: dict[tuple[InstanceId, int], None] = {}
        #: requests that were never dispatched, with their model and the time of arrival
        self._waiting: dict[RequestId, tuple[str, int]] = {}

    def observe(
        self,
        now_ns: int,
        events: Sequence[AnyEvent],
        commands: Sequence[AnyCommand],
        done_ns: int,
    ) -> list[ScaleLine]:
        """Take in one step; returns the scale events that it finished."""
        for event in events:
            self._absorb(now_ns, event)
        for command in commands:
            self._start(now_ns, done_ns, command)
        return self._take_finished()

    def flush(self) -> list[ScaleLine]:
        """The events that never finished, with the phases known so far."""
        lines, self._open, self._awaited = self._open, [], []
        return lines

    # -- helpers --------------------------------------------------------------------------------

    def _start(self, now_ns: int, done_ns: int, command: AnyCommand) -> None:
        if isinstance(command, ScaleDecided):
            self._decided(now_ns, done_ns, command)
        elif isinstance(command, PlanMade) and command.instances:
            plan = command.plan
            self._replace(
                len(self._open) - 1,
                plan=plan.plan,
                bytes_per_target=plan.bytes_per_target,
                routes=plan.routes(),
                strategy=plan.strategy,
                predicted_ns=plan.predicted_ns,
            )
        elif isinstance(command, Paired):
            self._pairings[command.instance] = _in_words(command)
        elif isinstance(command, StartLoad):
            upstream = _upstreams(command.feeds)
            phases = LoadPhases(
                instance=command.instance,
                worker=command.worker,
                upstream=upstream,
                rank=command.rank,
                pairing=self._pairings.get(command.instance, ""),
            )
            self._replace(len(self._open) - 1, loads=(*self._open[-1].loads, phases))
            self._awaited[-1][command.instance] = None
            self._worker_of[command.instance, command.rank] = command.worker
        elif isinstance(command, AmendLoad):
            self._amended(command)
        elif isinstance(command, Dispatch | FailRequest):
            self._waiting.pop(command.request, None)
        elif isinstance(command, Drain):
            self._awaited[-1][command.instance] = None
        elif isinstance(command, Resume):
            self._forget(command.instance, is_up=False)
        elif isinstance(command, Release):
            # A scale-up whose instance is released before its first token is finished.
            self._forget(command.instance, is_up=True)

    def _decided(self, now_ns: int, done_ns: int, command: ScaleDecided) -> None:
        line = ScaleLine(
            command.model,
            command.from_instances,
            command.to_instances,
            command.reason,
            command.values,
            decided_ns=now_ns,
            planned_ns=done_ns,
        )
        first = next((i for i in self._waiting.items() if i[1][0] == command.model), None)
        if first is not None and not command.from_instances:
            request, (_, asked_ns) = first
            line = msgspec.structs.replace(line, woken_by=request, asked_ns=asked_ns)
        self._open.append(line)
        self._awaited.append({})

    def _amended(self, command: AmendLoad) -> None:
        for index, line in enumerate(self._open):
            if line.plan == command.plan:
                new = f"{command.receiver} from {_upstreams(command.feeds)}"
                self._replace(index, amendments=(*line.amendments, new))

    def _absorb(self, now_ns: int, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self._joined(event)
        elif isinstance(event, LiveStarted):
            self._phase(event.instance, event.rank, live_ns=now_ns)
        elif isinstance(event, BatchTaken):
            self._phase(event.target, None, first_help_ns=now_ns)
        elif isinstance(event, LoadStarted):
            self._phase(event.instance, event.rank, first_byte_ns=now_ns)
        elif isinstance(event, LayerArrived):
            if (event.instance, event.rank) not in self._has_layers:
                self._has_layers[event.instance, event.rank] = None
                self._phase(event.instance, event.rank, first_layer_ns=now_ns)
        elif isinstance(event, LoadCompleted):
            self._phase(event.instance, event.rank, first_layer_ns=now_ns, loaded_ns=now_ns)
            self._forget_if_used(event.instance)
        elif isinstance(event, LoadFailed):
            self._phase(event.instance, event.rank, failed=event.reason)
            self._gone(event.instance)
        elif isinstance(event, InstanceReported) and event.emitted_tokens:
            self._phase(event.instance, None, first_token_ns=now_ns)
            self._forget_if_used(event.instance)
        elif isinstance(event, Released):
            self._released(now_ns, event)
        elif isinstance(event, WorkerLost):
            self._lost(event.worker, event.reason)
        elif isinstance(event, RequestArrived):
            if event.worker is None:
                self._waiting[event.request] = (event.model, now_ns)
        elif isinstance(event, RequestCancelled):
            self._waiting.pop(event.request, None)

    def _joined(self, event: WorkerJoined) -> None:
        for worker in list(self._worker_of.values()):
            if worker.worker == event.worker.worker and worker < event.worker:
                self._lost(worker, f"{event.worker} took its place")
        if event.report is not None:
            self._worker_of[event.report.instance, event.report.rank] = event.worker

    def _phase(self, instance: InstanceId, rank: int | None, **values: int | str) -> None:
        """Set phases that are not known yet on the load of a rank (None: of all ranks)."""
        for index, line in enumerate(self._open):
            for place, load in enumerate(line.loads):
                if load.instance == instance and rank in (None, load.rank):
                    new = {k: v for k, v in values.items() if getattr(load, k) is None}
                    loads = list(self._open[index].loads)
                    loads[place] = msgspec.structs.replace(load, **new)
                    self._replace(index, loads=tuple(loads))

    def _released(self, now_ns: int, event: Released) -> None:
        instance = event.instance
        self._worker_of.pop((instance, event.rank), None)
        if any(number == instance for number, _ in self._worker_of):
            return  # other ranks are still to come
        for index, awaited in enumerate(self._awaited):
            if instance in awaited and not self._open[index].loads:
                released = {**self._open[index].released_ns, instance: now_ns}
                self._replace(index, released_ns=released)
                del awaited[instance]
        self._gone(instance)

    def _lost(self, worker: WorkerRef, reason: str) -> None:
        for instance, _ in [key for key, there in self._worker_of.items() if there == worker]:
            if any(instance in awaited for awaited in self._awaited):
                self._phase(instance, None, failed=f"worker lost: {reason}")
            self._gone(instance)

    def _gone(self, instance: InstanceId) -> None:
        """Nobody waits any more for an instance that is no more."""
        for key in [key for key in self._worker_of if key[0] == instance]:
            del self._worker_of[key]
        for key in [key for key in self._has_layers if key[0] == instance]:
            del self._has_layers[key]
        self._pairings.pop(instance, None)
        self._forget(instance, is_up=True)
        self._forget(instance, is_up=False)

    def _forget_if_used(self, instance: InstanceId) -> None:
        """A live instance may serve its first token before all ranks have said that they have
        everything: its scale-up is finished when both are known."""
        loads = [load for line in self._open for load in line.loads if load.instance == instance]
        if all(None not in (load.first_token_ns, load.loaded_ns) for load in loads):
            self._forget(instance, is_up=True)

    def _forget(self, instance: InstanceId, *, is_up: bool) -> None:
        """Scale-ups, or scale-downs, do not wait for the instance any more."""
        for line, awaited in zip(self._open, self._awaited, strict=True):
            if bool(line.loads) == is_up:
                awaited.pop(instance, None)

    def _take_finished(self) -> list[ScaleLine]:
        finished = [line for line, left in zip(self._open, self._awaited, strict=True) if not left]
        kept = [(li, aw) for li, aw in zip(self._open, self._awaited, strict=True) if aw]
        self._open = [line for line, _ in kept]
        self._awaited = [awaited for _, awaited in kept]
        return finished

    def _replace(self, index: int, **values: object) -> None:
        self._open[index] = msgspec.structs.replace(self._open[index], **values)


def _upstreams(feeds: Sequence[Feed]) -> str:
    """Who sends, each once."""
    return " + ".join(dict.fromkeys(str(feed.upstream) for feed in feeds))


def _in_words(command: Paired) -> str:
    """ "zigzag: helps instance 7, sends no parameters on"."""
    order = command.pairing.order if command.pairing is not None else "waits"
    return f"{order}: {command.reason}"
