"""A ScalePlan for a person: sentences, and a small diagram of who has how much when."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.messages.scale_plan import PlannedLoad, ScalePlan
from livescale.report.run.terminal import filling
from livescale.values.types import FromStorage, FromWorker, Upstream, WorkerRef

_COLUMNS = 60
_LINES_MAX = 16
_HOPS_MAX = 10


def describe_plan(plan: ScalePlan, bound_ns: int | None, bound_why: str) -> str:
    """Several lines: who sends to whom, how long it takes, what meets serving traffic, a diagram
    over time, and the lower bound if there is one."""
    size = f"{plan.bytes_per_target / 1e9:.3g} GB"
    lines = [f"{plan.model}: {size} to each of {plan.receivers}, by {plan.strategy}"]
    lines += _sentences(plan)
    lines.append(f"{_prediction(plan)}; {_serving(plan)}.")
    if plan.predicted_ns:
        lines += ["", *_diagram(plan, plan.predicted_ns)]
    if bound_ns is not None:
        lines += ["", _bound(plan, bound_ns, bound_why)]
    return "\n".join(lines)


# -- helpers, in the order used -------------------------------------------------------------------


def _sentences(plan: ScalePlan) -> list[str]:
    """Whole copies as paths, one for every end; loads from several upstreams one for each."""
    follows = {load.receiver: load.feeds[0].upstream for load in plan.loads if len(load.feeds) == 1}
    passing = {u.worker: None for u in follows.values() if isinstance(u, FromWorker)}
    found = []
    for load in plan.loads:
        if len(load.feeds) > 1:
            found.append(_shared(load))
        elif load.receiver not in passing:
            found.append(_path(load.receiver, follows))
    if len(found) > _LINES_MAX:
        found = [*found[:_LINES_MAX], f"and {len(found) - _LINES_MAX} more such"]
    return [f"  {sentence}" for sentence in found]


def _shared(load: PlannedLoad) -> str:
    """ "w4 gets 25 % each from w0 and w5, 50 % from w6"."""
    counts = [sum(len(part) for part in feed.chunks) for feed in load.feeds]
    shares: dict[str, list[str]] = {}
    for count, feed in zip(counts, load.feeds, strict=True):
        share = f"{100 * count / sum(counts):.3g} %"
        shares.setdefault(share, []).append(_name(feed.upstream))
    parts = [
        f"{share} {'each ' if len(names) > 1 else ''}from {_listed(names)}"
        for share, names in shares.items()
    ]
    return f"{_name(load.receiver)} gets {', '.join(parts)}"


def _path(end: WorkerRef, follows: dict[WorkerRef, Upstream]) -> str:
    """ "w0 sends to w1, which passes on to w2, and so on: w3, w4"."""
    names = [_name(end)]
    upstream = follows[end]
    while isinstance(upstream, FromWorker) and upstream.worker in follows:
        names.append(_name(upstream))
        upstream = follows[upstream.worker]
    names.reverse()
    if len(names) > _HOPS_MAX:
        left_out = len(names) - _HOPS_MAX
        names[_HOPS_MAX // 2 : -_HOPS_MAX // 2] = [f"{left_out} more"]
    verb = "is read by" if isinstance(upstream, FromStorage) else "sends to"
    text = f"{_name(upstream)} {verb} {', which passes on to '.join(names[:2])}"
    return f"{text}, and so on: {', '.join(names[2:])}" if len(names) > 2 else text


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _name(ref: Upstream | WorkerRef) -> str:
    """A first life goes without saying."""
    return str(ref).removesuffix(".0")


def _prediction(plan: ScalePlan) -> str:
    if plan.predicted_ns is None:
        return "How long it takes is not known: no rate is"
    return f"Predicted {_seconds(plan.predicted_ns)}"


def _serving(plan: ScalePlan) -> str:
    if not plan.serving_bytes:
        return "nothing meets serving traffic"
    met = [f"{u.serving_bytes / 1e9:.3g} GB on {u.link}" for u in plan.links if u.serving_bytes]
    return f"meets serving traffic: {', '.join(met)}"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3g} s" if ns >= 1_000_000_000 else f"{ns / 1e6:.3g} ms"


def _diagram(plan: ScalePlan, end_ns: int) -> list[str]:
    """A row per receiver that fills as its layers are completed."""
    loads = list(plan.loads)
    shown = loads if len(loads) <= _LINES_MAX else [*loads[: _LINES_MAX - 1], loads[-1]]
    width = max(len(_name(load.receiver)) for load in shown)
    lines = []
    for load in shown:
        if load is shown[-1] and len(shown) < len(loads):
            lines.append(f"{'…':>{width}}")
        lines.append(f"{_name(load.receiver):>{width}} |{_row(load.layer_ns, end_ns)}|")
    end = _seconds(end_ns)
    lines.append(f"{'':>{width}} 0{end:>{_COLUMNS}}")
    return lines


def _row(layer_ns: Sequence[int], end_ns: int) -> str:
    cells = []
    for column in range(1, _COLUMNS + 1):
        done = sum(at * _COLUMNS <= end_ns * column for at in layer_ns)
        cells.append(filling(done, len(layer_ns)))
    return "".join(cells)


def _bound(plan: ScalePlan, bound_ns: int, why: str) -> str:
    text = f"Nothing is faster than {_seconds(bound_ns)} ({why})"
    if plan.predicted_ns is None:
        return f"{text}."
    return f"{text}: this is {plan.predicted_ns / bound_ns:.2f} times as long."
