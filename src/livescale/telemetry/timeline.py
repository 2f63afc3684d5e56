"""What a run record says over time: how many instances served, what the client saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from livescale.messages.commands import Drain, Resume, StartLoad
from livescale.messages.events import LoadCompleted, WorkerJoined, WorkerLost
from livescale.slo import RequestTiming, SloAbsolute
from livescale.telemetry.record import AnyLine, RequestLine, RunLine, StepLine
from livescale.types import InstanceId, RequestId, WorkerRef


def instances_over_time(lines: Iterable[AnyLine]) -> list[tuple[int, int]]:
    """(now_ns, instances that serve from then on) in one start of a pool, one entry per change."""
    instance_on: dict[WorkerRef, InstanceId] = {}
    loading_ranks: dict[InstanceId, dict[int, None]] = {}
    serving: dict[InstanceId, None] = {}
    changes: list[tuple[int, int]] = []
    for line in lines:
        if isinstance(line, RunLine):
            # A new controller hears of every instance again.
            serving.clear()
        if not isinstance(line, StepLine):
            continue
        for message in (*line.events, *line.commands):
            if isinstance(message, StartLoad):
                instance_on[message.worker] = message.instance
                loading_ranks.setdefault(message.instance, {})[message.rank] = None
            elif isinstance(message, LoadCompleted):
                ranks = loading_ranks.get(message.instance, {})
                ranks.pop(message.rank, None)
                if not ranks:
                    serving[message.instance] = None
            elif isinstance(message, Resume):
                serving[message.instance] = None
            elif isinstance(message, WorkerJoined) and message.report is not None:
                instance_on[message.worker] = message.report.instance
                if message.report.is_loaded:
                    serving[message.report.instance] = None
            elif isinstance(message, Drain):
                serving.pop(message.instance, None)
            elif isinstance(message, WorkerLost):
                lost = instance_on.pop(message.worker, None)
                if lost is not None:
                    serving.pop(lost, None)
        if not changes or changes[-1][1] != len(serving):
            changes.append((line.now_ns, len(serving)))
    return changes


def with_client_times(
    lines: Iterable[AnyLine], timings: Sequence[RequestTiming], slo: SloAbsolute | None
) -> list[AnyLine]:
    """The record with what only the client knows: when each request was due, sent, and well.

    Requests are joined by id; lines of requests that the client does not know stay as they are.
    """
    by_request: Mapping[RequestId, RequestTiming] = {t.request: t for t in timings}
    joined: list[AnyLine] = []
    for line in lines:
        timing = by_request.get(line.request) if isinstance(line, RequestLine) else None
        if timing is not None:
            line = msgspec.structs.replace(
                line,
                scheduled_ns=timing.scheduled_ns,
                sent_ns=timing.sent_ns,
                slo_met=slo.is_met(timing) if slo is not None else None,
            )
        joined.append(line)
    return joined
