"""The documents say what the program does: every setting, command and endpoint is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rooms
from livescale.control.state import holdings, instance
from livescale.main import COMMANDS, build_parser
from settings_table import settings_table_markdown

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "livescale"
ROOMS = sorted({path.parent.relative_to(SOURCE).parts[0] for path in SOURCE.glob("*/*.py")})
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def test_the_settings_table_is_the_programs_own() -> None:
    assert settings_table_markdown() in (ROOT / "docs" / "configuration.md").read_text()


def test_every_command_is_in_the_readme_or_changelog() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CHANGELOG.md").read_text()
    for command in COMMANDS:
        assert f"livescale {command}" in text, command
        assert build_parser(command).format_help()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|scripts)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    for path in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/]+\.py)`", text):
        assert (ROOT / "src" / "livescale" / path).exists(), f"{document.name} names {path}"


def test_the_picture_of_the_rooms_is_made_from_the_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    shown = text.split("<!-- rooms -->\n")[1].split("<!-- /rooms -->")[0]
    assert shown == rooms.picture(), "python tests/rooms.py prints it"


@pytest.mark.parametrize("walk", ["One request", "One layer"])
def test_a_walk_through_the_house_is_short(walk: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split(f"**{walk}**\n\n")[1].split("\n\n")[0]
    files = set(re.findall(r"`([\w/]+\.py)`", table))
    assert 10 <= len(files) <= 15
    assert [name for name in files if not (SOURCE / name).is_file()] == []


def test_handlers_that_the_architecture_names_exist() -> None:
    """Each table of handlers is held against the classes and methods of the code."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    classes = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    members = set(re.findall(r"\bdef (\w+)\(", source))
    members |= set(re.findall(r"^    (\w+): ", source, re.MULTILINE))
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert len(named) > 20
    wrong = [f"{of}.{name}" for of, name in named if of not in classes or name not in members]
    wrong += [name for name in re.findall(r"`(_[a-z]\w+)`", text) if name not in members]
    assert wrong == []


def test_the_state_diagrams_are_made_from_the_tables() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for title, table in (
        ("an instance", instance.TRANSITIONS),
        ("a holding", holdings.TRANSITIONS),
    ):
        section = text.split(f"## States of {title}")[1].split("\n## ")[0]
        rows = [
            f"{state.name} --> {target.name}: {cause.__name__}"
            for state, moves in table.items()
            for cause, target in moves.items()
        ]
        shown = [line.strip() for line in section.splitlines() if " --> " in line]
        assert shown[1:] == rows, title
