"""How long Runs take on timed workers, as the settings say."""

from __future__ import annotations

import re
from pathlib import Path

from livescale.clusters.profiles import read_profile
from livescale.common.settings import ConfigError
from livescale.config.pool import LINEAR_PREFIX, ROOFLINE_PREFIX, PoolConfig
from livescale.latency.models import AnyLatency
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.latency.table import TableLatency
from livescale.latency.work import LinearLatency


def latency(config: PoolConfig) -> AnyLatency:
    """How long a timed worker takes for a Run. Raises ConfigError for a bad `timed_profile`."""
    profile = config.timed_profile
    if profile is None:
        return LinearLatency(config.timed_run_us * 1000, config.timed_token_us * 1000)
    try:
        if profile.startswith(LINEAR_PREFIX):
            return _linear(profile)
        if profile.startswith(ROOFLINE_PREFIX):
            return _roofline(profile)
        return table_latency(Path(profile))
    except ValueError as error:  # ConfigError, too
        raise ConfigError(f"timed_profile: {error}") from error


def _linear(text: str) -> LinearLatency:
    found = re.fullmatch(r"linear:(\d{1,8}):(\d{1,8})", text)
    if found is None:
        raise ConfigError(f"'{text}' is not linear:RUN_US:TOKEN_US, such as linear:8000:67")
    return LinearLatency(int(found[1]) * 1000, int(found[2]) * 1000)


def table_latency(path: Path) -> TableLatency:
    """From a profile that was measured. Raises ConfigError that names the file."""
    profile = read_profile(path)
    try:
        return TableLatency.measured(profile)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _roofline(text: str) -> RooflineLatency:
    kind, _, name = text.removeprefix(ROOFLINE_PREFIX).partition(":")
    if name not in PRESETS:
        raise ConfigError(
            f"'{text}' is not roofline:ACCELERATOR:MODEL"
            f" with one of the models {', '.join(PRESETS)}"
        )
    return RooflineLatency.of(kind, PRESETS[name])
