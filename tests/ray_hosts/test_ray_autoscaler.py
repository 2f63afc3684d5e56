"""Ray's own autoscaler behind a pool: it adds nodes for Host actors that wait for one, and removes
those whose hosts were given back. Its fake provider starts them beside the head, in one namespace.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray_bed import NEEDS_RAY, TWO_HOSTS, RayBed

from livescale.lab.testbed.bed import CONTROL, Testbed
from livescale.lab.testbed.spec import NetworkSpec

pytestmark = [*NEEDS_RAY, pytest.mark.long]
FAKE = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}


def autoscaling(gcs: str) -> dict[str, object]:
    """A cluster whose head has no room for hosts."""
    types = {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "host": {
            "resources": {"CPU": 1, "livescale_host": 1, "object_store_memory": 100 << 20},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    }
    return {
        "cluster_name": "pool",
        "max_workers": 2,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": gcs,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        **{key: {} for key in ("auth", "file_mounts", "head_node", "worker_nodes")},
        **{
            key: []
            for key in (
                *("initialization_commands", "setup_commands", "head_setup_commands"),
                *("worker_setup_commands", "head_start_ray_commands"),
                *("worker_start_ray_commands", "cluster_synced_files"),
            )
        },
    }


def test_nodes_come_for_hosts_that_wait_and_go_with_them(
    network_namespaces: None, tiny_model: Path, tmp_path: Path
) -> None:
    with Testbed(NetworkSpec(hosts=1, link_bits_per_s=1_000_000_000)) as bed:
        cluster = RayBed(bed, tmp_path, TWO_HOSTS.format(model=tiny_model))
        try:
            cluster.environ |= FAKE
            file = tmp_path / "autoscaling.yaml"
            file.write_text(yaml.safe_dump(autoscaling(cluster.gcs)))
            cluster.start_node(CONTROL, f"--autoscaling-config={file}")
            assert len(cluster.raylets(CONTROL)) == 1
            cluster.serve()
            assert cluster.count("has joined with") == 1
            assert len(cluster.raylets(CONTROL)) == 2, "a node was added for the first host"
            answers = cluster.answers(cluster.client(8, 2000))
            assert [reason for _, reason in answers] == ["length"] * 8
            cluster.wait(lambda: cluster.count("has joined with") == 2, "a node for a second host")
            cluster.wait(lambda: cluster.logged("host", "has left"), "it was given back")
            cluster.wait(lambda: len(cluster.raylets(CONTROL)) == 2, "its node was removed")
            assert cluster.answers(cluster.client(1, 8))[0][1] == "length"
            assert cluster.stop() == 0
        finally:
            cluster.close()
