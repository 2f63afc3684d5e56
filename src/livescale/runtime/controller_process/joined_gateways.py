"""The gateways on machines of their own, as the pool's controller sees their supervisors.

The gateways themselves connect to the controller like the head's, and are gateways like that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from livescale.control.cluster.host_ledger import HostRefusedError
from livescale.runtime.controller_process.joined_hosts import check_may_join, settings_elsewhere
from livescale.runtime.wire import joining, protocol
from livescale.runtime.wire.boot import ControllerBoot, Status, report
from livescale.runtime.wire.news import News
from livescale.runtime.wire.wire_channel import Wire

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials


class JoinedGateways:
    """Lives on the controller's event loop."""

    def __init__(self, boot: ControllerBoot, tls: Credentials | None = None) -> None:
        """Gateways are told whose certificates `tls` no longer admits."""
        self._boot = boot
        self._tls = tls
        if tls is not None:
            tls.watch(self._tell_revoked)
        #: by name: the supervisor's start, and its wire
        self._wires: dict[str, tuple[str, Wire[protocol.ToController]]] = {}

    async def serve(self, hello: joining.GatewayJoins, wire: Wire[protocol.ToController]) -> None:
        """A gateway's supervisor, until its wire ends."""
        boot = self._boot
        try:
            self._check(hello)
        except HostRefusedError as error:
            wire.send(protocol.Refused(str(error), error.may_pass))
            wire.close()
            return
        if hello.name in self._wires:
            # Of the same supervisor, whose end of it broke first.
            self._wires[hello.name][1].break_off("it has connected again")
        self._wires[hello.name] = hello.start, wire
        pool = settings_elsewhere(boot.pool)
        wire.send(joining.GatewayWelcome(pool, boot.has_api_keys, boot.has_admin_keys))
        if self._tls is not None and self._tls.revoked_list:
            wire.send(joining.RevokedMembers(self._tls.revoked_list))
        self._tell(News(f"gateway {hello.name} has joined"))
        has_left = False
        async for message in wire:
            if isinstance(message, joining.Farewell):
                has_left = True
                wire.close()
                break
            wire.break_off(f"a gateway's supervisor sent {type(message).__name__}")
        if self._wires.get(hello.name, ("", None))[1] is wire:
            del self._wires[hello.name]
            if has_left:
                self._tell(News(f"gateway {hello.name} has left"))
            else:
                self._tell(News(f"gateway {hello.name} is lost: {wire.error}", is_problem=True))

    def say_farewell(self) -> None:
        """The pool is about to end: each gateway lets running requests finish, and ends."""
        for _, wire in self._wires.values():
            wire.send(joining.Farewell())

    # -- helpers --------------------------------------------------------------------------------

    def _check(self, hello: joining.GatewayJoins) -> None:
        """Raises HostRefusedError for what cannot join."""
        check_may_join(self._boot.pool, hello, "gateway")
        here = self._wires.get(hello.name)
        if here is not None and here[0] != hello.start:
            raise HostRefusedError(
                f"a gateway named {hello.name} is in the pool: choose another --name", may_pass=True
            )

    def _tell(self, news: News) -> None:
        report(Status(news=(news,), gateways=len(self._wires)))

    def _tell_revoked(self) -> None:
        assert self._tls is not None
        for _, wire in self._wires.values():
            wire.send(joining.RevokedMembers(self._tls.revoked_list))

    def __repr__(self) -> str:
        return f"<JoinedGateways: {len(self._wires)}>"
