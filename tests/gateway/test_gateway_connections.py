"""Clients that leave, and a server that stops: nothing keeps running for nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvloop
from gateway_double import (
    TEXT,
    WAIT_S,
    LocalServer,
    Script,
    ScriptedBackend,
    running,
    sse_data,
)

from livescale.gateway.endpoints.app import AppOptions, create_app
from livescale.gateway.http.server import serve

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 190}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: 900\r\n"
)


def connect_and_post(server: LocalServer, body: dict[str, object]) -> socket.socket:
    """A connection with a complete request on it and nothing read yet."""
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    sock.sendall(head.encode() + raw)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_disconnect_cancels(
    stream: bool, tokens: int, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    """Also while the backend yields nothing, before and after the first token."""
    backend.script = Script(backend.script.token_ids[:tokens], then=asyncio.Event())
    sock = connect_and_post(shared_server, {**PROMPT, "stream": stream})
    running_stream = backend.wait_for_stream()
    assert running_stream.waiting.wait(WAIT_S)
    assert not running_stream.cancelled.is_set()
    sock.close()
    assert running_stream.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_every_choice(
    stream: bool, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    ids = backend.script.token_ids
    backend.script = Script(ids[:2], then=asyncio.Event())
    backend.next_scripts = [Script(ids[:1])]
    body = {**PROMPT, "prompt": ["x", "y"], "n": 2, "stream": stream}
    with connect_and_post(shared_server, body):
        for number in (2, 3, 4):
            assert backend.wait_for_stream(number).waiting.wait(WAIT_S)
    for entry in backend.streams[1:]:
        assert entry.cancelled.wait(WAIT_S)


def test_reset_cancels(shared_server: LocalServer, backend: ScriptedBackend) -> None:
    backend.script = Script([5], then=asyncio.Event())
    sock = connect_and_post(shared_server, {**PROMPT, "stream": True})
    stream = backend.wait_for_stream()
    assert stream.waiting.wait(WAIT_S)
    linger_0 = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_0)
    sock.close()
    assert stream.cancelled.wait(WAIT_S)


def cancelled_requests(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    name = 'livescale_requests_total{model="tiny",outcome="cancelled"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_disconnect_is_counted(
    http: httpx.Client, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    before = cancelled_requests(http)
    backend.script = Script([], then=asyncio.Event())
    with connect_and_post(shared_server, PROMPT):
        assert backend.wait_for_stream().waiting.wait(WAIT_S)
    assert backend.streams[0].cancelled.wait(WAIT_S)
    assert cancelled_requests(http) == before + 1


def test_leaving_in_mid_body_is_quiet(
    shared_server: LocalServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    sock = socket.create_connection(("127.0.0.1", shared_server.port), timeout=WAIT_S)
    sock.sendall(HEAD + b"\r\n{")
    sock.close()
    assert http.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_first_chunk_waits_for_the_first_token_only(
    shared_server: LocalServer, backend: ScriptedBackend, http: httpx.Client
) -> None:
    gate = asyncio.Event()
    backend.script = Script(backend.script.token_ids[:2], then=gate)
    with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None
        assert not backend.streams[0].is_finished
        shared_server.call(gate.set)
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.usefixtures("machine")
def test_serve_drains(backend: ScriptedBackend) -> None:
    """What runs may finish; new connections are refused; then `serve` returns."""
    gate = asyncio.Event()
    backend.script = Script(backend.script.token_ids, then=gate)
    with running(backend, drain_s=WAIT_S) as server, ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(
                httpx.post,
                f"{server.url}/v1/completions",
                json={**PROMPT, "stream": stream},
                timeout=WAIT_S,
                trust_env=False,
            )
            for stream in (False, True)
        ]
        for number in (1, 2):
            assert backend.wait_for_stream(number).waiting.wait(WAIT_S)
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += idle.recv(1000)
            server.stop()
            assert idle.recv(1) == b""  # closed by the drain: it has begun
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        assert server.thread.is_alive()
        server.call(gate.set)
        whole, streamed = (answer.result(WAIT_S) for answer in answers)
        assert whole.json()["choices"][0]["text"] == TEXT
        assert sse_data(streamed.text)[-1] == "[DONE]"
        server.join()


@pytest.mark.usefixtures("machine")
def test_serve_cancels_what_does_not_finish(
    backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are told, streams are freed, nothing is logged as a bug."""
    with ThreadPoolExecutor() as pool, running(backend, drain_s=0.1) as server:
        answers = []
        for number, (tokens, stream) in enumerate([(3, True), (3, False), (0, True)]):
            backend.script = Script(backend.script.token_ids[:tokens], then=asyncio.Event())
            answers.append(
                pool.submit(
                    httpx.post,
                    f"{server.url}/v1/completions",
                    json={**PROMPT, "stream": stream},
                    timeout=WAIT_S,
                    trust_env=False,
                )
            )
            assert backend.wait_for_stream(number + 1).waiting.wait(WAIT_S)
        server.stop()
        server.join()
    cut, whole, empty = (answer.result(WAIT_S) for answer in answers)
    assert json.loads(sse_data(cut.text)[-1])["error"]["code"] == "server_stopping"
    for unanswered in (whole, empty):
        assert unanswered.status_code == 503
        assert unanswered.json()["error"]["code"] == "server_stopping"
    assert all(stream.cancelled.is_set() for stream in backend.streams)
    assert "Traceback" not in caplog.text


@pytest.mark.usefixtures("machine")
def test_serve_answers_a_request_that_was_never_complete(backend: ScriptedBackend) -> None:
    with running(backend, drain_s=0.1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
            sock.sendall(HEAD + b"expect: 100-continue\r\n\r\n{")
            assert sock.recv(1000).startswith(b"HTTP/1.1 100")  # the server reads the body
            server.stop()
            assert sock.recv(1000).startswith(b"HTTP/1.1 503")
        server.join()


@pytest.mark.usefixtures("machine")
def test_serve_stops_when_idle_and_leaves_signals_alone(backend: ScriptedBackend) -> None:
    async def main() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        stop = asyncio.Event()
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/health"
        serving = asyncio.create_task(
            serve(create_app(backend, AppOptions("gw")), sock, stop, drain_s=WAIT_S)
        )
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
            assert signal.getsignal(signal.SIGTERM) is handler
            stop.set()
            await asyncio.wait_for(serving, WAIT_S)
        assert sock.fileno() == -1

    uvloop.run(main())
