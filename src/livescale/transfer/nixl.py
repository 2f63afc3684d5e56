"""The NIXL carrier: chunks are read from the other side's memory by NIXL, over whatever UCX finds.

For RDMA networks. Frames go over TCP; instead of a chunk's bytes they carry where these lie, the
receiver reads them with NIXL and says so with one of NIXL's notifications. A read that was begun
cannot be called back (releasing it and forgetting the peer leave it running, and it writes later),
so it goes into a buffer of the channel and from there into place, under the permit; a buffer whose
read has no end is given up until the carrier closes.

NIXL's bytes about a peer go to its own parser, and only after the peer has proved that it belongs
to the pool. UCX itself asks for no proof: over TCP, any process that reaches its port reads and
writes all memory of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import struct
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from livescale.transfer.carrier import (
    PLACE,
    Address,
    ChannelClosedError,
    WritePermit,
    receive_place,
)
from livescale.transfer.tcp import TcpCarrier, TcpChannel
from livescale.transfer.token_bucket import TokenBucket

_PACKAGE = "nixl_cu12._bindings"
# magic, number of the channel, where the memory begins and its size, bytes that follow for NIXL
_HELLO = struct.Struct(">4sIQQI")
_MAGIC = b"LSnx"
_DONE = struct.Struct(">I")
_ABOUT_BYTES_MAX = 64 << 10
_IN_FLIGHT_MAX = 4
# NIXL has no call that waits: it is asked again after ever longer pauses.
_PAUSE_S_MIN, _PAUSE_S_MAX = 50e-6, 1e-3
# Its own thread would spin without a pause, and take a whole core of an idle process.
_PROGRESS_PAUSE_US = 1000
Bytes = npt.NDArray[np.uint8]


class NixlChannel:
    """A Channel whose ranges do not travel on its socket."""

    def __init__(self, tcp: TcpChannel, carrier: NixlCarrier) -> None:
        self.is_network = True
        self.taken_bytes = 0
        self._tcp = tcp
        self._carrier = carrier
        self._number = carrier.number()
        self._peer = ""
        self._peer_number = 0
        self._peer_start = self._peer_bytes = 0
        self._in_flight = 0
        self._buffer: Bytes = np.zeros(0, np.uint8)
        self._is_broken_off = False

    def protect(self, timeout_s: float) -> None:
        """It cannot be: a pool with certificates does not use NIXL."""

    def share_memory(self, timeout_s: float) -> None:
        carrier = self._carrier
        place = (carrier.memory.ctypes.data, len(carrier.memory))
        about = carrier.about
        self._tcp.send(_HELLO.pack(_MAGIC, self._number, *place, len(about)) + about)
        hello = _HELLO.unpack(self._tcp.receive(_HELLO.size, timeout_s))
        magic, self._peer_number, self._peer_start, self._peer_bytes, about_bytes = hello
        if magic != _MAGIC or about_bytes > _ABOUT_BYTES_MAX:
            raise ChannelClosedError("the other side does not use NIXL")
        self._peer = carrier.know(self._tcp.receive(about_bytes, timeout_s))

    def send(self, message: bytes, is_urgent_payload: bool = False) -> None:
        self._tcp.send(message, is_urgent_payload)

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        self._carrier.uplink.pay(size_bytes)
        self._await_reads(_IN_FLIGHT_MAX - 1)
        self._in_flight += 1
        self._tcp.send(header + PLACE.pack(offset_bytes))

    def settle(self) -> None:
        self._await_reads(0)

    def receive(
        self, size_bytes: int, timeout_s: float | None = None, is_urgent_payload: bool = False
    ) -> bytes:
        return self._tcp.receive(size_bytes, timeout_s, is_urgent_payload)

    def receive_range(self, offset_bytes: int, size_bytes: int, permit: WritePermit) -> int:
        self._read(size_bytes)
        with permit.lock:
            if permit.is_revoked:
                return 0
            place = self._carrier.memory[offset_bytes : offset_bytes + size_bytes]
            np.copyto(place, self._buffer[:size_bytes])
        return size_bytes

    def discard_range(self, size_bytes: int) -> None:
        # Read all the same, so that a probe measures what a chunk would take.
        self._read(size_bytes)

    def break_off(self) -> None:
        self._is_broken_off = True
        self._tcp.break_off()

    def close(self) -> None:
        self._tcp.close()
        self._carrier.release(self._buffer)
        if self._peer:
            self._carrier.forget(self._peer, self._number)

    def _read(self, size_bytes: int) -> None:
        """The range that the other side says it sends lies in the buffer, and it knows that."""
        start = receive_place(self, size_bytes, self._peer_bytes)
        if len(self._buffer) < size_bytes:
            self._carrier.release(self._buffer)
            self._buffer = self._carrier.buffer(size_bytes)
        read = self._carrier.begin_read(
            self._buffer[:size_bytes], self._peer, self._peer_start + start
        )
        pause_s = _PAUSE_S_MIN
        while not self._carrier.is_read(read):
            if self._is_broken_off:
                self._carrier.give_up(read, self._buffer)
                self._buffer = np.zeros(0, np.uint8)
                raise ChannelClosedError("the channel was broken off")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        self._carrier.downlink.pay(size_bytes)
        self.taken_bytes += size_bytes
        self._carrier.say_read(self._peer, self._peer_number)

    def _await_reads(self, in_flight_max: int) -> None:
        """At most so many ranges that were sent are still to be read."""
        pause_s = _PAUSE_S_MIN
        while self._in_flight > in_flight_max:
            count = self._carrier.reads_done(self._number)
            if count > self._in_flight:
                raise ChannelClosedError(f"{count} chunks were read of {self._in_flight} sent")
            self._in_flight -= count
            if self._is_broken_off:
                raise ChannelClosedError("the channel was broken off")
            if not count:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)


class NixlCarrier:
    """NIXL's agent of this process, beside a TCP carrier whose channels carry the frames.

    Raises ImportError, with what to install, where NIXL is missing, and OSError where it finds no
    network.
    """

    def __init__(
        self, tcp: TcpCarrier, memory: memoryview, uplink: TokenBucket, downlink: TokenBucket
    ) -> None:
        try:
            self._nixl: Any = importlib.import_module(_PACKAGE)
        except ImportError as error:
            raise ImportError(
                f"carrier nixl needs pip install 'livescale[rdma]': {error}"
            ) from error
        self.memory: Bytes = np.frombuffer(memory, np.uint8)
        self._tcp = tcp
        self.uplink = uplink
        self.downlink = downlink
        self._lock = threading.Lock()
        self._numbers = 0
        # By channel: reads by the other side that it has told of and no order has asked for.
        self._done: dict[int, int] = {}
        # By name: how many channels there are with the peer.
        self._peers: dict[str, int] = {}
        # Reads without an end, and what they may still write into.
        self._given_up: list[tuple[int, Bytes]] = []
        _choose_network(tcp.address[0])
        with _as_os_error("cannot start"):
            self._agent = self._new_agent()
            self._backend = self._agent.createBackend("UCX", {})
            self._register(self.memory)
            self.about: bytes = self._agent.getLocalMD()

    @property
    def address(self) -> Address:
        """Where frames are taken."""
        return self._tcp.address

    def connect(self, address: Address, timeout_s: float) -> NixlChannel:
        """A channel to the member that listens there. Raises OSError."""
        return NixlChannel(self._tcp.connect(address, timeout_s), self)

    def accept(self) -> NixlChannel:
        return NixlChannel(self._tcp.accept(), self)

    def break_off(self) -> None:
        self._tcp.break_off()

    def close(self) -> None:
        self._tcp.close()
        # First the agent, then the memory: nothing is written any more when it is gone.
        self._agent = None
        self._given_up.clear()
        self.memory = np.zeros(0, np.uint8)

    # -- called by channels -----------------------------------------------------------------------

    def number(self) -> int:
        """Of a new channel."""
        with self._lock:
            self._numbers += 1
            self._done[self._numbers] = 0
            return self._numbers

    def know(self, about: bytes) -> str:
        """The name by which NIXL knows the peer that sent this about itself."""
        with self._lock, _as_os_error("cannot understand the other side"):
            name: str = self._agent.loadRemoteMD(about).decode()
            self._peers[name] = self._peers.get(name, 0) + 1
            return name

    def forget(self, peer: str, number: int) -> None:
        """A channel with the peer is closed."""
        with self._lock, contextlib.suppress(OSError), _as_os_error("cannot forget a peer"):
            self._done.pop(number, None)
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
                self._agent.invalidateRemoteMD(peer)

    def buffer(self, size_bytes: int) -> Bytes:
        """Memory that can be read into."""
        buffer = np.zeros(size_bytes, np.uint8)
        with self._lock, _as_os_error("cannot use more memory"):
            self._register(buffer)
        return buffer

    def release(self, buffer: Bytes) -> None:
        """The memory is not read into any more."""
        if len(buffer):
            with self._lock, contextlib.suppress(OSError), _as_os_error("cannot release memory"):
                self._agent.deregisterMem(self._registration(buffer), [self._backend])

    def begin_read(self, buffer: Bytes, peer: str, start: int) -> int:
        """The peer's bytes from the address `start` on are coming into the buffer."""
        own, theirs = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(where, len(buffer), 0)])
            for where in (buffer.ctypes.data, start)
        )
        with _as_os_error("cannot read"):
            read: int = self._agent.createXferReq(
                self._nixl.NIXL_READ, own, theirs, peer, "", [self._backend]
            )
            self._agent.postXferReq(read)
            return read

    def is_read(self, read: int) -> bool:
        """The read is through, and its handle is released. Raises OSError if it has failed."""
        try:
            with _as_os_error("a read failed"):
                if self._agent.getXferStatus(read) == self._nixl.NIXL_IN_PROG:
                    return False
        except OSError:
            self._agent.releaseXferReq(read)
            raise
        self._agent.releaseXferReq(read)
        return True

    def give_up(self, read: int, buffer: Bytes) -> None:
        """No thread waits for the read. Its buffer stays until the carrier closes."""
        with self._lock:
            self._given_up.append((read, buffer))

    def say_read(self, peer: str, peer_number: int) -> None:
        """The peer's channel of this number is sent that a range was read."""
        with _as_os_error("cannot tell the other side"):
            self._agent.genNotif(peer, _DONE.pack(peer_number), [self._backend])

    def reads_done(self, number: int) -> int:
        """Ranges sent on this channel that the other side has read since the last call."""
        with self._lock, _as_os_error("cannot receive from the other side"):
            notices: dict[Any, list[bytes]] = self._agent.getNotifs({}, [self._backend])
            for message in (message for messages in notices.values() for message in messages):
                if len(message) == _DONE.size and _DONE.unpack(message)[0] in self._done:
                    self._done[_DONE.unpack(message)[0]] += 1
            count, self._done[number] = self._done[number], 0
            return count

    def _new_agent(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_PAUSE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        return self._nixl.nixlAgent(f"livescale-{secrets.token_hex(8)}", config)

    def _register(self, memory: Bytes) -> None:
        self._agent.registerMem(self._registration(memory), [self._backend])

    def _registration(self, memory: Bytes) -> Any:
        place = (memory.ctypes.data, len(memory), 0, "")
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [place])

    def __repr__(self) -> str:
        host, port = self.address
        return f"<NixlCarrier {host}:{port}, {len(self._peers)} peers>"


def _choose_network(host: str) -> None:
    """UCX uses and listens on the interface that has this address, and no other; with TCP, unless
    the environment (UCX_NET_DEVICES, UCX_TLS) says what to use."""
    if "UCX_NET_DEVICES" in os.environ:
        return
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(address.address == host for address in addresses):
            os.environ["UCX_NET_DEVICES"] = name
            os.environ.setdefault("UCX_TLS", "tcp")
            return
    raise OSError(f"no interface has the address {host}: set UCX_NET_DEVICES")


@contextlib.contextmanager
def _as_os_error(what: str) -> Any:
    """NIXL's own errors have no class in common but Exception."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ChannelClosedError(f"NIXL {what}: {error}") from error
