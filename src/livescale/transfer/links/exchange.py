"""Connections: who may be asked and where, who has connected, and one connection for each.

Opening, accepting, greeting and replacing connections live here; what is sent on them does not.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from livescale.transfer.carriers.nixl import NixlCarrier
from livescale.transfer.carriers.shm import ShmCarrier
from livescale.transfer.carriers.tcp import TcpCarrier
from livescale.transfer.formats.carrier import Address, Carrier, Channel, ChannelClosedError
from livescale.transfer.formats.greeting import Strangers
from livescale.transfer.formats.orders import BytesMoved, TransferError
from livescale.transfer.links.connection import Connection
from livescale.values.types import Value, WorkerRef

if TYPE_CHECKING:
    from livescale.transfer.carriers.sealed_tcp import SealedCarrier

_ACCEPT_PAUSE_S = 0.1


class Introduction(Value, frozen=True):
    """Where a peer can be reached; `shm_path` is set for peers that may be on the same host."""

    peer: WorkerRef
    address: Address
    shm_path: str | None = None


class ConnectionTerms(Value, frozen=True):
    """Both sides of a connection prove that they know the `secret`. Opening one may take
    `handshake_s`, and opens without being asked as long as there are fewer than
    `eager_peers_max`."""

    secret: str = ""
    handshake_s: float = 5.0
    eager_peers_max: int = 32


class ExchangeListener(Protocol):
    """Told from the exchange's threads."""

    def connected(self, connection: Connection) -> None:
        """There is a connection with its peer."""

    def unreachable(self, peer: WorkerRef, reason: str) -> None:
        """It could not be called."""


class Exchange:
    """Thread-safe. At most one connection that was opened here and one that was opened there
    exist with each peer, and only with its newest incarnation that is known.

    A peer that is introduced on both sides is called by the side with the lower number, as long
    as that has opened fewer connections than the terms say; else the side that first
    wants something calls.
    """

    def __init__(
        self,
        worker: WorkerRef,
        network: TcpCarrier | NixlCarrier | SealedCarrier,
        shm: ShmCarrier | None,
        terms: ConnectionTerms,
        make: Callable[[WorkerRef, Channel, bool], Connection],
        listener: ExchangeListener,
    ) -> None:
        """`make` wraps a channel whose peer is known: (peer, channel, was it opened here)."""
        self._worker = worker
        self._network = network
        self._shm = shm
        self._handshake_s = terms.handshake_s
        self._eager_peers_max = terms.eager_peers_max
        self._make = make
        self._listener = listener
        self._strangers = Strangers(worker, terms.secret, terms.handshake_s)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._introduced: dict[int, Introduction] = {}
        # By worker number, and whether it was opened here.
        self._connections: dict[tuple[int, bool], Connection] = {}
        self._calling: set[WorkerRef] = set()
        self._threads: list[threading.Thread] = []
        self._ended: list[Connection] = []
        # What went over connections that are forgotten.
        self._moved = BytesMoved()
        # Forgotten, but their last thread may still be telling of it.
        self._leaving: list[Connection] = []
        self._closing = threading.Event()

    def start(self) -> None:
        """Others can connect."""
        self._run(functools.partial(self._accept, self._network), "accepts")
        if self._shm is not None:
            self._run(functools.partial(self._accept, self._shm), "accepts on its host")

    def introduce(self, introduction: Introduction) -> None:
        """The peer can be asked from now on. Raises TransferError for an older incarnation."""
        peer = introduction.peer
        if peer.worker == self._worker.worker:
            raise TransferError(f"{self._worker} cannot be introduced to {peer}")
        with self._lock:
            self._refuse_outdated(peer)
            self._introduced[peer.worker] = introduction
            own = sum(is_own for _, is_own in self._connections) + len(self._calling)
            is_eager = self._worker < peer and own < self._eager_peers_max
        self._drop(lambda other: other.worker == peer.worker and other != peer, f"{peer} is here")
        if is_eager:
            self.reach(peer)

    def is_introduced(self, peer: WorkerRef) -> bool:
        with self._lock:
            known = self._introduced.get(peer.worker)
            return known is not None and known.peer == peer

    def reach(self, peer: WorkerRef) -> Connection | None:
        """A connection, or None: then one is being opened if the peer is introduced, and told."""
        with self._lock:
            connection = self._find(peer)
            known = self._introduced.get(peer.worker)
            if connection is not None or known is None or known.peer != peer:
                return connection
            if peer in self._calling:
                return None
            self._calling.add(peer)
        if not self._try_to_run(functools.partial(self._call_and_tell, known), f"calls {peer}"):
            self._has_called(
                peer, f"{peer} is not called: no thread starts, or this side is closing"
            )
        return None

    def wait(self, peer: WorkerRef) -> Connection:
        """A connection; waits until it is open. Raises TransferError if it cannot be opened."""
        connection = self.reach(peer)
        deadline_s = time.monotonic() + self._handshake_s
        while connection is None:
            with self._changed:
                if peer not in self._calling and self._find(peer) is None:
                    raise TransferError(f"{self._worker} has no connection to {peer}")
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))
                connection = self._find(peer)
            if connection is None and time.monotonic() >= deadline_s:
                raise TransferError(f"{self._worker} has no connection to {peer} yet")
        return connection

    def connected(self) -> tuple[WorkerRef, ...]:
        with self._lock:
            return tuple(sorted({c.peer for c in self._connections.values() if c.is_alive}))

    def connections(self) -> list[Connection]:
        """All that exist, those that have just ended included."""
        with self._lock:
            return [*self._connections.values(), *self._ended]

    def forget(self, connection: Connection) -> None:
        """The connection has ended."""
        with self._lock:
            key = (connection.peer.worker, connection.is_own)
            if self._connections.get(key) is connection:
                del self._connections[key]
            if connection in self._ended:
                self._ended.remove(connection)
            self._moved += connection.moved
            self._leaving = [c for c in self._leaving if c.is_running]
            self._leaving.append(connection)

    def usage(self) -> BytesMoved:
        """Payload bytes that went over all connections so far."""
        with self._lock:
            return sum((c.moved for c in self.connections()), self._moved)

    def disconnect(self, peer: WorkerRef) -> None:
        """The peer is a stranger again."""
        with self._lock:
            known = self._introduced.get(peer.worker)
            if known is not None and known.peer == peer:
                del self._introduced[peer.worker]
        self._drop(lambda other: other == peer, f"{peer} was disconnected")

    def close(self, reason: str) -> None:
        """All connections have ended and all threads are gone."""
        with self._lock:
            self._closing.set()
            connections = [*self._connections.values(), *self._ended, *self._leaving]
        carriers: list[Carrier] = [self._network]
        if self._shm is not None:
            carriers.append(self._shm)
        for carrier in carriers:
            carrier.break_off()
        for connection in connections:
            connection.break_off(reason)
        self._strangers.close()
        for connection in connections:
            connection.join()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        for carrier in carriers:
            carrier.close()

    # -- opening ----------------------------------------------------------------------------------

    def _call_and_tell(self, known: Introduction) -> None:
        peer = known.peer
        reason = None
        try:
            channel = self._call(known)
        except OSError as error:
            reason = str(error)
        if reason is None and not self._establish(peer, channel, is_own=True):
            channel.close()
            reason = f"{peer} is not the newest or this side is closing"
        self._has_called(peer, reason)

    def _has_called(self, peer: WorkerRef, reason: str | None) -> None:
        """It can be called again. Without a connection the `reason` is told."""
        with self._changed:
            self._calling.discard(peer)
            # While this side was calling the other did not.
            if reason is None and self._find(peer) is None:
                reason = f"the connection to {peer} was lost at once"
            self._changed.notify_all()
        if reason is not None:
            self._listener.unreachable(peer, reason)

    def _call(self, known: Introduction) -> Channel:
        """A channel at whose other end the peer has answered. Raises TransferError."""
        if self._shm is not None and known.shm_path is not None:
            # Not reachable this way: another host after all.
            with contextlib.suppress(OSError):
                near = self._shm.connect(known.shm_path, self._handshake_s)
                return self._strangers.call(known.peer, near)
        try:
            channel = self._network.connect(known.address, self._handshake_s)
            return self._strangers.call(known.peer, channel)
        except OSError as error:
            raise TransferError(
                f"cannot connect to {known.peer} at {known.address}: {error}"
            ) from error

    def _accept(self, carrier: Carrier) -> None:
        while not self._closing.is_set():
            try:
                channel = carrier.accept()
            except ChannelClosedError:
                return
            except OSError:
                # The process is out of file descriptors, mostly: others may free some.
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            self._strangers.came(channel)
            if not self._try_to_run(functools.partial(self._welcome, channel), "greets"):
                self._strangers.left(channel)
                channel.close()

    def _welcome(self, channel: Channel) -> None:
        """The member that opened the channel is known and connected, or the channel is closed."""
        peer = self._strangers.answer(channel, self._refuse_unwanted)
        if peer is not None and not self._establish(peer, channel, is_own=False):
            channel.close()

    def _establish(self, peer: WorkerRef, channel: Channel, is_own: bool) -> bool:
        """The channel is the connection with the peer and runs; False if it may not be."""
        connection = self._make(peer, channel, is_own)
        with self._lock:
            try:
                self._refuse_outdated(peer)
            except TransferError:
                return False
            if self._closing.is_set():
                return False
            replaced = [
                key
                for key, other in self._connections.items()
                if key[0] == peer.worker and (key[1] == is_own or other.peer != peer)
            ]
            old = [self._connections.pop(key) for key in replaced]
            self._ended += old
            self._connections[peer.worker, is_own] = connection
            connection.start()
        for other in old:
            other.break_off(f"a newer connection with {peer} took its place")
        self._listener.connected(connection)
        return True

    def _refuse_unwanted(self, caller: WorkerRef) -> None:
        """Raises TransferError for who claims to be this worker, or one that was followed."""
        if caller.worker == self._worker.worker:
            raise TransferError(f"{caller} calls {self._worker}")
        with self._lock:
            self._refuse_outdated(caller)

    def _refuse_outdated(self, peer: WorkerRef) -> None:
        """Raises TransferError if a later incarnation of the peer is known."""
        open_ones = [c for c in self._connections.values() if c.is_alive]
        known = [c.peer for c in open_ones if c.peer.worker == peer.worker]
        if peer.worker in self._introduced:
            known.append(self._introduced[peer.worker].peer)
        if known and max(known) > peer:
            raise TransferError(f"{peer} was followed by {max(known)}")

    def _find(self, peer: WorkerRef) -> Connection | None:
        for is_own in (True, False):
            connection = self._connections.get((peer.worker, is_own))
            if connection is not None and connection.peer == peer and connection.is_alive:
                return connection
        return None

    def _drop(self, is_meant: Callable[[WorkerRef], bool], reason: str) -> None:
        with self._lock:
            meant = [c for c in self._connections.values() if is_meant(c.peer)]
        for connection in meant:
            connection.break_off(reason)

    def _run(self, run: Callable[[], None], does: str) -> bool:
        """The thread runs and `close` will wait for it; False when closing."""
        with self._lock:
            if self._closing.is_set():
                return False
            thread = threading.Thread(target=run, name=f"{self._worker} {does}", daemon=True)
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            return True

    def _try_to_run(self, run: Callable[[], None], does: str) -> bool:
        """As `_run`; False also where the system gives no thread: others that end free some."""
        try:
            return self._run(run, does)
        except RuntimeError:
            return False

    def __repr__(self) -> str:
        return f"<Exchange {self._worker}, connected {len(self.connected())}>"
