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

import msgspec

from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_files import read_layers
from livescale.member import inputs
from livescale.transfer.formats.orders import ABORTED, ContentChecks, ReceiveOrder
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.chunks import Feed
from livescale.values.types import FromStorage, FromWorker, WorkerRef

_log = logging.getLogger(__name__)


class ModelFetch:
    """One model on its way into one place, passed on to others while it comes. It is the data
    plane's ReceiveListener; all its other methods are called by one thread.
    """

    def __init__(
        self,
        order: ReceiveOrder,
        memory: memoryview,
        data_plane: DataPlane,
        post: Callable[[inputs.MemberInput], None],
        *,
        directory: str | None = None,
        storage_bytes_per_s: int | None = None,
    ) -> None:
        """`memory` is the data plane's from the order's offset on. Feeds from storage read the
        model's files in `directory`. `post` takes the news, from other threads; it must not block.
        Nothing follows AllCame or FetchFailed."""
        #: with the feeds of now
        self.order = order
        self.memory = memory
        self.data_plane = data_plane
        self.directory = directory
        self.storage_bytes_per_s = storage_bytes_per_s
        self._post = post
        #: while the files are read, and no peers asked
        self._reading: _Reading | None = None
        self._lock = threading.Lock()
        self._present: dict[int, None] = dict.fromkeys(order.present_layers)
        self._has_begun = False
        #: what came by feeds that were ended
        self._earlier_bytes = 0

    def start(self) -> None:
        """Begin."""
        if self.order.present_layers:
            self.first_byte()
        for layer in self.order.present_layers:
            self._post(inputs.LayerCame(self.order.plan, layer))
        self._go_on(self.order.feeds)

    def amend(self, feeds: tuple[Feed, ...]) -> None:
        """Get what is missing by these feeds. Layers that are there stay.

        With a feed from storage everything that is missing is read from there: no peer is waited
        for where the files can be had.
        """
        if self._reading is not None:
            return  # it gets everything already
        if len(self.present()) == len(self.order.manifest.layers):
            return  # everything is there, and AllCame is on its way
        if all(isinstance(feed.upstream, FromWorker) for feed in feeds):
            self.data_plane.amend(self.order.plan, feeds)
            return
        self._earlier_bytes += self.data_plane.abort(self.order.plan)
        self._go_on(feeds)

    def stop(self) -> None:
        """Forget the model: when this returns these bytes are neither written nor read any more.

        News that were on their way may still come.
        """
        if self._reading is not None:
            self._reading.end()
        else:
            self.data_plane.abort(self.order.plan)
        self.data_plane.withdraw(self.order.manifest)

    def _go_on(self, feeds: tuple[Feed, ...]) -> None:
        present = self.present()
        self.order = msgspec.structs.replace(self.order, feeds=feeds, present_layers=present)
        if any(isinstance(feed.upstream, FromStorage) for feed in feeds):
            try:
                self._reading = _Reading(self)
            except ValueError as error:
                # Reads of the feeds from before have not ended, and may write there.
                self.failed(f"plan {self.order.plan}: {error}")
                return
            self._reading.begin()
        else:
            self.data_plane.receive(self.order, self)

    # -- news of the data plane, or of the reading (other threads) ------------------------------

    def present(self) -> tuple[int, ...]:
        """Layers that are complete."""
        with self._lock:
            return tuple(sorted(self._present))

    def first_byte(self) -> None:
        with self._lock:
            has_begun, self._has_begun = self._has_begun, True
        if not has_begun:
            self._post(inputs.FirstByteCame(self.order.plan))

    def layer_arrived(self, layer: int) -> None:
        with self._lock:
            self._present[layer] = None
        self._post(inputs.LayerCame(self.order.plan, layer))

    def completed(self, received_bytes: int) -> None:
        self._post(inputs.AllCame(self.order.plan, self._earlier_bytes + received_bytes))

    def failed(self, reason: str) -> None:
        # What was ended here is no news: the fetch goes on another way, or is over.
        if reason != ABORTED:
            self._post(inputs.FetchFailed(self.order.plan, reason))

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        self._post(inputs.FeedEnded(self.order.plan, upstream, reason, is_stalled=False))

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        self._post(inputs.FeedEnded(self.order.plan, upstream, reason, is_stalled=True))


class _Reading:
    """Layers are read from the model's directory by a thread; peers are fed while it reads."""

    def __init__(self, fetch: ModelFetch) -> None:
        order = fetch.order
        assert fetch.directory is not None, f"plan {order.plan} reads storage, but not where"
        self._fetch = fetch
        self._directory = Path(fetch.directory)
        self._is_over = threading.Event()
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
        read_bytes = 0
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
                    read_bytes += manifest.layers[layer].size_bytes
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
            fetch.completed(read_bytes)

    def _paced(self, layers: Iterator[int]) -> Iterator[int]:
        """The layers as they are read, no faster than storage is configured to be."""
        manifest, rate = self._fetch.order.manifest, self._fetch.storage_bytes_per_s
        started, read_bytes = time.monotonic(), 0
        for layer in layers:
            if rate is not None:
                read_bytes += manifest.layers[layer].size_bytes
                due = started + read_bytes / rate
                self._is_over.wait(max(0.0, due - time.monotonic()))
            yield layer
