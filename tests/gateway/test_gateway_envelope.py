"""What surrounds every request: ids and shapes of errors, time limits, and clients that stall."""

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
    Script,
    ScriptedBackend,
    running,
    sse_data,
)
from starlette.types import Receive, Scope, Send

from livescale.gateway.backend import QueueFull
from livescale.gateway.limits import HEAD_BYTES_MAX

pytestmark = pytest.mark.usefixtures("machine")

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 190}
#: short enough for a test, long enough for a request that is in time
SHORT_S = 0.3
TIMEOUTS = 'livescale_requests_total{model="tiny",outcome="timeout"}'
TOKENS = 'livescale_generation_tokens_total{model="tiny"}'
HASTY = dataclasses.replace(LIMITS, receive_timeout_s=SHORT_S, stalled_client_s=SHORT_S)


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
    with caplog.at_level(logging.INFO, "livescale.gateway.envelope"):
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


# -- a request that takes too long ----------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    limits = dataclasses.replace(LIMITS, request_timeout_s=SHORT_S)
    with running(shared_backend, limits=limits) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_time_is_over_before_the_first_token(
    stream: bool, impatient: LocalServer, backend: ScriptedBackend
) -> None:
    backend.script = Script([], then=asyncio.Event())
    url, before = f"{impatient.url}/v1/completions", counted(impatient, TIMEOUTS)
    response = httpx.post(url, json={**PROMPT, "stream": stream}, timeout=WAIT_S)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_timeout", "server_error")
    assert "0.3 s" in error["message"]
    assert backend.streams[0].cancelled.is_set()
    assert counted(impatient, TIMEOUTS) == before + 1


def test_time_is_over_in_mid_stream(
    impatient: LocalServer, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = Script(backend.script.token_ids[:3], then=asyncio.Event())
    url = f"{impatient.url}/v1/completions"
    body, headers = {**PROMPT, "stream": True}, {"X-Request-Id": "mine-2"}
    with caplog.at_level(logging.INFO, "livescale.gateway"):
        response = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
    assert response.status_code == 200
    [line] = [record.getMessage() for record in caplog.records]
    assert "mine-2" in line
    assert backend.streams[0].request.request in line
    *pieces, last = [json.loads(data) for data in sse_data(response.text)]
    assert len(pieces) == 3
    assert last["error"]["code"] == "request_timeout"
    assert backend.streams[0].cancelled.is_set()


def test_who_is_in_time_notices_nothing(impatient: LocalServer, backend: ScriptedBackend) -> None:
    url = f"{impatient.url}/v1/completions"
    assert httpx.post(url, json=PROMPT, timeout=WAIT_S).status_code == 200
    response = httpx.post(url, json={**PROMPT, "stream": True}, timeout=WAIT_S)
    assert sse_data(response.text)[-1] == "[DONE]"


# -- a request that does not arrive ---------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with running(shared_backend, limits=HASTY) as server:
        yield server


def answer_to(server: LocalServer, *parts: bytes) -> bytes:
    """All that comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        for part in parts:
            sock.sendall(part)
        received = b""
        while part := sock.recv(65536):
            received += part
        return received


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: 900\r\n"
)


def error_in(answer: bytes, status: int) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    error: dict[str, object] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_body_that_does_not_come(hasty: LocalServer, backend: ScriptedBackend) -> None:
    answer = answer_to(hasty, HEAD + b"x-request-id: mine\r\n\r\n{")
    assert error_in(answer, 408)["code"] == "request_incomplete"
    assert b"x-request-id: mine" in answer
    assert not backend.streams


def test_a_body_that_trickles(hasty: LocalServer, backend: ScriptedBackend) -> None:
    """Each byte in time, and never the last one."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=SHORT_S / 10) as sock:
        sock.sendall(HEAD + b"\r\n")
        received, is_open = b"", True
        while is_open:
            try:
                part = sock.recv(65536)
                received, is_open = received + part, bool(part)
            except TimeoutError:
                sock.sendall(b" ")
            except ConnectionError:
                is_open = False
    assert error_in(received, 408)


@pytest.mark.parametrize("part", [b"POST /v1/comp", HEAD, HEAD + b"x-more: "])
def test_a_head_that_does_not_come(part: bytes, hasty: LocalServer) -> None:
    assert error_in(answer_to(hasty, part), 408)


def test_nothing_at_all(hasty: LocalServer) -> None:
    assert error_in(answer_to(hasty), 408)


def test_empty_lines_do_not_hold_a_connection(hasty: LocalServer) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += sock.recv(65536)
        sock.sendall(b"\r\n")
        assert sock.recv(65536) == b""


@pytest.mark.parametrize("start", [b"POST /nowhere", b"PUT /v1/completions"])
def test_the_rest_of_a_refused_body_is_not_waited_for(start: bytes, hasty: LocalServer) -> None:
    """The answer is there at once; then whoever goes on sending nothing is cut off."""
    head = start + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S) as sock:
        sock.sendall(head)
        assert sock.recv(65536).startswith(b"HTTP/1.1 40")
        assert sock.recv(65536) == b""


def test_endless_headers(hasty: LocalServer, backend: ScriptedBackend) -> None:
    lines = [b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100)]
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S) as sock:
        sock.sendall(HEAD)
        received = b""
        try:
            for line in lines:
                sock.sendall(line)
            while part := sock.recv(65536):
                received += part
        except ConnectionError:
            pass  # closed while we were still talking: what it said may be lost
    assert not received or error_in(received, 431)
    assert sum(map(len, lines)) > HEAD_BYTES_MAX


@pytest.mark.parametrize(
    "raw", [b"\x00\x01\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"hello\r\n"]
)
def test_what_is_not_http(raw: bytes, hasty: LocalServer) -> None:
    assert error_in(answer_to(hasty, raw), 400)["code"] == "invalid_http"


@pytest.mark.parametrize("behind", [b"GET /hea", HEAD + b"\r\n{"])
def test_an_answer_may_take_longer_than_a_request(
    behind: bytes, hasty: LocalServer, backend: ScriptedBackend
) -> None:
    """What is behind it on the connection, complete or not, does not end it."""
    gate = asyncio.Event()
    backend.script = Script(backend.script.token_ids[:2], then=gate)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    head = HEAD.replace(b"900", b"%d" % len(body)) + b"\r\n"
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S) as sock:
        sock.sendall(head + body)
        assert backend.wait_for_stream().waiting.wait(WAIT_S)
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
        # Longer than `receive_timeout_s`: somebody else's slow request is over by then.
        answer_to(hasty, HEAD)
        answer_to(hasty, HEAD)
        hasty.call(gate.set)
        received = b""
        while part := sock.recv(65536):
            received += part
    streamed, _, rest = received.partition(b"[DONE]")
    assert streamed.startswith(b"HTTP/1.1 200")
    assert b'{"status":"ok"}' in rest
    assert b"HTTP/1.1 408" in rest


# -- a client that does not read ------------------------------------------------------------------

MANY = 200_000


@pytest.fixture
def torrent(backend: ScriptedBackend) -> Iterator[tuple[LocalServer, ScriptedBackend]]:
    """A server of answers that no socket buffer holds."""
    [card, *_] = backend.models()
    token_ids = (backend.script.token_ids * MANY)[:MANY]
    endless = ScriptedBackend((dataclasses.replace(card, model_tokens_max=2 * MANY),), token_ids)
    with running(endless, limits=HASTY) as server:
        yield server, endless


def test_a_client_that_reads_nothing_is_cut_off_and_delays_nobody(
    torrent: tuple[LocalServer, ScriptedBackend],
) -> None:
    server, backend = torrent
    raw = json.dumps({**PROMPT, "max_tokens": MANY, "stream": True}).encode()
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

    server = LocalServer(app, 0.2, HASTY, send_buffer_bytes=4096)
    with deaf_client(server) as deaf:
        deaf.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert has_answered.wait(WAIT_S)
        # Somebody else is cut off twice, each time after as long as this one may take.
        for _ in range(2):
            assert answer_to(server, HEAD)
        assert is_reset(deaf)
    server.stop()
    server.join()


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
