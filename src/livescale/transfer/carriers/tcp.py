"""The TCP carrier: blocking sockets, bytes received into place and sent from place.

Socket options, pacing and partial reads live here. What the bytes say does not.
"""

from __future__ import annotations

import contextlib
import socket

from livescale.common.addresses import family_of
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats.carrier import Address, ChannelClosedError, Landed, WritePermit
from livescale.transfer.formats.frames import HEADER_BYTES
from livescale.transfer.formats.listener import Listener, SocketChannel, notice_loss

# 64 KiB of socket buffer cuts throughput to a quarter; 1-4 MiB is right.
_SOCKET_BUFFER_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 10
_AHEAD_BYTES_MAX = 256
# A thread that is woken for every few packets costs as much as the copying. Half of the socket
# buffer is the most that the system takes for it.
_WAKE_BYTES = 512 << 10
# On a slow link what has come is taken sooner: the watch for stalls must see that bytes come.
_WAKE_MS = 50.0
# Feeds that bring nothing are told of long before (`stall_s`). A receiver that is held to a few
# kilobytes per second takes this long to show that it has room again.
_LOST_AFTER_S = 10.0


class TcpChannel(SocketChannel):
    """A Channel over one connected socket. The downlink is paid after bytes were taken from it."""

    def __init__(
        self, sock: socket.socket, memory: memoryview, uplink: TokenBucket, downlink: TokenBucket
    ) -> None:
        super().__init__(sock)
        self.is_network = True
        self._memory = memory
        self._uplink = uplink
        self._downlink = downlink
        self._wake_bytes = 1
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        # What follows a range is a header: taken along with it, that needs no waking of its own.
        self._ahead = memoryview(bytearray(_AHEAD_BYTES_MAX))
        self._ahead_start = self._ahead_stop = 0

    @property
    def is_one_machine(self) -> bool:
        """Nothing leaves the machine: both ends have one address."""
        own: str = self._sock.getsockname()[0]
        peer: str = self._sock.getpeername()[0]
        return own == peer

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Of the registered memory."""
        return self._memory[offset_bytes : offset_bytes + size_bytes]

    def protect(self, timeout_s: float) -> None:
        """It is not: `sealed_tcp.py` is."""

    def share_memory(self, timeout_s: float) -> None:
        """Ranges travel on the socket."""

    def send(self, message: bytes, is_urgent_payload: bool = False) -> None:
        if not is_urgent_payload:
            self._sock.sendall(message)
            return
        self.send_paced(b"", memoryview(message), is_urgent=True)

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        self.send_paced(header, self.view(offset_bytes, size_bytes))

    def settle(self) -> None:
        """The network has its own copy of what was sent."""

    def receive_range(
        self, offset_bytes: int, size_bytes: int, permit: WritePermit, landed: Landed
    ) -> None:
        place = self.view(offset_bytes, size_bytes)
        got = 0
        while got < size_bytes:
            step = self._downlink.slice_bytes(size_bytes - got)
            self._wait_readable(size_bytes - got, _WAKE_MS)
            with permit.lock:
                if permit.is_revoked:
                    break
                # Without blocking: the thread that revokes the permit waits for one copy at most.
                ahead_bytes = HEADER_BYTES if got + step == size_bytes else 0
                taken = self._take_into(place[got : got + step], ahead_bytes)
            got += taken
            self.taken_bytes += taken
            self._downlink.take(taken)
        self._discard(size_bytes - got)
        landed(got)

    def discard_range(self, size_bytes: int, landed: Landed) -> None:
        self._discard(size_bytes)
        landed(0)

    def close(self) -> None:
        self._sock.close()
        self._memory = memoryview(b"")

    def receive_paced(self, into: memoryview, ahead_bytes: int = 0) -> None:
        """As many bytes of a range as there is room for. A message of `ahead_bytes` follows, if the
        range ends with them."""
        assert ahead_bytes <= _AHEAD_BYTES_MAX
        while into:
            step = self._downlink.slice_bytes(len(into))
            self._wait_readable(len(into), _WAKE_MS)
            taken = self._take_into(into[:step], ahead_bytes if step == len(into) else 0)
            self.taken_bytes += taken
            self._downlink.take(taken)
            into = into[taken:]

    def send_paced(self, header: bytes, payload: memoryview, is_urgent: bool = False) -> None:
        """The header goes along with the first bytes."""
        for step in self._uplink.slices(len(payload), is_urgent):
            sent = self._sock.sendmsg((header, payload[:step])) - len(header)
            if sent < 0:
                self._sock.sendall(header[sent:])
                sent = 0
            if sent < step:
                self._sock.sendall(payload[sent:step])
            header, payload = b"", payload[step:]

    def _discard(self, size_bytes: int) -> None:
        while size_bytes > 0:
            step = self._downlink.slice_bytes(min(size_bytes, _SCRATCH_BYTES))
            self._wait_readable(step, _WAKE_MS)
            taken = self._take_into(self._scratch[:step])
            size_bytes -= taken
            self.taken_bytes += taken
            self._downlink.take(taken)

    def _take_into(self, view: memoryview, ahead_bytes: int = 0) -> int:
        """Bytes that were there to take, 0 if none are there yet. `ahead_bytes` that follow may be
        taken along, for later."""
        if self._ahead_start < self._ahead_stop:
            return self._take_from_ahead(view)
        try:
            if ahead_bytes:
                pair = (view, self._ahead[:ahead_bytes])
                taken = self._sock.recvmsg_into(pair, 0, socket.MSG_DONTWAIT)[0]
            else:
                taken = self._sock.recv_into(view, len(view), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if taken == 0:
            raise ChannelClosedError("the other side closed the connection")
        if taken > len(view):
            self._ahead_start, self._ahead_stop = 0, taken - len(view)
            return len(view)
        return taken

    def _took_urgent(self, size_bytes: int) -> None:
        self._downlink.take(size_bytes, is_urgent=True)

    def _take_from_ahead(self, view: memoryview) -> int:
        taken = min(self._ahead_stop - self._ahead_start, len(view))
        stop = self._ahead_start + taken
        view[:taken] = self._ahead[self._ahead_start : stop]
        self._ahead_start = stop
        return taken

    def _wait_readable(self, size_bytes: int, wait_ms: float | None) -> bool:
        """That many bytes are there, or enough of them, or the end; False after the time.

        First of all: mostly nothing is there yet, and an attempt that fails costs more.
        """
        if self._ahead_start < self._ahead_stop:
            return True
        wake_bytes = min(size_bytes, _WAKE_BYTES)
        if wake_bytes != self._wake_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes
        return bool(self._readable.poll(wait_ms))


class TcpCarrier:
    """Listens on an ephemeral port of `host`; all its channels share both buckets."""

    def __init__(
        self, host: str, memory: memoryview, uplink: TokenBucket, downlink: TokenBucket
    ) -> None:
        self._memory = memory
        self._uplink = uplink
        self._downlink = downlink
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        # Set before listen(): the window scale of accepted connections follows from the buffer.
        try:
            _tune(sock)
            sock.bind((host, 0))
            #: where it listens
            self.address: Address = sock.getsockname()[:2]
            self._listener = Listener(sock)
        except OSError:
            sock.close()
            raise

    def connect(self, address: Address, timeout_s: float) -> TcpChannel:
        """A channel to the member that listens there. Raises OSError."""
        # From the own address: a host with several NICs would take the first one for everything.
        sock = socket.create_connection(address, timeout_s, source_address=(self.address[0], 0))
        return self._channel(sock)

    def accept(self) -> TcpChannel:
        while True:
            sock = self._listener.accept()
            # A peer that resets at once makes the socket options fail: its loss alone.
            with contextlib.suppress(OSError):
                return self._channel(sock)

    def break_off(self) -> None:
        self._listener.break_off()

    def close(self) -> None:
        self._listener.close()
        self._memory = memoryview(b"")

    def _channel(self, sock: socket.socket) -> TcpChannel:
        try:
            _tune(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(True)
        except OSError:
            sock.close()
            raise
        return TcpChannel(sock, self._memory, self._uplink, self._downlink)

    def __repr__(self) -> str:
        return f"<TcpCarrier {self._listener!r}>"


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    notice_loss(sock, _LOST_AFTER_S)
    # bbr, the default of some kernels, halves the rate on loopback.
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
