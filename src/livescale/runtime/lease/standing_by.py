"""A controller that may not act yet: it waits for the lease, and turns away all connections."""

from __future__ import annotations

import asyncio
import secrets
import socket

import msgspec

from livescale.control.cluster.lease import LeaseClaim
from livescale.control.state.config import taking_over
from livescale.messages.epochs import ControllerEpoch
from livescale.runtime.lease.lease_keeper import LeaseKeeper, lease_terms
from livescale.runtime.lease.lease_stores import lease_store
from livescale.runtime.wire.boot import ControllerBoot, Status, report
from livescale.runtime.wire.news import News
from livescale.runtime.wire.protocol import Catalog

_LINE = "lease"


def keeper_of(boot: ControllerBoot) -> LeaseKeeper | None:
    """Of the lease by which this controller acts (None: it is the only one). Raises ConfigError."""
    lease = boot.pool.lease
    if lease is None:
        return None
    terms = lease_terms(boot.pool)
    machine, life = socket.gethostname(), f"{boot.start}-{secrets.token_hex(4)}"
    holder = f"{boot.pool.listen or 'no address'} on {machine} ({life})"
    return LeaseKeeper(LeaseClaim(holder, terms, boot.epoch_min), lease_store(lease, terms))


async def wait_for_lease(listener: socket.socket, keeper: LeaseKeeper, stop: asyncio.Event) -> bool:
    """Until the lease is this process's, or (False) it is to end."""
    waiting = await asyncio.start_server(_turn_away, sock=listener.dup())
    acquiring = asyncio.create_task(keeper.acquired())
    stopping = asyncio.create_task(stop.wait())
    telling = asyncio.create_task(_tell_who_acts(keeper))
    tasks = (acquiring, stopping, telling)
    try:
        await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
        if acquiring.done():
            acquiring.result()
    finally:
        waiting.close()
        for task in tasks:
            task.cancel()
    return acquiring.done() and not stopping.done()


def boot_acting(boot: ControllerBoot, epoch: int) -> tuple[ControllerBoot, ControllerEpoch]:
    """What the controller begins with that has got the lease. In the first epoch there is no
    controller that it could take over from."""
    config = msgspec.structs.replace(boot.config, epoch=epoch)
    config = config if epoch == 1 else taking_over(config, epoch)
    report(Status(is_acting=True, news=(News(f"this head node is leader (epoch {epoch})"),)))
    return msgspec.structs.replace(boot, config=config), ControllerEpoch(_LINE, epoch)


def boot_with(boot: ControllerBoot, catalog: Catalog) -> ControllerBoot:
    """With these models: the pool's may be others than when the controller began to wait."""
    models = tuple(model.policy for model in catalog.models)
    config = msgspec.structs.replace(boot.config, models=models)
    return msgspec.structs.replace(boot, config=config, catalog=catalog)


# -- helpers, in the order used -------------------------------------------------------------------


async def _turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _tell_who_acts(keeper: LeaseKeeper) -> None:
    """For people, whenever that changes."""
    told = ""
    while True:
        if keeper.holder and keeper.holder != told:
            told = keeper.holder
            report(Status(news=(News(f"this head node is standby; the leader is {told}"),)))
        await asyncio.sleep(0.1)
