"""A host agent's memory: copies come from storage and from peers, feed workers, and go."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from thread_workers import (
    CHUNK_BYTES,
    WAIT_S,
    ThreadWorker,
    all_from,
    introduce_all,
)

from livescale.clusters.topology import Host
from livescale.config.pool import PoolConfig
from livescale.engine.files.make import make_model
from livescale.engine.files.model_files import read_manifest
from livescale.member.member import Member
from livescale.messages.commands import AmendHolding, DropHolding, StartHolding
from livescale.messages.events import (
    FeedFailed,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
)
from livescale.runtime.member_process.member_thread import MemberThread
from livescale.runtime.wire.boot import AgentBoot
from livescale.runtime.wire.protocol import Address, Order
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.chunks import Feed
from livescale.values.types import HoldingId, LayerSpan, Manifest, WorkerRef, agent_ref
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

ROOM_BYTES = 16 << 20


class ThreadAgent:
    """A host agent on a thread; everything it says lands in `said`."""

    def __init__(
        self,
        number: int,
        size_bytes: int = ROOM_BYTES,
        storage_bytes_per_s: int | None = None,
        **data_plane: Any,
    ) -> None:
        self.ref = agent_ref(number)
        self.said: queue.Queue[object] = queue.Queue()
        self.memory = Arena(size_bytes)
        self.data_plane = DataPlane(self.ref, self.memory, PlaneOptions(**data_plane))
        boot = AgentBoot(
            secret="",
            member=self.ref,
            pool=PoolConfig(),
            controller=Address("127.0.0.1", 0),
            place=Host("localhost", "leaf0", size_bytes),
            data_host="127.0.0.1",
            shm_directory="",
            storage_bytes_per_s=storage_bytes_per_s,
            touched_bytes=size_bytes,
        )
        member = Member(self.ref, size_bytes)
        self.store = MemberThread(boot, member, self.memory, self.data_plane, self.said.put)
        self._thread = threading.Thread(target=self.store.run, daemon=True)
        self._thread.start()

    def copy(
        self, manifest: Manifest, feeds: tuple[Feed, ...], plan: int, directory: Path | None = None
    ) -> None:
        command = StartHolding(
            holding=HoldingId(plan, self.ref),
            model=manifest.model,
            span=LayerSpan(0, len(manifest.layers)),
            feeds=feeds,
            chunk_bytes=CHUNK_BYTES,
            reason="for a test",
        )
        order = Order(command, manifest, None if directory is None else str(directory))
        self.store.obey(order)

    def amend(self, plan: int, feeds: tuple[Feed, ...]) -> None:
        self.store.obey(Order(AmendHolding(HoldingId(plan, self.ref), feeds)))

    def drop(self, plan: int) -> None:
        self.store.obey(Order(DropHolding(HoldingId(plan, self.ref), "for a test")))

    def heard(self, wanted: Callable[[object], bool]) -> list[object]:
        words = []
        while True:
            words.append(self.said.get(timeout=patient(WAIT_S)))
            if wanted(words[-1]):
                return words

    def close(self) -> None:
        self.store.stop()
        self._thread.join(patient(WAIT_S))
        self.data_plane.close()


class Cluster:
    """Agents and workers that know each other."""

    def __init__(self) -> None:
        self._members: list[ThreadAgent | ThreadWorker] = []

    def agent(self, **options: object) -> ThreadAgent:
        return self._add(ThreadAgent(len(self._members), **options))

    def worker(self, **options: object) -> ThreadWorker:
        return self._add(ThreadWorker(len(self._members), ROOM_BYTES, **options))

    def _add(self, member):
        self._members.append(member)
        introduce_all(self._members)
        return member

    def close(self) -> None:
        for member in self._members:
            member.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


def copied(agent: ThreadAgent, manifest: Manifest, plan: int) -> list[object]:
    words = agent.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingCompleted), words[-1]
    layers = [word.layer for word in words if isinstance(word, LayerArrived)]
    assert sorted(layers) == list(range(len(manifest.layers)))
    assert {word.holding for word in words} == {HoldingId(plan, agent.ref)}
    return words


def served(worker: ThreadWorker, manifest: Manifest, source: WorkerRef, instance: int) -> bytes:
    """The worker gets the model from there: its arena's bytes."""
    worker.load(instance, manifest, all_from(manifest, source), plan=100 + instance)
    words = worker.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingCompleted), words[-1]
    return bytes(worker.arena.view(0, manifest.size_bytes))


def test_a_copy_read_from_storage_feeds_a_worker_and_another_host(
    cluster: Cluster, model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    first, second, worker = cluster.agent(), cluster.agent(), cluster.worker()
    first.copy(manifest, all_from(manifest, None), 1, model)
    # While the first still reads: it passes on what it has.
    second.copy(manifest, all_from(manifest, first.ref), 2)
    copied(first, manifest, 1)
    copied(second, manifest, 2)
    shutil.rmtree(model)
    got = served(worker, manifest, second.ref, 1)
    assert got == bytes(first.memory.view(0, manifest.size_bytes))
    [report] = second.store.member.reports
    assert (report.order.model, report.order.holding.plan, report.is_whole) == ("tiny", 2, True)
    assert report.order.feeds == ()


def test_models_of_one_shape_lie_side_by_side_and_are_not_mixed_up(
    cluster: Cluster, tmp_path: Path
) -> None:
    agent, worker = cluster.agent(), cluster.worker()
    manifests = []
    for seed in (1, 2):
        directory = tmp_path / f"tune{seed}"
        make_model(directory, "tiny", seed=seed)
        manifests.append(read_manifest(directory, directory.name))
        agent.copy(manifests[-1], all_from(manifests[-1], None), seed, directory)
        copied(agent, manifests[-1], seed)
    assert manifests[0].config_json == manifests[1].config_json
    agent.drop(1)
    assert isinstance(agent.heard(lambda _: True)[-1], HoldingDropped)
    served(worker, manifests[1], agent.ref, 1)
    # The memory of the first one is taken again.
    agent.copy(manifests[0], all_from(manifests[0], None), 3, tmp_path / "tune1")
    copied(agent, manifests[0], 3)
    assert {report.order.model for report in agent.store.member.reports} == {"tune1", "tune2"}


def test_a_copy_lies_where_no_read_for_a_dropped_one_can_write(
    cluster: Cluster, model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    agent = cluster.agent(withdraw_wait_s=0.05)

    def place(plan: int) -> int:
        agent.copy(manifest, all_from(manifest, None), plan, model)
        copied(agent, manifest, plan)
        return agent.store.member.holdings[0].offset_bytes

    def drop(plan: int) -> None:
        agent.drop(plan)
        assert isinstance(agent.heard(lambda _: True)[-1], HoldingDropped)

    first = place(1)
    # A network card still writes for it, and cannot be told that it is gone.
    write = agent.data_plane.writes.begin(first, 1)
    drop(1)
    assert place(2) != first
    drop(2)
    agent.data_plane.writes.end(write)
    assert place(3) == first


def test_a_model_without_room_is_refused_with_both_sizes(cluster: Cluster, model: Path) -> None:
    manifest = read_manifest(model, "tiny")
    agent = cluster.agent(size_bytes=manifest.size_bytes - 1)
    agent.copy(manifest, all_from(manifest, None), 1, model)
    [failed] = agent.heard(lambda _: True)
    assert isinstance(failed, HoldingFailed)
    assert str(manifest.size_bytes) in failed.reason
    assert str(manifest.size_bytes - 1) in failed.reason
    assert agent.store.member.reports == ()


def test_a_directory_that_changed_fails_the_copy_and_leaves_the_memory_free(
    cluster: Cluster, model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    agent = cluster.agent(size_bytes=manifest.size_bytes)
    victim = sorted(model.glob("*.safetensors"))[-1]
    kept = victim.read_bytes()
    victim.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    agent.copy(manifest, all_from(manifest, None), 1, model)
    words = agent.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingFailed)
    assert "another SHA-256" in words[-1].reason
    victim.write_bytes(kept)
    agent.copy(manifest, all_from(manifest, None), 2, model)
    copied(agent, manifest, 2)


def test_a_copy_goes_on_elsewhere_when_its_source_dies(cluster: Cluster, model: Path) -> None:
    manifest = read_manifest(model, "tiny")
    slow, other = cluster.agent(uplink_bytes_per_s=2_000_000), cluster.agent()
    for plan, source in enumerate((slow, other), 1):
        source.copy(manifest, all_from(manifest, None), plan, model)
        copied(source, manifest, plan)
    agent = cluster.agent()
    agent.copy(manifest, all_from(manifest, slow.ref), 3)
    before = agent.heard(lambda word: isinstance(word, LayerArrived))
    slow.data_plane.close()
    before += agent.heard(lambda word: isinstance(word, (FeedFailed, HoldingCompleted)))
    assert isinstance(before[-1], FeedFailed), "it was complete before the source died"
    assert (before[-1].holding.plan, before[-1].upstream) == (3, slow.ref)
    agent.amend(3, all_from(manifest, other.ref))
    after = agent.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(after[-1], HoldingCompleted)
    told = [word.layer for word in (*before, *after) if isinstance(word, LayerArrived)]
    assert sorted(told) == list(range(len(manifest.layers)))


def test_a_copy_that_is_dropped_while_it_comes_and_is_read_ends_in_words_for_all(
    cluster: Cluster, model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    source = cluster.agent(uplink_bytes_per_s=1_000_000)
    source.copy(manifest, all_from(manifest, None), 1, model)
    copied(source, manifest, 1)
    middle, worker = cluster.agent(), cluster.worker()
    middle.copy(manifest, all_from(manifest, source.ref), 2)
    worker.load(11, manifest, all_from(manifest, middle.ref), plan=12)
    worker.heard(lambda word: isinstance(word, LayerArrived))
    middle.drop(2)
    words = middle.heard(lambda word: isinstance(word, HoldingDropped))
    ends = [type(word) for word in words if not isinstance(word, LayerArrived)]
    assert ends == [HoldingFailed, HoldingDropped]
    assert middle.store.member.reports == ()
    [failed] = [
        word
        for word in worker.heard(lambda word: isinstance(word, FeedFailed))
        if isinstance(word, FeedFailed)
    ]
    assert failed.upstream == middle.ref
    middle.drop(2)
    assert isinstance(middle.heard(lambda _: True)[-1], HoldingDropped)


def test_storage_is_read_no_faster_than_it_is_said_to_be(cluster: Cluster, model: Path) -> None:
    """At a quarter of the rate that the machine showed, it takes more than twice as long."""
    manifest = read_manifest(model, "tiny")

    def seconds_of(agent: ThreadAgent) -> float:
        began_s = time.monotonic()
        agent.copy(manifest, all_from(manifest, None), 1, model)
        copied(agent, manifest, 1)
        return time.monotonic() - began_s

    free_s = seconds_of(cluster.agent())
    slow = cluster.agent(storage_bytes_per_s=round(manifest.size_bytes / (4 * free_s)))
    assert seconds_of(slow) > 2 * free_s


def with_another_content(manifest: Manifest) -> Manifest:
    """As if its last layer's bytes were other ones with the same checksum."""
    *layers, last = manifest.layers
    last = msgspec.structs.replace(last, content_hash="0" * 64)
    return msgspec.structs.replace(manifest, layers=(*layers, last))


@pytest.mark.parametrize("is_from_files", [True, False])
def test_a_copy_whose_bytes_were_changed_fails_though_their_checksum_agrees(
    is_from_files: bool, cluster: Cluster, model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    changed = with_another_content(manifest)
    source, agent = cluster.agent(), cluster.agent()
    source.copy(manifest, all_from(manifest, None), 1, model)
    copied(source, manifest, 1)
    if is_from_files:
        agent.copy(changed, all_from(manifest, None), 2, model)
    else:
        agent.copy(changed, all_from(manifest, source.ref), 2)
    words = agent.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingFailed)
    last = manifest.layers[-1].layer
    assert f"layer {last}" in words[-1].reason
    assert "SHA-256" in words[-1].reason
    layers = [word.layer for word in words if isinstance(word, LayerArrived)]
    assert last not in layers
    assert agent.store.member.reports == ()


def test_a_load_over_a_network_whose_bytes_were_changed_never_serves(
    cluster: Cluster, model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    source, worker = cluster.agent(), cluster.worker()
    source.copy(manifest, all_from(manifest, None), 1, model)
    copied(source, manifest, 1)
    changed = with_another_content(manifest)
    worker.load(1, changed, all_from(changed, source.ref), plan=2)
    words = worker.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingFailed)
    assert "SHA-256" in words[-1].reason
