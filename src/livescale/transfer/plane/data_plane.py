"""The data plane of one holder: it asks others for chunks and answers those who ask.

Receives into its memory and sends from it. What to move where is decided by others; this module
knows no controller, no model code and no event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from livescale.transfer.carriers.nixl import NixlCarrier
from livescale.transfer.carriers.shm import ShmCarrier
from livescale.transfer.carriers.tcp import TcpCarrier
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats import frames, orders
from livescale.transfer.formats.carrier import Address, Channel
from livescale.transfer.links.connection import Connection
from livescale.transfer.links.exchange import Exchange, Introduction
from livescale.transfer.links.outbox import Outbox
from livescale.transfer.links.precedence import Precedence
from livescale.transfer.links.probe import Probes
from livescale.transfer.memory.arena import Arena
from livescale.transfer.memory.content_hashes import ContentHashes
from livescale.transfer.memory.model_bytes import ModelBytes
from livescale.transfer.memory.open_writes import OpenWrites
from livescale.transfer.plane.options import PlaneOptions
from livescale.transfer.plane.patience import Patience
from livescale.transfer.plane.reception import Receiver, Reception
from livescale.transfer.plane.receptions import Receptions
from livescale.transfer.plane.store import Filling, Store
from livescale.values.chunks import Feed
from livescale.values.types import Manifest, PlanId, WorkerRef

if TYPE_CHECKING:
    # A pool without certificates needs no library for them.
    from livescale.transfer.carriers.sealed_tcp import SealedCarrier
    from livescale.transfer.formats.sealing import Protection

_CHUNK_BYTES = 512 << 10
_DEFAULTS = PlaneOptions()


def _sealed(tcp: TcpCarrier, protection: Protection | None) -> TcpCarrier | SealedCarrier:
    if protection is None:
        return tcp
    from livescale.transfer.carriers.sealed_tcp import SealedCarrier

    return SealedCarrier(tcp, protection)


class DataPlane:
    """Moves chunks between this memory and those of its peers, as receivers ask (BlitzScale §5.1
    and λScale §4: chains, trees and pipelines are who asks whom for what, in which order).

    A hop has two threads: one receives into place, one sends from place. All TCP connections
    share one token bucket per direction.

    `on_parcel` gets parcels, `on_disconnected` peers whose connection has ended after parcels went
    over it (some may be lost); the data plane's threads call both, in the order of events on the
    connection, and must not be blocked.
    """

    def __init__(
        self,
        worker: WorkerRef,
        memory: Arena,
        options: PlaneOptions = _DEFAULTS,
        *,
        on_parcel: Callable[[WorkerRef, bytes], None] | None = None,
        on_disconnected: Callable[[WorkerRef], None] | None = None,
        chunk_received: orders.ChunkObserver | None = None,
    ) -> None:
        """Listens at once. Raises ImportError if NIXL is asked for and not installed."""
        self.worker = worker
        self._memory = memory
        self._withdraw_wait_s = options.withdraw_wait_s
        self.on_parcel = on_parcel
        self.on_disconnected = on_disconnected
        self._uplink = TokenBucket.of_uplink(
            options.uplink_bytes_per_s, options.parameter_share_percent
        )
        self._downlink = TokenBucket(options.downlink_bytes_per_s)
        self._precedence = Precedence(worker, self._downlink)
        view = memory.view(0, memory.size_bytes)
        #: into its memory, by network cards
        self.writes = OpenWrites()
        self._store = Store(worker, self.writes)
        self._contents = ContentHashes(worker)
        self._receiver = Receiver(worker, memory, self._store, self._contents, chunk_received)
        self._receptions = Receptions(worker, self._store)
        self._probes = Probes(worker)
        tcp = TcpCarrier(options.host, view, self._uplink, self._downlink)
        network: TcpCarrier | NixlCarrier | SealedCarrier = _sealed(tcp, options.protection)
        if options.carrier == "nixl":
            network = NixlCarrier(tcp, view, self._uplink, self._downlink, self.writes)
        shm = None
        if options.shm_directory is not None and options.carrier != "tcp":
            path = options.shm_directory / f"{worker}.sock"
            shm = ShmCarrier(path, options.host_name, view, memory.fd)
        self.address: Address = network.address
        self.shm_path = shm.path if shm is not None else None
        self._exchange = Exchange(
            worker, network, shm, options.connections, self._connection, self._receptions
        )
        self._patience = Patience(
            self._receptions.all,
            self._store,
            self._exchange.is_introduced,
            stall_ns=int(options.stall_s * 1e9),
            order_wait_ns=int(options.order_wait_s * 1e9),
        )
        self._patience.start(f"{worker} waits")
        self._exchange.start()

    # -- peers ------------------------------------------------------------------------------------

    def introduce(self, peer: WorkerRef, address: Address, shm_path: str | None = None) -> None:
        """The peer, which listens there, can be asked. Returns at once; raises TransferError for
        this worker itself or an incarnation that was followed by another."""
        self._exchange.introduce(Introduction(peer, address, shm_path))
        self._receptions.tell(Reception.introduced, peer)

    def reach(self, peer: WorkerRef) -> None:
        """If the peer was introduced, a connection is there or being opened. Returns at once."""
        self._exchange.reach(peer)

    def disconnect(self, peer: WorkerRef) -> None:
        """The peer is a stranger again and no connection with it is left; feeds from it fail."""
        self._exchange.disconnect(peer)

    def connected(self) -> tuple[WorkerRef, ...]:
        """Peers with which there is a connection, in order."""
        return self._exchange.connected()

    # -- receiving --------------------------------------------------------------------------------

    def receive(self, order: orders.ReceiveOrder, listener: orders.ReceiveListener) -> None:
        """The order's chunks are asked for and written in place; each is given to others as soon
        as it is there.

        An order that cannot be carried out is told to the listener like any other failure.
        """
        try:
            self._memory.check_fits(order.manifest, order.offset_bytes)
            reception = Reception(
                self._receiver,
                order,
                listener,
                reach=self._exchange.reach,
                tell_over=self._receptions.remove,
            )
            orders.check_feeds(order.feeds, reception.held.grid.chunks)
            self._receptions.add(reception)
        except ValueError as error:  # ArenaError, too
            listener.failed(f"plan {order.plan}: {error}")
            return
        reception.begin()
        self._patience.wake()

    def amend(self, plan: PlanId, feeds: tuple[Feed, ...]) -> None:
        """These feeds, and no others, bring what is missing of the plan. Chunks that are here or
        under way on a feed that stays are not asked for again. Nothing happens for a plan that is
        over. Raises ValueError for feeds that cannot be."""
        reception = self._receptions.find(plan)
        if reception is not None:
            reception.amend(feeds)

    def abort(self, plan: PlanId) -> int:
        """Nothing of the plan goes on here: its listener got "aborted", nothing is written for it,
        and wants for parts of it were refused. What still comes is thrown away.

        A plan that is complete, or becomes so meanwhile, stays: its copy is given to others.

        Bytes that a network card still writes after `withdraw_wait_s` (`writes`) are given
        to nothing else until it has ended. Returns the bytes that came for what was under way.
        """
        reception = self._receptions.find(plan)
        if reception is None:
            return 0
        reception.fail(orders.ABORTED)
        # Peers may read for ever from the copy of a plan that has just been completed.
        if reception.held.is_withdrawn:
            self._wait_unread(reception.held)
        return reception.received_bytes

    # -- giving -----------------------------------------------------------------------------------

    def offer(self, manifest: Manifest, offset_bytes: int = 0) -> None:
        """The memory holds all of it: every peer that asks is answered. Nothing happens if it is
        offered already. Raises ArenaError if it does not fit or something else lies there."""
        self._memory.check_fits(manifest, offset_bytes)
        known = self._store.find(frames.copy_id(manifest))
        if known is None or not known.is_complete or known.offset_bytes != offset_bytes:
            self._store.add(ModelBytes(manifest, _CHUNK_BYTES, offset_bytes), is_complete=True)

    def fill(self, manifest: Manifest, chunk_bytes: int, offset_bytes: int = 0) -> Filling:
        """The caller writes the bytes, and reports to the Filling. Raises ArenaError."""
        self._memory.check_fits(manifest, offset_bytes)
        held = ModelBytes(manifest, chunk_bytes, offset_bytes)
        self._store.add(held)
        return Filling(held, self._store)

    def withdraw(self, manifest: Manifest) -> None:
        """No peer reads these bytes any more; one that asks is refused. A peer that holds this up
        for `withdraw_wait_s` loses its connection. Nothing happens if it is not here."""
        held = self._store.find(frames.copy_id(manifest))
        if held is not None:
            self._store.remove(held, f"{self.worker} gave the model up")
            self._wait_unread(held)

    # -- messages and measurements ----------------------------------------------------------------

    def post(self, peer: WorkerRef, body: bytes, patience_s: float = 0.0) -> None:
        """The parcel is on its way, before all chunks; it is lost if the connection is.

        Raises TransferError if the peer cannot be reached (blocks for `handshake_s` at most
        where there is no connection yet), the connection is just ending, or too much waits to be
        sent, and still does after `patience_s`.
        """
        most = frames.PARCEL_BYTES_MAX
        if len(body) > most:
            raise orders.TransferError(f"a parcel of {len(body)} bytes is above {most}")
        self._exchange.wait(peer).post(body, patience_s)

    def probe(self, peer: WorkerRef, size_bytes: int, timeout_s: float = 30.0) -> int:
        """Bytes per second at which the peer's memory comes here, measured with `size_bytes` to
        nowhere. Blocks. Raises TransferError."""
        return self._probes.measure(self._exchange.wait(peer), size_bytes, timeout_s)

    def usage(self) -> orders.BytesMoved:
        """Payload bytes moved so far."""
        return self._exchange.usage()

    def close(self) -> None:
        """All orders have ended, all connections are closed and all threads are gone.

        The memory stays. Idempotent. Not to be called by a listener.
        """
        reason = f"{self.worker} closed its data plane"
        # First those that wait for news, so that they get the cause and not its consequences.
        self._receptions.close(reason)
        self._uplink.close()
        self._downlink.close()
        self._exchange.close(reason)
        self._contents.close()
        self._patience.close()

    # -- called by connections --------------------------------------------------------------------

    def handle(self, connection: Connection, frame: frames.Frame) -> None:
        """One frame; its payload is taken from the channel. Raises FrameError, OSError."""
        match frame.kind:
            case frames.FrameKind.CHUNK:
                self._precedence.parameters_come(connection)
                self._receptions.take(connection, frame)
            case frames.FrameKind.WANT:
                wanted = frames.decode_wanted(connection.channel.receive(frame.payload_bytes))
                self._store.want(connection.outbox, frame.plan, wanted)
                self._patience.wake()
            case frames.FrameKind.STOP:
                ranges = frames.decode_ranges(connection.channel.receive(frame.payload_bytes))
                self._store.stop(connection.outbox, frame.plan, ranges)
            case frames.FrameKind.REFUSE:
                reason = connection.channel.receive(frame.payload_bytes).decode(errors="replace")
                self._receptions.refused(connection.peer, frame, reason)
            case frames.FrameKind.PARCEL:
                self._take_parcel(connection, frame)
            case frames.FrameKind.PROBE:
                self._probes.answer(connection, frame)
            case frames.FrameKind.PROBED:
                self._precedence.parameters_come(connection)
                self._probes.take(connection, frame)
            case frames.FrameKind.HOLD:
                connection.outbox.hold(frame.chunk * 1000)
            case frames.FrameKind.HELLO:
                raise frames.FrameError("HELLO on an open connection")

    def settled(self, connection: Connection) -> None:
        self._store.settled(connection.outbox)

    def ended(self, connection: Connection, reason: str) -> None:
        self._store.forget_peer(connection.outbox)
        self._exchange.forget(connection)
        self._precedence.forget(connection)
        self._probes.connection_ended(connection, reason)
        self._receptions.tell(Reception.connection_ended, connection, reason)
        if connection.carries_parcels and self.on_disconnected is not None:
            self.on_disconnected(connection.peer)

    def _take_parcel(self, connection: Connection, frame: frames.Frame) -> None:
        body = self._precedence.receive_parcel(connection.channel, frame.payload_bytes)
        connection.carries_parcels = True
        if self.on_parcel is not None:
            self.on_parcel(connection.peer, body)

    # -- inside -----------------------------------------------------------------------------------

    def _connection(self, peer: WorkerRef, channel: Channel, is_own: bool) -> Connection:
        outbox = Outbox(peer, self._store.lock)
        return Connection(self.worker, outbox, channel, self, self._memory.size_bytes, is_own)

    def _wait_unread(self, held: ModelBytes) -> None:
        """No peer reads from the copy, which was taken away; one that goes on is cut off. Writes
        into it have ended, or are waited for no longer."""
        if not self._store.wait_unread(held, self._withdraw_wait_s):
            for connection in self._exchange.connections():
                if connection.outbox.reading is held:
                    connection.break_off(f"{connection.peer} held up the withdrawal of a model")
            self._store.wait_unread(held, None)
        size_bytes = held.end_bytes - held.start_bytes
        self.writes.wait_closed(held.start_bytes, size_bytes, self._withdraw_wait_s)

    def __repr__(self) -> str:
        host, port = self.address
        return (
            f"<DataPlane {self.worker} on {host}:{port}, {len(self.connected())} peers, "
            f"{len(self._receptions.all())} receptions, {self._store}>"
        )
