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
from livescale.config.ray_serve_file import pool_document
from livescale.values.types import Value

_HOSTS_MAX = 4096
NO_RAY = "Ray is not installed: pip install 'livescale[ray]'"


def has_ray() -> bool:
    """Ray is installed (without it: NO_RAY)."""
    return importlib.util.find_spec("ray") is not None


class RayConfig(Value, frozen=True, kw_only=True):
    """What is asked of Ray. Made by `load_ray_config`, which also checks it."""

    hosts_min: Annotated[
        int,
        About(
            "Smallest number of Ray nodes. The pool requests this many at any time.",
            "hosts",
            0,
            _HOSTS_MAX,
        ),
    ] = 1
    hosts_max: Annotated[
        int | None,
        About(
            "Largest number of Ray nodes. The pool requests nodes as its load grows. With none, the"
            " pool uses every node with the resource and releases none.",
            "hosts",
            1,
            _HOSTS_MAX,
        ),
    ] = None
    host_idle_s: Annotated[
        int,
        About("Idle time before the pool releases a node without an instance.", "s", 1, 31_536_000),
    ] = 300
    workers_per_host: Annotated[
        int,
        About(
            "Worker processes of a node. With device cuda, Ray reserves a GPU for each worker.",
            "",
            1,
            WORKERS_MAX,
        ),
    ] = 1
    host_resource: Annotated[
        str | None,
        About(
            "Ray resource of the nodes that may join. Each node needs 1 of the resource. With none,"
            " Ray selects nodes by their GPUs."
        ),
    ] = "livescale_host"
    accelerator_type: Annotated[
        str | None,
        About(
            "Ray's name of the accelerator that a node needs. With none, every accelerator will do."
        ),
    ] = None
    rack_label: Annotated[
        str | None,
        About(
            "Ray label with the rack of a node. With none, all nodes get the rack of the head node."
        ),
    ] = "ray.io/availability-zone"
    tls_dir: Annotated[
        str | None,
        About(
            "Folder of each node's own certificate, on every node. A pool with `tls_dir` requires"
            " the folder."
        ),
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
            f"{where}.host_resource none requires device cuda. The device is {pool.device}"
        )
    _check_tls(config, pool, where)
    return config


def _check_tls(config: RayConfig, pool: PoolConfig, where: str) -> None:
    """Raises ConfigError."""
    if config.tls_dir is not None and not Path(config.tls_dir).is_absolute():
        raise ConfigError(f"{where}.tls_dir is {config.tls_dir}. Write an absolute path")
    if pool.tls_dir is not None and config.tls_dir is None:
        raise ConfigError(
            f"tls_dir is set, but {where}.tls_dir is not. Set the folder of each node's own"
            " certificate"
        )
    if pool.tls_dir is None and config.tls_dir is not None:
        raise ConfigError(f"{where}.tls_dir requires tls_dir, the certificate of the head node")
