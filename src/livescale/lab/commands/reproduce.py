"""`livescale reproduce [ID …]`: the papers' claims beside what comes out here, and figures."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from livescale.cli.loads import data_folder, write_json, writing
from livescale.lab.reproduce.base.claim import Conditions, Reproduction
from livescale.lab.reproduce.base.figures import as_markdown, draw_all
from livescale.lab.reproduce.base.paper_figures import INDEX
from livescale.lab.reproduce.figure_run import UnknownFigureError, choose_figures, draw_figures
from livescale.lab.reproduce.run import UnknownClaimError, choose, reproduce

_DOCUMENT = "reproduction.md"
_FIGURES = "figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "IDs of claims, for example B5, L10 or N7 (default: all). 'figures' draws figures of"
    words += " BlitzScale by number (default: all)."
    add("ids", nargs="*", metavar="ID", help=words)
    add("--out", type=Path, metavar="DIR", help="Folder for 'figures' (default: figures).")
    add("--json", type=Path, metavar="FILE", help="Write the figures to this file (JSON).")
    words = f"Write {_DOCUMENT} and figures (SVG) into this folder."
    add("--report", type=Path, metavar="DIR", help=words)
    words = "Number of processes (default: one per CPU core)."
    add("--jobs", type=_count, default=os.cpu_count() or 1, metavar="N", help=words)
    add("--seed", type=_seed, default=0, help="Random seed, 0 or more (default: 0).")


def run(arguments: argparse.Namespace) -> int:
    """0 also where a claim does not come out: it is a report. 2 for an unknown id."""
    conditions = Conditions(arguments.seed, data_folder())
    if arguments.ids[:1] == [_FIGURES]:
        return _draw(arguments, conditions)
    try:
        claims = choose(arguments.ids)
    except UnknownClaimError as error:
        return _usage(error)
    if arguments.out is not None:
        return _usage("--out is for figures: claims are written with --report and --json")
    found = reproduce(
        claims, conditions, lambda claim: _say(f"{claim.id}: {claim.setup}"), arguments.jobs
    )
    print(as_markdown(found), end="")
    if arguments.json is not None:
        write_json(arguments.json, found.as_json())
    if arguments.report is not None:
        _write(found, arguments.report)
    return 0


# -- helpers --------------------------------------------------------------------------------------


def _draw(arguments: argparse.Namespace, conditions: Conditions) -> int:
    """The figures, and where they are."""
    if arguments.json is not None or arguments.report is not None:
        return _usage("figures are written with --out, not with --report or --json")
    try:
        numbers = choose_figures(arguments.ids[1:])
    except UnknownFigureError as error:
        return _usage(error)
    folder = arguments.out or Path(_FIGURES)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        absent = draw_figures(
            numbers, conditions, folder, lambda n: _say(f"Figure {n}"), arguments.jobs
        )
    print(f"figures   {folder / INDEX}: {len(numbers) - len(absent)} of {len(numbers)}")
    for number, reason in absent.items():
        print(f"not drawn: Figure {number}: {reason}")
    return 0


def _usage(error: ValueError | str) -> int:
    print(f"livescale reproduce: {error}", file=sys.stderr)
    return 2


def _seed(text: str) -> int:
    """What generators of random numbers take. argparse turns a ValueError into a usage error."""
    seed = int(text)
    if seed < 0:
        raise ValueError(f"{seed} is negative")
    return seed


def _count(text: str) -> int:
    """argparse turns a ValueError into a usage error."""
    count = int(text)
    if count < 1:
        raise ValueError(f"{count} processes")
    return count


def _say(words: str) -> None:
    """What is measured now, where a person may be waiting."""
    if sys.stderr.isatty():
        print(f"{words} …", file=sys.stderr)


def _write(found: Reproduction, folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw_all(found, folder)
        (folder / _DOCUMENT).write_text(f"# Reproduction\n\n{as_markdown(found, pictures)}")
