"""A Ray cluster in network namespaces, and a pool on it, for tests. Real `ray start` with token
authentication; nothing of it listens outside the namespaces, which end all that is left.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from livescale.common.interpreter import module_words
from livescale.testbed.bed import CONTROL, Testbed
from livescale.testbed.commands import processes

GCS_PORT, HTTP_PORT = 6379, 8000
_WAIT_S = 180.0


class RayBed:
    """A head node in "control", and one node with `livescale_host` in each host, as a context."""

    def __init__(self, bed: Testbed, scratch: Path, config: str) -> None:
        self.bed = bed
        self.log = scratch / "serve.log"
        self._scratch = scratch
        self._config = scratch / "pool.yaml"
        self._config.write_text(config)
        # The paths of Ray's sockets are bounded, a test's own directory is not.
        self._session = tempfile.mkdtemp(prefix="lsray", dir="/tmp")
        token = scratch / "ray.token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("LIVESCALE_", "RAY_"))}
        self._environ = environ | {
            "HOME": str(scratch),
            "PYTHONUNBUFFERED": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_agent_register_timeout_ms": "90000",
        }
        self.pool: subprocess.Popen[bytes] | None = None

    @property
    def gcs(self) -> str:
        return f"{self.bed.control_address}:{GCS_PORT}"

    def __enter__(self) -> Self:
        try:
            self.start_node(CONTROL)
            for host in self.bed.hosts:
                self.start_node(host.name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing of Ray or of the pool is left."""
        if self.pool is not None and self.pool.poll() is None:
            self.pool.kill()
            self.pool.wait()
        self.bed.close()
        shutil.rmtree(self._session, ignore_errors=True)

    def start_node(self, host: str) -> None:
        """`ray start`, which returns when the node is up."""
        if host == CONTROL:
            own = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
            own += [f"--node-ip-address={self.bed.control_address}", f"--temp-dir={self._session}"]
        else:
            address = self.bed.host(host).control_address
            own = [f"--address={self.gcs}", f"--node-ip-address={address}"]
            own += ["--resources", '{"livescale_host": 1}']
        words = ["start", *own, "--num-cpus=1", f"--object-store-memory={100 << 20}"]
        with (self._scratch / f"ray-{host}.log").open("ab") as log:
            subprocess.run(
                [*self.bed.inside(host), *module_words("ray.scripts.scripts", *words)],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=_WAIT_S,
            )

    def serve(self) -> None:
        """`livescale serve --ray` in "control", until it is ready."""
        words = ["serve", "-c", str(self._config), "--ray", self.gcs, "--port", str(HTTP_PORT)]
        with self.log.open("ab") as log:
            self.pool = subprocess.Popen(
                [*self.bed.inside(CONTROL), *module_words("livescale.cli.main", *words)],
                env=self._environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.wait(lambda: self.logged("ready after", "/v1"), "the pool is ready")

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        assert self.pool is not None
        self.pool.send_signal(signal.SIGINT)
        return self.pool.wait(_WAIT_S)

    def logged(self, *words: str) -> bool:
        """A line has all of these words."""
        return self.count(*words) > 0

    def count(self, *words: str) -> int:
        lines = self.log.read_text().splitlines()
        return sum(all(word in line for word in words) for line in lines)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while not condition():
            assert self.pool is None or self.pool.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, f"not within {_WAIT_S} s: {what}\n" + (
                self.log.read_text()
            )
            time.sleep(0.05)

    def found(self, host: str, word: str) -> list[psutil.Process]:
        """Processes of a host whose name or command line has this word."""
        found = []
        for pid in processes(self.bed.host(host).namespace):
            try:
                process = psutil.Process(pid)
                if word in " ".join((process.name(), *process.cmdline())):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def actor(self, host: str) -> psutil.Process:
        """The one process of Ray there that is a Host actor."""
        [process] = self.found(host, "ray::HostActor")
        return process

    def raylet(self, host: str) -> psutil.Process:
        [process] = [p for p in self.found(host, "raylet") if p.name() == "raylet"]
        return process

    def members(self, host: str) -> list[psutil.Process]:
        """LiveScale's own processes there: workers, an agent, and what workers are forks of."""
        return self.found(host, "livescale.runtime")

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
        output, _ = client.communicate(timeout=_WAIT_S)
        assert client.returncode == 0
        return json.loads(output.splitlines()[-1])
