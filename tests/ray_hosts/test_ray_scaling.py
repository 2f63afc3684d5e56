"""Hosts are asked for as the load needs them, and given back when nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_bed import NEEDS_RAY, TWO_HOSTS, RayBed

from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec

pytestmark = [*NEEDS_RAY, pytest.mark.long]


def test_a_second_host_comes_and_goes(
    network_namespaces: None, tiny_model: Path, tmp_path: Path
) -> None:
    with (
        Testbed(NetworkSpec(hosts=2, link_bits_per_s=1_000_000_000)) as bed,
        RayBed(bed, tmp_path, TWO_HOSTS.format(model=tiny_model)) as cluster,
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
