"""A gateway's wires to the workers that the controller names, opened again when they break."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from livescale.messages.attempts import Cancel, Disown
from livescale.runtime.wire.doors import token_door
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.protocol import FromTokenServer, GatewayHello, Peer, Peers, Submit
from livescale.runtime.wire.wire_channel import Wire, open_wire
from livescale.values.types import WorkerRef

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_log = logging.getLogger(__name__)


class TokenWires:
    """Lives on the gateway's event loop."""

    def __init__(
        self,
        secret: str,
        gateway: str,
        heartbeats: Heartbeats,
        received: Callable[[WorkerRef, FromTokenServer], None],
        gone: Callable[[WorkerRef], None],
        tls: Credentials | None = None,
    ) -> None:
        """Of the gateway of this name. `gone` is called when a worker cannot be reached (any
        more)."""
        self._secret = secret
        self._tls = tls
        self._gateway = gateway
        self._heartbeats = heartbeats
        self._received = received
        self._gone = gone
        self._peers: dict[WorkerRef, Peer] = {}
        self._wires: dict[WorkerRef, Wire[FromTokenServer]] = {}
        self._readers: dict[WorkerRef, asyncio.Task[None]] = {}
        #: to workers whose wire is still being opened
        self._unsent: dict[WorkerRef, list[Submit | Cancel | Disown]] = {}

    def meet(self, message: Peers) -> None:
        """These workers live, as far as the controller knows."""
        self._peers = {peer.worker: peer for peer in message.peers}
        for worker in self._peers:
            self._connect(worker)

    def is_reachable(self, worker: WorkerRef) -> bool:
        """There is a wire, or one is being opened."""
        return worker in self._readers

    def send(self, worker: WorkerRef, message: Submit | Cancel | Disown) -> None:
        """A worker that cannot be reached has lost, or never got, what the message is about."""
        wire = self._wires.get(worker)
        if wire is not None:
            wire.send(message)
        elif worker in self._readers:
            self._unsent.setdefault(worker, []).append(message)

    async def close(self) -> None:
        for reader in self._readers.values():
            reader.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)

    def _connect(self, worker: WorkerRef) -> None:
        """Open a wire to the worker if there is none and the controller names it."""
        if worker in self._peers and worker not in self._readers:
            self._readers[worker] = asyncio.create_task(self._read(self._peers[worker]))

    async def _read(self, peer: Peer) -> None:
        worker = peer.worker
        try:
            wire: Wire[FromTokenServer] = await open_wire(
                peer.token_address,
                FromTokenServer,
                secret=self._secret,
                door=token_door(worker),
                tls=self._tls,
            )
        except OSError as error:
            _log.warning("worker %s is unreachable: %s", worker, error)
        else:
            wire.send(GatewayHello(self._gateway))
            self._heartbeats.add(wire)
            self._wires[worker] = wire
            for unsent in self._unsent.pop(worker, []):
                wire.send(unsent)
            async for message in wire:
                self._received(worker, message)
            _log.info("worker %s is disconnected: %s", worker, wire.error)
            del self._wires[worker]
        del self._readers[worker]
        self._unsent.pop(worker, None)
        self._gone(worker)
        # By then the controller has given it up, too, unless the trouble is on the way to here.
        await asyncio.sleep(self._heartbeats.lost_after_ms / 2000)
        self._connect(worker)
