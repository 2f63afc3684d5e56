"""The configuration of a pool: settings in groups, and what the pool works with beside them.

The fields of the groups and of ModelConfig *are* the table of settings: type, default, unit, bounds
and help stand in one place. Flags and documentation are made from it (`reading.py`). What a value
leads to is decided elsewhere.
"""

from __future__ import annotations

from livescale.common.settings import settings_of
from livescale.config.model import ModelConfig
from livescale.config.settings.api import GATEWAYS_MAX, ApiSettings
from livescale.config.settings.devices import WORKERS_MAX, DeviceSettings
from livescale.config.settings.machines import MachineSettings
from livescale.config.settings.records import RecordSettings
from livescale.config.settings.scaling import ScalingSettings

__all__ = ["GATEWAYS_MAX", "WORKERS_MAX", "PoolConfig"]

ROOFLINE_PREFIX, LINEAR_PREFIX = "roofline:", "linear:"
"""What a `timed_profile` begins with that is no file."""


class PoolConfig(RecordSettings, frozen=True, kw_only=True):
    """All settings of a pool. Made by `load_config`, which also checks them."""

    models: tuple[ModelConfig, ...] = ()


SETTINGS = settings_of(PoolConfig)
GROUPS = {
    group.title: tuple(setting for setting in SETTINGS if setting.name in group.__annotations__)
    for group in (ApiSettings, DeviceSettings, MachineSettings, ScalingSettings, RecordSettings)
}
"""The settings again, as people look for them."""
