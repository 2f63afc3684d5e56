"""The command lines of the manifests, run: a head, a host that joins through its Service's name,
probes, a request, and what SIGTERM does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from deployed import TOKEN, command_of, plain_objects, pool_yaml, probed_paths, rendered

from livescale.common.interpreter import module_words

pytestmark = pytest.mark.pool

WAIT_S = 60.0
# Timed workers: what they compute is not looked at here, and they need no imports of torch.
SMALL = {"device": "timed", "arena_bytes": "64MiB", "kv_bytes": "4MiB", "lost_after_ms": 2000}


@contextlib.contextmanager
def run(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            module_words("livescale.cli.main", *words), stdout=file, stderr=file, env=environ
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_S)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for_status(url: str, status: int, *processes: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == status:
                return
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline_s, f"{url} never answered with {status}"


def test_the_commands_serve_and_end_in_order(tiny_model: Path, tmp_path: Path) -> None:
    http, control = free_ports(2)
    token, pool = tmp_path / "token", tmp_path / "pool.yaml"
    token.write_text(TOKEN)
    token.chmod(0o400)
    settings = yaml.safe_load(pool_yaml(plain_objects())) | SMALL
    settings["models"][0]["path"] = str(tiny_model)
    pool.write_text(yaml.safe_dump(settings))
    here = {
        "/etc/livescale/pool.yaml": str(pool),
        "/run/secrets/livescale/token": str(token),
        "livescale-control:7000": f"localhost:{control}",
        "$(POD_IP)": "127.0.0.1",
        "$(POD_NAME)": "livescale-host-0",
        ":7000": f":{control}",
        "--port=8000": f"--port={http}",
    }
    url = f"http://127.0.0.1:{http}"
    serve = command_of(plain_objects(), "serve", here)
    join = command_of(plain_objects(), "join", here)
    with run(serve, tmp_path / "head.log") as head:
        wait_for_status(f"{url}/live", 200, head)
        assert httpx.get(f"{url}/health").status_code == 503, "without hosts it is alive, not ready"
        with run(join, tmp_path / "host.log") as host:
            for path in sorted(set().union(*map(probed_paths, rendered().values()))):
                wait_for_status(f"{url}{path}", 200, head, host)
            assert "\nlivescale_workers_wanted 1.0\n" in httpx.get(f"{url}/metrics").text
            body = {"model": tiny_model.name, "prompt": "a", "max_tokens": 3}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
            assert answer.status_code == 200, answer.text
            host.send_signal(signal.SIGTERM)
            assert host.wait(WAIT_S) == 0
            assert "left" in (tmp_path / "host.log").read_text()
            assert head.poll() is None
        head.send_signal(signal.SIGTERM)
        assert head.wait(WAIT_S) == 0
        assert "stopped" in (tmp_path / "head.log").read_text()
