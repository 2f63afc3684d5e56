"""`livescale serve MODEL… | -c pool.yaml`: run a pool until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path

from livescale.cli.errors import UserError
from livescale.cli.serve_display import ServeDisplay
from livescale.config import PoolConfig
from livescale.config_reading import add_flags, given_flags, load_config
from livescale.engine.errors import ModelError
from livescale.runtime.news import News
from livescale.runtime.pool_layout import PoolLayout
from livescale.runtime.supervisor import Pool, PoolFailed, describe
from livescale.settings import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="directory of a model")
    parser.add_argument("-c", "--config", type=Path, help="configuration file (YAML)")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first drains, the second ends everything at once."""
    try:
        config = load_config(arguments.config, arguments.models, os.environ, given_flags(arguments))
        with ServeDisplay(config.log_level) as display:
            return asyncio.run(serve(config, display))
    except (ConfigError, ModelError, PoolFailed) as error:
        raise UserError(str(error)) from error


async def serve(config: PoolConfig, display: ServeDisplay, layout: PoolLayout | None = None) -> int:
    """Run a pool, at this layout if there is one, until it is told to stop."""
    started = time.monotonic()
    names = ", ".join(model.name for model in config.models)
    display.tell(News(f"reading {names or 'no model'}"))
    pool = Pool(config, os.environ, layout, display.tell)
    for line in describe(pool.models):
        print(line)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    print(f"starting {pool.layout} …", flush=True)
    async with pool:
        stop = asyncio.create_task(interrupted.wait())
        ready = asyncio.create_task(pool.ready())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            print(f"ready after {time.monotonic() - started:.1f} s: {pool.base_url}/v1")
            print("Ctrl-C drains and stops.", flush=True)
            await pool.or_failure(stop)
        ready.cancel()
        print("draining (Ctrl-C again ends at once) …", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: asyncio.ensure_future(pool.kill()))
    print("stopped")
    return 0
