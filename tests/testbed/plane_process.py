"""A data plane in a process of its own, on an emulated host: a JSON order per line, an answer each.

Times are those of the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from typing import Any

import msgspec
import xxhash

from livescale.transfer.formats.orders import ReceiveOrder
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.chunks import Feed
from livescale.values.types import LayerEntry, Manifest, WorkerRef

_WAIT_S = 60.0


class _Load:
    """What became of one order; a ReceiveListener."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.completed_ns = 0
        self.failures: list[str] = []

    def first_byte(self) -> None:
        """Only the end is measured."""

    def layer_arrived(self, layer: int) -> None:
        """Only the end is measured."""

    def completed(self, received_bytes: int) -> None:
        self.completed_ns = time.monotonic_ns()
        self.done.set()

    def failed(self, reason: str) -> None:
        self.failures.append(reason)
        self.done.set()

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        self.failed(f"{upstream}: {reason}")

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        """Serving traffic may have the whole link for a while."""


class PlaneProcess:
    """Orders are methods; their names stand in `do`."""

    def __init__(self, number: int, address: str, rate: int | None, size_bytes: int) -> None:
        self._arena = Arena(size_bytes)
        self._came = threading.Condition()
        self._parcels_ns: list[int] = []
        self._load = _Load()
        self.plane = DataPlane(
            WorkerRef(number),
            self._arena,
            PlaneOptions(host=address, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate),
            on_parcel=self._parcel_came,
        )

    def introduce(self, peers: list[tuple[int, str, int]]) -> None:
        """Know these, and be connected with them."""
        for number, address, port in peers:
            self.plane.introduce(WorkerRef(number), (address, port))
            self.plane.post(WorkerRef(number), b"")

    def make(self, size_bytes: int) -> Any:
        """A model of one layer, and its manifest."""
        content = self._arena.view(0, size_bytes)
        content[:] = bytes(size_bytes)
        sums = xxhash.xxh3_64_hexdigest(content), hashlib.sha256(content).hexdigest()
        manifest = Manifest("m", "{}", "BF16", (LayerEntry(0, 0, size_bytes, (), *sums),))
        self.plane.offer(manifest)
        return msgspec.to_builtins(manifest)

    def load(self, plan: int, manifest: Any, feed: Any, chunk_bytes: int) -> int:
        """Begins a load; returns when."""
        self._load = _Load()
        feeds = (msgspec.convert(feed, Feed),)
        order = ReceiveOrder(plan, msgspec.convert(manifest, Manifest), chunk_bytes, feeds)
        began_ns = time.monotonic_ns()
        self.plane.receive(order, self._load)
        return began_ns

    def loaded(self, manifest: Any) -> int:
        """Waits for its end, forgets the model, and returns when that was."""
        assert self._load.done.wait(_WAIT_S), "the load does not end"
        assert not self._load.failures, self._load.failures
        self.plane.withdraw(msgspec.convert(manifest, Manifest))
        return self._load.completed_ns

    def send(self, peer: int, size_bytes: int, every_ns: int, count: int) -> list[int]:
        """So many parcels at that pace; returns when each was given to the data plane."""
        body, pause, sent_ns = bytes(size_bytes), threading.Event(), []
        for number in range(count):
            due_ns = (sent_ns[0] if sent_ns else time.monotonic_ns()) + number * every_ns
            pause.wait(max(0, due_ns - time.monotonic_ns()) / 1e9)
            sent_ns.append(time.monotonic_ns())
            self.plane.post(WorkerRef(peer), body, _WAIT_S)
        return sent_ns

    def came(self, count: int) -> list[int]:
        """When so many parcels with bytes had come, each of them."""
        with self._came:
            assert self._came.wait_for(lambda: len(self._parcels_ns) >= count, _WAIT_S)
            found, self._parcels_ns = self._parcels_ns, []
        return found

    def _parcel_came(self, peer: WorkerRef, body: bytes) -> None:
        with self._came:
            if body:
                self._parcels_ns.append(time.monotonic_ns())
                self._came.notify_all()


def main(number: str, address: str, rate: str, size_bytes: str) -> None:
    process = PlaneProcess(int(number), address, json.loads(rate), int(size_bytes))
    print(json.dumps(process.plane.address[1]), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(process, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)
    process.plane.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
