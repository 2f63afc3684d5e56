"""One worker of `bench multicast` and `bench mesh`: an arena, a data plane, and lines for orders.

No torch, no executor. Times are those of the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import xxhash

from livescale.lab.bench.peers.line_server import Job, answering, serve_lines
from livescale.transfer.formats.orders import ReceiveOrder
from livescale.transfer.links.exchange import ConnectionTerms
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.types import LayerEntry, Manifest, WorkerRef

if TYPE_CHECKING:
    from livescale.transfer.formats.sealing import Protection

_WAIT_S = 600.0
SECRET = "that of a pool for a benchmark"
_PAGE_BYTES = 4096
_POLL_S = 0.001


class Transfer:
    """What became of one order; a ReceiveListener."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.times: Job = {"layer_ns": {}}
        self.failures: list[str] = []

    def first_byte(self) -> None:
        self.times["first_byte_ns"] = time.monotonic_ns()

    def layer_arrived(self, layer: int) -> None:
        self.times["layer_ns"][layer] = time.monotonic_ns()

    def completed(self, received_bytes: int) -> None:
        self.times["completed_ns"] = time.monotonic_ns()
        self.times["received_bytes"] = received_bytes
        self.done.set()

    def failed(self, reason: str) -> None:
        self.failures.append(reason)
        self.done.set()

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        self.failed(f"{upstream}: {reason}")

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        self.failures.append(f"{upstream}: {reason}")


class _Worker:
    """Orders are answered at once; `wait` alone takes the time of a transfer."""

    def __init__(self, job: Job) -> None:
        self._arena = Arena(job["arena_bytes"])
        began_ns = time.monotonic_ns()
        options = PlaneOptions(
            host=job["address"],
            host_name=job.get("host", ""),
            protection=_protection(job),
            shm_directory=Path(job["shm_directory"]) if "shm_directory" in job else None,
            connections=ConnectionTerms(SECRET, eager_peers_max=job.get("eager_peers_max", 0)),
            uplink_bytes_per_s=job.get("uplink_bytes_per_s"),
        )
        self.plane = DataPlane(WorkerRef(job["worker"]), self._arena, options)
        self.register_ns = time.monotonic_ns() - began_ns
        self._transfers: dict[int, Transfer] = {}

    def introduce(self, job: Job) -> Job:
        """Know all peers: (number, address, port, shm path). Answers at once."""
        for number, address, port, shm_path in job["peers"]:
            self.plane.introduce(WorkerRef(number), (address, port), shm_path)
        return {}

    def connected(self, job: Job) -> Job:
        """How many connections there are once there are `peers`, or after `wait_s`."""
        until_s = time.monotonic() + job["wait_s"]
        while len(self.plane.connected()) < job["peers"] and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return {"peers": len(self.plane.connected()), "at_ns": time.monotonic_ns()}

    def make(self, job: Job) -> Job:
        """A model of random bytes at `offset_bytes`, for others to ask for."""
        sizes = layer_sizes(job["size_bytes"], job["layers"])
        draw = np.random.default_rng(job["seed"])
        entries = []
        at = 0
        for layer, size in enumerate(sizes):
            content = self._arena.view(job["offset_bytes"] + at, size)
            content[:] = draw.bytes(size)
            checksum = xxhash.xxh3_64_hexdigest(content)
            content_hash = hashlib.sha256(content).hexdigest()
            entries.append(LayerEntry(layer, at, size, (), checksum, content_hash))
            at += size
        manifest = Manifest(job["model"], json.dumps(job["model"]), "BF16", tuple(entries))
        self.plane.offer(manifest, job["offset_bytes"])
        return {"manifest": msgspec.to_builtins(manifest)}

    def receive(self, job: Job) -> Job:
        """Start a plan's load; the answer says nothing about its end."""
        order = msgspec.convert(job["order"], ReceiveOrder)
        transfer = self._transfers[order.plan] = Transfer()
        self.plane.receive(order, transfer)
        return {}

    def wait(self, job: Job) -> Job:
        """The times of a load that has ended, or why it failed."""
        transfer = self._transfers.pop(job["plan"])
        if not transfer.done.wait(_WAIT_S):
            transfer.failures.append("it does not end")
        return {**transfer.times, "failures": transfer.failures}

    def drop(self, job: Job) -> Job:
        """Hold the model no longer, nor its bytes."""
        self.plane.withdraw(msgspec.convert(job["manifest"], Manifest))
        place = self._arena.view(job["offset_bytes"], job["size_bytes"])
        place[:] = bytes(len(place))
        return {}

    def usage(self, job: Job) -> Job:
        """CPU seconds, memory and threads of this process."""
        process = psutil.Process()
        return {
            "cpu_s": time.process_time(),
            "rss_bytes": process.memory_info().rss,
            "threads": process.num_threads(),
        }


def _protection(job: Job) -> Protection | None:
    """As in a pool: with the certificate of `tls_dir`, ranges sealed if `seals`; None without."""
    if "tls_dir" not in job:
        return None
    from livescale.common.credentials import Credentials
    from livescale.transfer.formats.sealing import Protection

    credentials = Credentials(Path(job["tls_dir"]))
    return Protection(credentials, SECRET, lambda _: bool(job["seals"]))


def layer_sizes(size_bytes: int, layers: int) -> list[int]:
    """Whole pages, as even as can be, `size_bytes` or a little more together."""
    pages = -(-size_bytes // _PAGE_BYTES)
    return [(pages * (k + 1) // layers - pages * k // layers) * _PAGE_BYTES for k in range(layers)]


def load(job: Job) -> tuple[Job, Callable[[Job], Job]]:
    """A data plane that listens; the settings say where."""
    worker = _Worker(job)
    host, port = worker.plane.address
    settings = {
        "address": host,
        "port": port,
        "shm_path": worker.plane.shm_path,
        "register_ns": worker.register_ns,
    }
    return settings, answering(worker)


if __name__ == "__main__":
    serve_lines(load)
