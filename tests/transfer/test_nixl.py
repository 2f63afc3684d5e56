"""Transfers through NIXL, over TCP on the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import psutil
import pytest
from transfer_world import WAIT_S, World, total_bytes, write_model

from livescale.common.settings import ConfigError
from livescale.config.reading import load_config
from livescale.transfer.arena import Arena
from livescale.transfer.carrier import ChannelClosedError, WritePermit
from livescale.transfer.data_plane import DataPlane
from livescale.transfer.nixl import NixlCarrier
from livescale.transfer.tcp import TcpCarrier
from livescale.transfer.token_bucket import TokenBucket
from livescale.types import WorkerRef

MIB = 1 << 20
KIB = 1 << 10
CHUNK = 16 * KIB
SLOW = 4_000_000
HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed (extra rdma)")


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the carrier chooses for itself does not outlive the test."""
    for name in ("UCX_NET_DEVICES", "UCX_TLS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with Arena(MIB) as memory, pytest.raises(ImportError, match=r"livescale\[rdma\]"):
        DataPlane(WorkerRef(0), memory, carrier="nixl")
    with pytest.raises(ConfigError, match=r"carrier.*livescale\[rdma\]"):
        load_config(None, ["a"], {}, {"carrier": "nixl"})


@needs_nixl
def test_a_chain_delivers_identical_bytes_and_only_loopback_listens() -> None:
    with World(3, 4 * MIB, carrier="nixl") as world:
        manifest = write_model(world.arenas[0], [100_000, 1_000_000, 1_000_000, 65_536, 7])
        world.planes[0].offer(manifest)
        for node, recorder in enumerate(world.chain(1, manifest, CHUNK, 0, 1, 2), start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
            used = world.planes[node].usage()
            assert used.parameter_received_bytes == total_bytes(manifest)
        assert world.planes[2].probe(world.refs[0], MIB) > 0
        listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        # Each plane has two: for frames, and UCX's own.
        assert listening.count("127.0.0.1") >= 6
        assert set(listening) == {"127.0.0.1"}


@needs_nixl
def test_a_holder_that_dies_is_replaced() -> None:
    with World(4, 4 * MIB, carrier="nixl", uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        write_model(world.arenas[3], [512 * KIB, 512 * KIB])
        for node in (0, 3):
            world.planes[node].offer(manifest)
        first, second = world.chain(1, manifest, CHUNK, 0, 1, 2)
        world.wait_chunks(2, 3)
        world.planes[0].close()
        assert first.wait("feed_failed")[1] == world.refs[0]
        world.planes[1].amend(1, (world.feed(3, manifest, CHUNK),))
        for node, recorder in ((1, first), (2, second)):
            recorder.check_completed(manifest, recorder.verdict()[1])
            assert world.holds(node, manifest)
        assert world.planes[3].usage().parameter_sent_bytes < total_bytes(manifest)


@needs_nixl
def test_what_is_withdrawn_is_read_by_nobody() -> None:
    with World(2, 4 * MIB, carrier="nixl", order_wait_s=0.05, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        reader = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        world.wait_chunks(1, 3)
        world.planes[0].withdraw(manifest)
        world.arenas[0].view(0, 2 * MIB)[:] = bytes(2 * MIB)
        assert "gave the model up" in reader.wait("feed_failed")[2]
        # All that came is of the model: none of it was read after the withdrawal.
        write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        world.planes[1].amend(1, (world.feed(0, manifest, CHUNK),))
        reader.check_completed(manifest)
        assert world.planes[1].usage().discarded_bytes == 0


@needs_nixl
def test_a_peer_without_nixl_is_told_apart_at_once() -> None:
    with World(2, MIB, carrier=["nixl", "auto"], handshake_s=WAIT_S) as world:
        manifest = write_model(world.arenas[0], [1000])
        world.planes[0].offer(manifest)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        assert recorder.wait("feed_failed")[1] == world.refs[0]


HOLDER = f"""
import os, signal, sys
from livescale.transfer.nixl import NixlCarrier
from livescale.transfer.tcp import TcpCarrier
from livescale.transfer.token_bucket import TokenBucket
buckets = TokenBucket(None), TokenBucket(None)
memory = memoryview(bytearray(b"\\xff" * {16 * MIB}))
carrier = NixlCarrier(TcpCarrier("127.0.0.1", memory, *buckets), memory, *buckets)
print(carrier.address[1], flush=True)
for is_frozen in (True, False):
    channel = carrier.accept()
    channel.share_memory({WAIT_S})
    channel.send_range(b"h", 0, len(memory))
    if is_frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        channel.settle()
sys.stdin.read()
os._exit(0)
"""


class _Reading:
    """Takes one range of 16 MiB from the holder at that address, in a thread."""

    def __init__(self, carrier: NixlCarrier, address: tuple[str, int]) -> None:
        self.channel = carrier.connect(address, WAIT_S)
        self.channel.share_memory(WAIT_S)
        self.permit = WritePermit()
        self.ended: Any = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.channel.receive(1, WAIT_S)
            self.ended = self.channel.receive_range(0, 16 * MIB, self.permit)
        except OSError as error:
            self.ended = error


@needs_nixl
def test_a_read_without_an_end_is_given_up_and_writes_nothing_later() -> None:
    """NIXL cannot call it back: when the holder goes on, its bytes still come."""
    buckets = TokenBucket(None), TokenBucket(None)
    with (
        Arena(16 * MIB) as memory,
        subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder,
    ):
        view = memory.view(0, 16 * MIB)
        carrier = NixlCarrier(TcpCarrier("127.0.0.1", view, *buckets), view, *buckets)
        try:
            assert holder.stdout is not None
            address = ("127.0.0.1", int(holder.stdout.readline()))
            reading = _Reading(carrier, address)
            _, status = os.waitpid(holder.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            reading.permit.revoke()
            reading.channel.break_off()
            reading.thread.join(WAIT_S)
            assert isinstance(reading.ended, ChannelClosedError)
            reading.channel.close()
            holder.send_signal(signal.SIGCONT)
            # The next one is through, so the holder has gone on.
            again = _Reading(carrier, address)
            again.permit.revoke()
            again.thread.join(WAIT_S)
            assert again.ended == 0
            assert not np.frombuffer(view, np.uint8).any()
            again.channel.close()
        finally:
            holder.kill()
            carrier.break_off()
            carrier.close()
            del view
