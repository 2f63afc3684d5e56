"""How a model gets into this process' memory: by feeds from peers, or read from storage.

The bytes are moved by `transfer` and by `engine.model_files`; which feeds there are is decided by
the controller. Workers (into the arena) and host agents (into a region) use the same fetch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from livescale.chunks import Feed
from livescale.engine.errors import ModelError
from livescale.engine.model_files import read_layers
from livescale.member.inputs import (
    AllCame,
    FeedEnded,
    FetchFailed,
    FirstByteCame,
    LayerCame,
    MemberInput,
)
from livescale.transfer.data_plane import DataPlane
from livescale.transfer.orders import ContentChecks, ReceiveOrder
from livescale.types import FromStorage, FromWorker, Manifest, PlanId, Value, WorkerRef

_log = logging.getLogger(__name__)


class FetchOrder(Value, frozen=True):
    """What shall come where: the model lies at `offset_bytes` of the data plane's memory, where
    `present_layers` of it are already, verified. Feeds from storage read its files in `directory`.
    With ALL `content_checks` files are checked, too.
    """

    plan: PlanId
    attempt: int
    manifest: Manifest
    chunk_bytes: int
    directory: str | None = None
    offset_bytes: int = 0
    storage_bytes_per_s: int | None = None
    present_layers: tuple[int, ...] = ()
    content_checks: ContentChecks = ContentChecks.NETWORK


class ModelFetch:
    """One model on its way into one place, passed on to others while it comes.

    Its methods are called by one thread.
    """

    def __init__(
        self,
        order: FetchOrder,
        memory: memoryview,
        data_plane: DataPlane,
        post: Callable[[MemberInput], None],
    ) -> None:
        """`memory` is the data plane's from the order's offset on. `post` takes the news, from
        other threads; it must not block. Nothing follows AllCame or FetchFailed."""
        self.order = order
        self.feeds: tuple[Feed, ...] = ()
        self._memory = memory
        self._data_plane = data_plane
        self._post = post
        self._way: _FromPeers | _FromFiles | None = None
        self._lock = threading.Lock()
        self._present: dict[int, None] = dict.fromkeys(order.present_layers)
        self._has_begun = False

    def start(self, feeds: tuple[Feed, ...]) -> None:
        """Begin."""
        if self.order.present_layers:
            self.first_byte()
        for layer in self.order.present_layers:
            self._post(LayerCame(self.order.plan, layer))
        self._make_way(feeds)

    def _make_way(self, feeds: tuple[Feed, ...]) -> None:
        self.feeds, directory = feeds, self.order.directory
        if any(isinstance(feed.upstream, FromStorage) for feed in feeds):
            assert directory is not None, f"plan {self.order.plan} reads storage, but not where"
            self._way = _FromFiles(self, Path(directory))
        else:
            self._way = _FromPeers(self)
        self._way.begin()

    def amend(self, feeds: tuple[Feed, ...]) -> None:
        """Get what is missing by these feeds. Layers that are there stay.

        With a feed from storage everything that is missing is read from there: no peer is waited
        for where the files can be had.
        """
        if isinstance(self._way, _FromFiles):
            return  # it gets everything already
        if all(isinstance(feed.upstream, FromWorker) for feed in feeds):
            self.feeds = feeds
            self._data_plane.amend(self.order.plan, feeds)
            return
        if self._way is not None:
            self._way.end()
        self._make_way(feeds)

    def stop(self) -> None:
        """Forget the model: when this returns these bytes are neither written nor read any more.

        News that were on their way may still come.
        """
        if self._way is not None:
            self._way.end()
            self._way = None
        self._data_plane.withdraw(self.order.manifest)

    # -- news of the two ways (other threads) ---------------------------------------------------

    def present(self) -> tuple[int, ...]:
        """Layers that are complete."""
        with self._lock:
            return tuple(sorted(self._present))

    def first_byte(self) -> None:
        with self._lock:
            has_begun, self._has_begun = self._has_begun, True
        if not has_begun:
            self._post(FirstByteCame(self.order.plan))

    def layer_arrived(self, layer: int) -> None:
        with self._lock:
            self._present[layer] = None
        self._post(LayerCame(self.order.plan, layer))

    def completed(self) -> None:
        self._post(AllCame(self.order.plan))

    def failed(self, reason: str) -> None:
        self._post(FetchFailed(self.order.plan, reason))

    def feed_failed(self, upstream: WorkerRef, reason: str, is_stalled: bool) -> None:
        self._post(FeedEnded(self.order.plan, upstream, reason, is_stalled))

    @property
    def memory(self) -> memoryview:
        return self._memory

    @property
    def data_plane(self) -> DataPlane:
        return self._data_plane


class _FromPeers:
    """Layers come from workers and agents. It is the data plane's ReceiveListener."""

    def __init__(self, fetch: ModelFetch) -> None:
        self._fetch = fetch
        self._has_ended = False

    def begin(self) -> None:
        order = self._fetch.order
        self._fetch.data_plane.receive(
            ReceiveOrder(
                plan=order.plan,
                attempt=order.attempt,
                manifest=order.manifest,
                chunk_bytes=order.chunk_bytes,
                feeds=self._fetch.feeds,
                offset_bytes=order.offset_bytes,
                present_layers=self._fetch.present(),
                content_checks=order.content_checks,
            ),
            self,
        )

    def end(self) -> None:
        self._has_ended = True
        self._fetch.data_plane.abort(self._fetch.order.plan)

    def first_byte(self) -> None:
        self._fetch.first_byte()

    def layer_arrived(self, layer: int) -> None:
        self._fetch.layer_arrived(layer)

    def completed(self, received_bytes: int) -> None:
        self._fetch.completed()

    def failed(self, reason: str) -> None:
        # Its own end is no news: the fetch goes on another way, or is over.
        if not self._has_ended:
            self._fetch.failed(reason)

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        if not self._has_ended:
            self._fetch.feed_failed(upstream, reason, False)

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        if not self._has_ended:
            self._fetch.feed_failed(upstream, reason, True)


class _FromFiles:
    """Layers are read from the model's directory by a thread; peers are fed while it reads."""

    def __init__(self, fetch: ModelFetch, directory: Path) -> None:
        self._fetch = fetch
        self._directory = directory
        self._is_over = threading.Event()
        order = fetch.order
        self._filling = fetch.data_plane.fill(order.manifest, order.chunk_bytes, order.offset_bytes)
        self._thread = threading.Thread(
            target=self._read, name=f"plan {order.plan} reads", daemon=True
        )

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stops at the next layer; no byte is written when this returns."""
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        fetch, manifest = self._fetch, self._fetch.order.manifest
        present = fetch.present()
        for layer in present:
            self._filling.layer_done(layer)
        missing = {entry.layer for entry in manifest.layers} - set(present)
        try:
            fetch.first_byte()
            layers = read_layers(
                self._directory,
                manifest,
                fetch.memory,
                missing,
                by_content=fetch.order.content_checks is ContentChecks.ALL,
            )
            # Closed before the thread ends: it reads some layers ahead.
            assert isinstance(layers, Generator)
            with contextlib.closing(layers):
                for layer in self._paced(layers):
                    if self._is_over.is_set():
                        self._filling.fail("the load was stopped")
                        return
                    self._filling.layer_done(layer)
                    fetch.layer_arrived(layer)
        except ModelError as error:
            self._filling.fail(str(error))
            fetch.failed(str(error))
        except Exception as error:
            # A bug must not leave a load that never ends.
            _log.exception("plan %s: reading %s", fetch.order.plan, self._directory)
            self._filling.fail(repr(error))
            fetch.failed(f"{self._directory}: {error!r}")
        else:
            fetch.completed()

    def _paced(self, layers: Iterator[int]) -> Iterator[int]:
        """The layers as they are read, no faster than storage is configured to be."""
        order = self._fetch.order
        started, read_bytes = time.monotonic(), 0
        for layer in layers:
            if order.storage_bytes_per_s is not None:
                read_bytes += order.manifest.layers[layer].size_bytes
                due = started + read_bytes / order.storage_bytes_per_s
                self._is_over.wait(max(0.0, due - time.monotonic()))
            yield layer
