"""A pool on a Ray cluster in network namespaces, and its clients, for tests."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from livescale.common.interpreter import module_words
from livescale.lab.testbed.bed import CONTROL, Testbed
from livescale.lab.testbed.ray_cluster import RayCluster
from slowness import patient

HTTP_PORT = 8000
#: Ray takes its time for everything
_END_S = 90.0
NEEDS_RAY = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
TWO_HOSTS = """
device: timed
timed_profile: "linear:8000:67"
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


class RayBed(RayCluster):
    """The cluster, and a pool on it whose head is in "control"."""

    def __init__(self, bed: Testbed, scratch: Path, config: str) -> None:
        super().__init__(bed, scratch)
        self.log = scratch / "serve.log"
        #: where a configuration may have it
        self.record = scratch / "record.jsonl"
        self._config = scratch / "pool.yaml"
        self._config.write_text(config)
        self.pool: subprocess.Popen[bytes] | None = None

    def start_node(self, host: str, *flags: str) -> None:
        """Each host in a rack of its own."""
        super().start_node(host, "--labels", f"rack=rack-of-{host}", *flags)

    def close(self) -> None:
        """Nothing of Ray or of the pool is left."""
        if self.pool is not None and self.pool.poll() is None:
            self.pool.kill()
            self.pool.wait()
        super().close()

    def serve(self) -> None:
        """`livescale serve --ray` in "control", until it is ready."""
        self.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        self.wait(lambda: self.logged("ready after", "/v1"), "the pool is ready")

    def start(self) -> None:
        words = ["serve", "-c", str(self._config), "--ray", self.gcs, "--port", str(HTTP_PORT)]
        with self.log.open("ab") as log:
            self.pool = subprocess.Popen(
                [*self.bed.inside(CONTROL), *module_words("livescale.main", *words)],
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        assert self.pool is not None
        self.pool.send_signal(signal.SIGINT)
        return self.pool.wait(patient(_END_S))

    def logged(self, *words: str) -> bool:
        """A line has all of these words."""
        return self.count(*words) > 0

    def count(self, *words: str) -> int:
        lines = self.log.read_text().splitlines()
        return sum(all(word in line for word in words) for line in lines)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_s = patient(_END_S)
        deadline_s = time.monotonic() + wait_s
        while not condition():
            assert self.pool is None or self.pool.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, f"not within {wait_s} s: {what}\n" + (
                self.log.read_text()
            )
            time.sleep(0.05)

    def client(self, count: int, tokens: int) -> subprocess.Popen[str]:
        """Streams that are read in "control"."""
        script = Path(__file__).with_name("ray_client.py")
        words = [f"http://127.0.0.1:{HTTP_PORT}", str(count), str(tokens)]
        return subprocess.Popen(
            [*self.bed.inside(CONTROL), sys.executable, "-P", str(script), *words],
            stdout=subprocess.PIPE,
            text=True,
        )

    def answers(self, client: subprocess.Popen[str]) -> Any:
        """What its streams brought."""
        output, _ = client.communicate(timeout=patient(_END_S))
        assert client.returncode == 0
        return json.loads(output.splitlines()[-1])
