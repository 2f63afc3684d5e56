"""The hosts that joined the pool, as its controller sees them: one wire to the supervisor of each.

Members of these hosts connect to the controller themselves, and are members like all others; here
is only what their supervisors are told. Who gets which numbers is decided in `control/host_ledger`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from livescale import __version__
from livescale.common.settings import ConfigError
from livescale.config.pool import WORKERS_MAX, PoolConfig
from livescale.config.racks import read_racks
from livescale.control.cluster.departures import Departures
from livescale.control.cluster.host_ledger import HostLedger, HostRefusedError
from livescale.control.cluster.wanted_hosts import PoolNeed, need_of
from livescale.messages.events import AnyEvent, Tick
from livescale.runtime.models.publication import Publication
from livescale.runtime.wire import joining, protocol
from livescale.runtime.wire.boot import ControllerBoot, Status, report
from livescale.runtime.wire.news import News
from livescale.runtime.wire.wire_channel import Wire
from livescale.values.types import WorkerRef

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_log = logging.getLogger(__name__)
_HostWire = Wire[protocol.ToController]


class JoinedHosts:
    """Lives on the controller's event loop."""

    def __init__(
        self,
        boot: ControllerBoot,
        publication: Publication,
        push: Callable[[AnyEvent], None],
        tls: Credentials | None = None,
    ) -> None:
        """`push` gives the controller an event. Hosts are told whose certificates `tls` no longer
        admits."""
        self._pool = boot.pool
        self._tls = tls
        if tls is not None:
            tls.watch(self._tell_revoked)
        self._push = push
        self._departures = Departures()
        self._publication = publication
        #: of workers, as it was told last
        self._need = PoolNeed()
        self._ledger = HostLedger(boot.own_hosts, boot.pool.workers, boot.hosts)
        #: by name of a host, as the file said last
        self._racks: dict[str, str] = {}
        #: by name: when the supervisor began, and its wire
        self._wires: dict[str, tuple[int, _HostWire]] = {}

    async def serve(self, hello: joining.HostHello, wire: _HostWire) -> None:
        """A host's supervisor, until its wire ends."""
        try:
            self._check(hello)
            numbers = self._ledger.admit(hello.name, hello.workers, hello.clock_ns, hello.numbers)
        except HostRefusedError as error:
            _log.warning("node %r was rejected: %s", hello.name, error)
            wire.send(protocol.Refused(str(error), error.may_pass))
            wire.close()
            return
        if hello.name in self._wires:
            # Of the same supervisor, whose end of it broke first.
            self._wires[hello.name][1].break_off("it has connected again")
        self._wires[hello.name] = hello.clock_ns, wire
        sizes = self._sizes(hello.wants)
        wire.send(joining.Welcome(numbers, self._settings_of(hello.name), sizes))
        if self._tls is not None and self._tls.revoked_list:
            wire.send(joining.RevokedMembers(self._tls.revoked_list))
        brings = f"and wants {hello.wants}" if hello.wants else f"with {hello.workers} workers"
        self._keep(News(f"node {hello.name} has joined {brings}"))
        await self._listen(hello.name, wire, is_guest=bool(hello.wants))

    def observe(
        self,
        members: Iterable[tuple[str, WorkerRef]],
        free: Collection[WorkerRef],
    ) -> list[WorkerRef]:
        """Look whether hosts that leave may go now (see `Departures.look`). To be called after
        every step. Returns the members that go with them."""
        there = list(members)
        telling, going = self._departures.look(there, free)
        for event in telling:
            self._push(event)
        for name in going:
            if name in self._wires:
                self._wires[name][1].send(joining.Farewell())
        return [ref for host, ref in there if host in going]

    def tell_need(
        self, lacking: int, hosts: Mapping[WorkerRef, str], busy: Collection[WorkerRef]
    ) -> None:
        """The supervisor is told when it has changed how many workers are lacking, on which hosts
        of all members (`hosts`) there are some, and on which some are `busy`."""
        need = need_of(lacking, hosts, busy)
        if need != self._need:
            self._need = need
            report(Status(need=need))

    def say_farewell(self) -> None:
        """The pool ends in order: its hosts need not wait for another life of the controller."""
        for _, wire in self._wires.values():
            wire.send(joining.Farewell())

    # -- helpers --------------------------------------------------------------------------------

    def _settings_of(self, host: str) -> PoolConfig:
        """The pool's for this host, which may stand in a rack of its own. The file is read anew for
        everyone who joins; where it cannot be read now, as it was read last."""
        if self._pool.racks is not None:
            try:
                self._racks = read_racks(Path(self._pool.racks))
            except ConfigError as error:
                _log.warning("The racks file is invalid; the previous racks stay in use: %s", error)
        rack = self._racks.get(host, self._pool.rack)
        return msgspec.structs.replace(settings_elsewhere(self._pool), rack=rack)

    def _tell_revoked(self) -> None:
        assert self._tls is not None
        for _, wire in self._wires.values():
            wire.send(joining.RevokedMembers(self._tls.revoked_list))

    def _check(self, hello: joining.HostHello) -> None:
        """Raises HostRefusedError for what cannot join."""
        check_may_join(self._pool, hello, "host")
        if hello.wants:
            self._check_wanted(hello)
        if not 0 <= hello.workers <= WORKERS_MAX:
            raise HostRefusedError(f"A node has 0 to {WORKERS_MAX} workers, not {hello.workers}")
        if hello.kv_bytes is not None and hello.kv_bytes < self._pool.kv_bytes:
            raise HostRefusedError(
                f"kv_bytes of the node is {hello.kv_bytes}, below the pool's "
                f"{self._pool.kv_bytes}. Give the node at least as much"
            )
        here = self._wires.get(hello.name)
        if here is not None and here[0] != hello.clock_ns:
            raise HostRefusedError(
                f"a node named {hello.name} is in the pool: choose another --name", may_pass=True
            )

    def _check_wanted(self, hello: joining.HostHello) -> None:
        models = {
            name: model
            for name, model in self._publication.models.items()
            if not model.is_leaving and model.entry.spec.stage is None
        }
        if hello.wants not in models:
            names = ", ".join(models) or "none"
            raise HostRefusedError(
                f"the pool has no model '{hello.wants}' in one piece. Available: {names}"
            )
        if hello.workers:
            raise HostRefusedError("a guest, which wants a model, brings no workers")

    async def _listen(self, name: str, wire: _HostWire, *, is_guest: bool) -> None:
        async for message in wire:
            if not isinstance(message, joining.Farewell):
                wire.error = f"a host sent {type(message).__name__}"
                wire.close()
                break
            if self._departures.begin(name, message.members):
                report(Status(news=(News(f"node {name} leaves"),)))
            # The members that are there are known after a step.
            self._push(Tick())
        if self._wires.get(name, (0, None))[1] is not wire:
            return
        del self._wires[name]
        if self._departures.end(name):
            self._ledger.leave(name)
            self._keep(News(f"node {name} has left"))
        elif is_guest:
            # Of a process that comes again under another name, if at all.
            self._ledger.leave(name)
            self._keep(News(f"guest {name} is lost: {wire.error}"))
        else:
            self._keep(News(f"node {name} is lost: {wire.error}", is_problem=True))

    def _keep(self, news: News) -> None:
        """The controller's next life must know the numbers."""
        report(Status(hosts=self._ledger.entries, news=(news,)))

    def _sizes(self, wanted: str) -> tuple[int, ...]:
        """Of all models, or of the one that is wanted."""
        models = self._publication.models
        chosen = [models[wanted]] if wanted else models.values()
        return tuple(model.entry.manifest.size_bytes for model in chosen)

    def __repr__(self) -> str:
        return f"<JoinedHosts {', '.join(self._wires) or 'none'}>"


def check_may_join(
    pool: PoolConfig, hello: joining.HostHello | joining.GatewayJoins, kind: str
) -> None:
    """Raises HostRefusedError for a machine that cannot join, whatever else is true of it."""
    if pool.listen is None:
        raise HostRefusedError("This pool accepts no nodes. Start `serve` with --listen")
    if hello.version != __version__:
        raise HostRefusedError(
            f"The pool runs livescale {__version__}, this {kind} {hello.version}. "
            "Install the same version"
        )
    if not 0 < len(hello.name) <= joining.NAME_CHARS_MAX or not hello.name.isprintable():
        raise HostRefusedError(
            f"A {kind}'s name has 1 to 253 printable characters. Choose another --name"
        )


def settings_elsewhere(pool: PoolConfig) -> PoolConfig:
    """The pool's settings without what names files and addresses of the head."""
    return msgspec.structs.replace(
        pool,
        models=(),
        port=0,
        gateways=1,
        listen=None,
        topology=None,
        racks=None,
        token_file=None,
        tls_dir=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        lease=None,
        record=None,
        record_members=None,
        state=None,
        api_key_file=None,
        admin_key_file=None,
    )
