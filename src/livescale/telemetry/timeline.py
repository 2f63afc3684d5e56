"""What a run record says over time: instances that served, and copies of models in host memory.

A copy takes memory from its order on until its agent reports that it is gone. Nothing is decided or
drawn here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from livescale.telemetry.history.holding_history import InstanceHistory
from livescale.telemetry.history.reading import History
from livescale.values.types import InstanceState, Role, WorkerRef


def instances_over_time(history: History) -> list[tuple[int, int]]:
    """(now_ns, instances that serve from then on), one entry per change, the first at the first
    step. Every instance is reported again to a controller that begins anew."""
    return _counts(history, [(begun, ended) for _, begun, ended in spans_of_serving(history)])


def roles_over_time(history: History) -> dict[Role, list[tuple[int, int]]]:
    """The same of the instances with each role that some instance had."""
    spans: dict[Role, list[tuple[int, int]]] = {}
    for instance, begun_ns, ended_ns in spans_of_serving(history):
        for role, start_ns, stop_ns in instance.role_stretches(history.end_ns + 1):
            left_ns, right_ns = max(begun_ns, start_ns), min(ended_ns, stop_ns)
            if left_ns < right_ns:
                spans.setdefault(role, []).append((left_ns, right_ns))
    return {role: _counts(history, spans[role]) for role in Role if role in spans}


def instances_by_model(history: History) -> dict[str, list[tuple[int, int]]]:
    """The same of the instances of each model, or stage, that had one which served."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for instance, begun_ns, ended_ns in spans_of_serving(history):
        spans.setdefault(instance.model, []).append((begun_ns, ended_ns))
    return {model: _counts(history, spans[model]) for model in sorted(spans)}


def spans_of_serving(history: History) -> list[tuple[InstanceHistory, int, int]]:
    """Each instance with a time from which and until which it served, as a controller knew it; one
    that serves at the end does so until just behind that."""
    later_ns = history.end_ns + 1
    spans = []
    for instance in history.instances:
        for known_ns, unknown_ns in instance.holdings[0].known_spans(later_ns):
            for state, start_ns, stop_ns in instance.stretches(later_ns):
                begun_ns, ended_ns = max(start_ns, known_ns), min(stop_ns, unknown_ns)
                if state is InstanceState.SERVING and begun_ns < ended_ns:
                    spans.append((instance, begun_ns, ended_ns))
    return spans


@dataclass(frozen=True, slots=True)
class HostCopyUse:
    """Copies and bytes of one model in the memory of all hosts: averages over time, and maxima."""

    copies_mean: float
    copies_max: int
    bytes_mean: float
    bytes_max: int


def host_copy_use(history: History) -> dict[str, HostCopyUse]:
    """Per model of the record, in the order in which they appear (BlitzScale, Figure 19).

    Averages go over the time of all lives of the controller, from the first step to the last. A
    controller that begins anew knows of no copy until the agents have joined it. What was there for
    no time does not count.
    """
    levels_of = _levels(history)
    span_ns = max(history.end_ns - history.started_ns, 1)
    uses = {}
    for model in history.policies:
        levels = [*levels_of.get(model, []), (history.end_ns, 0, 0)]
        spans = [(after[0] - at_ns, n, size) for (at_ns, n, size), after in pairwise(levels)]
        uses[model] = HostCopyUse(
            sum(passed_ns * copies for passed_ns, copies, _ in spans) / span_ns,
            max(copies for _, copies, _ in levels),
            sum(passed_ns * size_bytes for passed_ns, _, size_bytes in spans) / span_ns,
            max(size_bytes for _, _, size_bytes in levels),
        )
    return uses


def copies_over_time(history: History) -> dict[str, list[tuple[int, int]]]:
    """(now_ns, copies from then on) of every model that ever had a copy, one entry per change."""
    return {
        model: [
            (at_ns, copies)
            for (_, before, _), (at_ns, copies, _) in pairwise([(0, 0, 0), *levels])
            if before != copies
        ]
        for model, levels in _levels(history).items()
    }


def since(changes: Sequence[tuple[int, int]], from_ns: int) -> list[tuple[int, int]]:
    """Counts over time from `from_ns` on, which is 0 then: (ns, count from then on)."""
    before = [count for at_ns, count in changes if at_ns <= from_ns]
    after = [(at_ns - from_ns, count) for at_ns, count in changes if at_ns > from_ns]
    return [(0, before[-1] if before else 0), *after]


def mean_until(steps: Sequence[tuple[int, int]], end_ns: int) -> float:
    """The mean of a count over time, from the first of its `steps` until `end_ns`."""
    spans = pairwise([*steps, (end_ns, 0)])
    held = sum(n * max(min(stop, end_ns) - start, 0) for (start, n), (stop, _) in spans)
    return held / max(end_ns, 1)


# -- helpers --------------------------------------------------------------------------------------


def _counts(history: History, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(now_ns, spans from then on), one entry per change, the first at the first step."""
    deltas = Counter({history.started_ns: 0})
    for begun_ns, ended_ns in spans:
        deltas[begun_ns] += 1
        deltas[ended_ns] -= 1
    del deltas[history.end_ns + 1]
    count, changes = 0, list[tuple[int, int]]()
    for at_ns, delta in sorted(deltas.items()):
        count += delta
        if delta or not changes:
            changes.append((at_ns, count))
    return changes


def _levels(history: History) -> dict[str, list[tuple[int, int, int]]]:
    """Per model that had a copy: (now_ns, copies, bytes) from then on. A copy counts once, however
    many ranks it has."""
    changes: dict[str, list[tuple[int, WorkerRef, int, int]]] = {}
    for held in history.copies:
        of_model = changes.setdefault(held.model, [])
        for begun_ns, ended_ns in held.known_spans(history.end_ns + 1):
            of_model.append((begun_ns, held.member, 1, held.size_bytes))
            of_model.append((ended_ns, held.member, -1, -held.size_bytes))
    levels_of = {}
    for model, of_model in changes.items():
        ranks: Counter[WorkerRef] = Counter()
        levels: dict[int, tuple[int, int, int]] = {}
        total_bytes = 0
        for at_ns, agent, rank, size_bytes in sorted(of_model):
            ranks[agent] += rank
            total_bytes += size_bytes
            # Of several changes at one time the last one holds.
            levels[at_ns] = (at_ns, sum(count > 0 for count in ranks.values()), total_bytes)
        levels.pop(history.end_ns + 1, None)
        levels_of[model] = list(levels.values())
    return levels_of
