"""A model on its way into memory, by peers and from storage, when its feeds are amended."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest
from transfer_world import World, grid

from livescale.engine.files.model_files import read_manifest
from livescale.member.inputs import AllCame, LayerCame, MemberInput
from livescale.runtime.member_process.model_fetch import ModelFetch
from livescale.transfer.formats.orders import ReceiveOrder
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromStorage, Manifest
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
CHUNK_BYTES = 16 << 10


class Fetched:
    """The fetch of a model into the memory of a worker, with its news."""

    def __init__(
        self,
        world: World,
        node: int,
        manifest: Manifest,
        path: Path,
        feed: Feed,
        present_layers: tuple[int, ...] = (),
    ) -> None:
        self.news: queue.Queue[MemberInput] = queue.Queue()
        order = ReceiveOrder(
            1 + node, manifest, CHUNK_BYTES, (feed,), present_layers=present_layers
        )
        memory = world.arenas[node].view(0, manifest.size_bytes)
        self.fetch = ModelFetch(
            order, memory, world.planes[node], self.news.put, directory=str(path)
        )
        self.fetch.start()

    def until_all_came(self) -> list[MemberInput]:
        return self.until(lambda last: isinstance(last, AllCame))

    def until(self, is_last: Callable[[MemberInput], bool]) -> list[MemberInput]:
        news = [self.news.get(timeout=patient(20))]
        while not is_last(news[-1]):
            news.append(self.news.get(timeout=patient(20)))
        return news


def test_what_comes_is_counted_and_what_was_there_is_not(tiny_model: Path) -> None:
    """From storage, from a peer, and from a peer and then storage."""
    manifest = read_manifest(tiny_model, "tiny")
    storage = Feed(FromStorage(), grid(manifest, CHUNK_BYTES).all())
    with World(3, manifest.size_bytes) as world:
        source = Fetched(world, 0, manifest, tiny_model, storage)
        assert source.until_all_came()[-1] == AllCame(1, manifest.size_bytes)
        kept = manifest.layers[0].size_bytes
        from_peer = world.feed(0, manifest, CHUNK_BYTES)
        world.arenas[1].view(0, kept)[:] = world.arenas[0].view(0, kept)
        target = Fetched(world, 1, manifest, tiny_model, from_peer, present_layers=(0,))
        assert target.until_all_came()[-1] == AllCame(2, manifest.size_bytes - kept)
        chunks = grid(manifest, CHUNK_BYTES).of_layer(0)
        first = Feed(from_peer.upstream, (ChunkRange(chunks.start, chunks.stop),))
        other = Fetched(world, 2, manifest, tiny_model, first)
        other.until(lambda news: news == LayerCame(3, 0))
        other.fetch.amend((storage,))
        assert other.until_all_came()[-1] == AllCame(3, manifest.size_bytes)
        for fetched in (other, target, source):
            fetched.fetch.stop()


def test_an_amendment_that_meets_the_end_of_a_load_changes_nothing(tiny_model: Path) -> None:
    """All has come, and the controller did not know it yet when it found another way."""
    manifest = read_manifest(tiny_model, "tiny")
    storage = Feed(FromStorage(), grid(manifest, CHUNK_BYTES).all())
    with World(2, manifest.size_bytes) as world:
        source = Fetched(world, 0, manifest, tiny_model, storage)
        source.until_all_came()
        target = Fetched(world, 1, manifest, tiny_model, world.feed(0, manifest, CHUNK_BYTES))
        layers = [news.layer for news in target.until_all_came() if isinstance(news, LayerCame)]
        assert sorted(layers) == [entry.layer for entry in manifest.layers]
        target.fetch.amend((storage,))
        for fetched in (target, source):
            fetched.fetch.stop()
            assert fetched.news.empty(), "nothing follows AllCame"
        assert world.holds(1, manifest)
