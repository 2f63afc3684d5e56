"""The gateways on machines of their own, as the pool's controller sees their supervisors.

The gateways themselves connect to the controller like the head's, and are gateways like that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from livescale.control.host_ledger import HostRefusedError
from livescale.runtime import joining, protocol
from livescale.runtime.boot import ControllerBoot, Status, report
from livescale.runtime.joined_hosts import check_may_join, settings_elsewhere
from livescale.runtime.news import News
from livescale.runtime.wire_channel import Wire

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
        self._wires: dict[Wire[protocol.ToController], None] = {}

    async def serve(self, hello: joining.GatewayJoins, wire: Wire[protocol.ToController]) -> None:
        """A gateway's supervisor, until its wire ends."""
        boot = self._boot
        try:
            check_may_join(boot.pool, hello.version, "gateway")
        except HostRefusedError as error:
            wire.send(protocol.Refused(str(error)))
            wire.close()
            return
        pool = settings_elsewhere(boot.pool)
        wire.send(joining.GatewayWelcome(pool, boot.has_api_keys, boot.has_admin_keys))
        if self._tls is not None and self._tls.revoked_list:
            wire.send(joining.RevokedMembers(self._tls.revoked_list))
        name = "".join(c for c in hello.name if c.isprintable())[: joining.NAME_CHARS_MAX]
        self._wires[wire] = None
        self._tell(News(f"gateway {name} has joined"))
        async for message in wire:
            wire.break_off(f"a gateway's supervisor sent {type(message).__name__}")
        del self._wires[wire]
        self._tell(News(f"gateway {name} is gone: {wire.error}", is_problem=True))

    def say_farewell(self) -> None:
        """The pool is about to end: each gateway lets running requests finish, and ends."""
        for wire in self._wires:
            wire.send(joining.Farewell())

    def _tell(self, news: News) -> None:
        report(Status(news=(news,), gateways=len(self._wires)))

    def _tell_revoked(self) -> None:
        assert self._tls is not None
        for wire in self._wires:
            wire.send(joining.RevokedMembers(self._tls.revoked_list))

    def __repr__(self) -> str:
        return f"<JoinedGateways: {len(self._wires)}>"
