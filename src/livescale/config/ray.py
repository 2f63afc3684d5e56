"""The section `ray` of a configuration file: which nodes of a Ray cluster become hosts of a pool.

The fields are a table of settings, as those of the pool are.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import msgspec

from livescale.common.settings import (
    About,
    ConfigError,
    as_mapping,
    read_values,
    read_yaml,
    settings_of,
)
from livescale.config.pool import WORKERS_MAX, PoolConfig
from livescale.config.serve_file import pool_document
from livescale.values.types import Value

_HOSTS_MAX = 4096
NO_RAY = "Ray is not installed: pip install 'livescale[ray]'"


def has_ray() -> bool:
    """Ray is installed (without it: NO_RAY)."""
    return importlib.util.find_spec("ray") is not None


class RayConfig(Value, frozen=True, kw_only=True):
    """What is asked of Ray. Made by `load_ray_config`, which also checks it."""

    hosts_min: Annotated[
        int, About("hosts that the pool asks for at any time", "hosts", 0, _HOSTS_MAX)
    ] = 1
    hosts_max: Annotated[
        int | None,
        About(
            "hosts that it asks for as its load needs them, at most; none: one on every node that"
            " has the resource, and none is given back",
            "hosts",
            1,
            _HOSTS_MAX,
        ),
    ] = None
    host_idle_s: Annotated[
        int,
        About("time without an instance after which a host is given back", "s", 1, 31_536_000),
    ] = 300
    workers_per_host: Annotated[
        int,
        About(
            "worker processes of a host; with device cuda also the GPUs that Ray reserves",
            "",
            1,
            WORKERS_MAX,
        ),
    ] = 1
    host_resource: Annotated[
        str | None,
        About("resource that a node must have, 1 for each host; none: GPUs alone count"),
    ] = "livescale_host"
    accelerator_type: Annotated[
        str | None, About("Ray's name of the accelerator that a node must have; none: any")
    ] = None
    rack_label: Annotated[
        str | None,
        About("label of a node that names the rack it is in; none: all are in the head's"),
    ] = "ray.io/availability-zone"
    tls_dir: Annotated[
        str | None,
        About("directory on every node with that node's own certificate, for a pool with tls_dir"),
    ] = None


RAY_SETTINGS = settings_of(RayConfig)


def load_ray_config(path: Path | None, pool: PoolConfig) -> RayConfig:
    """The file's section `ray`, for this pool. Raises ConfigError (without a file: the
    defaults)."""
    section: object = None
    if path is not None:
        section = pool_document(read_yaml(path), path).get("ray")
    where = "ray" if path is None else f"{path}: ray"
    fields = {} if section is None else as_mapping(section, where)
    config = msgspec.convert(read_values(fields, RAY_SETTINGS, f"{where}."), RayConfig)
    if config.hosts_max is not None and config.hosts_min > config.hosts_max:
        raise ConfigError(
            f"{where}.hosts_min is {config.hosts_min}, above hosts_max {config.hosts_max}"
        )
    if config.host_resource is None and pool.device != "cuda":
        raise ConfigError(
            f"{where}.host_resource is none, but device is {pool.device}: no GPU counts"
        )
    _check_tls(config, pool, where)
    return config


def _check_tls(config: RayConfig, pool: PoolConfig, where: str) -> None:
    """Raises ConfigError."""
    if config.tls_dir is not None and not Path(config.tls_dir).is_absolute():
        raise ConfigError(f"{where}.tls_dir is {config.tls_dir}, no absolute path")
    if pool.tls_dir is not None and config.tls_dir is None:
        raise ConfigError(
            f"tls_dir is set, but {where}.tls_dir is not: the directory on every node with that"
            " node's own certificate"
        )
    if pool.tls_dir is None and config.tls_dir is not None:
        raise ConfigError(f"{where}.tls_dir is set, but tls_dir, the head's certificate, is not")
