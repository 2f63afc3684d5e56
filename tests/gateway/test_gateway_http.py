"""HTTP itself, as the RFCs 9110 and 9112 have it: old clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket

import pytest
from gateway_double import (
    TEXT,
    WAIT_S,
    LocalServer,
    Script,
    ScriptedBackend,
    sse_data,
)

from livescale.gateway.contract.backend import GenerationFailed

ASKED = {"model": "tiny", "prompt": "x", "max_tokens": 190}
STREAMED = {**ASKED, "stream": True}
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def posted(body: object, *lines: str, version: str = "1.1", host: str = "host: x") -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/{version}",
        *filter(None, [host]),
        "content-type: application/json",
        f"content-length: {len(raw)}",
        *lines,
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


def connect(server: LocalServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def exchanged(server: LocalServer, *parts: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with connect(server) as sock:
        for part in parts:
            sock.sendall(part)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def texts_of(answers: bytes) -> list[str]:
    """Of answers that follow one another, each with its length: the statuses, with their bodies."""
    found = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        [size] = [
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        found.append(head.split(b" ")[1].decode() + " " + rest[:size].decode())
        answers = rest[size:]
    return found


# -- HTTP/1.0 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [(), ("connection: keep-alive",), ("expect: 100-continue",)])
@pytest.mark.parametrize("host", ["host: x", ""])
@pytest.mark.parametrize("then", [None, GenerationFailed("lost")])
def test_a_stream_to_http_1_0_ends_with_the_connection(
    lines: tuple[str, ...],
    host: str,
    then: Exception | None,
    shared_server: LocalServer,
    backend: ScriptedBackend,
) -> None:
    """In no chunks, whatever the client would like; also a stream that fails."""
    backend.script.then = then
    answer = exchanged(shared_server, posted(STREAMED, *lines, version="1.0", host=host))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    *events, last = sse_data(body.decode())
    if then is None:
        assert last == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        assert text == TEXT
    else:
        assert json.loads(last)["error"]["code"] == "generation_failed"


class OldConnection(http.client.HTTPConnection):
    _http_vsn = 10
    _http_vsn_str = "HTTP/1.0"


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_other_answers_to_http_1_0_have_a_length(
    method: str, path: str, shared_server: LocalServer
) -> None:
    connection = OldConnection("127.0.0.1", shared_server.port, timeout=WAIT_S)
    connection.request(method, path, headers={"connection": "keep-alive"})
    answer = connection.getresponse()
    size = int(answer.headers["content-length"])
    assert answer.headers["connection"] == "close"
    assert size
    assert len(answer.read()) == (size if method == "GET" else 0)


def test_http_1_0_gets_one_answer(shared_server: LocalServer, backend: ScriptedBackend) -> None:
    request = posted({**ASKED, "max_tokens": 1}, "connection: keep-alive", version="1.0")
    [answer] = texts_of(exchanged(shared_server, request + VERSION))
    assert answer.startswith("200 ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_that_leaves_is_cancelled(
    stream: bool, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    backend.script = Script(backend.script.token_ids[:2], then=asyncio.Event())
    sock = connect(shared_server)
    sock.sendall(posted({**ASKED, "stream": stream}, version="1.0"))
    running = backend.wait_for_stream()
    assert running.waiting.wait(WAIT_S)
    assert not running.cancelled.is_set()
    sock.close()
    assert running.cancelled.wait(WAIT_S)
