"""A pool's life in the foreground of a command: until Ctrl-C, with its news shown. Its hosts are
its own, those of Ray, or those of a testbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from typing import Protocol

from livescale.cli.serve_display import ServeDisplay
from livescale.common.addresses import is_loopback
from livescale.common.stopping import unless_stopped
from livescale.config.pool import PoolConfig
from livescale.runtime.layout.pool_layout import PoolLayout
from livescale.runtime.supervisor.supervisor import Pool, describe
from livescale.runtime.wire.news import News


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
    display.tell(News(f"reading the files of {names or 'no model'}"))
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
        print(f"Join a node with: {words}")
        if config.tls_dir is None and not is_loopback(config.listen):
            display.tell(News(_PLAIN_TEXT, is_problem=True))
    print(f"starting {pool.layout} …", flush=True)
    hosts = hosts_of(pool) if hosts_of is not None else None
    async with contextlib.AsyncExitStack() as stack:
        if hosts is not None:
            await stack.enter_async_context(hosts)
        # A first start compiles kernels for minutes.
        if await unless_stopped(stack.enter_async_context(pool), interrupted):
            stop = asyncio.create_task(interrupted.wait())
            ready = asyncio.create_task(pool.ready())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                print(f"ready after {time.monotonic() - started:.1f} s: {pool.base_url}/v1")
                print(f"try: {first_request(config, pool.base_url)}")
                print("Ctrl-C drains and stops.", flush=True)
                await pool.or_failure(stop)
            ready.cancel()
            print("draining (Ctrl-C again stops at once) …", flush=True)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, lambda: asyncio.ensure_future(pool.kill()))
        if hosts is not None:
            hosts.let_go()
    print("stopped")
    return 0


def first_request(config: PoolConfig, base_url: str) -> str:
    """A command that asks the first model for some tokens, or publishes one where there is none."""
    if not config.models:
        return "livescale models add DIRECTORY"
    authority = f" --cacert {config.ssl_certfile}" if config.ssl_certfile else ""
    key = ' -H "authorization: Bearer $KEY"' if config.api_key_file else ""
    body = json.dumps({"model": config.models[0].name, "prompt": "Hello", "max_tokens": 16})
    words = ["curl", f"{base_url}/v1/completions", "-H", "content-type: application/json"]
    return f"{shlex.join(words)}{authority}{key} -d {shlex.quote(body)}"


_PLAIN_TEXT = (
    "Prompts and answers cross the network unencrypted. Encrypt with `livescale "
    "cluster init` and --tls-dir (docs/security.md)"
)
