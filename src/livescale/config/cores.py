"""What cores do for a model's service time, from a file of `livescale bench cores`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.values.scaling_policies import CoresModel


def read_cores(path: Path) -> CoresModel:
    """Raises ConfigError for a file that is not there, or is none of these."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoresModel)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cores_profile: {path}: {error}") from error


def cores_model(config: PoolConfig) -> CoresModel | None:
    """What the pool's `cores_profile` says (None: cores are left alone). Raises ConfigError."""
    return None if config.cores_profile is None else read_cores(Path(config.cores_profile))


def cores_max(config: PoolConfig) -> int:
    """CPU_max of each host: as configured, or what this machine has."""
    return config.cores_max or len(os.sched_getaffinity(0))


def write_cores(path: Path, model: CoresModel) -> None:
    """As `read_cores` reads it. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")
