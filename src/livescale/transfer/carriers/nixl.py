"""The NIXL carrier: chunks are read from the other side's memory by NIXL, over whatever UCX finds.

For RDMA networks. Frames go over TCP; instead of a chunk's bytes they carry where these lie, and
the receiver reads them with NIXL, straight into place, several at a time. A read that was begun
cannot be called back: releasing it and forgetting the peer leave it running, and it writes later.
So its place is taken from `OpenWrites` until it has ended, whatever becomes of its plan and its
channel.

Nothing here looks at the bytes, so that the memory could be a device's.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import select
import struct
import threading
import time

import numpy as np
import numpy.typing as npt

from livescale.transfer.carriers.nixl_agent import NixlAgent
from livescale.transfer.carriers.nixl_watch import NixlWatch
from livescale.transfer.carriers.tcp import TcpCarrier, TcpChannel
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats.carrier import (
    PLACE,
    Address,
    ChannelClosedError,
    Landed,
    WritePermit,
    receive_place,
)
from livescale.transfer.memory.arena import ArenaError
from livescale.transfer.memory.memory_region import MemoryKind, MemoryRegion, host_region
from livescale.transfer.memory.open_writes import OpenWrites

# magic, number of the channel; kind, device, address and size of its memory; bytes for NIXL
_HELLO = struct.Struct(">4sIBIQQI")
_MAGIC = b"LSn2"
_ABOUT_BYTES_MAX = 64 << 10
READS_MAX = 16
"""Chunks under way on one channel. The end of a read is seen 0.1 to 0.2 ms late (the watch's
pause), so that a window must take longer on the network: 16 chunks of 1 MiB take 0.34 ms at
400 Gbit/s."""
Bytes = npt.NDArray[np.uint8]


class NixlChannel:
    """A Channel whose ranges do not travel on its socket."""

    def __init__(self, tcp: TcpChannel, carrier: NixlCarrier) -> None:
        self.is_network = True
        self.taken_bytes = 0
        self.done = 0
        self.peer = ""
        self.peer_number = 0
        self.number = carrier.watch.add(self)
        self._tcp = tcp
        self._carrier = carrier
        self._peer_memory = carrier.memory.part(0, 0)
        self._lock = threading.Lock()
        self._is_broken_off = False
        # Of the receiving side: ranges that were begun and that `landed` was not told of, what is
        # to be told, and what wakes the thread that tells.
        self._begun = 0
        self._ended: collections.deque[tuple[_Range, int]] = collections.deque()
        self._bell = _Bell()
        self._rings = select.poll()
        self._rings.register(self._bell, select.POLLIN)
        self._rings_or_comes = select.poll()
        self._rings_or_comes.register(self._bell, select.POLLIN)
        self._rings_or_comes.register(tcp, select.POLLIN)
        # Of the sending side: ranges sent, and those of them that the other side has read.
        self._sent = 0
        self._peer_read = 0
        self._peer_has_read = threading.Condition(self._lock)

    def protect(self, timeout_s: float) -> None:
        """It cannot be: a pool with certificates does not use NIXL."""

    def share_memory(self, timeout_s: float) -> None:
        own, about = self._carrier.memory, self._carrier.about
        place = (own.kind, own.device, own.start, own.size_bytes)
        self._tcp.send(_HELLO.pack(_MAGIC, self.number, *place, len(about)) + about)
        hello = _HELLO.unpack(self._tcp.receive(_HELLO.size, timeout_s))
        magic, self.peer_number, kind, device, start, size_bytes, about_bytes = hello
        if magic != _MAGIC or about_bytes > _ABOUT_BYTES_MAX or kind not in set(MemoryKind):
            raise ChannelClosedError("the other side does not use NIXL, or another version of it")
        self._peer_memory = MemoryRegion(MemoryKind(kind), device, start, size_bytes)
        self.peer = self._carrier.agent.know(self._tcp.receive(about_bytes, timeout_s))

    # -- sending ----------------------------------------------------------------------------------

    def send(self, message: bytes, is_urgent_payload: bool = False) -> None:
        self._tcp.send(message, is_urgent_payload)

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        self._carrier.uplink.pay(size_bytes)
        self._await_peer(self._carrier.reads_max - 1)
        self._sent += 1
        self._tcp.send(header + PLACE.pack(offset_bytes))

    def settle(self) -> None:
        self._await_peer(0)

    def peer_read(self, count: int) -> None:
        with self._lock:
            self._peer_read = max(self._peer_read, count)
            self._peer_has_read.notify_all()

    def _await_peer(self, unread_max: int) -> None:
        """At most so many ranges that were sent are still to be read."""
        if self._sent - self._peer_read > unread_max:
            with self._carrier.watch.waiting(), self._lock:
                self._peer_has_read.wait_for(
                    lambda: self._is_broken_off or self._sent - self._peer_read <= unread_max
                )
                if self._is_broken_off:
                    raise ChannelClosedError("the channel was broken off")
        if self._peer_read > self._sent:
            raise ChannelClosedError(f"{self._peer_read} chunks were read of {self._sent} sent")

    # -- receiving --------------------------------------------------------------------------------

    def receive(
        self, size_bytes: int, timeout_s: float | None = None, is_urgent_payload: bool = False
    ) -> bytes:
        # In turns: the network gets work, and no stream of messages keeps what has landed waiting.
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._begun and not self._comes(deadline_s):
            pass
        if deadline_s is not None:
            timeout_s = max(0.0, deadline_s - time.monotonic())
        return self._tcp.receive(size_bytes, timeout_s, is_urgent_payload)

    def _comes(self, deadline_s: float | None) -> bool:
        """Something comes on the socket, or the time is over. One landed range is told of."""
        wait_ms = None
        if deadline_s is not None:
            wait_ms = max(0.0, deadline_s - time.monotonic()) * 1000
        ready = dict(self._rings_or_comes.poll(wait_ms))
        if self._bell.fileno() in ready:
            self._tell_landed()
        return not ready or self._tcp.fileno() in ready

    def receive_range(
        self, offset_bytes: int, size_bytes: int, permit: WritePermit, landed: Landed
    ) -> None:
        source = self._receive_source(size_bytes)
        with permit.lock:
            if not permit.is_revoked:
                write = self._open_write(offset_bytes, size_bytes)
                into = self._carrier.memory.part(offset_bytes, size_bytes)
                self._begin(into, source, _Range(size_bytes, landed, write, permit))
                return
        # Nothing is read for an order that is over.
        with self._lock:
            self.done += 1
        self._carrier.watch.refused(self)
        landed(0)

    def discard_range(self, size_bytes: int, landed: Landed) -> None:
        # Read all the same, so that a probe measures what chunks would take.
        source = self._receive_source(size_bytes)
        into = self._carrier.waste(size_bytes)
        self._begin(into, source, _Range(size_bytes, landed, None, None))

    def _receive_source(self, size_bytes: int) -> MemoryRegion:
        """Where the range that comes next lies at the other side; there is room for one more."""
        start = receive_place(self, size_bytes, self._peer_memory.size_bytes)
        while self._begun >= self._carrier.reads_max:
            self._rings.poll()
            self._tell_landed()
            if self._is_broken_off:
                raise ChannelClosedError("the channel was broken off")
        return self._peer_memory.part(start, size_bytes)

    def _open_write(self, offset_bytes: int, size_bytes: int) -> int:
        try:
            return self._carrier.writes.begin(offset_bytes, size_bytes)
        except ArenaError as error:
            raise ChannelClosedError(str(error)) from error

    def _begin(self, into: MemoryRegion, source: MemoryRegion, asked: _Range) -> None:
        """The range is being read. If this raises, `landed` is not told of it."""
        try:
            read = self._carrier.agent.begin_read(into, self.peer, source)
        except OSError:
            if asked.write is not None:
                self._carrier.writes.end(asked.write)
            raise
        self._begun += 1
        self._carrier.watch.follow(read, self, functools.partial(self._read_ended, asked))

    def _read_ended(self, asked: _Range, is_done: bool) -> None:
        """Nothing is written any more for this range. Called by the watch."""
        if asked.write is not None:
            self._carrier.writes.end(asked.write)
        with self._lock:
            # The other side may have used its memory anew since the channel was broken off.
            is_waited_for = not self._is_broken_off
            self.done += 1
            if is_waited_for:
                self.taken_bytes += asked.size_bytes if is_done else 0
                self._ended.append((asked, asked.size_bytes if is_done else 0))
        if is_waited_for:
            self._bell.ring()
        else:
            asked.landed(0)
        if not is_done:
            self.break_off()

    def _tell_landed(self) -> None:
        """The range that has landed first is told of. The bell goes on ringing for others."""
        with self._lock:
            if len(self._ended) <= 1:
                self._bell.still()
            if not self._ended:
                return
            asked, written_bytes = self._ended.popleft()
        self._begun -= 1
        try:
            self._carrier.downlink.pay(asked.size_bytes)
        except OSError:
            asked.landed(0)
            raise
        asked.landed(written_bytes if asked.is_wanted else 0)

    # -- the end ----------------------------------------------------------------------------------

    def break_off(self) -> None:
        with self._lock:
            self._is_broken_off = True
            self._peer_has_read.notify_all()
        self._bell.ring()
        self._tcp.break_off()

    def close(self) -> None:
        """Reads that are under way go on, and are told of when they have ended."""
        self.break_off()
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
        for asked, written_bytes in ended:
            asked.landed(written_bytes if asked.is_wanted else 0)
        self._tcp.close()
        self._bell.close()
        self._carrier.watch.remove(self.number)
        if self.peer:
            self._carrier.agent.forget(self.peer)


class _Range:
    """A range that is being read; without `write` and `permit` it is thrown away."""

    def __init__(
        self, size_bytes: int, landed: Landed, write: int | None, permit: WritePermit | None
    ) -> None:
        self.size_bytes = size_bytes
        self.landed = landed
        self.write = write
        self._permit = permit

    @property
    def is_wanted(self) -> bool:
        return self._permit is not None and not self._permit.is_revoked


class _Bell:
    """Wakes one thread that waits on a descriptor. May be rung by any thread, closed or not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def still(self) -> None:
        """It rings no more."""
        with self._lock, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


class NixlCarrier:
    """NIXL's agent of this process, beside a TCP carrier whose channels carry the frames.

    Raises ImportError, with what to install, where NIXL is missing, and OSError where it finds no
    network.
    """

    def __init__(
        self,
        tcp: TcpCarrier,
        memory: memoryview,
        uplink: TokenBucket,
        downlink: TokenBucket,
        writes: OpenWrites,
        reads_max: int = READS_MAX,
    ) -> None:
        """`writes`: what is under way into the memory. At most `reads_max` chunks are under way on
        a channel, in each direction."""
        self._tcp = tcp
        self.uplink = uplink
        self.downlink = downlink
        self.writes = writes
        self.reads_max = reads_max
        self.agent = NixlAgent(tcp.address[0])
        self.memory = host_region(memory)
        # What regions lie in must live as long as the agent.
        self._kept: list[memoryview | Bytes] = [memory]
        self._lock = threading.Lock()
        self._waste = self.memory.part(0, 0)
        self.agent.register(self.memory)
        self.about: bytes = self.agent.about()
        self.watch = NixlWatch(self.agent)

    @property
    def address(self) -> Address:
        """Where frames are taken."""
        return self._tcp.address

    def connect(self, address: Address, timeout_s: float) -> NixlChannel:
        """A channel to the member that listens there. Raises OSError."""
        return NixlChannel(self._tcp.connect(address, timeout_s), self)

    def accept(self) -> NixlChannel:
        return NixlChannel(self._tcp.accept(), self)

    def waste(self, size_bytes: int) -> MemoryRegion:
        """Memory that anything may be read into, by several at a time."""
        with self._lock:
            if self._waste.size_bytes < size_bytes:
                memory = np.zeros(size_bytes, np.uint8)
                region = host_region(memory.data)
                self.agent.register(region)
                self._kept.append(memory)
                self._waste = region
            return self._waste.part(0, size_bytes)

    def break_off(self) -> None:
        self._tcp.break_off()

    def close(self) -> None:
        self._tcp.close()
        self.watch.close()
        # First the agent, then the memory: nothing is written any more when it is gone.
        self.agent.close()
        self._kept.clear()

    def __repr__(self) -> str:
        return f"<NixlCarrier {self.address}, {self.reads_max} reads per channel, {self.agent!r}>"
