"""Ranges over TCP channels, plain and sealed: byte for byte, however the bytes come."""

from __future__ import annotations

import array
import fcntl
import random
import socket
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_world import WAIT_S

from effort import examples
from livescale.common.credentials import Credentials
from livescale.runtime.join.cluster_folder import ClusterFolder
from livescale.transfer.carriers.sealed_tcp import SealedChannel
from livescale.transfer.carriers.tcp import TcpCarrier
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats.carrier import Channel, WritePermit
from livescale.transfer.formats.sealing import Protection
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.types import WorkerRef

MEMORY_BYTES = 4 << 20
HEADER_BYTES = 64
#: around the size that a receiver is woken for, and that of a sealed piece
SIZES = st.sampled_from([1, 999, 256 << 10, (256 << 10) + 1, 512 << 10, (512 << 10) + 1, 1_500_000])
#: a range: its bytes, and whether they are wanted
RANGES = st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=5)
#: where the way holds bytes back, in thousandths of all
PAUSES = st.lists(st.integers(0, 999), max_size=3)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    path = tmp_path_factory.mktemp("cluster") / "pool"
    folder = ClusterFolder(path)
    folder.init()
    folder.add("alice")
    return Credentials(Path(path, "alice"))


class SlowWay:
    """Between a sender's socket and a receiver's: at each pause no more bytes come before the
    receiver has taken all that did."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._out = socket.create_connection(to)
        self._out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        #: where to pause, and how many bytes have passed since that was set
        self.pauses: list[int] = []
        self.passed = 0
        #: the descriptor of the receiver's end
        self.receiver = -1
        self.failure = ""
        self._threads = [threading.Thread(target=self._forth), threading.Thread(target=self._back)]

    def start(self) -> None:
        self._in, _ = self._listener.accept()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for end in (self._in, self._out):
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for end in (self._listener, self._in, self._out):
            end.close()

    def _forth(self) -> None:
        while part := self._in.recv(1 << 16):
            while self.pauses and self.pauses[0] < self.passed + len(part):
                before = self.pauses.pop(0) - self.passed
                self._pass(part[:before])
                part = part[before:]
                self._wait_taken()
            self._pass(part)

    def _pass(self, part: bytes) -> None:
        self._out.sendall(part)
        self.passed += len(part)

    def _back(self) -> None:
        while part := self._out.recv(1 << 16):
            self._in.sendall(part)

    def _wait_taken(self) -> None:
        """The receiver's socket holds nothing back, though nothing follows."""
        deadline_s = time.monotonic() + WAIT_S
        waiting = array.array("i", [1])
        while waiting[0]:
            if time.monotonic() > deadline_s:
                self.failure = f"{waiting[0]} bytes are not taken"
                return
            fcntl.ioctl(self.receiver, termios.FIONREAD, waiting)


class Ends:
    """A sender's channel and a receiver's, with a slow way between them."""

    def __init__(self, protection: Protection | None) -> None:
        content = random.Random(7).randbytes(MEMORY_BYTES)
        self.memories = [bytearray(content), bytearray(MEMORY_BYTES)]
        carriers = [
            TcpCarrier("127.0.0.1", memoryview(memory), TokenBucket(None), TokenBucket(None))
            for memory in self.memories
        ]
        self.way = SlowWay(carriers[1].address)
        calls = carriers[0].connect(self.way.address, WAIT_S)
        self.way.start()
        answers = carriers[1].accept()
        self.way.receiver = answers.fileno()
        self.sender: Channel = calls
        self.receiver: Channel = answers
        if protection is not None:
            self.sender = SealedChannel(calls, protection, is_caller=True)
            self.receiver = SealedChannel(answers, protection, is_caller=False)
        caller = threading.Thread(target=self.sender.protect, args=(WAIT_S,))
        caller.start()
        self.receiver.protect(WAIT_S)
        caller.join()
        for carrier in carriers:
            carrier.close()

    def close(self) -> None:
        self.way.close()
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=["plain", "sealed"])
def ends(machine: None, request: pytest.FixtureRequest, credentials: Credentials) -> Iterator[Ends]:
    protection = Protection(credentials, "a secret", lambda _: True)
    with ExitStack() as stack:
        yield stack.enter_context(closing(Ends(protection if request.param == "sealed" else None)))


@given(ranges=RANGES, pauses=PAUSES)
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_ranges_come_byte_for_byte_and_nothing_waits_for_what_does_not_come(
    ends: Ends, ranges: list[tuple[int, bool]], pauses: list[int]
) -> None:
    total = sum(size + HEADER_BYTES for size, _ in ranges)
    ends.way.passed = 0
    ends.way.pauses = sorted(total * part // 1000 for part in pauses)
    ends.memories[1][:] = bytes(MEMORY_BYTES)

    def send() -> None:
        for size, _ in ranges:
            header = size.to_bytes(HEADER_BYTES, "big")
            ends.sender.send_range(header, MEMORY_BYTES - size, size)

    landed: list[int] = []
    sending = threading.Thread(target=send)
    sending.start()
    for size, is_wanted in ranges:
        assert int.from_bytes(ends.receiver.receive(HEADER_BYTES, WAIT_S), "big") == size
        if not is_wanted:
            ends.receiver.discard_range(size, landed.append)
            continue
        ends.memories[1][:] = bytes(MEMORY_BYTES)
        ends.receiver.receive_range(0, size, WritePermit(), landed.append)
        assert ends.memories[1][:size] == ends.memories[0][MEMORY_BYTES - size :]
        assert not any(ends.memories[1][size : size + 100]), "nothing is written behind a range"
    sending.join()
    assert landed == [size if is_wanted else 0 for size, is_wanted in ranges]
    assert not ends.way.failure


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.usefixtures("machine")
def test_members_reach_each_other_over_either_family(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    here, there = WorkerRef(0), WorkerRef(1)
    with ExitStack() as stack:
        planes = [
            stack.enter_context(closing(DataPlane(ref, Arena(1 << 16), PlaneOptions(host=host))))
            for ref in (here, there)
        ]
        assert {plane.address[0] for plane in planes} == {host}
        planes[0].introduce(there, planes[1].address)
        planes[1].introduce(here, planes[0].address)
        assert planes[0].probe(there, 1 << 12) > 0
