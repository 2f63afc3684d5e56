"""The documentation's tables of settings, as the program's own table has them."""

from __future__ import annotations

from collections.abc import Mapping

from livescale.common.settings import Setting, shown_default
from livescale.config.automatic import AUTOMATIC
from livescale.config.model import MODEL_SETTINGS
from livescale.config.pool import GROUPS


def settings_table_markdown() -> str:
    """The documentation's tables of pool and model settings."""
    lines = []
    for title, group in GROUPS.items():
        lines += [f"**{title[0].upper()}{title[1:]}**", ""]
        lines += [
            "| setting | variable | type | unit | default | meaning |",
            "|---|---|---|---|---|---|",
        ]
        for setting in group:
            lines.append(
                f"| `{setting.name}` | `{setting.variable}` | {_cells(setting, AUTOMATIC)} |"
            )
        lines.append("")
    lines += ["| key of `models:` | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for setting in MODEL_SETTINGS:
        lines.append(f"| `{setting.name}` | {_cells(setting)} |")
        for key in setting.keys:
            lines.append(f"| `{setting.name}: {key.name}:` | {_cells(key)} |")
    [same] = {key.keys for setting in MODEL_SETTINGS for key in setting.keys}
    lines += [f"| `roles: …: {key.name}` | {_cells(key)} |" for key in same]
    return "\n".join(lines) + "\n"


def _cells(setting: Setting, chosen: Mapping[str, str] | None = None) -> str:
    kind = f"{setting.type} or none" if setting.is_optional else setting.type
    words = setting.about.help.replace("|", "\\|")
    default = (chosen or {}).get(setting.name) or shown_default(setting)
    return f"{kind} | {setting.about.unit} | {default} | {words}"
