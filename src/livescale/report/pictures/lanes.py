"""Instance lanes: what every worker did over time, and the largest scale-up from close by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from livescale.report.pictures.canvas import HALF_IN, WIDE_IN, PlotRow, draw_rows, time_axis
from livescale.telemetry.history.holding_history import HoldingHistory, InstanceHistory
from livescale.telemetry.history.reading import History
from livescale.values.types import InstanceState, Role
from livescale.values.units import NS_PER_S

LANES_MAX = 64
"""More workers than these are not shown."""

_VECTORS_MAX = 2500
"""So many shapes are drawn as such; more become one picture, which is smaller."""
_FILL_POINTS_MAX = 40
_LABELS_MAX = 34
_TINTS = {
    InstanceState.LOADING: 0.22,
    InstanceState.LIVE: 0.22,
    InstanceState.SERVING: 1.0,
    InstanceState.DRAINING: 0.45,
}
"""How much of the model's colour a state has; the filling part of a load has _FILL of it."""
_FILL = 0.72
_LANE = 0.8
"""The height of a worker's lane; the next one begins at 1."""
_WORK_PART = 0.24
"""The lower part of a live instance's lane looks as if it served; it loads above that."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """A filled polygon: its corners and its colour."""

    corners: list[Point]
    colour: tuple[float, float, float]


def part_name(model: str, role: Role) -> str:
    """What instances of a model with this role are called, and what their colour is found by."""
    return model if role is Role.UNIFIED else f"{model} {role}"


def tint(colour: str, share: float) -> tuple[float, float, float]:
    """The colour on white: a share of 1 is the colour itself."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return red, green, blue


class LanesShown(NamedTuple):
    """From when on lanes are shown, when the run ended, and the colours by `part_name`."""

    zero_ns: int
    end_ns: int
    colours: Mapping[str, str]


def state_tint(colour: str, state: InstanceState | None) -> tuple[float, float, float]:
    """How a state is shown; None is the part of a load that is there."""
    return tint(colour, _FILL if state is None else _TINTS[state])


def lanes(
    name: str, history: History, started_ns: int, until_s: float, colours: Mapping[str, str]
) -> str:
    """One lane per worker over the whole load, of the first LANES_MAX; `colours` are found by
    `part_name`."""
    workers = sorted(history.workers)[:LANES_MAX]
    shown = LanesShown(started_ns, history.end_ns, colours)
    shapes: list[Shape] = []
    places = {worker: place for place, worker in enumerate(workers)}
    for instance in history.instances:
        for held in instance.holdings:
            place = places.get(held.member.worker)
            if place is not None:
                shapes += instance_shapes(instance, held, (place, _LANE), shown)
    lane_in = min(max(3.6 / max(len(workers), 1), 0.13), 0.3)
    row = PlotRow(
        lane_in * len(workers) + 0.62, lambda axes: _draw_lanes(axes, shapes, workers, until_s)
    )
    return draw_rows(name, "What every worker did over time", [row])


def close_up(
    name: str,
    history: History,
    receivers: Sequence[tuple[int, int]],
    span_ns: tuple[int, int],
    colours: Mapping[str, str],
    *,
    is_wide: bool,
) -> str:
    """The loads of one scale-up in `span_ns`, which begins with its decision; `receivers` are
    (instance, worker)."""
    first = list(receivers)[:LANES_MAX]
    shown = LanesShown(span_ns[0], history.end_ns, colours)
    shapes: list[Shape] = []
    for place, (number, worker) in enumerate(first):
        instance = history.by_number[number]
        for held in instance.holdings:
            if held.member.worker == worker:
                shapes += instance_shapes(instance, held, (place, _LANE), shown)
    lane_in = min(max(2.4 / max(len(first), 1), 0.13), 0.45)

    def plot(axes: Axes) -> None:
        until_s = (span_ns[1] - span_ns[0]) / NS_PER_S
        _draw_lanes(axes, shapes, [worker for _, worker in first], until_s)
        axes.set_xlabel("seconds since the decision")

    row = PlotRow(lane_in * len(first) + 0.62, plot)
    width_in = WIDE_IN if is_wide else HALF_IN
    return draw_rows(name, "Layers arriving in the largest scale-up", [row], width_in=width_in)


# -- helpers, in the order used -------------------------------------------------------------------


def instance_shapes(
    instance: InstanceHistory,
    held: HoldingHistory,
    lane: tuple[float, float],
    shown: LanesShown,
) -> list[Shape]:
    """What one worker's lane (its middle, and how high it is) shows of the instance. Lanes go down
    from 0."""
    (place, height), zero_ns = lane, shown.zero_ns
    low = place + height / 2
    stop_ns = shown.end_ns if held.ended_ns is None else held.ended_ns
    shapes = []
    for state, role, start, stop in _stretches(instance, shown.end_ns):
        left_ns, right_ns = (min(max(at, held.begun_ns), stop_ns) for at in (start, stop))
        if right_ns <= left_ns:
            continue
        colour = shown.colours[part_name(instance.model, role)]
        span_s = (left_ns - zero_ns) / NS_PER_S, (right_ns - zero_ns) / NS_PER_S
        # A draining instance is half as high, so that its colour need not say it alone.
        half = height / 4 if state is InstanceState.DRAINING else height / 2
        shapes.append(_box(span_s, place - half, place + half, state_tint(colour, state)))
        floor = low
        if state is InstanceState.LIVE:
            floor = low - height * _WORK_PART
            shapes.append(_box(span_s, floor, low, state_tint(colour, InstanceState.SERVING)))
        if state in (InstanceState.LOADING, InstanceState.LIVE) and held.filled:
            filling = _filling(held.filled, (floor, place - height / 2), zero_ns, span_s)
            shapes.append(Shape(filling, state_tint(colour, None)))
    return shapes


def _stretches(
    instance: InstanceHistory, end_ns: int
) -> Iterator[tuple[InstanceState, Role, int, int]]:
    """Its states and roles, each from when to when."""
    roles = instance.role_stretches(end_ns)
    for state, start_ns, stop_ns in instance.stretches(end_ns):
        for role, from_ns, until_ns in roles:
            left_ns, right_ns = max(start_ns, from_ns), min(stop_ns, until_ns)
            if left_ns < right_ns:
                yield state, role, left_ns, right_ns


def draw_shapes(axes: Axes, shapes: Sequence[Shape]) -> None:
    """Put them on the axes, over what is there."""
    axes.add_collection(
        PolyCollection(
            [shape.corners for shape in shapes],
            facecolors=[shape.colour for shape in shapes],
            edgecolors="none",
            rasterized=len(shapes) > _VECTORS_MAX,
            zorder=2,
        ),
        autolim=False,
    )


def _box(
    span_s: tuple[float, float], top: float, floor: float, colour: tuple[float, float, float]
) -> Shape:
    left, right = span_s
    return Shape([(left, floor), (right, floor), (right, top), (left, top)], colour)


def _filling(
    filled: Sequence[tuple[int, float]],
    height: tuple[float, float],
    zero_ns: int,
    span_s: tuple[float, float],
) -> list[Point]:
    """A staircase within the span, from what is there at its left; closed along the floor of
    `height`, which is (floor, top)."""
    floor, top = height
    left, right = span_s
    stride = -(-len(filled) // _FILL_POINTS_MAX)
    kept = [*filled[:-1:stride], filled[-1]]
    corners, level = [(left, floor)], floor
    for at_ns, share in kept:
        at_s = min(max((at_ns - zero_ns) / NS_PER_S, left), right)
        corners.append((at_s, level))
        level = floor + (top - floor) * share
        corners.append((at_s, level))
    return [*corners, (right, level), (right, floor)]


def _draw_lanes(
    axes: Axes, shapes: Sequence[Shape], workers: Sequence[int], until_s: float
) -> None:
    draw_shapes(axes, shapes)
    axes.set_ylim(len(workers) - 0.45, -0.55)
    stride = -(-len(workers) // _LABELS_MAX) or 1
    ticks = range(0, len(workers), stride)
    axes.set_yticks(list(ticks), [f"w{workers[place]}" for place in ticks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("worker")
    axes.grid(visible=False, axis="y")
    time_axis(axes, until_s)
