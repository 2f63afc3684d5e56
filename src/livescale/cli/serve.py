"""`livescale serve MODEL… | -c pool.yaml`: run a pool until Ctrl-C, and show its news."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from livescale.cli.serve_display import ServeDisplay
from livescale.cli.serve_run import serve
from livescale.common.settings import ConfigError
from livescale.config.automatic import AUTOMATIC
from livescale.config.ray import NO_RAY, has_ray
from livescale.config.reading import add_flags, given_flags, load_given
from livescale.runtime.layout.worker_python import check_worker_python
from livescale.runtime.models.fitting import fitted_here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="Folder of a model.")
    parser.add_argument("-c", "--config", type=Path, help="Configuration file (YAML).")
    words = "Run a standby head node without workers. The standby takes over if the leader fails."
    parser.add_argument("--standby", action="store_true", help=words)
    words = "Start workers on a Ray cluster (GCS address or auto, docs/ray.md)."
    parser.add_argument("--ray", metavar="ADDRESS", help=words)
    add_flags(parser, AUTOMATIC)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first drains, the second ends everything at once."""
    flags = given_flags(arguments)
    if arguments.ray is not None:
        if arguments.standby:
            raise ConfigError(_NO_RAY_STANDBY)
        if not has_ray():
            raise ConfigError(f"--ray: {NO_RAY}")
        # Imported here: it imports Ray, which is an extra.
        from livescale.cli import ray_serve

        return ray_serve.run(arguments.ray, arguments.config, arguments.models, flags)
    config, given = load_given(arguments.config, arguments.models, os.environ, flags)
    if config.worker_python is not None:
        check_worker_python(config.worker_python)
    if not arguments.standby:
        config, words = fitted_here(config, given)
        if words:
            print(words)
    with ServeDisplay(config.log_level) as display:
        return asyncio.run(serve(config, display, is_standby=arguments.standby))


_NO_RAY_STANDBY = (
    "--standby does not support --ray. Ray ends the nodes of a head node that ends, so a standby"
    " would have none"
)
