"""A Ray cluster on a testbed: real `ray start` with token authentication, one raylet in each
namespace. Nothing of it listens outside of them, and all of it ends with them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import psutil

from livescale.common.interpreter import module_words
from livescale.lab.testbed.bed import CONTROL, Testbed
from livescale.lab.testbed.commands import processes
from livescale.lab.testbed.spec import TestbedError

_GCS_PORT = 6379
_START_S = 180.0
_STORE_BYTES = 100 << 20
_ACTOR = "ray::HostActor"
_OWN_MODULES = "livescale.runtime"


class RayCluster:
    """A head node in "control", and one node with `livescale_host` in each host, as a context.
    `folder` gets the token and the logs."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed = bed
        self._folder = folder
        #: of Ray: the paths of its sockets are bounded, a folder's is not
        self.session = tempfile.mkdtemp(prefix="lsray", dir="/tmp")
        token = folder / "ray.token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("LIVESCALE_", "RAY_"))}
        #: of every process that is to use the cluster
        self.environ = environ | {
            "HOME": str(folder),
            "PYTHONUNBUFFERED": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Where others use the machine, too, agents take longer than raylets wait for them.
            "RAY_agent_register_timeout_ms": "90000",
        }

    @property
    def gcs(self) -> str:
        """The cluster's address, inside."""
        return f"{self.bed.control_address}:{_GCS_PORT}"

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
        """Nothing of Ray, nor of the testbed, is left."""
        self.bed.close()
        shutil.rmtree(self.session, ignore_errors=True)

    def start_node(self, host: str, *flags: str) -> None:
        """`ray start` with these flags besides, which returns when the node is up. Raises
        TestbedError."""
        if host == CONTROL:
            own = ["--head", f"--port={_GCS_PORT}", "--include-dashboard=false"]
            own += [f"--node-ip-address={self.bed.control_address}", f"--temp-dir={self.session}"]
        else:
            address = self.bed.host(host).control_address
            own = [f"--address={self.gcs}", f"--node-ip-address={address}"]
            own += ["--resources", '{"livescale_host": 1}']
        words = ["start", *own, "--num-cpus=1", f"--object-store-memory={_STORE_BYTES}", *flags]
        path = self._folder / f"ray-{host}.log"
        with path.open("ab") as log:
            try:
                done = subprocess.run(
                    [*self.bed.inside(host), *module_words("ray.scripts.scripts", *words)],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=_START_S,
                )
            except subprocess.TimeoutExpired:
                raise TestbedError(
                    f"ray start in {host} took more than {_START_S:.0f} s ({path})"
                ) from None
        if done.returncode != 0:
            raise TestbedError(f"ray start in {host}: exit status {done.returncode} ({path})")

    def found(self, host: str, word: str) -> list[psutil.Process]:
        """Processes of a host, or of "control", whose name or command line has this word."""
        bed, found = self.bed, []
        is_control = host == CONTROL
        for pid in processes(bed.control_namespace if is_control else bed.host(host).namespace):
            try:
                process = psutil.Process(pid)
                if word in " ".join((process.name(), *process.cmdline())):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def actor(self, host: str) -> psutil.Process:
        """The one process of Ray there that is a Host actor. Raises TestbedError."""
        return self._one(host, self.found(host, _ACTOR), "Host actor")

    def raylet(self, host: str) -> psutil.Process:
        """Raises TestbedError."""
        return self._one(host, self.raylets(host), "raylet")

    def raylets(self, host: str) -> list[psutil.Process]:
        """All of a host, or of "control"."""
        return [process for process in self.found(host, "raylet") if _is_raylet(process)]

    def members(self, host: str) -> list[psutil.Process]:
        """LiveScale's own processes there: workers, an agent, and what workers are forks of."""
        return self.found(host, _OWN_MODULES)

    def pool_processes(self) -> list[psutil.Process]:
        """Of all hosts: their members, and Host actors."""
        words = (_OWN_MODULES, _ACTOR)
        return [p for host in self.bed.hosts for word in words for p in self.found(host.name, word)]

    def _one(self, host: str, found: list[psutil.Process], what: str) -> psutil.Process:
        if len(found) != 1:
            raise TestbedError(f"{host} has {len(found)} processes that are a {what}, not one")
        return found[0]


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == "raylet")
    except psutil.NoSuchProcess:
        return False
