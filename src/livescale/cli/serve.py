"""`livescale serve MODEL… | -c pool.yaml`: run a pool until Ctrl-C, and show its news."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from livescale.cli.serve_display import ServeDisplay
from livescale.common.addresses import is_loopback
from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.config.ray import NO_RAY, has_ray
from livescale.config.reading import add_flags, given_flags, load_config
from livescale.runtime.news import News
from livescale.runtime.pool_layout import PoolLayout
from livescale.runtime.supervisor import Pool, describe
from livescale.runtime.worker_python import check_worker_python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="directory of a model")
    parser.add_argument("-c", "--config", type=Path, help="configuration file (YAML)")
    words = "wait until the head that acts is gone; this one has no workers of its own"
    parser.add_argument("--standby", action="store_true", help=words)
    words = "nodes of this Ray cluster are the hosts (its GCS, or auto; extra ray; see docs/ray.md)"
    parser.add_argument("--ray", metavar="ADDRESS", help=words)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first drains, the second ends everything at once."""
    flags = given_flags(arguments)
    if arguments.ray is not None:
        if arguments.standby:
            raise ConfigError(_NO_RAY_STANDBY)
        if not has_ray():
            raise ConfigError(f"--ray: {NO_RAY}")
        module = importlib.import_module("livescale.cli.ray_serve")
        code: int = module.run(arguments.ray, arguments.config, arguments.models, flags)
        return code
    config = load_config(arguments.config, arguments.models, os.environ, flags)
    if config.worker_python is not None:
        check_worker_python(config.worker_python)
    with ServeDisplay(config.log_level) as display:
        return asyncio.run(serve(config, display, is_standby=arguments.standby))


class HostSource(Protocol):
    """What brings hosts to a pool, as a context around the pool's life."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *_: object) -> None: ...

    def let_go(self) -> None:
        """The pool is about to end: it needs no more hosts."""


async def serve(
    config: PoolConfig,
    display: ServeDisplay,
    layout: PoolLayout | None = None,
    *,
    is_standby: bool = False,
    hosts_of: Callable[[Pool], HostSource] | None = None,
) -> int:
    """Run a pool, at this layout if there is one, until SIGINT or SIGTERM. Where `hosts_of` is
    given, hosts come from there."""
    started = time.monotonic()
    names = ", ".join(model.name for model in config.models)
    display.tell(News(f"reading {names or 'no model'}"))
    pool = Pool(config, os.environ, layout, display.tell, is_standby=is_standby)
    for line in describe(pool.models):
        print(line)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    if pool.token_file is not None:
        tls = "" if config.tls_dir is None else " --tls-dir DIR"
        words = f"livescale join {pool.join_address} --token-file {pool.token_file}{tls}"
        print(f"others join with: {words}")
        if config.tls_dir is None and not is_loopback(config.listen):
            display.tell(News(_PLAIN_TEXT, is_problem=True))
    print(f"starting {pool.layout} …", flush=True)
    hosts = hosts_of(pool) if hosts_of is not None else None
    async with hosts if hosts is not None else contextlib.nullcontext(), pool:
        stop = asyncio.create_task(interrupted.wait())
        ready = asyncio.create_task(pool.ready())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            print(f"ready after {time.monotonic() - started:.1f} s: {pool.base_url}/v1")
            print("Ctrl-C drains and stops.", flush=True)
            await pool.or_failure(stop)
        ready.cancel()
        if hosts is not None:
            hosts.let_go()
        print("draining (Ctrl-C again ends at once) …", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: asyncio.ensure_future(pool.kill()))
    print("stopped")
    return 0


_NO_RAY_STANDBY = (
    "--standby and --ray do not go together: Ray ends hosts with the head that asked for them, so"
    " another head would find none"
)
_PLAIN_TEXT = (
    "prompts and answers cross the network as plain text: a listener there reads them, and may"
    " change them (docs/security.md: livescale cluster init, --tls-dir)"
)
