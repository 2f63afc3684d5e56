"""`livescale reproduce [ID …]`: the papers' claims beside what comes out here."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from livescale.cli.loads import write_json, writing
from livescale.reproduce.claim import Claim, Conditions, Reproduction
from livescale.reproduce.figures import as_markdown, draw_all
from livescale.reproduce.run import UnknownClaimError, choose, reproduce

_DOCUMENT = "reproduction.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ids", nargs="*", metavar="ID", help="claims such as B5 or L10 (default: all)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add("--report", type=Path, metavar="DIR", help=f"write {_DOCUMENT} and figures (SVG) here")
    add("--seed", type=_seed, default=0, help="of everything that is drawn (0 or more)")


def run(arguments: argparse.Namespace) -> int:
    """0 also where a claim does not come out: it is a report. 2 for an unknown id."""
    try:
        claims = choose(arguments.ids)
    except UnknownClaimError as error:
        print(f"livescale reproduce: {error}", file=sys.stderr)
        return 2
    data = os.environ.get("LIVESCALE_DATA")
    conditions = Conditions(arguments.seed, Path(data) if data else None)
    found = reproduce(claims, conditions, _say)
    print(as_markdown(found), end="")
    if arguments.json is not None:
        write_json(arguments.json, found.as_json())
    if arguments.report is not None:
        _write(found, arguments.report)
    return 0


# -- helpers --------------------------------------------------------------------------------------


def _seed(text: str) -> int:
    """What generators of random numbers take. argparse turns a ValueError into a usage error."""
    seed = int(text)
    if seed < 0:
        raise ValueError(f"{seed} is negative")
    return seed


def _say(claim: Claim) -> None:
    """What is measured now, where a person may be waiting."""
    if sys.stderr.isatty():
        print(f"{claim.id}: {claim.setup} …", file=sys.stderr)


def _write(found: Reproduction, folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw_all(found, folder)
        (folder / _DOCUMENT).write_text(f"# Reproduction\n\n{as_markdown(found, pictures)}")
