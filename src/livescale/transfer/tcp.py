"""The TCP carrier: blocking sockets, bytes received into place and sent from place.

Socket options, pacing and partial reads live here. What the bytes say does not.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from livescale.transfer.carrier import Address, ChannelClosedError, WritePermit
from livescale.transfer.token_bucket import TokenBucket

# 64 KiB of socket buffer cuts throughput to a quarter; 1-4 MiB is right.
_SOCKET_BUFFER_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 10
_BACKLOG = 128


class TcpChannel:
    """A Channel over one connected socket. The downlink is paid after bytes were taken from it."""

    def __init__(
        self, sock: socket.socket, memory: memoryview, uplink: TokenBucket, downlink: TokenBucket
    ) -> None:
        self._sock = sock
        self._memory = memory
        self._uplink = uplink
        self._downlink = downlink
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def send(self, message: bytes) -> None:
        self._sock.sendall(message)

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        end_bytes = offset_bytes + size_bytes
        step = self._uplink.slice_bytes(size_bytes)
        self._uplink.take(step)
        self._send_pair(header, self._memory[offset_bytes : offset_bytes + step])
        offset_bytes += step
        while offset_bytes < end_bytes:
            step = self._uplink.slice_bytes(end_bytes - offset_bytes)
            self._uplink.take(step)
            self._sock.sendall(self._memory[offset_bytes : offset_bytes + step])
            offset_bytes += step

    def receive(self, size_bytes: int, timeout_s: float | None = None) -> bytes:
        message = bytearray(size_bytes)
        view = memoryview(message)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        got = 0
        while got < size_bytes:
            taken = self._take_into(view[got:])
            if taken == 0:
                self._wait_readable(deadline_s)
            got += taken
        return bytes(message)

    def receive_range(self, offset_bytes: int, size_bytes: int, permit: WritePermit) -> int:
        place = self._memory[offset_bytes : offset_bytes + size_bytes]
        got = 0
        while got < size_bytes:
            step = self._downlink.slice_bytes(size_bytes - got)
            with permit.lock:
                if permit.is_revoked:
                    break
                # Without blocking: whoever revokes the permit waits for one copy at most.
                taken = self._take_into(place[got : got + step])
            if taken == 0:
                self._wait_readable()
                continue
            got += taken
            self._downlink.take(taken)
        self.discard(size_bytes - got)
        return got

    def discard(self, size_bytes: int) -> None:
        while size_bytes > 0:
            taken = self._take_into(self._scratch[: self._downlink.slice_bytes(size_bytes)])
            if taken == 0:
                self._wait_readable()
                continue
            size_bytes -= taken
            self._downlink.take(taken)

    def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            self._wait_readable()

    def break_off(self) -> None:
        # Shutting down wakes threads that wait on the socket; closing it here would let the
        # system give its number to somebody else's socket under them.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _send_pair(self, header: bytes, payload: memoryview) -> None:
        sent = self._sock.sendmsg((header, payload))
        if sent < len(header):
            self._sock.sendall(header[sent:])
            sent = len(header)
        if sent < len(header) + len(payload):
            self._sock.sendall(payload[sent - len(header) :])

    def _take_into(self, view: memoryview) -> int:
        """Bytes that were there to take, 0 if none are there yet."""
        try:
            taken = self._sock.recv_into(view, len(view), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if taken == 0:
            raise ChannelClosedError("the other side closed the connection")
        return taken

    def _wait_readable(self, deadline_s: float | None = None) -> None:
        wait_ms = None
        if deadline_s is not None:
            wait_ms = max(0.0, (deadline_s - time.monotonic()) * 1000)
        if not self._readable.poll(wait_ms):
            raise TimeoutError("nothing was received in time")


class TcpCarrier:
    """Listens on an ephemeral port of `host`; all its channels share both buckets."""

    def __init__(self, host: str, uplink: TokenBucket, downlink: TokenBucket) -> None:
        self._uplink = uplink
        self._downlink = downlink
        self._memory = memoryview(b"")
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Set before listen(): the window scale of accepted connections follows from the buffer.
        _tune(self._listening)
        self._listening.bind((host, 0))
        self._listening.listen(_BACKLOG)
        self._address: Address = self._listening.getsockname()[:2]
        self._is_broken_off = False

    @property
    def address(self) -> Address:
        return self._address

    def register(self, memory: memoryview) -> None:
        self._memory = memory

    def connect(self, address: Address, timeout_s: float) -> TcpChannel:
        sock = socket.create_connection(address, timeout_s)
        return self._channel(sock)

    def accept(self) -> TcpChannel:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError as error:
                if self._is_broken_off:
                    raise ChannelClosedError("the carrier takes no more connections") from error
                raise
            # A peer that resets at once makes the socket options fail: its loss alone.
            with contextlib.suppress(OSError):
                return self._channel(sock)

    def break_off(self) -> None:
        self._is_broken_off = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()

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
        host, port = self._address
        return f"<TcpCarrier {host}:{port}{', broken off' if self._is_broken_off else ''}>"


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # bbr, the default of some kernels, halves the rate on loopback.
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
