"""Configurations that tests make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from livescale.config.pool import PoolConfig
from livescale.config.reading import load_config
from livescale.config.settings.tuning import Tuning


def made_config(
    path: Path | None, model_paths: list[str], values: Mapping[str, object]
) -> PoolConfig:
    """Settings as flags have them, and what is no setting (`Tuning`) as it is."""
    tuned = {name: value for name, value in values.items() if name in Tuning.__struct_fields__}
    flags = {name: value for name, value in values.items() if name not in tuned}
    return load_config(path, model_paths, {}, flags, tuned)
