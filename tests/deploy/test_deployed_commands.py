"""The command lines of the manifests, run: a head, a host and a gateway that join it by the name of
a Service, probes, requests, what SIGTERM does; two heads."""

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
from chart_values import VALUES
from deployed import (
    TOKEN,
    Object,
    chart_objects,
    command_of,
    plain_objects,
    pool_yaml,
    probed_paths,
    rendered,
)

from livescale.common.interpreter import module_words
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")

# Timed workers: what they compute is not looked at here, and they need no imports of torch.
SMALL = {"device": "timed", "arena_bytes": "64MiB", "kv_bytes": "4MiB"}


def wait_s() -> float:
    return patient(60)


@contextlib.contextmanager
def run(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            module_words("livescale.main", *words), stdout=file, stderr=file, env=environ
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(wait_s())


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for_status(url: str, status: int, *processes: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + wait_s()
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == status:
                return
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline_s, f"{url} never answered with {status}"


class Here:
    """What the commands of manifests find here in place of a cluster."""

    def __init__(self, objects: list[Object], model: Path, scratch: Path) -> None:
        self._objects = objects
        token, pool = scratch / "token", scratch / "pool.yaml"
        token.write_text(TOKEN)
        token.chmod(0o400)
        settings = yaml.safe_load(pool_yaml(objects)) | SMALL
        settings["lost_after_ms"] = patient_ms(2000)
        settings["models"][0]["path"] = str(model)
        pool.write_text(yaml.safe_dump(settings))
        self._files = {
            "/etc/livescale/pool.yaml": str(pool),
            "/run/secrets/livescale/token": str(token),
            "/lease/": f"{scratch}/",
        }

    def command(
        self, verb: str, replaced: dict[str, str], *, is_standby: bool = False
    ) -> list[str]:
        """With other texts for names and ports of the cluster."""
        pod = {"$(POD_IP)": "127.0.0.1", "$(POD_NAME)": f"pod-of-{verb}", "$(RACK)": ""}
        return command_of(self._objects, verb, self._files | replaced | pod, is_standby=is_standby)


def ask(url: str, model: Path) -> None:
    """A request is answered."""
    body = {"model": model.name, "prompt": "a", "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=wait_s())
    assert answer.status_code == 200, answer.text


def end(process: subprocess.Popen[bytes], log: Path, word: str) -> None:
    """SIGTERM ends it in order."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(wait_s()) == 0
    assert word in log.read_text()


def test_the_commands_serve_and_end_in_order(tiny_model: Path, tmp_path: Path) -> None:
    http, control, http_of_gateway = free_ports(3)
    here = Here(plain_objects(), tiny_model, tmp_path)
    join_at = {"livescale-control:7000": f"localhost:{control}"}
    listen_at = {"$(POD_IP):7000": f"127.0.0.1:{control}", "--port=8000": f"--port={http}"}
    serve = here.command("serve", listen_at)
    join = here.command("join", join_at)
    gateway = here.command("gateway", join_at | {"--port=8000": f"--port={http_of_gateway}"})
    urls = [f"http://127.0.0.1:{port}" for port in (http, http_of_gateway)]
    log, log_of_host, log_of_gateway = (tmp_path / f"{n}.log" for n in ("head", "host", "gateway"))
    with run(serve, log) as head, run(gateway, log_of_gateway) as second:
        for url in urls:
            wait_for_status(f"{url}/live", 200, head, second)
            assert httpx.get(f"{url}/health").status_code == 503, (
                "alive, and without hosts not ready"
            )
        with run(join, log_of_host) as host:
            for url in urls:
                for path in sorted(set().union(*map(probed_paths, rendered().values()))):
                    wait_for_status(f"{url}{path}", 200, head, host, second)
                assert "\nlivescale_workers_wanted 1.0\n" in httpx.get(f"{url}/metrics").text
                ask(url, tiny_model)
            end(second, log_of_gateway, "stopped")
            ask(urls[0], tiny_model)
            end(host, log_of_host, "left")
            assert head.poll() is None
        end(head, log, "stopped")


@pytest.mark.long
def test_the_standby_of_the_chart_takes_over(tiny_model: Path, tmp_path: Path) -> None:
    """The heads know each other by the names of their Services."""
    http, control, http_of_standby, control_of_standby, http_of_gateway = free_ports(5)
    values = VALUES["two heads by a file"] | {"tls": {}}
    here = Here(chart_objects(values), tiny_model, tmp_path)
    names = {
        # A host joins by one name of the head, and is told another.
        "test-release-control:7000": f"127.0.0.1:{control}",
        "test-release-head:7000": f"localhost:{control}",
        "test-release-standby:7000": f"localhost:{control_of_standby}",
    }

    def at(http: int, control: int) -> dict[str, str]:
        ports = {"$(POD_IP):7000": f"127.0.0.1:{control}", "--port=8000": f"--port={http}"}
        return names | ports

    first = here.command("serve", at(http, control))
    second = here.command("serve", at(http_of_standby, control_of_standby), is_standby=True)
    gateway = here.command("gateway", at(http_of_gateway, control))
    urls = [f"http://127.0.0.1:{port}" for port in (http, http_of_standby, http_of_gateway)]
    with contextlib.ExitStack() as running:
        head = running.enter_context(run(first, tmp_path / "head.log"))
        wait_for_status(f"{urls[0]}/live", 200, head)
        others = [
            running.enter_context(run(words, tmp_path / f"{name}.log"))
            for name, words in (
                ("standby", second),
                ("gateway", gateway),
                ("host", here.command("join", names)),
            )
        ]
        for url in urls:
            wait_for_status(f"{url}/health", 200, head, *others)
            ask(url, tiny_model)
        head.kill()
        head.wait(wait_s())
        for url in urls[1:]:
            wait_for_status(f"{url}/health", 200, *others)
            ask(url, tiny_model)
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("head", "standby", "host")}
    assert not any("given up before" in log for log in logs.values()), logs
