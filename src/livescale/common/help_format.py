"""Help texts of commands: each flag with its default."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from livescale.common.settings import Setting


class HelpFormatter(argparse.HelpFormatter):
    """Appends the default of a flag to its help text, unless the text names the default. A
    description or epilog of several lines keeps its lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, words = action.default, action.help
        has_default = default == 0 or bool(default)
        is_shown = has_default and default is not False and default != argparse.SUPPRESS
        if not words or not action.option_strings or not is_shown or "default" in words:
            return words
        return f"{words.removesuffix('.')} (default: %(default)s)."


class Parser(argparse.ArgumentParser):
    """A parser whose help, and that of its subcommands, has this format."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})


def add_setting(parser: argparse._ActionsContainer, setting: Setting, more: str = "") -> None:
    """A flag of this name, whose help ends with `more`. Without it the arguments have none of it;
    values stay text."""
    unit = f" [{setting.about.unit}]" if setting.about.unit else ""
    parser.add_argument(
        setting.flag,
        dest=setting.name,
        metavar="|".join(setting.about.choices) or setting.type.upper(),
        default=argparse.SUPPRESS,
        help=f"{setting.about.help}{unit}{more}".replace("%", "%%"),
    )
