"""Bytes that were changed so that their checksum agrees are found where they came over a network.

Nobody can make such bytes here: the manifest names another content hash instead.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from transfer_world import Recorder, World, write_model

from livescale.transfer.formats.orders import ContentChecks
from livescale.values.chunks import ChunkRange
from livescale.values.types import Manifest

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20
CHUNK = 64 << 10
LAYERS = [300_000, 0, 700_000, 200_000]
CHANGED = 2

NONE, NETWORK, ALL = ContentChecks.NONE, ContentChecks.NETWORK, ContentChecks.ALL


def changed(manifest: Manifest) -> Manifest:
    """As if other bytes with the same checksum lay where the manifest's should."""
    layers = list(manifest.layers)
    layers[CHANGED] = msgspec.structs.replace(layers[CHANGED], content_hash="0" * 64)
    return msgspec.structs.replace(manifest, layers=tuple(layers))


def world(shm: Path, hosts: list[str]) -> World:
    return World(len(hosts), 2 * MIB, shm_directory=shm, host_name=hosts)


def receive(world: World, manifest: Manifest, checks: ContentChecks, *nodes: int) -> list[Recorder]:
    """The recorders of a chain's targets."""
    return [
        world.receive(
            9, manifest, node, [world.feed(before, manifest, CHUNK)], CHUNK, content_checks=checks
        )
        for before, node in itertools.pairwise(nodes)
    ]


def check_refused(recorder: Recorder) -> None:
    recorder.check_failed("layer 2", "SHA-256", "0" * 64)
    assert ("layer_arrived", CHANGED) not in recorder.news


@pytest.mark.parametrize("checks", list(ContentChecks))
@pytest.mark.parametrize("hosts", [["one", "one"], ["one", "two"]])
def test_right_bytes_arrive_under_every_check(
    checks: ContentChecks, hosts: list[str], tmp_path: Path
) -> None:
    with world(tmp_path, hosts) as w:
        manifest = write_model(w.arenas[0], LAYERS)
        w.planes[0].offer(manifest)
        (recorder,) = receive(w, manifest, checks, 0, 1)
        recorder.check_completed(manifest)
        assert w.holds(1, manifest)


@pytest.mark.parametrize(
    ("checks", "hosts", "is_found"),
    [
        (NONE, ["one", "two"], False),
        (NETWORK, ["one", "one"], False),
        (NETWORK, ["one", "two"], True),
        (ALL, ["one", "one"], True),
        (ALL, ["one", "two"], True),
    ],
)
def test_changed_bytes_are_found_where_they_are_looked_for(
    checks: ContentChecks, hosts: list[str], is_found: bool, tmp_path: Path
) -> None:
    with world(tmp_path, hosts) as w:
        manifest = changed(write_model(w.arenas[0], LAYERS))
        w.planes[0].offer(manifest)
        (recorder,) = receive(w, manifest, checks, 0, 1)
        if is_found:
            check_refused(recorder)
        else:
            recorder.check_completed(manifest)


def test_changed_bytes_are_found_behind_who_passed_them_on(tmp_path: Path) -> None:
    """A target shares memory with its holders. One is whole; the other has received a part over a
    network, which cannot be compared yet."""
    with world(tmp_path, ["one", "two", "two", "two"]) as w:
        manifest = changed(write_model(w.arenas[0], LAYERS))
        for whole in (0, 3):
            write_model(w.arenas[whole], LAYERS)
            w.planes[whole].offer(manifest)
        begun = w.feed(0, manifest, CHUNK, ChunkRange(0, 8))
        part = w.receive(9, manifest, 1, [begun], CHUNK, content_checks=NETWORK)
        w.wait_chunks(1, 8)
        feeds = [
            w.feed(1, manifest, CHUNK, ChunkRange(6, 8)),
            w.feed(3, manifest, CHUNK, ChunkRange(0, 6), ChunkRange(8, 20)),
        ]
        check_refused(w.receive(9, manifest, 2, feeds, CHUNK, content_checks=NETWORK))
        w.planes[1].abort(9)
        part.check_failed("aborted")


def test_what_was_proved_needs_no_other_proof(tmp_path: Path) -> None:
    """From a copy whose hashes were compared, over shared memory: a manifest that lies about a
    hash is believed, which shows that nothing is hashed."""
    with world(tmp_path, ["one", "two", "two"]) as w:
        manifest = write_model(w.arenas[0], LAYERS)
        w.planes[0].offer(manifest)
        (first,) = receive(w, manifest, NETWORK, 0, 1)
        first.check_completed(manifest)
        # The same copy, by its bytes: its name does not depend on content hashes.
        (second,) = receive(w, changed(manifest), NETWORK, 1, 2)
        second.check_completed(manifest)
