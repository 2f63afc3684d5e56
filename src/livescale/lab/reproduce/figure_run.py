"""BlitzScale's figures, drawn one after the other into a folder, with an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from livescale.lab.reproduce.base.claim import Conditions
from livescale.lab.reproduce.base.paper_figures import INDEX, PaperFigure, index, write_figure
from livescale.lab.reproduce.base.processes import results
from livescale.lab.reproduce.blitzscale.blitzscale_figures import FIGURES


class UnknownFigureError(ValueError):
    """There is no figure of that number; the message names all."""


def choose_figures(numbers: Sequence[str]) -> list[int]:
    """The figures of these numbers, in the paper's order; none: all of them.

    Raises UnknownFigureError.
    """
    for number in numbers:
        if number not in map(str, FIGURES):
            known = ", ".join(map(str, FIGURES))
            raise UnknownFigureError(f"there is no figure '{number}'; {known}")
    return [number for number in FIGURES if not numbers or str(number) in numbers]


def draw_figures(
    numbers: Sequence[int],
    conditions: Conditions,
    folder: Path,
    on_start: Callable[[int], None] = lambda number: None,
    processes: int = 1,
) -> dict[int, str]:
    """Write the figures and their index; what could not be drawn, and why. Raises OSError."""
    drawn: list[PaperFigure] = []
    absent: dict[int, str] = {}
    with results(_figure, numbers, conditions, processes) as made:
        for number in numbers:
            on_start(number)
            figure = made(number)
            if isinstance(figure, str):
                absent[number] = figure
            else:
                drawn.append(figure)
                write_figure(figure, folder)
    (folder / INDEX).write_text(index(drawn, absent.items()))
    return absent


def _figure(number: int, conditions: Conditions) -> PaperFigure:
    return FIGURES[number](conditions)
