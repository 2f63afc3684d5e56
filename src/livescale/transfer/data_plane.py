"""The data plane of one worker: its connections, and the orders that run over them.

Receives into the arena, forwards from it, sends from it. What to move where is decided by
others; this module knows no controller, no model code and no event loop.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable

from livescale.transfer.arena import Arena, ArenaError
from livescale.transfer.carrier import Address, Channel, ChannelClosedError
from livescale.transfer.frames import (
    CHUNK_BYTES_MAX,
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameKind,
    decode_header,
)
from livescale.transfer.inbound import Inbound
from livescale.transfer.order_book import OrderBook
from livescale.transfer.orders import (
    ABORTED,
    ChunkObserver,
    ReceiveListener,
    ReceiveOrder,
    SendListener,
    SendOrder,
)
from livescale.transfer.outbound import Flow, Outbound
from livescale.transfer.reception import Reception
from livescale.transfer.tcp import TcpCarrier
from livescale.transfer.token_bucket import TokenBucket
from livescale.types import PlanId, WorkerRef

_STRANGERS_MAX = 64
_ACCEPT_PAUSE_S = 0.1


class TransferError(ConnectionError):
    """A connection to a worker could not be made. The message names the worker and the address."""


class DataPlane:
    """Moves layers between this worker's arena and its peers (BlitzScale §5.1: a chain).

    A hop has two threads: one receives into place, one forwards from place. All connections
    share one token bucket per direction. Plans on one connection follow one another; plans on
    different connections run at once. A plan id is used once for a (sender, receiver) pair.
    """

    def __init__(
        self,
        worker: WorkerRef,
        arena: Arena,
        *,
        host: str = "127.0.0.1",
        chunk_bytes: int = 512 << 10,
        uplink_bytes_per_s: int | None = None,
        downlink_bytes_per_s: int | None = None,
        order_wait_s: float = 10.0,
        handshake_s: float = 5.0,
        chunk_received: ChunkObserver | None = None,
    ) -> None:
        """Listens on an ephemeral port of `host` at once.

        `order_wait_s` bounds how long a stream waits for its order, and an order for the
        connection of its upstream; `handshake_s` bounds the opening of a connection.
        """
        if not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, not in 1..{CHUNK_BYTES_MAX}")
        self.worker = worker
        self._arena = arena
        self._chunk_bytes = chunk_bytes
        self._order_wait_s = order_wait_s
        self._handshake_s = handshake_s
        self._observer = chunk_received
        self._uplink = TokenBucket(uplink_bytes_per_s)
        self._downlink = TokenBucket(downlink_bytes_per_s)
        self._carrier = TcpCarrier(host, self._uplink, self._downlink)
        self._carrier.register(arena.view(0, arena.size_bytes))
        self._book = OrderBook()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._outbound: dict[int, Outbound] = {}
        self._inbound: dict[int, Inbound] = {}
        # Connections that were accepted and have not said whose they are.
        self._strangers: list[Channel] = []
        self._flows: list[Flow] = []
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._hello = Frame(FrameKind.HELLO, worker).encode()
        self._start_thread(self._accept, f"{worker} accepts")

    @property
    def address(self) -> Address:
        """(host, port) where peers connect to."""
        return self._carrier.address

    def connected(self) -> tuple[WorkerRef, ...]:
        """Peers that this worker can send to, in order."""
        with self._lock:
            return tuple(sorted(outbound.peer for outbound in self._outbound.values()))

    def upstreams(self) -> tuple[WorkerRef, ...]:
        """Peers that can send to this worker, in order."""
        with self._lock:
            return tuple(sorted(inbound.peer for inbound in self._inbound.values()))

    def connect(self, peer: WorkerRef, address: Address) -> None:
        """This worker can send to `peer`, which listens at `address`.

        Does nothing if it can already; replaces the connection to an older incarnation. Blocks
        for `handshake_s` at most, then and on refusal raises TransferError.
        """
        if peer.worker == self.worker.worker:
            raise TransferError(f"{self.worker} cannot connect to {peer}: it is the same worker")
        with self._connecting:
            with self._lock:
                old = self._outbound.get(peer.worker)
            if old is not None and old.peer == peer:
                return
            if old is not None and old.peer > peer:
                raise TransferError(f"{peer} at {address} was followed by {old.peer}")
            channel = self._open_channel(peer, address)
            outbound = Outbound(
                self.worker, peer, channel, self._chunk_bytes, self._forget_outbound
            )
            if old is not None:
                old.lose(f"{peer} took its place")
            with self._lock:
                is_closing = self._closing.is_set()
                if not is_closing:
                    self._outbound[peer.worker] = outbound
                    outbound.start()
                    self._threads.append(outbound.thread)
            if is_closing:
                channel.close()
                raise TransferError(f"{self.worker} is closing, {peer} is not connected")

    def disconnect(self, worker: WorkerRef) -> None:
        """No connection with `worker` is left; plans that ran over them fail."""
        with self._lock:
            outbound = self._outbound.get(worker.worker)
            inbound = self._inbound.get(worker.worker)
        if outbound is not None and outbound.peer == worker:
            outbound.lose(f"{worker} was disconnected")
        if inbound is not None and inbound.peer == worker:
            inbound.break_off()

    def receive(self, order: ReceiveOrder, listener: ReceiveListener) -> None:
        """The plan's stream from `upstream` is received in place when it comes, and forwarded.

        An order that cannot be carried out is told to the listener like any other failure.
        """
        flow = None
        if order.forward_to is not None:
            flow = self._flow(order, order.forward_to, 0, listener.forward_ended)
        reception = Reception(
            order, self._arena, listener, flow, self._observer, tell_over=self._book.strike
        )
        try:
            self._arena.check_fits(order.manifest)
            problem = self._book.place(reception)
        except ArenaError as error:
            problem = str(error)
        if problem is not None:
            reception.fail(problem)
        if flow is not None:
            # Also when it has ended already: the next worker must hear that nothing comes.
            self._submit(flow)
        if problem is None and order.upstream not in self.upstreams():
            self._give_upstream_time(reception)

    def send(self, order: SendOrder, listener: SendListener) -> None:
        """All layers are sent to `target` after what is queued for it.

        The arena holds them, or is receiving them: then each chunk goes on as it arrives, and a
        target that is added to a chain late lags behind only by what it has missed.
        """
        reception = next((r for r in self._book.all() if r.is_receiving(order.manifest)), None)
        total_bytes = sum(entry.size_bytes for entry in order.manifest.layers)
        flow = self._flow(
            order, order.target, 0 if reception is not None else total_bytes, listener.ended
        )
        if reception is not None:
            reception.forward_also(flow)
        try:
            self._arena.check_fits(order.manifest)
        except ArenaError as error:
            flow.end(f"plan {order.plan}: sending to {order.target} failed: {error}")
        self._submit(flow)

    def abort(self, plan: PlanId) -> None:
        """Nothing of the plan goes on at this worker: listeners have been told "aborted".

        When this returns, nobody writes into the arena for the plan. The workers downstream are
        told; what still arrives from upstream is thrown away. Connections stay usable.
        """
        reception = self._book.find(plan)
        if reception is not None:
            reception.abort()
        with self._lock:
            flows = [flow for flow in self._flows if flow.plan == plan]
        for flow in flows:
            flow.end(ABORTED)

    def close(self) -> None:
        """All plans have ended, all connections are closed and all threads are gone.

        The arena stays. Idempotent. Not to be called by a listener.
        """
        with self._lock:
            self._closing.set()
            outbound = list(self._outbound.values())
            incoming: list[Inbound | Channel] = [*self._inbound.values(), *self._strangers]
        self._carrier.break_off()
        self._book.close()
        # First those who wait for news, so that they hear the cause and not its consequences.
        reason = f"{self.worker} closed its data plane"
        for reception in self._book.all():
            reception.fail(reason)
        for connection in outbound:
            connection.lose(reason)
        for source in incoming:
            source.break_off()
        self._uplink.close()
        self._downlink.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._carrier.close()

    def _flow(
        self,
        order: ReceiveOrder | SendOrder,
        target: WorkerRef,
        available_bytes: int,
        tell: Callable[[int, str | None], None],
    ) -> Flow:
        def tell_ended(sent_bytes: int, error: str | None) -> None:
            with self._lock:
                self._flows.remove(flow)
            tell(sent_bytes, error)

        flow = Flow(order.plan, order.manifest, target, available_bytes, tell_ended)
        with self._lock:
            self._flows.append(flow)
        return flow

    def _submit(self, flow: Flow) -> None:
        with self._lock:
            outbound = self._outbound.get(flow.target.worker)
        if outbound is None or outbound.peer != flow.target:
            flow.end(f"plan {flow.plan}: {self.worker} has no connection to {flow.target}")
        else:
            outbound.submit(flow)

    def _give_upstream_time(self, reception: Reception) -> None:
        """The order fails unless its upstream connects within `order_wait_s`."""
        upstream = reception.order.upstream

        def wait() -> None:
            self._closing.wait(self._order_wait_s)
            if not reception.has_begun and upstream not in self.upstreams():
                reception.fail(f"{upstream} did not connect within {self._order_wait_s} s")

        self._start_thread(wait, f"{self.worker} awaits {upstream}")

    def _open_channel(self, peer: WorkerRef, address: Address) -> Channel:
        """A channel at whose other end `peer` has answered."""
        try:
            channel = self._carrier.connect(address, self._handshake_s)
        except OSError as error:
            raise TransferError(f"cannot connect to {peer} at {address}: {error}") from error
        try:
            channel.send(self._hello)
            welcome = decode_header(channel.receive(HEADER_BYTES, self._handshake_s))
            if welcome.kind is not FrameKind.HELLO or welcome.sender != peer:
                raise FrameError(f"{welcome.sender} answered {welcome.kind.name}")
        except (OSError, FrameError) as error:
            channel.close()
            raise TransferError(f"cannot connect to {peer} at {address}: {error}") from error
        return channel

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                channel = self._carrier.accept()
            except ChannelClosedError:
                return
            except OSError:
                # The process is out of file descriptors, mostly: others may free some.
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            with self._lock:
                is_welcome = len(self._strangers) < _STRANGERS_MAX
                if is_welcome:
                    self._strangers.append(channel)
            serve = functools.partial(self._serve, channel)
            if not is_welcome or not self._start_thread(serve, f"{self.worker} receives"):
                channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            inbound = self._greet(channel)
            if inbound is not None:
                reason = "its receiving thread failed"
                try:
                    reason = inbound.serve(self._hello)
                finally:
                    self._forget_inbound(inbound, reason)
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._strangers.remove(channel)
            channel.close()

    def _greet(self, channel: Channel) -> Inbound | None:
        """Who opened the channel is known and takes the place of its earlier connection.

        None for somebody who does not speak the protocol, or an incarnation that was followed
        by another: the channel is closed without an answer.
        """
        try:
            frame = decode_header(channel.receive(HEADER_BYTES, self._handshake_s))
        except (OSError, FrameError):
            return None
        peer = frame.sender
        if frame.kind is not FrameKind.HELLO or peer.worker == self.worker.worker:
            return None
        inbound = Inbound(peer, channel, self._book, self._order_wait_s)
        with self._lock:
            old = self._inbound.get(peer.worker)
            if self._closing.is_set() or (old is not None and old.peer > peer):
                return None
            self._inbound[peer.worker] = inbound
            self._strangers.remove(channel)
        if old is not None:
            old.break_off()
        return inbound

    def _forget_inbound(self, inbound: Inbound, reason: str) -> None:
        with self._lock:
            current = self._inbound.get(inbound.peer.worker)
            if current is inbound:
                del self._inbound[inbound.peer.worker]
        if inbound.reception is not None:
            inbound.reception.fail(reason)
        # The same incarnation may have connected again: then the others can still begin.
        if current is inbound or current is None or current.peer != inbound.peer:
            for reception in self._book.all(inbound.peer):
                if not reception.has_begun:
                    reception.fail(reason)

    def _forget_outbound(self, outbound: Outbound) -> None:
        with self._lock:
            if self._outbound.get(outbound.peer.worker) is outbound:
                del self._outbound[outbound.peer.worker]

    def _start_thread(self, run: Callable[[], None], name: str) -> bool:
        """The thread runs and `close` will wait for it; False when closing."""
        with self._lock:
            if self._closing.is_set():
                return False
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            return True

    def __repr__(self) -> str:
        with self._lock:
            host, port = self.address
            return (
                f"<DataPlane {self.worker} on {host}:{port}, sends to {len(self._outbound)}, "
                f"receives from {len(self._inbound)}>"
            )
