"""A small world of data planes on 127.0.0.1 for the tests: planes, arenas, recorded news."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any

import xxhash

from livescale.transfer.carriers.tcp import TcpChannel
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats.frames import HEADER_BYTES, Frame, decode_header
from livescale.transfer.formats.greeting import Greeting
from livescale.transfer.formats.orders import ReceiveOrder
from livescale.transfer.links.exchange import ConnectionTerms
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromWorker, LayerEntry, Manifest, WorkerRef

WAIT_S = 20.0
ALIGN_BYTES = 64


class Recorder:
    """Listens to one order and keeps the news in the order it came."""

    def __init__(self) -> None:
        self.news: list[tuple[Any, ...]] = []
        #: called with each of the news, in the thread that brings it
        self.on_news: Any = None
        self._changed = threading.Condition()

    def first_byte(self) -> None:
        self._note("first_byte")

    def layer_arrived(self, layer: int) -> None:
        self._note("layer_arrived", layer)

    def completed(self, received_bytes: int) -> None:
        self._note("completed", received_bytes)

    def failed(self, reason: str) -> None:
        self._note("failed", reason)

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        self._note("feed_failed", upstream, reason)

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        self._note("feed_stalled", upstream, reason)

    def _note(self, *news: Any) -> None:
        with self._changed:
            self.news.append(news)
            self._changed.notify_all()
        if self.on_news is not None:
            self.on_news(*news)

    def wait(self, *names: str, count: int = 1) -> tuple[Any, ...]:
        """The news of that count with one of these names."""
        found: list[tuple[Any, ...]] = []

        def is_there() -> bool:
            found[:] = [news for news in self.news if news[0] in names]
            return len(found) >= count

        with self._changed:
            assert self._changed.wait_for(is_there, WAIT_S), f"no {names} in {self.news}"
        return found[count - 1]

    def verdict(self) -> tuple[Any, ...]:
        """What ended the receiving."""
        return self.wait("completed", "failed")

    def check_completed(self, manifest: Manifest, received_bytes: int | None = None) -> None:
        """Every layer once, then completed, all bytes counted, nothing after it."""
        name, received = self.verdict()
        assert name == "completed", self.news
        assert received == (total_bytes(manifest) if received_bytes is None else received_bytes)
        assert self.news[-1][0] == "completed"
        layers = [news[1] for news in self.news if news[0] == "layer_arrived"]
        assert sorted(layers) == [entry.layer for entry in manifest.layers]
        names = [news[0] for news in self.news]
        assert names.count("first_byte") == bool(total_bytes(manifest))

    def check_failed(self, *words: str) -> str:
        """Failed, told once and last; the reason has all the words."""
        name, reason = self.verdict()
        assert name == "failed", self.news
        assert self.news[-1] == ("failed", reason)
        assert all(word in reason for word in words), (reason, words)
        return str(reason)


class World:
    """`count` workers w0…, each with its own memory and data plane, all introduced."""

    def __init__(
        self, count: int, arena_bytes: int, are_introduced: bool = True, **limits: Any
    ) -> None:
        """A limit is given to all planes, or, as a list, to each plane its own."""
        self._threads_before = set(threading.enumerate())
        self.refs = [WorkerRef(index) for index in range(count)]
        self.arenas = [Arena(arena_bytes) for _ in self.refs]
        self._connections_before = open_descriptors("socket", "anon_inode")
        #: per worker: (plan, chunk, bytes, at_ns)
        self.chunks: list[list[tuple[int, int, int, int]]] = [[] for _ in self.refs]
        self._chunk_arrived = threading.Condition()
        self.planes = [
            self._plane(
                index,
                **{
                    name: value[index] if isinstance(value, list) else value
                    for name, value in limits.items()
                },
            )
            for index in range(count)
        ]
        for plane in self.planes:
            for peer in self.planes:
                if peer is not plane and are_introduced:
                    plane.introduce(peer.worker, peer.address, peer.shm_path)

    def _plane(
        self, index: int, on_parcel: Any = None, on_disconnected: Any = None, **limits: Any
    ) -> DataPlane:
        names = limits.keys() & set(ConnectionTerms.__struct_fields__)
        terms = ConnectionTerms(**{name: limits.pop(name) for name in names})
        return DataPlane(
            self.refs[index],
            self.arenas[index],
            PlaneOptions(connections=terms, **limits),
            on_parcel=on_parcel,
            on_disconnected=on_disconnected,
            chunk_received=self._observer(index),
        )

    def _observer(self, index: int) -> Any:
        def observe(plan: int, chunk: int, size_bytes: int, at_ns: int) -> None:
            with self._chunk_arrived:
                self.chunks[index].append((plan, chunk, size_bytes, at_ns))
                self._chunk_arrived.notify_all()

        return observe

    def wait_chunks(self, index: int, count: int) -> None:
        """The worker has received `count` chunks, of whatever plan."""
        with self._chunk_arrived:
            assert self._chunk_arrived.wait_for(lambda: len(self.chunks[index]) >= count, WAIT_S)

    def check_sent(self, index: int, size_bytes: int) -> None:
        """The worker counts so many bytes of parameters as sent: a sender counts a chunk after it
        has gone out, which may be after its receiver has completed."""
        usage, pause = self.planes[index].usage, threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if usage().parameter_sent_bytes >= size_bytes:
                break
            pause.wait(0.01)
        assert usage().parameter_sent_bytes == size_bytes

    def receive(
        self,
        plan: int,
        manifest: Manifest,
        node: int,
        feeds: Sequence[Feed],
        chunk_bytes: int,
        recorder: Recorder | None = None,
        **more: Any,
    ) -> Recorder:
        recorder = recorder or Recorder()
        order = ReceiveOrder(plan, manifest, chunk_bytes, tuple(feeds), **more)
        self.planes[node].receive(order, recorder)
        return recorder

    def feed(
        self,
        node: int,
        manifest: Manifest,
        chunk_bytes: int,
        *chunks: ChunkRange,
        window: int | None = None,
    ) -> Feed:
        """From that worker: these chunks, by default all."""
        return Feed(
            FromWorker(self.refs[node]), chunks or grid(manifest, chunk_bytes).all(), window
        )

    def chain(self, plan: int, manifest: Manifest, chunk_bytes: int, *nodes: int) -> list[Recorder]:
        """Recorders of the targets, each fed by the one before it."""
        return [
            self.receive(
                plan, manifest, node, [self.feed(nodes[at], manifest, chunk_bytes)], chunk_bytes
            )
            for at, node in enumerate(nodes[1:])
        ]

    def holds(self, node: int, manifest: Manifest, offset_bytes: int = 0) -> bool:
        """The worker's bytes are those that the manifest describes."""
        arena = self.arenas[node]
        return all(
            checksum(arena.view(offset_bytes + entry.offset_bytes, entry.size_bytes))
            == entry.checksum
            for entry in manifest.layers
        )

    def close(self) -> None:
        for plane in self.planes:
            plane.close()
        left = set(threading.enumerate()) - self._threads_before
        assert not left, f"threads are left: {sorted(thread.name for thread in left)}"
        assert open_descriptors("socket", "anon_inode") == self._connections_before
        for arena in self.arenas:
            arena.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()


def open_descriptors(*kinds: str) -> int:
    """How many descriptors of these kinds ("socket", "/memfd") this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(kinds)
    return found


def grid(manifest: Manifest, chunk_bytes: int) -> ChunkGrid:
    return ChunkGrid([entry.size_bytes for entry in manifest.layers], chunk_bytes)


def checksum(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def total_bytes(manifest: Manifest) -> int:
    return sum(entry.size_bytes for entry in manifest.layers)


def write_model(
    arena: Arena, layer_bytes: list[int], seed: int = 0, base_bytes: int = 0
) -> Manifest:
    """Random layers written into the arena, aligned, and their manifest."""
    rng = random.Random(seed)
    layers = []
    offset = base_bytes
    for layer, size in enumerate(layer_bytes):
        data = rng.randbytes(size)
        arena.view(offset, size)[:] = data
        content_hash = hashlib.sha256(data).hexdigest()
        layers.append(LayerEntry(layer, offset, size, (), checksum(data), content_hash))
        offset = -(-(offset + size) // ALIGN_BYTES) * ALIGN_BYTES
    return Manifest(f"model-{seed}", "{}", "float32", tuple(layers))


def open_as(world: World, node: int, ref: WorkerRef) -> socket.socket:
    """A raw connection that has introduced itself to the worker as `ref`."""
    raw = socket.create_connection(world.planes[node].address, WAIT_S)
    channel = TcpChannel(raw, memoryview(b""), TokenBucket(None), TokenBucket(None))
    try:
        Greeting(ref, "", WAIT_S).call(channel, world.refs[node])
    except OSError:
        raw.close()
        raise
    return raw


def read_frame(raw: socket.socket) -> tuple[Frame, bytes]:
    """The next frame on a raw connection, and its payload."""
    raw.settimeout(WAIT_S)
    frame = decode_header(_read_all(raw, HEADER_BYTES))
    return frame, _read_all(raw, frame.payload_bytes)


def _read_all(raw: socket.socket, size_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        part = raw.recv(size_bytes - len(parts))
        assert part, "the connection has ended"
        parts += part
    return bytes(parts)
