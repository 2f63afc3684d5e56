"""The supervisor: owns every process of a pool and does nothing else.

It keeps the listening sockets, so that a controller or gateway that dies is replaced behind an
address that never closes, and it gives a replaced process its next incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from livescale.common.addresses import address_text, parse_address
from livescale.common.errors import UserError
from livescale.common.settings import ConfigError
from livescale.config.cores import cores_model
from livescale.config.pool import PoolConfig
from livescale.config.racks import read_racks
from livescale.control.cluster.host_ledger import HostNumbers
from livescale.control.cluster.wanted_hosts import PoolNeed
from livescale.gateway.http.https import check_https
from livescale.gateway.http.pages import page_origins
from livescale.latency.models import AnyLatency
from livescale.runtime.children.forking import ForkServer
from livescale.runtime.children.kept_children import ChildCare, KeptChildren
from livescale.runtime.children.pool_process import Child
from livescale.runtime.children.restarts import Restarts
from livescale.runtime.layout.pool_layout import PoolLayout
from livescale.runtime.layout.vllm_python import check_vllm
from livescale.runtime.lease.lease_keeper import lease_terms
from livescale.runtime.lease.lease_stores import lease_store
from livescale.runtime.models.catalog import controller_config, sizes_of, with_host_memory
from livescale.runtime.models.restoration import restored_models
from livescale.runtime.models.state_directory import PoolState, StateDirectory
from livescale.runtime.models.timed_latency import latency
from livescale.runtime.supervisor.child_boots import ChildBoots, MemberBoots, other_heads
from livescale.runtime.supervisor.host_supervisor import (
    STOP_TIMEOUT_S,
    HostSupervisor,
    fork_server,
)
from livescale.runtime.supervisor.key_watch import KeyWatch
from livescale.runtime.supervisor.known_catalog import KnownCatalog
from livescale.runtime.supervisor.listening import listen_inside
from livescale.runtime.supervisor.own_gateways import OwnGateways
from livescale.runtime.supervisor.pool_claims import (
    claim_record,
    claim_secret,
    configured_layout,
    make_member_records,
    token_path,
)
from livescale.runtime.supervisor.pool_directory import PoolDirectory
from livescale.runtime.supervisor.told_progress import ToldProgress
from livescale.runtime.wire.boot import PoolDrains, PoolEnds, Status
from livescale.runtime.wire.doors import open_credentials
from livescale.runtime.wire.examination import ExamineBoot, examine, examine_inside
from livescale.runtime.wire.news import News, PoolProgress, log_news
from livescale.runtime.wire.protocol import Address, CatalogEntry, HeldCopy
from livescale.values.types import WorkerRef

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class PoolFailed(UserError):
    """The pool cannot start or go on; the message says which process and why."""


class Pool:
    """A pool of warm workers, its controller and its gateways. Use as an async context."""

    def __init__(
        self,
        config: PoolConfig,
        environ: Mapping[str, str] | None = None,
        layout: PoolLayout | None = None,
        tell: Callable[[News | PoolProgress], None] = log_news,
        *,
        is_standby: bool = False,
    ) -> None:
        """Prepare models and sockets. Raises ModelError or ConfigError; no process is started.

        Keys are those of the files that `config` names and of the variables in `environ`. `layout`
        says where the processes run; without it that follows from the configuration. `tell` is
        called with news for people, and must not block. One that `is_standby` has no workers and
        no agent of its own: it waits for the lease, and its gateways serve meanwhile.
        """
        layout = layout if layout is not None else configured_layout(config, tell)
        # First: what can be wrong is found before anything is opened.
        _check(config, layout, is_standby)
        self.config = config
        self._is_standby = is_standby
        self._keys = KeyWatch(config, environ or {})
        tls = open_credentials(config.tls_dir)
        timing, origins = latency(config), page_origins(config.cors_origins)
        self._failure: asyncio.Future[None] | None = None
        self._told = ToldProgress(tell)
        #: as the controller last told them
        self.need = PoolNeed()
        #: over the files of keys, if there are any
        self._watching_keys: asyncio.Task[None] | None = None
        self._state = StateDirectory(Path(config.state)) if config.state is not None else None
        #: names this start in records
        self._start = secrets.token_hex(4)
        try:
            secret = self._prepare(layout, tell, tls)
        except BaseException:
            self._close_state()
            raise
        #: no gateway of another machine is there
        self._has_no_others = asyncio.Event()
        self._has_no_others.set()
        self._boots = ChildBoots(
            config,
            self.layout,
            self._catalog,
            self._keys,
            control=self._control,
            gateways=self._gateways,
            directory=self._directory.path,
            page_origins=origins,
            start=self._start,
            secret=secret,
        )
        self._known_catalog = KnownCatalog(self._boots, lambda: self._of_kind("controller"))
        #: of the hosts, per prefix
        self._fork_servers: dict[tuple[str, ...], ForkServer | None] = {}
        self._head = KeptChildren(config, self._head_children(), self._care())
        self._hosts = self._host_supervisors(timing)

    def _prepare(
        self,
        layout: PoolLayout,
        tell: Callable[[News | PoolProgress], None],
        tls: Credentials | None,
    ) -> str:
        """Everything that can be wrong is found here, before any process is started, and nothing
        is left of a start that fails. Returns the pool's secret."""
        config = self.config
        self._catalog = restored_models(
            config,
            self._state.read() if self._state is not None else PoolState(),
            lambda entries: with_host_memory(layout, config, sizes_of(entries)),
        )
        self.models = tuple(model.entry for model in self._catalog.models)
        check_vllm(config, self.models)
        for entry in self.models:
            for warning in entry.warnings:
                _log.warning("%s", warning)
        self.layout = with_host_memory(layout, config, sizes_of(self.models))
        controller_config(config, self.layout, (), 0)
        with contextlib.ExitStack() as opened:
            self._gateways = OwnGateways(config, tell)
            opened.callback(self._gateways.port.close)
            self._control = opened.enter_context(
                listen_inside(layout.control_prefix, *_control_address(config, layout))
            )
            self._directory = PoolDirectory()
            opened.callback(self._directory.remove)
            #: what a machine needs to join (None: none may)
            self.token_file = token_path(config, self._directory.path)
            secret = claim_secret(self.token_file, tls)
            self._member_records = make_member_records(config.record_members, self._start)
            # Last: a start that fails leaves the record as it is.
            self._record_claim = claim_record(config.record)
            opened.pop_all()
        return secret

    def _head_children(self) -> list[Child]:
        """Controller and gateways."""
        prefix, control = self.layout.control_prefix, (self._control.fileno(),)
        controller = Child("controller", "controller", self._boots.controller, control, prefix)
        controller.last_word = PoolEnds()
        self._gateways.make(self._boots.gateway, prefix)
        return [controller, *self._gateways.children]

    def _host_supervisors(self, timing: AnyLatency) -> list[HostSupervisor]:
        """One for each host of the layout."""
        boots = MemberBoots(
            self.config,
            self._boots.secret,
            self._boots.controller_address(),
            self._directory.path,
            timing,
            cores_model(self.config),
            keeps_rates=not self.layout.has_links,
            record_members=self._member_records,
            manifests=self._boots.manifests,
        )
        found, first = [], 0
        for number, seat in enumerate(() if self._is_standby else self.layout.hosts):
            if seat.prefix not in self._fork_servers:
                self._fork_servers[seat.prefix] = fork_server(self.config, seat.prefix)
            host = HostSupervisor(
                self.config,
                seat,
                HostNumbers(first, number),
                boots,
                self._fork_servers[seat.prefix],
                self._care(),
            )
            found.append(host)
            first += len(seat.devices)
        return found

    def _care(self) -> ChildCare:
        return ChildCare(
            heed=self._heed,
            peers=self._peers,
            was_ready=lambda: self._told.was_ready,
            tell=self._told.tell,
            failed=self._fail,
        )

    @property
    def _children(self) -> list[Child]:
        """All of the pool, in the order in which they are started."""
        members = [child for host in self._hosts for child in host.children]
        members.sort(key=lambda child: child.kind != "agent")
        return self._head.children + members

    def _heed(self, child: Child, status: Status) -> None:
        self._known_catalog.heed(child, status)
        self._gateways.heed(child, status)
        self.need = status.need or self.need
        if status.gateways:
            self._has_no_others.clear()
        elif status.gateways == 0 or (child.kind == "controller" and status.is_ready):
            self._has_no_others.set()
        if status.hosts is not None:
            self._boots.hosts = status.hosts
        if status.later_epoch is not None:
            self._boots.epoch_min = status.later_epoch + 1
        self._told.heed(child, status, self._children)

    def _close_state(self) -> None:
        if self._state is not None:
            self._state.close()

    @property
    def base_url(self) -> str:
        """Where the OpenAI API is, without /v1."""
        scheme = "http" if self.config.ssl_certfile is None else "https"
        return f"{scheme}://{address_text(*self._gateways.port.address)}"

    @property
    def join_address(self) -> str:
        """Where other machines join, if they may."""
        return address_text(*self._control.getsockname()[:2])

    def pids(self) -> dict[str, int]:
        """Process ids of the living children by name: controller, gateway (gateway 0, … where
        there are several), agent 0, worker 0, …"""
        found = self._head.pids()
        for host in self._hosts:
            found |= host.pids()
        return found

    async def examine(self) -> dict[WorkerRef, tuple[HeldCopy, ...]]:
        """The checksums of what every member's memory holds. Raises ExaminationError."""
        boot = ExamineBoot(
            secret=self._boots.secret,
            controller=self._boots.controller_address(),
            lost_after_ms=self.config.lost_after_ms,
            tls_dir=self.config.tls_dir,
        )
        if not self.layout.control_prefix:
            return await examine(boot)
        return await asyncio.to_thread(examine_inside, self.layout.control_prefix, boot)

    async def __aenter__(self) -> Pool:
        self._failure = asyncio.get_running_loop().create_future()
        if self._keys.has_files:
            self._watching_keys = asyncio.create_task(self._watch_keys())
        try:
            await self._head.start()
            for host in self._hosts:
                await host.start()
        except BaseException:
            await self.kill()
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Return when every model is served. Raises PoolFailed."""
        await self.or_failure(self._gateways.ready())

    async def or_failure(self, awaitable: Awaitable[Result]) -> Result:
        """The awaitable's result, but no longer than the pool lives. Raises PoolFailed."""
        assert self._failure is not None
        task = asyncio.ensure_future(awaitable)
        either: set[asyncio.Future[Any]] = {task, self._failure}
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure in done:
            task.cancel()
            self._failure.result()
        return await task

    async def stop(self) -> None:
        """No new requests; running ones finish within the timeout; then all processes end."""
        for kept in self._kept():
            kept.let_go()
        # The pool's own copies must close too, or clients could still connect and would hang.
        self._gateways.port.close()
        gateway_s = self.config.drain_timeout_s + 2 * STOP_TIMEOUT_S
        await asyncio.gather(
            self._head.end(self._gateways.children, gateway_s),
            self._end_others(gateway_s),
        )
        # Before its members: what ends with the pool is not lost, and not on record as that.
        await self._head.end(self._of_kind("controller"), STOP_TIMEOUT_S)
        await asyncio.gather(*(host.end() for host in self._hosts))
        for forks in filter(None, self._fork_servers.values()):
            forks.end()
            await forks.wait()
        await self._head.close()
        self._stop_watching()
        self._control.close()
        self._directory.remove()
        if self._record_claim is not None:
            self._record_claim.close()
        self._close_state()
        if self._failure is not None and not self._failure.cancel():
            self._failure.exception()  # reported where it was waited for: asyncio must not log it

    async def kill(self) -> None:
        """End every process at once."""
        self._stop_watching()
        for kept in self._kept():
            kept.kill()
        for forks in filter(None, self._fork_servers.values()):
            forks.end()

    # -- helpers --------------------------------------------------------------------------------

    async def _end_others(self, timeout_s: float) -> None:
        """Gateways of other machines end, unless another head goes on with them."""
        if self.config.lease is not None:
            return
        [controller] = self._of_kind("controller")
        controller.tell(PoolDrains())
        over: list[asyncio.Task[Any]] = [asyncio.create_task(self._has_no_others.wait())]
        # A controller that was killed, or died, never tells that no gateway is left.
        if controller.process is not None:
            over.append(asyncio.create_task(controller.process.wait()))
        await asyncio.wait(over, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in over:
            task.cancel()

    async def _watch_keys(self) -> None:
        """Gateways serve by the keys as they are in their files now."""
        async for digests in self._keys.changes():
            for gateway in self._gateways.children:
                gateway.tell(digests)

    def _stop_watching(self) -> None:
        if self._watching_keys is not None:
            self._watching_keys.cancel()

    def _fail(self, reason: str) -> None:
        for kept in self._kept():
            kept.let_go()
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(PoolFailed(reason))

    def _kept(self) -> list[KeptChildren | HostSupervisor]:
        return [self._head, *self._hosts]

    def _peers(self, child: Child) -> list[Restarts]:
        """All who can do its work. Without host agents a pool can serve."""
        able = self._children if child.kind == "agent" else self._of_kind(child.kind)
        return [other.restarts for other in able]

    def _of_kind(self, kind: str) -> list[Child]:
        return [child for child in self._children if child.kind == kind]


def describe(models: tuple[CatalogEntry, ...]) -> list[str]:
    """One line per model for people."""
    return [
        f"{m.spec.name}: {m.spec.size_bytes / 1e6:.1f} MB, {m.spec.layers} layers,"
        f" {m.manifest.dtype}, up to {m.request_tokens_max} tokens per request"
        for m in models
    ]


def _control_address(config: PoolConfig, layout: PoolLayout) -> tuple[str, int]:
    """Where the controller listens: on a free port, where no machine joins."""
    if config.listen is None:
        return layout.control_address, 0
    return parse_address(config.listen, "listen")


def _check(config: PoolConfig, layout: PoolLayout, is_standby: bool) -> None:
    """Raises ConfigError."""
    if len(layout.seats) != config.workers:
        raise ConfigError(
            f"workers is {config.workers}, but the layout has {len(layout.seats)} devices. "
            "Give the number of devices, or leave out workers"
        )
    check_https(config.ssl_certfile, config.ssl_keyfile)
    are_several = config.lease is not None and config.heads is not None
    if not are_several and (config.lease or config.heads or is_standby):
        raise ConfigError(
            "Several head nodes need both settings: heads (their addresses) and lease"
        )
    other_heads(config, Address("", 0))
    if config.racks is not None:
        read_racks(Path(config.racks))
    if config.lease is not None:
        lease_store(config.lease, lease_terms(config))
