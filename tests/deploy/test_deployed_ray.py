"""The scripts of deploy/ray, run as KubeRay would: with its `ray start` in a variable."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from deployed import RAY, of_kind, ray_objects, ray_scripts

from livescale.lab.testbed.bed import CONTROL, Testbed
from livescale.lab.testbed.ray_cluster import RayCluster
from livescale.lab.testbed.spec import NetworkSpec
from slowness import patient

pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
CLIENT = Path(__file__).parents[1] / "ray_hosts" / "ray_client.py"
SMALL = {"device": "timed", "arena_bytes": "64MiB", "kv_bytes": "4MiB"}


def wait_s() -> float:
    """Ray takes its time for everything."""
    return patient(90)


def start_command(cluster: RayCluster, host: str, group: dict[str, Any]) -> str:
    """As KubeRay writes it into the variable: a text for a shell."""
    if host == CONTROL:
        own = f"--head --port=6379 --node-ip-address={cluster.bed.control_address}"
        own += f" --include-dashboard=false --temp-dir={cluster.session}"
    else:
        own = f"--address={cluster.gcs} --node-ip-address={cluster.bed.host(host).control_address}"
    params = " ".join(f"--{name}={value} " for name, value in group["rayStartParams"].items())
    return f"ray start {own} {params} --block"


def run(
    cluster: RayCluster, host: str, script: str, group: dict[str, Any], log: Path
) -> subprocess.Popen[bytes]:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = start_command(cluster, host, group)
    with log.open("wb") as file:
        return cluster.bed.exec(
            host,
            ["bash", "-c", script],
            env={**cluster.environ, "PATH": beside, "KUBERAY_GEN_RAY_START_CMD": command},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(condition: Callable[[], object], logs: list[Path]) -> None:
    deadline_s = time.monotonic() + wait_s()
    while not condition():
        assert time.monotonic() < deadline_s, "\n".join(log.read_text() for log in logs)
        time.sleep(0.1)


def test_the_scripts_serve_and_end_in_order(
    network_namespaces: None, tiny_model: Path, tmp_path: Path
) -> None:
    settings = yaml.safe_load((RAY / "pool.yaml").read_text()) | SMALL
    settings["models"][0] |= {"path": str(tiny_model), "name": "tiny"}
    pool = tmp_path / "pool.yaml"
    pool.write_text(yaml.safe_dump(settings))
    (manifest,) = of_kind(ray_objects(), "RayCluster")
    spec = manifest["spec"]
    head_script, host_script = ray_scripts(ray_objects())
    logs = [tmp_path / "head.log", tmp_path / "host.log"]
    with Testbed(NetworkSpec(hosts=1, link_bits_per_s=1_000_000_000)) as bed:
        cluster = RayCluster(bed, tmp_path)
        try:
            script = head_script.replace("$(POD_IP)", bed.control_address)
            script = script.replace("/etc/livescale/pool.yaml", str(pool))
            head = run(cluster, CONTROL, script, spec["headGroupSpec"], logs[0])
            wait(lambda: "starting" in logs[0].read_text(), logs)
            host = run(cluster, "h0", host_script, spec["workerGroupSpecs"][0], logs[1])
            # Not a process that is ready: the pool.
            wait(lambda: re.search(r"ready after \S+ s: http", logs[0].read_text()), logs)
            client = subprocess.run(
                [
                    *(*bed.inside(CONTROL), sys.executable, "-P"),
                    str(CLIENT),
                    *(f"http://{bed.control_address}:8000", "1", "8"),
                ],
                capture_output=True,
                text=True,
                timeout=wait_s(),
                check=False,
            )
            logged = "\n".join(log.read_text() for log in logs)
            assert client.returncode == 0, client.stderr + logged
            assert '"length"' in client.stdout
            assert host.poll() is None
            members = cluster.members("h0")
            assert members
            head.send_signal(signal.SIGTERM)
            assert head.wait(wait_s()) == 0, logs[0].read_text()
            assert "stopped" in logs[0].read_text()
            _, alive = psutil.wait_procs(members, wait_s())
            assert alive == []
        finally:
            cluster.close()
        host.wait(wait_s())
