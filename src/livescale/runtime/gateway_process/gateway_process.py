"""The gateway process: the HTTP server on one side, the pool's wires on the other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import resource
import signal
import socket

import msgspec
import uvloop

from livescale.gateway.contract.keys import KeyDigests, KeyRing
from livescale.gateway.contract.limits import Limits
from livescale.gateway.endpoints.app import AppOptions, create_app
from livescale.gateway.http.https import HttpsFiles
from livescale.gateway.http.server import serve
from livescale.runtime.gateway_process.pool_backend import PoolBackend
from livescale.runtime.gateway_process.sibling_gateways import SiblingGateways
from livescale.runtime.wire.boot import (
    GatewayBoot,
    Status,
    answer_parent_from,
    heed_parent,
    read_boot,
    report,
)
from livescale.runtime.wire.protocol import Catalog

_YOUNG_OBJECTS_MAX = 20_000
"""New objects, beyond those that went, until the next look: some hundred requests make so many."""


async def _main(boot: GatewayBoot) -> None:
    place, is_of_head = boot.place, boot.files_directory is None
    is_first = place is None or place.number == 0
    tells_catalog = boot.pool.lease is not None and is_of_head and is_first
    backend = PoolBackend(boot, _tell_catalog) if tells_catalog else PoolBackend(boot)
    siblings = SiblingGateways(place) if place is not None else None
    keys = KeyRing(KeyDigests(boot.key_digests, boot.admin_key_digests, boot.key_weights))
    heed_parent(lambda line: keys.replace(msgspec.json.decode(line, type=KeyDigests)))
    listener = socket.socket(fileno=boot.listen_fd)
    limits = Limits(
        receive_timeout_s=boot.pool.receive_timeout_s,
        request_timeout_s=boot.pool.request_timeout_s,
        stalled_client_s=boot.pool.stalled_client_s,
    )
    stop = asyncio.Event()

    def told_to_stop() -> None:
        stop.set()
        report(Status(is_accepting=False))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told_to_stop)
    answer_parent_from(loop)

    async def tell_when_settled() -> None:
        await backend.is_settled.wait()
        report(Status(is_ready=True))

    tasks = [asyncio.create_task(backend.run()), asyncio.create_task(tell_when_settled())]
    if boot.is_successor:
        # Until the controller has told about the pool, or is away. Connections wait in the
        # listening socket: a pool that serves refuses nothing because its gateway was replaced, or
        # is new.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(boot.pool.lost_after_ms / 1000):
                await backend.is_known.wait()
    options = AppOptions(
        request_prefix=boot.gateway,
        slo=backend.slo,
        has_vllm_metrics=boot.pool.metrics_compat == "vllm",
        is_local=ipaddress.ip_address(listener.getsockname()[0]).is_loopback,
        page_origins=boot.page_origins,
    )
    app = create_app(backend, options, limits=limits, keys=keys, siblings=siblings)
    _spare_collections()
    if siblings is not None:
        await siblings.open()
    report(Status(is_accepting=True))
    await serve(
        app,
        listener,
        stop,
        boot.pool.drain_timeout_s,
        limits,
        HttpsFiles(boot.pool.ssl_certfile, boot.pool.ssl_keyfile),
    )
    if siblings is not None:
        await siblings.close()
    for task in tasks:
        task.cancel()


def _tell_catalog(catalog: Catalog) -> None:
    """The head that this gateway belongs to may be the next to act."""
    report(Status(catalog=catalog))


def _spare_collections() -> None:
    """Garbage is looked for less often, and not in what lives as long as the process: each look
    through it would stop all streams for a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS_MAX)


def _allow_open_files() -> None:
    """As many open files as the system lets this process have: each stream is one.

    The usual limit of 1,024 is there for programs that use select(), which none of ours does.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Serve until SIGTERM; then let running responses finish within the drain timeout."""
    _allow_open_files()
    uvloop.run(_main(read_boot(GatewayBoot)))
