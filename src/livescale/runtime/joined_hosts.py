"""The hosts that joined the pool, as its controller sees them: one wire to the supervisor of each.

Members of these hosts connect to the controller themselves, and are members like all others; here
is only what their supervisors are told. Who gets which numbers is decided in `control/host_ledger`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from livescale import __version__
from livescale.config.pool import WORKERS_MAX, PoolConfig
from livescale.control.departures import Departures
from livescale.control.host_ledger import HostLedger, HostRefusedError
from livescale.control.wanted_hosts import PoolNeed
from livescale.messages.events import AnyEvent, Tick
from livescale.runtime import joining, protocol
from livescale.runtime.boot import ControllerBoot, Status, report
from livescale.runtime.news import News
from livescale.runtime.publication import Publication
from livescale.runtime.wire_channel import Wire
from livescale.types import WorkerRef

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
        #: by name: when the supervisor began, and its wire
        self._wires: dict[str, tuple[int, _HostWire]] = {}

    async def serve(self, hello: joining.HostHello, wire: _HostWire) -> None:
        """A host's supervisor, until its wire ends."""
        try:
            self._check(hello)
            numbers = self._ledger.admit(hello.name, hello.workers, hello.clock_ns, hello.numbers)
        except HostRefusedError as error:
            _log.warning("host %r is refused: %s", hello.name, error)
            wire.send(protocol.Refused(str(error), error.may_pass))
            wire.close()
            return
        if hello.name in self._wires:
            # Of the same supervisor, whose end of it broke first.
            self._wires[hello.name][1].break_off("it has connected again")
        self._wires[hello.name] = hello.clock_ns, wire
        wire.send(joining.Welcome(numbers, settings_elsewhere(self._pool), self._sizes()))
        if self._tls is not None and self._tls.revoked_list:
            wire.send(joining.RevokedMembers(self._tls.revoked_list))
        self._keep(News(f"host {hello.name} has joined with {hello.workers} workers"))
        await self._listen(hello.name, wire)

    def observe(
        self,
        members: Iterable[tuple[str, WorkerRef]],
        free: Collection[WorkerRef],
    ) -> None:
        """Look whether hosts that leave may go now (see `Departures.look`). To be called after
        every step."""
        telling, going = self._departures.look(members, free)
        for event in telling:
            self._push(event)
        for name in going:
            if name in self._wires:
                self._wires[name][1].send(joining.Farewell())

    def tell_need(
        self, lacking: int, hosts: Mapping[WorkerRef, str], busy: Collection[WorkerRef]
    ) -> None:
        """The supervisor is told when it has changed how many workers are lacking, on which hosts
        of all members (`hosts`) there are some, and on which some are `busy`."""
        used = {hosts[ref] for ref in busy if ref in hosts}
        there = {host for ref, host in hosts.items() if not ref.is_agent}
        need = PoolNeed(lacking, tuple(sorted(used)), tuple(sorted(there)))
        if need != self._need:
            self._need = need
            report(Status(need=need))

    def say_farewell(self) -> None:
        """The pool ends in order: its hosts need not wait for another life of the controller."""
        for _, wire in self._wires.values():
            wire.send(joining.Farewell())

    # -- helpers --------------------------------------------------------------------------------

    def _tell_revoked(self) -> None:
        assert self._tls is not None
        for _, wire in self._wires.values():
            wire.send(joining.RevokedMembers(self._tls.revoked_list))

    def _check(self, hello: joining.HostHello) -> None:
        """Raises HostRefusedError for what cannot join."""
        check_may_join(self._pool, hello.version, "host")
        if not 0 < len(hello.name) <= joining.NAME_CHARS_MAX or not hello.name.isprintable():
            raise HostRefusedError("a host's name has 1 to 253 printable characters")
        if not 0 <= hello.workers <= WORKERS_MAX:
            raise HostRefusedError(f"a host has 0 to {WORKERS_MAX} workers, not {hello.workers}")
        if hello.kv_bytes is not None and hello.kv_bytes < self._pool.kv_bytes:
            raise HostRefusedError(
                f"kv_bytes {hello.kv_bytes} is less than the pool's {self._pool.kv_bytes}:"
                " requests could be too long for this host"
            )
        here = self._wires.get(hello.name)
        if here is not None and here[0] != hello.clock_ns:
            raise HostRefusedError(
                f"a host named {hello.name} is here: choose another --name", may_pass=True
            )

    async def _listen(self, name: str, wire: _HostWire) -> None:
        async for message in wire:
            if not isinstance(message, joining.Farewell):
                wire.error = f"a host sent {type(message).__name__}"
                wire.close()
                break
            if self._departures.begin(name, message.members):
                report(Status(news=(News(f"host {name} wants to leave"),)))
            # The members that are there are known after a step.
            self._push(Tick())
        if self._wires.get(name, (0, None))[1] is not wire:
            return
        del self._wires[name]
        if self._departures.end(name):
            self._ledger.leave(name)
            self._keep(News(f"host {name} has left"))
        else:
            self._keep(News(f"host {name} is gone: {wire.error}", is_problem=True))

    def _keep(self, news: News) -> None:
        """The controller's next life must know the numbers."""
        report(Status(hosts=self._ledger.entries, news=(news,)))

    def _sizes(self) -> tuple[int, ...]:
        return tuple(model.entry.manifest.size_bytes for model in self._publication.models.values())

    def __repr__(self) -> str:
        return f"<JoinedHosts {', '.join(self._wires) or 'none'}>"


def check_may_join(pool: PoolConfig, version: str, kind: str) -> None:
    """Raises HostRefusedError for a machine that cannot join, whatever else is true of it."""
    if pool.listen is None:
        raise HostRefusedError("no machine may join this pool: serve was started without --listen")
    if version != __version__:
        raise HostRefusedError(f"the pool runs livescale {__version__}, this {kind} {version}")


def settings_elsewhere(pool: PoolConfig) -> PoolConfig:
    """The pool's settings without what names files and addresses of the head."""
    return msgspec.structs.replace(
        pool,
        models=(),
        port=0,
        listen=None,
        topology=None,
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
