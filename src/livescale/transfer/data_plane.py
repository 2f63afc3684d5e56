"""The data plane of one holder: it asks others for chunks and answers those who ask.

Receives into its memory and sends from it. What to move where is decided by others; this module
knows no controller, no model code and no event loop.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

from livescale.chunks import Feed
from livescale.transfer.arena import Arena, ArenaError
from livescale.transfer.carrier import Address, Channel
from livescale.transfer.connection import Connection
from livescale.transfer.content_hashes import ContentHashes
from livescale.transfer.exchange import Exchange, Introduction
from livescale.transfer.filling import Filling
from livescale.transfer.frames import (
    PARCEL_BYTES_MAX,
    PROBE_BYTES_MAX,
    Frame,
    FrameError,
    FrameKind,
    copy_id,
    decode_ranges,
    decode_wanted,
)
from livescale.transfer.holding import Holding
from livescale.transfer.holdings import Holdings
from livescale.transfer.nixl import NixlCarrier
from livescale.transfer.orders import (
    BytesMoved,
    ChunkObserver,
    ReceiveListener,
    ReceiveOrder,
    TransferError,
    check_feeds,
)
from livescale.transfer.outbox import Outbox, OutboxFullError, Word
from livescale.transfer.patience import Patience
from livescale.transfer.probe import Probe
from livescale.transfer.reception import Reception
from livescale.transfer.shm import ShmCarrier
from livescale.transfer.tcp import TcpCarrier
from livescale.transfer.token_bucket import TokenBucket
from livescale.types import Manifest, PlanId, WorkerRef

_CHUNK_BYTES = 512 << 10
# How soon a parcel that found no room tries again.
_ROOM_PAUSE_S = 0.002


class DataPlane:
    """Moves chunks between this memory and those of its peers, as receivers ask (BlitzScale §5.1
    and λScale §4: chains, trees and pipelines are who asks whom for what, in which order).

    A hop has two threads: one receives into place, one sends from place. All TCP connections
    share one token bucket per direction.

    It listens on an ephemeral port of `host`, and on a unix socket in `shm_directory` if there is
    one; peers on a host of the same `host_name` use that. Who connects must prove that it knows
    the `secret`, and so does this side. `carrier`: "auto"; "tcp" leaves shared memory out; "nixl"
    takes NIXL in the place of TCP, which all peers must do then.

    `stall_s`: how long a feed may bring nothing before that is told. `order_wait_s` bounds how
    long a want waits for its copy, and a feed for its holder to be introduced; `handshake_s` the
    opening of a connection; `withdraw_wait_s` how long a peer may hold up `withdraw` and `abort`
    before it loses its connection. `parameter_share_percent` is what parameters may take of a
    limited uplink. `on_parcel` is told of parcels, and `on_disconnected` of peers whose connection
    has ended after parcels went over it (some may be lost); both are called from the data plane's
    threads, in the order in which things happened on the connection, and must not block.
    """

    def __init__(
        self,
        worker: WorkerRef,
        memory: Arena,
        *,
        host: str = "127.0.0.1",
        host_name: str = "",
        secret: str = "",
        carrier: str = "auto",
        shm_directory: Path | None = None,
        uplink_bytes_per_s: int | None = None,
        downlink_bytes_per_s: int | None = None,
        parameter_share_percent: int = 100,
        stall_s: float = 2.0,
        order_wait_s: float = 10.0,
        handshake_s: float = 5.0,
        withdraw_wait_s: float = 2.0,
        eager_peers_max: int = 32,
        on_parcel: Callable[[WorkerRef, bytes], None] | None = None,
        on_disconnected: Callable[[WorkerRef], None] | None = None,
        chunk_received: ChunkObserver | None = None,
    ) -> None:
        """Listens at once. Raises ImportError if NIXL is asked for and not installed."""
        self.worker = worker
        self._memory = memory
        self._withdraw_wait_s = withdraw_wait_s
        self._observer = chunk_received
        self.on_parcel = on_parcel
        self.on_disconnected = on_disconnected
        self._uplink = TokenBucket(
            uplink_bytes_per_s, parameter_share_percent=parameter_share_percent
        )
        self._downlink = TokenBucket(downlink_bytes_per_s)
        view = memory.view(0, memory.size_bytes)
        self._holdings = Holdings(worker)
        self._contents = ContentHashes(worker)
        self._lock = threading.Lock()
        self._receptions: dict[PlanId, Reception] = {}
        self._probes: dict[int, Probe] = {}
        self._probe_numbers = itertools.count()
        self._moved = BytesMoved()
        self._is_closed = False
        tcp = TcpCarrier(host, view, self._uplink, self._downlink)
        network: TcpCarrier | NixlCarrier = tcp
        if carrier == "nixl":
            network = NixlCarrier(tcp, view, self._uplink, self._downlink)
        shm = None
        if shm_directory is not None and carrier != "tcp":
            shm = ShmCarrier(shm_directory / f"{worker}.sock", host_name, view, memory.fd)
        self.address: Address = network.address
        self.shm_path = shm.path if shm is not None else None
        self._exchange = Exchange(
            worker=worker,
            network=network,
            shm=shm,
            secret=secret,
            handshake_s=handshake_s,
            eager_peers_max=eager_peers_max,
            make=self._connection,
            tell_connected=self._connected,
            tell_unreachable=self._unreachable,
        )
        self._patience = Patience(
            worker=worker,
            receptions=self._all_receptions,
            holdings=self._holdings,
            exchange=self._exchange,
            stall_ns=int(stall_s * 1e9),
            order_wait_ns=int(order_wait_s * 1e9),
        )
        self._patience.start()
        self._exchange.start()

    # -- peers ------------------------------------------------------------------------------------

    def introduce(self, peer: WorkerRef, address: Address, shm_path: str | None = None) -> None:
        """The peer, which listens there, can be asked. Returns at once; raises TransferError for
        this worker itself or an incarnation that was followed by another."""
        self._exchange.introduce(Introduction(peer, address, shm_path))
        for reception in self._all_receptions():
            reception.introduced(peer)

    def reach(self, peer: WorkerRef) -> None:
        """A connection with the peer, if it was introduced, is there or being opened. Returns at
        once."""
        self._exchange.reach(peer)

    def disconnect(self, peer: WorkerRef) -> None:
        """The peer is a stranger again and no connection with it is left; feeds from it fail."""
        self._exchange.disconnect(peer)

    def connected(self) -> tuple[WorkerRef, ...]:
        """Peers with which there is a connection, in order."""
        return self._exchange.connected()

    # -- receiving --------------------------------------------------------------------------------

    def receive(self, order: ReceiveOrder, listener: ReceiveListener) -> None:
        """The order's chunks are asked for and written in place; each is given to others as soon
        as it is there.

        An order that cannot be carried out is told to the listener like any other failure.
        """
        try:
            self._memory.check_fits(order.manifest, order.offset_bytes)
            reception = Reception(
                self.worker,
                order,
                self._memory,
                self._holdings,
                listener,
                observer=self._observer,
                reach=self._exchange.reach,
                tell_over=self._strike,
                contents=self._contents,
            )
            check_feeds(order.feeds, reception.holding.grid.chunks)
            with self._lock:
                if self._is_closed:
                    raise ArenaError(f"{self.worker} closed its data plane")
                if order.plan in self._receptions:
                    raise ArenaError("it is already being received")
                self._holdings.add(reception.holding)
                self._receptions[order.plan] = reception
        except ValueError as error:  # ArenaError, too
            listener.failed(f"plan {order.plan}: {error}")
            return
        reception.begin()
        self._patience.wake()

    def amend(self, plan: PlanId, feeds: tuple[Feed, ...]) -> None:
        """These feeds, and no others, bring what is missing of the plan. Chunks that are here or
        under way on a feed that stays are not asked for again. Nothing happens for a plan that is
        over. Raises ValueError for feeds that cannot be."""
        reception = self._reception(plan)
        if reception is not None:
            reception.amend(feeds)

    def abort(self, plan: PlanId) -> None:
        """Nothing of the plan goes on here: its listener was told "aborted", nobody writes into
        the memory for it, and who wanted parts of it was refused. What still comes is thrown
        away."""
        reception = self._reception(plan)
        if reception is not None:
            reception.abort()
            self._wait_unread(reception.holding)

    # -- giving -----------------------------------------------------------------------------------

    def offer(self, manifest: Manifest, offset_bytes: int = 0) -> None:
        """The memory holds all of it: whoever asks is answered. Nothing happens if it is offered
        already. Raises ArenaError if it does not fit or something else lies there."""
        self._memory.check_fits(manifest, offset_bytes)
        known = self._holdings.find(copy_id(manifest))
        if known is None or not known.is_complete or known.offset_bytes != offset_bytes:
            self._holdings.add(Holding(manifest, _CHUNK_BYTES, offset_bytes), is_complete=True)

    def fill(self, manifest: Manifest, chunk_bytes: int, offset_bytes: int = 0) -> Filling:
        """Somebody else writes the bytes, and tells the Filling. Raises ArenaError."""
        self._memory.check_fits(manifest, offset_bytes)
        holding = Holding(manifest, chunk_bytes, offset_bytes)
        self._holdings.add(holding)
        return Filling(holding, self._holdings)

    def withdraw(self, manifest: Manifest) -> None:
        """Nobody reads these bytes any more, and who asks is refused. A peer that holds this up
        for `withdraw_wait_s` loses its connection. Nothing happens if it is not here."""
        holding = self._holdings.find(copy_id(manifest))
        if holding is not None:
            self._holdings.remove(holding, f"{self.worker} gave the model up")
            self._wait_unread(holding)

    # -- messages and measurements ----------------------------------------------------------------

    def post(
        self, peer: WorkerRef, body: bytes, patience_s: float = 0.0, *, can_wait: bool = False
    ) -> None:
        """The parcel is on its way, before all chunks; it is lost if the connection is. One that
        `can_wait` lets other parcels pass.

        Raises TransferError if the peer cannot be reached (blocks for `handshake_s` at most
        where there is no connection yet), the connection is just ending, or too much waits to be
        sent, and still does after `patience_s`.
        """
        if len(body) > PARCEL_BYTES_MAX:
            raise TransferError(f"a parcel of {len(body)} bytes is above {PARCEL_BYTES_MAX}")
        connection = self._exchange.wait(peer)
        # Before the parcel: should the connection end right after it, that is told.
        connection.carries_parcels = True
        frame = Frame(FrameKind.PARCEL, self.worker, payload_bytes=len(body))
        word = Word(frame.encode(), body, can_wait)
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                connection.outbox.put(word)
                break
            except OutboxFullError as error:
                if time.monotonic() >= deadline_s:
                    raise TransferError(str(error)) from None
            time.sleep(_ROOM_PAUSE_S)
        if not connection.is_alive:
            raise TransferError(f"the connection with {peer} has ended")

    def probe(self, peer: WorkerRef, size_bytes: int, timeout_s: float = 30.0) -> int:
        """Bytes per second at which the peer's memory comes here, measured with `size_bytes` to
        nowhere. Blocks. Raises TransferError."""
        if not 1 <= size_bytes <= PROBE_BYTES_MAX:
            raise TransferError(f"a probe of {size_bytes} bytes is not in 1..{PROBE_BYTES_MAX}")
        connection = self._exchange.wait(peer)
        probe = Probe(connection, size_bytes)
        with self._lock:
            number = next(self._probe_numbers)
            self._probes[number] = probe
        try:
            frame = Frame(FrameKind.PROBE, self.worker, number, chunk=size_bytes)
            connection.outbox.put(Word(frame.encode()))
            return probe.wait(timeout_s)
        finally:
            with self._lock:
                del self._probes[number]

    def usage(self) -> BytesMoved:
        """Payload bytes moved so far."""
        with self._lock:
            moved = self._moved
            for connection in self._exchange.connections():
                moved = _with(moved, connection)
        return moved

    def close(self) -> None:
        """All orders have ended, all connections are closed and all threads are gone.

        The memory stays. Idempotent. Not to be called by a listener.
        """
        reason = f"{self.worker} closed its data plane"
        with self._lock:
            self._is_closed = True
        # First those who wait for news, so that they hear the cause and not its consequences.
        for reception in self._all_receptions():
            reception.fail(reason)
        self._uplink.close()
        self._downlink.close()
        self._exchange.close(reason)
        self._contents.close()
        self._patience.close()

    # -- called by connections --------------------------------------------------------------------

    def handle(self, connection: Connection, frame: Frame) -> None:
        """One frame; its payload is taken from the channel. Raises FrameError, OSError."""
        match frame.kind:
            case FrameKind.CHUNK:
                self._take_chunk(connection, frame)
            case FrameKind.WANT:
                wanted = decode_wanted(connection.channel.receive(frame.payload_bytes))
                self._holdings.want(connection.outbox, frame.plan, frame.attempt, wanted)
                self._patience.wake()
            case FrameKind.STOP:
                ranges = decode_ranges(connection.channel.receive(frame.payload_bytes))
                self._holdings.stop(connection.outbox, frame.plan, frame.attempt, ranges)
            case FrameKind.REFUSE:
                reason = connection.channel.receive(frame.payload_bytes).decode(errors="replace")
                reception = self._reception(frame.plan)
                if reception is not None and reception.order.attempt == frame.attempt:
                    reception.refused(connection.peer, reason)
            case FrameKind.PARCEL:
                self._take_parcel(connection, frame)
            case FrameKind.PROBE:
                self._answer_probe(connection, frame)
            case FrameKind.PROBED:
                self._take_probed(connection, frame)
            case FrameKind.HELLO:
                raise FrameError("HELLO on an open connection")

    def settled(self, connection: Connection) -> None:
        self._holdings.settled(connection.outbox)

    def ended(self, connection: Connection, reason: str) -> None:
        self._holdings.forget_peer(connection.outbox)
        with self._lock:
            self._moved = _with(self._moved, connection)
            self._exchange.forget(connection)
            probes = [probe for probe in self._probes.values() if probe.connection is connection]
        for probe in probes:
            probe.fail(reason)
        for reception in self._all_receptions():
            reception.connection_ended(connection, reason)
        if connection.carries_parcels and self.on_disconnected is not None:
            self.on_disconnected(connection.peer)

    def _take_chunk(self, connection: Connection, frame: Frame) -> None:
        size_bytes = frame.payload_bytes
        reception = self._reception(frame.plan)
        arrival = None if reception is None else reception.chunk_begins(connection, frame)
        if reception is None or arrival is None:
            connection.channel.discard_range(size_bytes)
            connection.count(size_bytes, size_bytes)
            return
        place = arrival.place_bytes
        written = connection.channel.receive_range(place, size_bytes, reception.permit)
        connection.count(size_bytes, size_bytes - written)
        reception.chunk_ends(arrival, written)

    def _take_parcel(self, connection: Connection, frame: Frame) -> None:
        body = connection.channel.receive(frame.payload_bytes, is_urgent_payload=True)
        connection.parcel_received_bytes += len(body)
        connection.carries_parcels = True
        if self.on_parcel is not None:
            self.on_parcel(connection.peer, body)

    def _answer_probe(self, connection: Connection, frame: Frame) -> None:
        if not 1 <= frame.chunk <= PROBE_BYTES_MAX:
            raise FrameError(f"a probe of {frame.chunk} bytes")
        try:
            connection.outbox.put_probe(frame.plan, frame.chunk)
        except OutboxFullError as error:
            raise FrameError(str(error)) from None

    def _take_probed(self, connection: Connection, frame: Frame) -> None:
        with self._lock:
            probe = self._probes.get(frame.plan)
        begin_ns = time.monotonic_ns()
        connection.channel.discard_range(frame.payload_bytes)
        connection.count(frame.payload_bytes, frame.payload_bytes)
        if probe is not None and probe.connection is connection:
            probe.took(frame.payload_bytes, begin_ns, time.monotonic_ns())

    # -- inside -----------------------------------------------------------------------------------

    def _connection(self, peer: WorkerRef, channel: Channel, is_own: bool) -> Connection:
        outbox = Outbox(peer, self._holdings.lock)
        size = self._memory.size_bytes
        return Connection(self.worker, outbox, channel, self, size, is_own)

    def _connected(self, connection: Connection) -> None:
        for reception in self._all_receptions():
            reception.connected(connection)

    def _unreachable(self, peer: WorkerRef, reason: str) -> None:
        for reception in self._all_receptions():
            reception.unreachable(peer, reason)

    def _strike(self, reception: Reception) -> None:
        with self._lock:
            if self._receptions.get(reception.order.plan) is reception:
                del self._receptions[reception.order.plan]

    def _reception(self, plan: PlanId) -> Reception | None:
        # One look-up, for every chunk: the interpreter's lock is enough.
        return self._receptions.get(plan)

    def _all_receptions(self) -> list[Reception]:
        with self._lock:
            return [self._receptions[plan] for plan in sorted(self._receptions)]

    def _wait_unread(self, holding: Holding) -> None:
        """Nobody reads from the copy, which was taken away; who does not let go is cut off."""
        if self._holdings.wait_unread(holding, self._withdraw_wait_s):
            return
        for connection in self._exchange.connections():
            if connection.outbox.reading is holding:
                connection.break_off(f"{connection.peer} held up the withdrawal of a model")
        self._holdings.wait_unread(holding, None)

    def __repr__(self) -> str:
        host, port = self.address
        return (
            f"<DataPlane {self.worker} on {host}:{port}, {len(self.connected())} peers, "
            f"{len(self._all_receptions())} receptions, {self._holdings}>"
        )


def _with(moved: BytesMoved, connection: Connection) -> BytesMoved:
    return BytesMoved(
        parameter_sent_bytes=moved.parameter_sent_bytes + connection.sent_bytes,
        parameter_received_bytes=moved.parameter_received_bytes + connection.received_bytes,
        parcel_sent_bytes=moved.parcel_sent_bytes + connection.parcel_sent_bytes,
        parcel_received_bytes=moved.parcel_received_bytes + connection.parcel_received_bytes,
        discarded_bytes=moved.discarded_bytes + connection.discarded_bytes,
    )
