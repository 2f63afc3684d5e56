"""A small world of data planes on 127.0.0.1 for the tests: planes, arenas, recorded news."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import xxhash

from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane
from livescale.transfer.orders import ReceiveOrder, SendOrder
from livescale.types import LayerEntry, Manifest, WorkerRef

WAIT_S = 20.0
ALIGN_BYTES = 64


class Recorder:
    """Listens to one order and keeps the news in the order it came."""

    def __init__(self) -> None:
        self.news: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()

    def first_byte(self) -> None:
        self._note("first_byte")

    def layer_arrived(self, layer: int) -> None:
        self._note("layer_arrived", layer)

    def completed(self, received_bytes: int) -> None:
        self._note("completed", received_bytes)

    def failed(self, reason: str) -> None:
        self._note("failed", reason)

    def forward_ended(self, sent_bytes: int, error: str | None) -> None:
        self._note("forward_ended", sent_bytes, error)

    def ended(self, sent_bytes: int, error: str | None) -> None:
        self._note("ended", sent_bytes, error)

    def _note(self, *news: Any) -> None:
        with self._changed:
            self.news.append(news)
            self._changed.notify_all()

    def wait(self, *names: str) -> tuple[Any, ...]:
        """The first news with one of these names."""
        found: list[tuple[Any, ...]] = []

        def is_there() -> bool:
            found[:] = [news for news in self.news if news[0] in names]
            return bool(found)

        with self._changed:
            assert self._changed.wait_for(is_there, WAIT_S), f"no {names} in {self.news}"
        return found[0]

    def verdict(self) -> tuple[Any, ...]:
        """What ended the receiving."""
        return self.wait("completed", "failed")

    def check_completed(self, manifest: Manifest) -> None:
        """Every layer once and in order, then completed, all bytes counted, nothing after it."""
        assert self.verdict() == ("completed", total_bytes(manifest)), self.news
        expected: list[tuple[Any, ...]] = [
            ("layer_arrived", entry.layer) for entry in manifest.layers
        ]
        expected.append(("completed", total_bytes(manifest)))
        filled = [entry.layer for entry in manifest.layers if entry.size_bytes]
        if filled:
            expected.insert(filled[0], ("first_byte",))
        assert [news for news in self.news if news[0] != "forward_ended"] == expected

    def check_failed(self, *words: str) -> str:
        """Failed, told once and last; the reason has all the words."""
        name, reason = self.verdict()
        assert name == "failed", self.news
        own = [news for news in self.news if news[0] != "forward_ended"]
        assert own[-1] == ("failed", reason)
        assert all(word in reason for word in words), (reason, words)
        return str(reason)


class World:
    """`count` workers w0…, each with its own arena and data plane."""

    def __init__(self, count: int, arena_bytes: int, **limits: Any) -> None:
        """A limit is given to all planes, or, as a list, to each plane its own."""
        self._threads_before = set(threading.enumerate())
        self.refs = [WorkerRef(index) for index in range(count)]
        self.arenas = [Arena(arena_bytes) for _ in self.refs]
        self.chunks: list[list[tuple[int, int, int, int]]] = [[] for _ in self.refs]
        self._chunk_arrived = threading.Condition()
        self.planes = [
            DataPlane(
                ref,
                self.arenas[index],
                chunk_received=self._observer(index),
                **{
                    name: value[index] if isinstance(value, list) else value
                    for name, value in limits.items()
                },
            )
            for index, ref in enumerate(self.refs)
        ]

    def _observer(self, index: int) -> Any:
        def observe(layer: int, offset_bytes: int, size_bytes: int, at_ns: int) -> None:
            with self._chunk_arrived:
                self.chunks[index].append((layer, offset_bytes, size_bytes, at_ns))
                self._chunk_arrived.notify_all()

        return observe

    def wait_chunks(self, index: int, count: int) -> None:
        """The worker has received `count` chunks, of whatever plan."""
        with self._chunk_arrived:
            assert self._chunk_arrived.wait_for(lambda: len(self.chunks[index]) >= count, WAIT_S)

    def link(self, sender: int, receiver: int) -> None:
        self.planes[sender].connect(self.refs[receiver], self.planes[receiver].address)

    def link_chain(self, *nodes: int) -> None:
        for sender, receiver in itertools.pairwise(nodes):
            self.link(sender, receiver)

    def receive(
        self, plan: int, manifest: Manifest, node: int, upstream: int, forward_to: int | None
    ) -> Recorder:
        recorder = Recorder()
        order = ReceiveOrder(
            plan,
            manifest,
            self.refs[upstream],
            None if forward_to is None else self.refs[forward_to],
        )
        self.planes[node].receive(order, recorder)
        return recorder

    def send(self, plan: int, manifest: Manifest, node: int, target: int) -> Recorder:
        recorder = Recorder()
        self.planes[node].send(SendOrder(plan, manifest, self.refs[target]), recorder)
        return recorder

    def chain(self, plan: int, manifest: Manifest, *nodes: int) -> list[Recorder]:
        """Recorders of the sender and of each target."""
        targets = [
            self.receive(
                plan,
                manifest,
                node,
                upstream=nodes[at],
                forward_to=nodes[at + 2] if at + 2 < len(nodes) else None,
            )
            for at, node in enumerate(nodes[1:])
        ]
        return [self.send(plan, manifest, nodes[0], nodes[1]), *targets]

    def holds(self, node: int, manifest: Manifest) -> bool:
        """The worker's bytes are those that the manifest describes."""
        return all(
            checksum(self.arenas[node].view(entry.offset_bytes, entry.size_bytes)) == entry.checksum
            for entry in manifest.layers
        )

    def close(self) -> None:
        for plane in self.planes:
            plane.close()
        left = set(threading.enumerate()) - self._threads_before
        assert not left, f"threads are left: {sorted(thread.name for thread in left)}"
        for arena in self.arenas:
            arena.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        layers.append(LayerEntry(layer, offset, size, (), checksum(data), ""))
        offset = -(-(offset + size) // ALIGN_BYTES) * ALIGN_BYTES
    return Manifest(f"model-{seed}", "{}", "float32", tuple(layers))
