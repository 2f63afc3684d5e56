"""Gateways on this machine, of a pool that runs elsewhere: their supervisor joins the pool, and
keeps the gateways' processes alive until the pool ends. Mostly there is one.

A process connects to the controller and to the workers itself, and its streams go on while the
controller is away. Files that it needs of the models come over its wire (`text_files.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from livescale import __version__
from livescale.common.addresses import address_text
from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.gateway.http.https import check_https
from livescale.gateway.http.pages import page_origins
from livescale.runtime.children.kept_children import ChildCare, KeptChildren
from livescale.runtime.children.pool_process import Child
from livescale.runtime.join.head_talk import HeadAccess, HeadTalk, JoinError
from livescale.runtime.supervisor.child_boots import other_heads
from livescale.runtime.supervisor.host_supervisor import STOP_TIMEOUT_S
from livescale.runtime.supervisor.key_watch import KeyWatch
from livescale.runtime.supervisor.own_gateways import OwnGateways, with_share_of_line
from livescale.runtime.supervisor.pool_directory import PoolDirectory
from livescale.runtime.wire.boot import GatewayBoot, Status
from livescale.runtime.wire.joining import Farewell, GatewayJoins, GatewayWelcome
from livescale.runtime.wire.news import News
from livescale.runtime.wire.protocol import Catalog, ToHost
from livescale.runtime.wire.wire_channel import Wire


class JoinedGateway:
    """`run` until the pool ends, or `leave` or `kill` was called."""

    def __init__(
        self,
        access: HeadAccess,
        name: str,
        settings: PoolConfig,
        own: Mapping[str, Any],
        environ: Mapping[str, str],
    ) -> None:
        """`own` are the settings of this machine, which replace the pool's here, and `settings`
        has them. Raises ConfigError for what is wrong on this machine alone."""
        check_https(settings.ssl_certfile, settings.ssl_keyfile)
        page_origins(settings.cors_origins)
        self._keys = KeyWatch(settings, environ)
        self._gateways = OwnGateways(settings, access.tell)
        self._is_https = settings.ssl_certfile is not None
        self._access = access
        self._name = name
        self._own = own
        self._tell = access.tell
        self._start = secrets.token_hex(4)
        self._directory = PoolDirectory()
        self._talk = HeadTalk(access, GatewayWelcome)
        self._is_leaving = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: what the gateways were started with, and their processes (None: not started yet)
        self._config: PoolConfig | None = None
        self._kept: KeptChildren | None = None
        self._lives = 0
        self._was_ready = False

    @property
    def base_url(self) -> str:
        """Where the OpenAI API is, without /v1."""
        scheme = "https" if self._is_https else "http"
        return f"{scheme}://{address_text(*self._gateways.port.address)}"

    async def run(self) -> None:
        """Raises JoinError where the head cannot be reached, refuses this gateway, or is none, and
        UserError where the gateway's process cannot run."""
        watching = asyncio.create_task(self._watch_keys())
        try:
            await self._talk.run(self._hello, self._stay, self._is_leaving.is_set)
            # One that is to leave while the head is away was on no wire then, and serves still.
            await self._drain()
        finally:
            watching.cancel()
            self._gateways.port.close()
            self.kill()
            self._directory.remove()
            self._failure.cancel()

    def leave(self) -> None:
        """No new requests; running ones finish within the drain timeout."""
        self._is_leaving.set()

    def kill(self) -> None:
        """End everything at once."""
        self._is_leaving.set()
        if self._kept is not None:
            self._kept.kill()

    def pids(self) -> dict[str, int]:
        """Process ids of the living children by name."""
        return {} if self._kept is None else self._kept.pids()

    # -- helpers, in the order used -------------------------------------------------------------

    def _hello(self) -> GatewayJoins:
        return GatewayJoins(__version__, self._name, self._start)

    async def _stay(self, wire: Wire[ToHost], welcome: GatewayWelcome) -> bool:
        """Until the wire ends; True if this gateway is to end. Raises UserError where it cannot
        run."""
        await self._take(welcome)
        try:
            is_over = await self._talk.hold(wire, self._is_leaving.wait(), self._failure)
            if is_over:
                await self._drain()
                wire.send(Farewell())
            return is_over
        finally:
            wire.close()

    async def _take(self, welcome: GatewayWelcome) -> None:
        """Start the gateway, or let it serve on where nothing has changed."""
        self._check_keys(welcome)
        config: PoolConfig = msgspec.structs.replace(welcome.pool, **self._own)
        if self._config == config:
            self._tell(News("connected to the controller again"))
            return
        if self._config is not None:
            self._tell(News("the pool's settings changed; the gateway restarts"))
            await self._end()
        self._config = config
        self._gateways.make(self._boot)
        children = self._gateways.children
        care = ChildCare(
            heed=self._heed,
            peers=lambda _: [child.restarts for child in children],
            was_ready=lambda: self._was_ready,
            tell=self._tell,
            failed=self._fail,
        )
        self._kept = KeptChildren(config, children, care)
        await self._kept.start()

    def _check_keys(self, welcome: GatewayWelcome) -> None:
        """Raises JoinError where the head asks its clients for keys and this gateway would not."""
        digests = self._keys.digests
        if welcome.has_api_keys and not digests.api:
            raise JoinError(
                "The pool requires API keys. Give --api-key-file, or set LIVESCALE_API_KEY"
            )
        if welcome.has_admin_keys and not digests.admin:
            raise JoinError(
                "The pool requires admin keys. Give --admin-key-file, or set LIVESCALE_ADMIN_KEY"
            )

    def _boot(self, number: int, _life: int) -> GatewayBoot:
        assert self._config is not None
        self._lives += 1
        return GatewayBoot(
            secret=self._access.secret,
            gateway=f"{self._start}g{self._lives}",
            # Clients wait in the listening socket until the models' files are here.
            is_successor=True,
            listen_fd=self._gateways.port.fileno(number),
            controller=self._access.head,
            other_controllers=other_heads(self._config, self._access.head),
            pool=with_share_of_line(self._config, number),
            catalog=Catalog(()),
            key_digests=self._keys.digests.api,
            admin_key_digests=self._keys.digests.admin,
            key_weights=self._keys.digests.weights,
            page_origins=page_origins(self._config.cors_origins),
            files_directory=str(self._directory.path / f"models-{self._lives}"),
            place=self._gateways.place(number, str(self._directory.path)),
        )

    def _heed(self, child: Child, status: Status) -> None:
        self._gateways.heed(child, status)
        for news in status.news:
            self._tell(news)
        if status.is_ready:
            name = "the gateway" if self._gateways.count == 1 else child.name
            again = " again" if self._was_ready else ""
            self._was_ready = self._was_ready or self._gateways.are_ready
            took_s = time.monotonic() - child.started_s
            self._tell(News(f"{name} is ready{again} after {took_s:.1f} s"))

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(UserError(reason))

    async def _drain(self) -> None:
        """No new requests, and running streams finish."""
        # The supervisor's own copy must close, too, or clients could still connect.
        self._gateways.port.close()
        await self._end()

    async def _end(self) -> None:
        """The processes let running streams finish, and end."""
        if self._kept is not None and self._config is not None:
            self._kept.let_go()
            timeout_s = self._config.drain_timeout_s + STOP_TIMEOUT_S
            await self._kept.end(self._kept.children, timeout_s)
            await self._kept.close()
            self._kept = None

    async def _watch_keys(self) -> None:
        """Gateways serve by the keys as they are in their files now."""
        async for digests in self._keys.changes():
            for child in [] if self._kept is None else self._kept.children:
                child.tell(digests)

    def __repr__(self) -> str:
        return f"<JoinedGateway {self._name} at {self._access.head}>"
