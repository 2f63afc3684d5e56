"""Data planes in processes that load parameters and send each other parcels at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import pytest

from livescale.lab.testbed.bed import Testbed
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromWorker, WorkerRef
from slowness import patient

MODEL_BYTES = 32 << 20
_CHUNK_BYTES = 64 << 10
_PARCEL_BYTES = 4 << 20
_PARCELS = 4
_TRIES = 5
#: between a parcel that goes ahead and one that has half of the link
_AHEAD = 1.25
_PROGRAM = Path(__file__).with_name("plane_process.py")


class Pair(NamedTuple):
    """Numbers of hosts."""

    sender: int
    receiver: int


class Times(NamedTuple):
    """Of a load, and the median of the parcels beside it; 0 where there were none."""

    load_s: float
    parcel_s: float


class BedPlanes:
    """One data plane per address, all connected. `start` runs a program, given in words, where the
    address of this number is."""

    def __init__(
        self,
        addresses: Sequence[str],
        start: Callable[..., Any],
        rates: Sequence[int],
        size_bytes: int,
    ) -> None:
        self.rates = rates
        self._plans = 0
        self._processes = []
        for number, address in enumerate(addresses):
            words = [sys.executable, str(_PROGRAM), str(number), address]
            words += [json.dumps(rates[number]), str(size_bytes)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._processes.append(start(number, words, **pipes))
        ports = [self._answer(number) for number in range(len(addresses))]
        known = list(zip(range(len(ports)), addresses, ports, strict=True))
        for number in range(len(known)):
            self._ask(number, "introduce", peers=known[number + 1 :])
        self._manifest = self._ask(0, "make", size_bytes=size_bytes)
        self._size_bytes = size_bytes

    def measure(
        self,
        load: Pair | None,
        parcels: Pair | None,
        *,
        chunk_bytes: int,
        parcel_bytes: int = 0,
        every_ns: int = 0,
        count: int = 0,
    ) -> Times:
        """A load of the first host's model, and so many parcels at that pace, both from now on."""
        began_ns = 0
        if load is not None:
            self._plans += 1
            chunks = ChunkGrid((self._size_bytes,), chunk_bytes).all()
            feed = Feed(FromWorker(WorkerRef(load.sender)), chunks)
            began_ns = self._ask(
                load.receiver,
                "load",
                plan=self._plans,
                manifest=self._manifest,
                feed=msgspec.to_builtins(feed),
                chunk_bytes=chunk_bytes,
            )
        if parcels is not None:
            order = {"size_bytes": parcel_bytes, "every_ns": every_ns, "count": count}
            self._tell(parcels.sender, "send", peer=parcels.receiver, **order)
        load_s = parcel_s = 0.0
        if load is not None:
            load_s = (self._ask(load.receiver, "loaded", manifest=self._manifest) - began_ns) / 1e9
        if parcels is not None:
            sent_ns = self._answer(parcels.sender)
            came_ns = self._ask(parcels.receiver, "came", count=count)
            pairs = zip(sent_ns, came_ns, strict=True)
            parcel_s = median((came - sent) / 1e9 for sent, came in pairs)
        return Times(load_s, parcel_s)

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            assert process.wait(patient(60)) == 0
            process.stdout.close()

    def _ask(self, number: int, do: str, **order: Any) -> Any:
        self._tell(number, do, **order)
        return self._answer(number)

    def _tell(self, number: int, do: str, **order: Any) -> None:
        stdin = self._processes[number].stdin
        stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        stdin.flush()

    def _answer(self, number: int) -> Any:
        line = self._processes[number].stdout.readline()
        assert line, f"the data plane of host {number} has ended"
        return json.loads(line)


@contextmanager
def planes(testbed: Testbed, rate: int, size_bytes: int) -> Iterator[BedPlanes]:
    """On the hosts of a testbed. They end with the block."""
    hosts = testbed.hosts

    def start(number: int, words: list[str], **pipes: Any) -> Any:
        return testbed.exec(hosts[number].name, words, **pipes)

    addresses = [host.devices[0].address for host in hosts]
    made = BedPlanes(addresses, start, [rate] * len(hosts), size_bytes)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def local_planes(rates: Sequence[int], size_bytes: int) -> Iterator[BedPlanes]:
    """On this machine: nothing but their token buckets limits them. They end with the block."""

    def start(number: int, words: list[str], **pipes: Any) -> Any:
        return subprocess.Popen(words, **pipes)

    made = BedPlanes(["127.0.0.1"] * len(rates), start, rates, size_bytes)
    try:
        yield made
    finally:
        made.close()


def check_two_classes(made: BedPlanes, load: Pair, parcels: Pair, rate: int) -> None:
    """KV takes a third of a link of `rate`. It takes about as long as alone, where equal shares
    would double that, and the load waits for it: how long exactly, `bench kv` measures. What else
    the machine does may be in the way of one measurement."""
    every_ns = 3 * _PARCEL_BYTES * 1_000_000_000 // rate
    kv = {"parcel_bytes": _PARCEL_BYTES, "every_ns": every_ns, "count": _PARCELS}
    found = []
    for _ in range(_TRIES):
        load_alone = made.measure(load, None, chunk_bytes=_CHUNK_BYTES).load_s
        kv_alone = made.measure(None, parcels, chunk_bytes=_CHUNK_BYTES, **kv).parcel_s
        both = made.measure(load, parcels, chunk_bytes=_CHUNK_BYTES, **kv)
        found.append((both.load_s / load_alone, both.parcel_s / kv_alone))
        # A link carries no more than it can.
        assert min(load_alone, both.load_s) > 0.9 * MODEL_BYTES / rate
        if found[-1][1] < _AHEAD < found[-1][0]:
            return
    pytest.fail(f"parameters took and KV took so many times as long: {found}")
