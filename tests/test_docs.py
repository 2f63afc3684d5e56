"""The documents say what the program does: every setting, command and endpoint is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from livescale.cli.main import COMMANDS, build_parser
from livescale.config_reading import settings_table_markdown
from livescale.control import holdings, instance

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def test_the_settings_table_is_the_programs_own() -> None:
    assert settings_table_markdown() in (ROOT / "docs" / "configuration.md").read_text()


def test_every_command_is_in_the_readme_or_changelog() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CHANGELOG.md").read_text()
    for command in COMMANDS:
        assert f"livescale {command.name}" in text, command.name
        assert build_parser(command.name).format_help()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|scripts)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    for path in re.findall(
        r"`((?:cli|runtime|sim|gateway|engine|transfer|control|batching|member)"
        r"/[\w/]+\.py)`",
        text,
    ):
        assert (ROOT / "src" / "livescale" / path).exists(), f"{document.name} names {path}"


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
