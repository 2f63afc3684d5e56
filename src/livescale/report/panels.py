"""What a page's sections are made of."""

from __future__ import annotations

from dataclasses import dataclass

from livescale.report.keys import KeyItem


@dataclass(frozen=True, slots=True)
class Panel:
    """One SVG with the name above it."""

    svg: str
    title: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PanelGroup:
    """Panels in one scale that one sentence explains."""

    sentence: str
    legend: list[KeyItem]
    panels: list[Panel]
    in_twos: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    anchor: str
    groups: list[PanelGroup]
