"""What a run record says over time: how many instances served, what the client saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from livescale.slo import RequestTiming, SloAbsolute
from livescale.telemetry.history.reading import History
from livescale.telemetry.record import AnyLine, RequestLine
from livescale.types import InstanceState, RequestId


def instances_over_time(history: History) -> list[tuple[int, int]]:
    """(now_ns, instances that serve from then on), one entry per change, the first at the first
    step. Every instance is reported again to a controller that begins anew."""
    later_ns = history.end_ns + 1
    deltas = Counter({history.started_ns: 0})
    for instance in history.instances:
        for known_ns, unknown_ns in instance.holdings[0].known_spans(later_ns):
            for state, start_ns, stop_ns in instance.stretches(later_ns):
                begun_ns, ended_ns = max(start_ns, known_ns), min(stop_ns, unknown_ns)
                if state is InstanceState.SERVING and begun_ns < ended_ns:
                    deltas[begun_ns] += 1
                    deltas[ended_ns] -= 1
    del deltas[later_ns]
    count, changes = 0, list[tuple[int, int]]()
    for at_ns, delta in sorted(deltas.items()):
        count += delta
        if delta or not changes:
            changes.append((at_ns, count))
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
