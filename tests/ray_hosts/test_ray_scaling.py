"""Hosts are asked for as the load needs them, and given back when nothing does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ray_bed import RayBed

from livescale.testbed.bed import Testbed
from livescale.testbed.spec import NetworkSpec

pytestmark = [
    pytest.mark.pool,
    pytest.mark.netns,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
CONFIG = """
device: timed
timed_run_us: 8000
arena_bytes: 8MiB
kv_bytes: 8MiB
ray: {{hosts_min: 1, hosts_max: 2, host_idle_s: 2}}
models:
  - path: {model}
    name: tiny
    min_replicas: 1
    max_replicas: 2
    target_ongoing_requests: 4
    prefill_tokens_per_s: 5000
"""


def test_a_second_host_comes_and_goes(
    network_namespaces: None, tiny_model: Path, tmp_path: Path
) -> None:
    with (
        Testbed(NetworkSpec(hosts=2, link_bits_per_s=1_000_000_000)) as bed,
        RayBed(bed, tmp_path, CONFIG.format(model=tiny_model)) as cluster,
    ):
        cluster.serve()
        assert cluster.count("has joined with") == 1
        answers = cluster.answers(cluster.client(8, 1500))
        assert [reason for _, reason in answers] == ["length"] * 8
        cluster.wait(lambda: cluster.count("has joined with") == 2, "a second host was asked for")
        cluster.wait(lambda: cluster.logged("is given back"), "it is given back")
        cluster.wait(lambda: cluster.logged("host", "has left"), "and has left in order")
        assert cluster.answers(cluster.client(1, 8))[0][1] == "length"
        assert cluster.stop() == 0
        assert cluster.count("is given back") == 1
