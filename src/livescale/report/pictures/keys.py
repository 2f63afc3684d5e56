"""What a page's sections are made of: panels, and keys of figures, which tell the colour or line of
each run and model. Keys stand in the page, above the figures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.colors import to_hex

from livescale.report.pictures.canvas import COLOURS, DASHES, INK, LIMIT, LOAD, REST, line_look
from livescale.report.pictures.lanes import part_name, state_tint
from livescale.report.run.reported_run import ReportedRun
from livescale.telemetry.history.device_time import DeviceUse
from livescale.values.types import InstanceState, Role

USE_COLOURS = {
    DeviceUse.SERVING: COLOURS[0],
    DeviceUse.LOADING: COLOURS[4],
    DeviceUse.DRAINING: COLOURS[3],
    DeviceUse.SPARE: COLOURS[2],
    DeviceUse.IDLE: LOAD,
    DeviceUse.LOST: COLOURS[1],
    DeviceUse.LEFT: COLOURS[6],
}
"""From the bottom of a stacked area to its top."""


@dataclass(frozen=True, slots=True)
class KeyItem:
    """One entry of a figure's key: a line, an area, or an area that fills with `second` (over a
    strip of `third`), or dots."""

    label: str
    colour: str
    kind: str = "line"
    second: str = ""
    third: str = ""
    dashes: str = ""
    width: float = 2.4


def run_keys(runs: Sequence[ReportedRun]) -> list[KeyItem]:
    """The runs by their lines; a single one needs no key."""
    if len(runs) == 1:
        return []
    looks = [line_look(number, len(runs)) for number in range(len(runs))]
    return [
        KeyItem(run.name, look["color"], dashes=_dashes(look["linestyle"]))
        for run, look in zip(runs, looks, strict=True)
    ]


def slo_keys(runs: Sequence[ReportedRun]) -> list[KeyItem]:
    """The line of the SLO, if any run has one."""
    if all(run.slo is None for run in runs):
        return []
    return [KeyItem("SLO", LIMIT, dashes=_dashes(DASHES[1]), width=1.4)]


def model_colours(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Colours of all models of all runs: those that held devices longest have their own."""
    held: dict[str, int] = {}
    for run in runs:
        for model, usage in run.usage.items():
            held[model] = held.get(model, 0) + usage.device_ns
        for model in run.history.policies:
            held.setdefault(model, 0)
    ordered = sorted(held, key=lambda model: (-held[model], model))
    own = dict(zip(ordered, COLOURS, strict=False))
    return {model: own.get(model, REST) for model in ordered}


def part_colours(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Colours by `part_name`: those of models, and where a model has roles one for each role."""
    models = model_colours(runs)
    used = [colour for colour in COLOURS if colour not in models.values()]
    colours: dict[str, str] = {}
    for model, colour in models.items():
        roles = {
            role
            for run in runs
            for instance in run.history.instances
            if instance.model == model
            for _, role in instance.roles
        }
        for role in [role for role in Role if role in roles] or [Role.UNIFIED]:
            first = colour in colours.values() and colour != REST
            colours[part_name(model, role)] = (used.pop(0) if used else REST) if first else colour
    return colours


def model_keys(colours: Mapping[str, str]) -> list[KeyItem]:
    """The models that have a colour of their own, and how many others there are."""
    own = {model: colour for model, colour in colours.items() if colour != REST}
    keys = [KeyItem(model, colour, "area") for model, colour in own.items()]
    others = len(colours) - len(own)
    return [*keys, KeyItem(f"{others} other models", REST, "area")] if others else keys


def use_keys(uses: Collection[DeviceUse]) -> list[KeyItem]:
    """What devices do, those uses that there are."""
    words = {DeviceUse.SPARE: "spare: parameters, no instance", DeviceUse.LEFT: "left in order"}
    return [
        KeyItem(words.get(use, use.name.lower()), colour, "area")
        for use, colour in USE_COLOURS.items()
        if use in uses
    ]


def lane_keys(colours: Mapping[str, str], *, has_live: bool) -> list[KeyItem]:
    """Models by colour if there are several; states by shape and by how much colour they have."""
    keys = model_keys(colours) if len(colours) > 1 else []
    base = INK if keys else next(iter(colours.values()), INK)
    loading, filled, serving, draining = (
        to_hex(state_tint(base, state))
        for state in (InstanceState.LOADING, None, InstanceState.SERVING, InstanceState.DRAINING)
    )
    live = [KeyItem("live: loading, and at work", loading, "live", second=filled, third=serving)]
    return [
        *keys,
        KeyItem("loading, filling", loading, "filling", second=filled),
        *(live if has_live else []),
        KeyItem("serving", serving, "area"),
        KeyItem("draining", draining, "thin"),
    ]


def _dashes(style: object) -> str:
    """A line style in SVG's words."""
    if not isinstance(style, tuple):
        return ""
    _, lengths = style
    return " ".join(f"{1.4 * length:g}" for length in lengths)


@dataclass(frozen=True, slots=True)
class Panel:
    """One SVG with the name above it."""

    svg: str
    title: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PanelGroup:
    """Panels that one sentence explains, up to three in a row."""

    sentence: str
    legend: list[KeyItem]
    panels: list[Panel]
    columns: int = 1


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    anchor: str
    groups: list[PanelGroup]
