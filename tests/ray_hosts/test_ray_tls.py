"""A pool with certificates whose hosts Ray places: nodes have theirs, and Ray sees no secret."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ray_bed import NEEDS_RAY, RayBed

from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec
from livescale.runtime.join.cluster_folder import ClusterFolder
from livescale.runtime.wire.token import read_token

pytestmark = [*NEEDS_RAY, pytest.mark.long]
CONFIG = """
device: timed
timed_profile: "linear:8000:67"
arena_bytes: 8MiB
kv_bytes: 8MiB
tls_dir: {head}
token_file: {token}
ray: {{tls_dir: {node}, hosts_max: 1}}
models:
  - path: {model}
    name: tiny
    prefill_tokens_per_s: 5000
"""


def test_nodes_show_their_own_certificates(
    network_namespaces: None, tiny_model: Path, tmp_path: Path
) -> None:
    folder = ClusterFolder(tmp_path / "pool")
    head, node, token = folder.init(), tmp_path / "node", tmp_path / "pool.token"
    strange = ClusterFolder(tmp_path / "strange")
    strange.init()
    shutil.copytree(strange.add("node"), node)
    config = CONFIG.format(head=head, node=node, token=token, model=tiny_model)
    with (
        Testbed(NetworkSpec(hosts=1, link_bits_per_s=1_000_000_000)) as bed,
        RayBed(bed, tmp_path, config) as cluster,
    ):
        cluster.start()
        cluster.wait(
            lambda: cluster.logged("Ray: host", "another certificate authority than tls_dir"),
            "refused",
        )
        assert not cluster.logged("has joined with")
        shutil.rmtree(node)
        shutil.copytree(folder.add("node"), node)
        cluster.wait_ready()
        assert cluster.answers(cluster.client(1, 8))[0][1] == "length"
        assert cluster.stop() == 0
        secrets = [read_token(token).secret, *key_lines(node), *key_lines(head)]
        files = [path for path in Path(cluster.session).rglob("*") if path.is_file()]
        assert len(files) > 3
        for path in [*files, cluster.log]:
            text = path.read_bytes()
            assert not any(secret.encode() in text for secret in secrets), path


def key_lines(folder: Path) -> list[str]:
    return (folder / "key.pem").read_text().splitlines()[1:-1]
