"""HTTP itself, as the RFCs 9110 and 9112 have it: old clients, requests that follow one another on
a connection, other protocols, and heads that are not as they should be."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket

import pytest
from gateway_double import (
    MODEL_TOKENS_MAX,
    TEXT,
    WAIT_S,
    LocalServer,
    Script,
    ScriptedBackend,
    sse_data,
)

from livescale.gateway.contract.backend import GenerationFailed
from livescale.gateway.http.server import AHEAD_BYTES_MAX

ASKED = {"model": "tiny", "prompt": "x", "max_tokens": 190}
STREAMED = {**ASKED, "stream": True}
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


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


def read_until(sock: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        part = sock.recv(1 << 16)
        assert part, received
        received += part
    return received


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


# -- requests that follow one another -------------------------------------------------------------

LONG = posted({"model": "tiny", "prompt": "x" * MODEL_TOKENS_MAX, "user": "y" * 50_000})
BEHIND = {
    "a whole request": VERSION,
    "several": VERSION * 100,
    "a part of a head": VERSION[:15],
    "a part of a body": posted(ASKED)[:-5],
    "a long body": LONG,
    "no request": b"nonsense\r\n\r\n",
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_behind_further_requests(
    stream: bool,
    is_at_once: bool,
    behind: bytes,
    shared_server: LocalServer,
    backend: ScriptedBackend,
) -> None:
    """Sent with the first one, or while that is answered."""
    backend.script = Script(backend.script.token_ids[:2], then=asyncio.Event())
    sock = connect(shared_server)
    request = posted({**ASKED, "stream": stream})
    sock.sendall(request + behind * is_at_once)
    running = backend.wait_for_stream()
    assert running.waiting.wait(WAIT_S)
    if not is_at_once:
        sock.sendall(behind)
    assert not running.cancelled.is_set()
    sock.close()
    assert running.cancelled.wait(WAIT_S)
    assert len(backend.streams) == 1  # nothing behind it was begun


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_at_its_second_request_is_noticed(
    stream: bool, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    backend.script = Script(backend.script.token_ids[:2], then=asyncio.Event())
    backend.next_scripts = [Script([5])]
    sock = connect(shared_server)
    second = posted({**ASKED, "stream": stream})
    sock.sendall(posted({**ASKED, "max_tokens": 1}) + second + VERSION)
    running = backend.wait_for_stream(2)
    assert running.waiting.wait(WAIT_S)
    sock.close()
    assert running.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_what_came_while_a_request_was_answered_is_answered_then(
    is_at_once: bool, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    """In order, also more than is kept of it."""
    gate = asyncio.Event()
    backend.script = Script([5], then=gate)
    behind = VERSION * (2 * AHEAD_BYTES_MAX // len(VERSION)) + posted(ASKED) + LAST
    with connect(shared_server) as sock:
        sock.sendall(posted(ASKED) + behind * is_at_once)
        assert backend.wait_for_stream().waiting.wait(WAIT_S)
        backend.script = Script(backend.script.token_ids)
        if not is_at_once:
            sock.sendall(behind)
        shared_server.call(gate.set)
        answers = texts_of(b"".join(iter(lambda: sock.recv(1 << 16), b"")))
    assert len(answers) == 2 * AHEAD_BYTES_MAX // len(VERSION) + 3
    assert all(answer.startswith("200 ") for answer in answers)
    is_generated = ["text_completion" in answer for answer in answers]
    assert [place for place, is_one in enumerate(is_generated) if is_one] == [0, len(answers) - 2]


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("behind", [b"nonsense\r\n\r\n", b"GET /version HTTP/1.1\r\n\r\n"])
def test_what_is_no_request_does_not_cost_the_one_before_its_answer(
    behind: bytes, is_at_once: bool, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    gate = asyncio.Event()
    backend.script = Script(backend.script.token_ids[:2], then=gate)
    with connect(shared_server) as sock:
        sock.sendall(posted(ASKED) + behind * is_at_once)
        assert backend.wait_for_stream().waiting.wait(WAIT_S)
        if not is_at_once:
            sock.sendall(behind)
        shared_server.call(gate.set)
        answers = texts_of(b"".join(iter(lambda: sock.recv(1 << 16), b"")))
    assert [answer[:4] for answer in answers] == ["200 ", "400 "]


# -- other protocols ------------------------------------------------------------------------------

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")


@pytest.mark.parametrize("is_split", [False, True])
def test_who_asks_for_another_protocol_is_answered_without_it(
    is_split: bool, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    """As Java's client does with every request, and `curl --http2`. What follows is served, too."""
    request = posted({**ASKED, "max_tokens": 2}, *H2C)
    head_bytes = request.index(b"\r\n\r\n") + 4
    with connect(shared_server) as sock:
        if is_split:
            sock.sendall(request[:head_bytes])
            sock.sendall(request[head_bytes:-3])
            sock.sendall(request[-3:])
        else:
            sock.sendall(request)
        assert b"HTTP/1.1 200 " in read_until(sock, b'"usage"')
        sock.sendall(request * 3 + LAST.replace(b"\r\n\r\n", b"\r\nupgrade: h2c\r\n\r\n"))
        rest = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert rest.count(b"HTTP/1.1 200 ") == 4
    assert b"HTTP/1.1 101" not in rest


# -- heads ----------------------------------------------------------------------------------------

LIVE = b"GET /live HTTP/1.1\r\n"
HEADS = {
    "no Host": (LIVE, 400, "invalid_http"),
    "a Host that is none": (LIVE + b"host: a b/c\r\n", 400, "invalid_http"),
    "two Hosts": (LIVE + b"host: x\r\nhost: x\r\n", 400, "invalid_http"),
    "two Hosts, HTTP/1.0": (
        b"GET /live HTTP/1.0\r\nhost: x\r\nhost: y\r\n",
        400,
        "invalid_http",
    ),
    "a folded header": (LIVE + b"host: x\r\nx-a: 1\r\n 2\r\n", 400, "invalid_http"),
    "a method in small letters": (b"get /live HTTP/1.1\r\nhost: x\r\n", 400, "invalid_http"),
    "a version to come": (b"GET /live HTTP/2.0\r\nhost: x\r\n", 505, "http_not_supported"),
    "a version of old": (b"GET /live HTTP/0.9\r\nhost: x\r\n", 505, "http_not_supported"),
    "two lengths": (
        LIVE + b"host: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n",
        400,
        "invalid_http",
    ),
    "a length and chunks": (
        LIVE + b"host: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n",
        400,
        "invalid_http",
    ),
    "another coding": (
        LIVE + b"host: x\r\ntransfer-encoding: gzip, chunked\r\n",
        501,
        "http_not_supported",
    ),
}


@pytest.mark.parametrize(("head", "status", "code"), HEADS.values(), ids=HEADS)
def test_a_head_that_cannot_be_served_is_refused(
    head: bytes, status: int, code: str, shared_server: LocalServer
) -> None:
    answer = exchanged(shared_server, head + b"\r\n")
    assert b"\r\ndate: " in answer
    assert b"\r\nconnection: close\r\n" in answer
    [text] = texts_of(answer)
    assert text.startswith(f"{status} ")
    assert json.loads(text[4:])["error"]["code"] == code


def test_a_refused_head_request_gets_no_body(shared_server: LocalServer) -> None:
    answer = exchanged(shared_server, b"HEAD /live HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize(
    "host",
    [
        "",
        "x",
        "x:8000",
        "127.0.0.1:",
        "[::1]:80",
        "[fe80::1%25eth0]",
        "my_host.example.org",
        "a%20b",
    ],
)
@pytest.mark.parametrize("target", ["/live", "http://other/live", "/live?a=b&c=%20"])
def test_hosts_and_targets_in_all_their_forms(
    target: str, host: str, shared_server: LocalServer
) -> None:
    head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    [text] = texts_of(exchanged(shared_server, head.encode()))
    assert text == '200 {"status":"ok"}'
