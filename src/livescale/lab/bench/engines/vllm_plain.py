"""A plain `vllm serve` on 127.0.0.1, as something to compare with."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from livescale.common.interpreter import module_words
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import bench_process, thread_environment
from livescale.vllm_engine.environment import DEFAULTS, FIXED

_HOST = "127.0.0.1"
_MODULE = "vllm.entrypoints.cli.main"
_LOOK_S = 0.5
_START_S = 600.0
# Its engine has a process of its own, as it is by default.
_ENVIRONMENT = {
    **DEFAULTS,
    **FIXED,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class PlainServer:
    """Its processes, as a context. `ready` waits for it."""

    def __init__(
        self,
        name: str,
        python: Path,
        directory: Path,
        flags: Sequence[str],
        threads: int,
        environ: Mapping[str, str],
    ) -> None:
        """It serves the model of the directory under this directory's name."""
        self.name = name
        self.host, self.port = _HOST, _free_port()
        words = [
            *module_words(_MODULE, "serve", str(directory), python=str(python)),
            *("--host", _HOST, "--port", str(self.port)),
            *("--served-model-name", directory.name),
            *("--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"),
            *flags,
        ]
        environment = {**_ENVIRONMENT, **thread_environment(threads), **environ}
        self._process = bench_process(name, "peers.guarded", *words, environ=environment)

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    def ready(self) -> None:
        """It answers. Raises BenchError with the end of its log."""
        deadline_s = time.monotonic() + _START_S
        url = f"http://{self.host}:{self.port}/health"
        with httpx.Client(trust_env=False, timeout=5) as client:
            while not _is_healthy(client, url):
                self._process.check_alive()
                if time.monotonic() > deadline_s:
                    raise BenchError(f"{self.name} does not answer after {_START_S:.0f} s")
                time.sleep(_LOOK_S)

    def __enter__(self) -> PlainServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
