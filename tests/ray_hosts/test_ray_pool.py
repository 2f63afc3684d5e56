"""A pool whose hosts Ray places: raylets in namespaces, what serves there lost in three ways."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray_bed import NEEDS_RAY, RayBed

from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec
from livescale.messages.events import WorkerJoined
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient, patient_ms

pytestmark = [*NEEDS_RAY, pytest.mark.long]
STREAMS, TOKENS = 4, 300
CONFIG = """
device: timed
timed_profile: "linear:{run_us}:67"
arena_bytes: 8MiB
kv_bytes: 8MiB
lost_after_ms: {lost_after_ms}
record: {record}
ray: {{rack_label: rack}}
tuning: {{request_attempts_max: 4}}
models:
  - path: {model}
    name: tiny
    min_replicas: 2
    prefill_tokens_per_s: 5000
"""


@pytest.fixture(scope="module")
def cluster(
    network_namespaces: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayBed]:
    scratch = tmp_path_factory.mktemp("ray")
    config = CONFIG.format(
        model=tiny_model,
        record=scratch / "record.jsonl",
        # Streams last until something is lost.
        run_us=1000 * patient_ms(8),
        lost_after_ms=patient_ms(1500),
    )
    with (
        Testbed(NetworkSpec(hosts=2, link_bits_per_s=1_000_000_000)) as bed,
        RayBed(bed, scratch, config) as made,
    ):
        made.serve()
        made.wait(lambda: made.count("worker", "has joined") >= 2, "both hosts have joined")
        yield made


def survive(cluster: RayBed, lose: Callable[[], None]) -> None:
    """Streams run while something is lost: each ends with the tokens that it has without."""
    expected = cluster.answers(cluster.client(STREAMS, TOKENS))
    client = cluster.client(STREAMS, TOKENS)
    assert client.stdout is not None
    assert client.stdout.readline() == '"begun"\n'
    lost = cluster.count("is lost")
    lose()
    assert cluster.answers(client) == expected
    assert [reason for _, reason in expected] == ["length"] * STREAMS
    cluster.wait(lambda: cluster.count("is lost") > lost, "a worker is given up")


def test_nodes_are_in_the_racks_that_their_labels_name(cluster: RayBed) -> None:
    def racks() -> set[str]:
        steps = [line for line in read_record(cluster.record) if isinstance(line, StepLine)]
        events = [event for line in steps for event in line.events]
        return {event.device.leaf for event in events if isinstance(event, WorkerJoined)}

    cluster.wait(lambda: len(racks()) == 2, "the workers of both hosts are in the record")
    assert racks() == {"rack-of-h0", "rack-of-h1"}


def test_an_actor_is_killed(cluster: RayBed) -> None:
    members = cluster.members("h0")
    assert members
    survive(cluster, lambda: cluster.actor("h0").send_signal(signal.SIGKILL))
    cluster.wait(lambda: not any(process.is_running() for process in members), "they are gone")
    cluster.wait(lambda: len(cluster.members("h0")) > 1, "Ray has started the host again")
    cluster.wait(lambda: cluster.logged("worker", "in its place"), "its worker is back")
    lines = cluster.log.read_text().splitlines()
    [lost, *_] = [n for n, line in enumerate(lines) if "is lost" in line and "worker" in line]
    [back, *_] = [n for n, line in enumerate(lines) if "in its place" in line and "worker" in line]
    assert lost < back


@pytest.mark.long
def test_a_raylet_is_killed(cluster: RayBed) -> None:
    joined = cluster.count("node", "has joined with")
    survive(cluster, lambda: cluster.raylet("h1").send_signal(signal.SIGKILL))
    cluster.wait(lambda: not cluster.members("h1"), "nothing of the pool is left there")
    cluster.start_node("h1")
    cluster.wait(lambda: cluster.count("node", "has joined with") > joined, "it has joined again")


@pytest.mark.long
def test_a_node_falls_silent(cluster: RayBed) -> None:
    try:
        survive(cluster, lambda: cluster.bed.isolate("h0"))
    finally:
        cluster.bed.rejoin("h0")


def test_ctrl_c_leaves_nothing(cluster: RayBed) -> None:
    there: list[psutil.Process] = cluster.members("h0") + cluster.members("h1")
    there += cluster.found("h0", "ray::HostActor") + cluster.found("h1", "ray::HostActor")
    assert cluster.stop() == 0
    _, alive = psutil.wait_procs(there, timeout=patient(60))
    assert alive == []
