"""What surrounds every request: ids and shapes of errors, and clients that stall. Their time limits
are in `test_gateway_time.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gateway_double import (
    LIMITS,
    WAIT_S,
    LocalServer,
    ScriptedBackend,
    running,
    sse_data,
)
from starlette.types import Receive, Scope, Send

import slowness
from livescale.gateway.contract.backend import QueueFull
from livescale.gateway.contract.limits import Limits

pytestmark = pytest.mark.usefixtures("machine")

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 190}
TOKENS = 'livescale_generation_tokens_total{model="tiny"}'


def hasty() -> Limits:
    """Short enough for a test, long enough on this machine for a request that is in time."""
    short_s = slowness.patient(0.3)
    return dataclasses.replace(LIMITS, receive_timeout_s=short_s, stalled_client_s=short_s)


# -- ids and shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", {"model": "tiny"}, 400),
        ("POST", "/v1/completions", {"model": "nope", "prompt": "x"}, 404),
        ("GET", "/nowhere", None, 404),
        ("DELETE", "/v1/completions", None, 405),
        ("PUT", "/health", None, 405),
        ("POST", "/v1/completions", {**PROMPT, "prompt": "x" * 100_000}, 413),
        ("POST", "/v1/completions", PROMPT, 503),
    ],
)
def test_errors_have_one_shape_and_the_clients_id(
    method: str,
    path: str,
    body: dict[str, object] | None,
    status: int,
    http: httpx.Client,
    backend: ScriptedBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if status == 503:
        backend.script.admission = QueueFull(1.0)
    with caplog.at_level(logging.INFO, "livescale.gateway.http.envelope"):
        response = http.request(method, path, json=body, headers={"X-Request-Id": "mine-1"})
    assert response.status_code == status
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    [line] = [record.getMessage() for record in caplog.records]
    assert "mine-1" in line
    assert f"{method} '{path}'" in line
    assert str(status) in line
    assert "gw-" in line  # our own id, too


def test_a_good_request_is_no_line_in_the_log(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "livescale.gateway"):
        assert http.post("/v1/completions", json=PROMPT).status_code == 200
    assert not caplog.records


# -- a client that does not read, and the system's buffers -----------------------------------------

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: 900\r\n"
)


MANY = 200_000


@pytest.fixture
def torrent(backend: ScriptedBackend) -> Iterator[tuple[LocalServer, ScriptedBackend]]:
    """A server of answers that no socket buffer holds."""
    [card, *_] = backend.models()
    token_ids = (backend.script.token_ids * MANY)[:MANY]
    endless = ScriptedBackend((dataclasses.replace(card, model_tokens_max=2 * MANY),), token_ids)
    endless.script.then = asyncio.Event()  # not over before its client is cut off, however late
    with running(endless, limits=hasty()) as server:
        yield server, endless


def test_a_client_that_reads_nothing_is_cut_off_and_delays_nobody(
    torrent: tuple[LocalServer, ScriptedBackend],
) -> None:
    server, backend = torrent
    raw = json.dumps({**PROMPT, "max_tokens": MANY + 1, "stream": True}).encode()
    with deaf_client(server) as deaf:
        deaf.sendall(HEAD.replace(b"900", b"%d" % len(raw)) + b"\r\n" + raw)
        ignored = backend.wait_for_stream()
        with ThreadPoolExecutor() as threads:
            url = f"{server.url}/v1/completions"
            others = [
                threads.submit(httpx.post, url, json={**PROMPT, "stream": True}, timeout=WAIT_S)
                for _ in range(4)
            ]
            assert all(sse_data(other.result().text)[-1] == "[DONE]" for other in others)
        assert ignored.cancelled.wait(WAIT_S)
        # What waited for the client was bounded by the buffers, not by its answer.
        assert counted(server, TOKENS) < MANY
        assert is_reset(deaf)


@pytest.mark.parametrize("body_bytes", [32 << 10, 32 << 20])
def test_an_answer_that_nobody_reads_is_not_kept_after_its_end(body_bytes: int) -> None:
    """The application is done with it: no request is left that could be cancelled."""
    has_answered = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(body_bytes)})
        has_answered.set()

    server = LocalServer(app, 0.2, hasty(), send_buffer_bytes=4096)
    with deaf_client(server) as deaf:
        deaf.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert has_answered.wait(WAIT_S)
        # Somebody else is cut off twice, each time after as long as this one may take.
        for _ in range(2):
            assert answer_to(server, HEAD)
        assert is_reset(deaf)
    server.stop()
    server.join()


def answer_to(server: LocalServer, *parts: bytes) -> bytes:
    """All that comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        for part in parts:
            sock.sendall(part)
        received = b""
        while part := sock.recv(65536):
            received += part
        return received


def is_reset(sock: socket.socket) -> bool:
    """The connection ends as if it had never been: neither we nor the kernel keep the rest."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return False


def deaf_client(server: LocalServer) -> socket.socket:
    """A connection whose receive buffer is as small as can be."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", server.port))
    return sock


def counted(server: LocalServer, series: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text.splitlines()
    [value] = [line.removeprefix(series) for line in lines if line.startswith(series + " ")]
    return float(value)
