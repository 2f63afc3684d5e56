"""Configurations that tests make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from livescale.config.pool import PoolConfig
from livescale.config.reading import load_config
from livescale.config.settings.tuning import Tuning


def made_config(
    path: Path | None, model_paths: list[str], values: Mapping[str, object]
) -> PoolConfig:
    """Settings as flags have them, and what is no setting (`Tuning`), or is the simulator's choice
    alone, as it is."""
    tuned = {name: value for name, value in values.items() if name in Tuning.__struct_fields__}
    flags = {name: value for name, value in values.items() if name not in tuned}
    simulated = {"placement": flags.pop("placement")} if flags.get("placement") == "all" else {}
    config = load_config(path, model_paths, {}, flags, tuned)
    return msgspec.structs.replace(config, **simulated)
