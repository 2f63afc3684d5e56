"""Streams whose tokens go into the connection in one call: what the client gets is what ASGI
messages would have brought, whatever was joined on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_double import (
    LIMITS,
    TEXT,
    WAIT_S,
    LocalServer,
    Script,
    ScriptedBackend,
    ScriptedStream,
    sse_data,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from effort import examples
from livescale.gateway.contract.backend import GenerationFailed
from livescale.gateway.endpoints.app import AppOptions, create_app
from livescale.runtime.join.cluster_folder import ClusterFolder

pytestmark = pytest.mark.usefixtures("machine")

relaxed = settings(
    max_examples=examples(80),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ASKED = {"model": "tiny", "prompt": "x", "max_tokens": 190, "stream": True}
USER = [{"role": "user", "content": "x"}]
CHAT = {"model": "tiny", "messages": USER, "max_tokens": 190, "stream": True}
#: what differs between two answers to the same question
OF_THE_MOMENT = re.compile(rb'"created":\d+|date: [^\r]+')
SMALL_BUFFER_BYTES = 4096


class AsgiOnly:
    """An application on a server that knows nothing but ASGI messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({k: v for k, v in scope.items() if k != "extensions"}, receive, send)


@contextlib.contextmanager
def served(backend: ScriptedBackend, *, is_direct: bool, **options: Any) -> Iterator[LocalServer]:
    app: ASGIApp = create_app(backend, AppOptions("gw"), limits=LIMITS)
    server = LocalServer(app if is_direct else AsgiOnly(app), 0.2, LIMITS, **options)
    try:
        yield server
    finally:
        server.stop()
        server.join()


@pytest.fixture(scope="module")
def asgi_server(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with served(shared_backend, is_direct=False) as server:
        yield server


def posted(
    path: str, body: object, version: str = "1.1", last: bool = False, padding_bytes: int = 0
) -> bytes:
    raw = json.dumps(body).encode() + b" " * padding_bytes
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(raw)}\r\n" + "connection: close\r\n" * last
    return head.encode() + b"\r\n" + raw


def connect(server: LocalServer, receive_bytes: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", server.port))
    return sock


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def exchanged(server: LocalServer, request: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with connect(server) as sock:
        sock.sendall(request)
        return read_all(sock)


def body_of(answer: bytes) -> str:
    """The body of an answer in chunks, which must be well formed."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head, head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        body, end, rest = body + rest[:count], rest[count : count + 2], rest[count + 2 :]
        assert end == b"\r\n"
        if not count:
            assert not rest
            return body.decode()


def folded(answer: bytes) -> dict[str, Any]:
    """What all events of an answer come to: the text of each choice with all that belongs to it,
    how each ended, and the events that have no choice."""
    *datas, done = sse_data(body_of(answer))
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    others = []
    for event in map(json.loads, datas):
        for entry in event["choices"]:
            of = choices[entry["index"]]
            of["text"].append(entry["text"] if "text" in entry else entry["delta"]["content"])
            of["roles"] += [entry.get("delta", {}).get("role")]
            of["ids"] += entry.get("token_ids", [])
            of["prompt_ids"] += entry.get("prompt_token_ids") or event.get("prompt_token_ids") or []
            for name, values in (entry["logprobs"] or {}).items():
                of[name] += values or []
            assert not of["end"], "events behind the last one"
            if entry["finish_reason"] is not None:
                of["end"] = [entry["finish_reason"], entry["stop_reason"]]
            of["usage"] = [event.get("usage")]
        if not event["choices"]:
            others.append(event["usage"])
    for of in choices.values():
        of["text"], of["roles"] = ["".join(of["text"])], [role for role in of["roles"] if role]
    several = len(choices) > 1  # which choice is the last to end is a matter of time
    return {
        "choices": {
            index: {name: of[name] for name in of if not (several and name == "usage")}
            for index, of in choices.items()
        },
        "others": others,
        "done": done,
    }


def events_in(answer: bytes) -> int:
    return sum(bool(json.loads(data)["choices"]) for data in sse_data(body_of(answer))[:-1])


# -- the same as with ASGI messages ---------------------------------------------------------------


def stops_within(text: str) -> st.SearchStrategy[list[str]]:
    starts = st.integers(0, len(text) - 1)
    return st.lists(
        st.builds(lambda start, size: text[start : start + size], starts, st.integers(1, 6)),
        max_size=2,
    )


@given(data=st.data(), is_chat=st.booleans(), n=st.integers(1, 3), likely=st.sampled_from([0, 2]))
@relaxed
def test_what_is_streamed_is_the_same_on_both_ways(
    data: st.DataObject,
    is_chat: bool,
    n: int,
    likely: int,
    shared_server: LocalServer,
    asgi_server: LocalServer,
    backend: ScriptedBackend,
) -> None:
    """Chats and completions, several choices, stop strings across tokens, logprobs and usage; with
    tokens that come one by one, or all in one turn of the event loop."""
    ids = backend.script.token_ids
    body: dict[str, Any] = {
        **{name: value for name, value in ASKED.items() if not (is_chat and name == "prompt")},
        **({"messages": USER} if is_chat else {}),
        "n": n,
        "seed": 1,
        "stop": data.draw(stops_within(TEXT)),
        "return_token_ids": data.draw(st.booleans()),
        "stream_options": {
            "include_usage": data.draw(st.booleans()),
            "continuous_usage_stats": data.draw(st.booleans()),
        },
    }
    if likely:
        body |= {"logprobs": True, "top_logprobs": likely} if is_chat else {"logprobs": likely}
    scripts = [
        Script(
            ids[: data.draw(st.integers(0, len(ids)))],
            turns_between=data.draw(st.sampled_from([0, 1, 3, 12])),
            cached_tokens=1,
        )
        for _ in range(n)
    ]
    request = posted("/v1/chat/completions" if is_chat else "/v1/completions", body, last=True)
    answers = []
    for server in (shared_server, asgi_server):
        backend.next_scripts = list(scripts)
        answers.append(folded(exchanged(server, request)))
    assert answers[0] == answers[1]
    assert answers[0]["done"] == "[DONE]"


@pytest.mark.parametrize(
    ("version", "then"),
    [("1.1", None), ("1.0", None), ("1.1", GenerationFailed("lost")), ("1.1", KeyError("k"))],
)
def test_every_byte_is_the_same_when_tokens_come_apart(
    version: str, then: Exception | None, backend: ScriptedBackend
) -> None:
    """Two requests that follow one another on a connection, the second one sent before the first is
    answered, and perhaps a failure in mid-stream; a client of HTTP/1.0 gets one answer."""
    first = posted("/v1/completions", {**ASKED, "stream_options": {"include_usage": True}}, version)
    second = posted("/v1/chat/completions", CHAT, version, last=True)
    answers = []
    for is_direct in (True, False):
        backend.script = Script(backend.script.token_ids, then=then)
        with served(backend, is_direct=is_direct) as server:
            answers.append(exchanged(server, first + second * (version == "1.1")))
    direct, by_messages = (OF_THE_MOMENT.sub(b"", answer) for answer in answers)
    assert direct == by_messages
    assert direct.count(b"HTTP/1.1 200") == (2 if version == "1.1" else 1)
    assert direct.count(b"[DONE]") == (0 if then else direct.count(b"HTTP/1.1 200"))


def test_only_the_first_and_the_last_events_are_asgi_messages(backend: ScriptedBackend) -> None:
    """Or all these tests would compare one way with itself."""
    bodies: list[bytes] = []
    app = create_app(backend, AppOptions("gw"), limits=LIMITS)

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            if message["type"] == "http.response.body":
                bodies.append(message["body"])
            await send(message)

        await app(scope, receive, watch)

    server = LocalServer(watched, 0.2, LIMITS)
    answer = exchanged(server, posted("/v1/completions", ASKED, last=True))
    server.stop()
    server.join()
    assert len(bodies) == 2
    assert events_in(answer) == len(backend.script.token_ids) + 1
    assert body_of(answer).startswith(bodies[0].decode())
    assert body_of(answer).endswith(bodies[1].decode())


# -- clients that read slowly, or leave -----------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = ClusterFolder(tmp_path_factory.mktemp("cluster") / "c").init()
    return {"certfile": str(folder / "cert.pem"), "keyfile": str(folder / "key.pem")}


def secured(sock: socket.socket) -> socket.socket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)


@pytest.mark.parametrize("has_tls", [False, True])
def test_what_a_slow_client_has_not_read_waits_as_tokens_and_is_joined(
    has_tls: bool, certificate: dict[str, str], backend: ScriptedBackend, text_ids: list[int]
) -> None:
    """All tokens have come before the client reads any; then it asks for more on the connection."""
    gate = asyncio.Event()
    tokens = (text_ids * 9)[:180]
    backend.script = Script(tokens, then=gate)
    asked = {**ASKED, "logprobs": 20, "return_token_ids": True}
    options = {"send_buffer_bytes": SMALL_BUFFER_BYTES, **(certificate if has_tls else {})}
    with served(backend, is_direct=True, **options) as server:
        sock = connect(server, SMALL_BUFFER_BYTES)
        with secured(sock) if has_tls else sock as client:
            client.sendall(posted("/v1/completions", asked))
            assert backend.wait_for_stream().waiting.wait(WAIT_S)
            server.call(gate.set)
            slow = read_answer(client)
            backend.script = Script(text_ids)
            client.sendall(posted("/v1/completions", ASKED, last=True))
            quick = read_all(client)
    assert folded(slow)["choices"][0]["ids"][:-1] == tokens
    assert len(folded(slow)["choices"][0]["tokens"]) == len(tokens) + 1
    assert events_in(slow) < len(tokens)
    assert folded(quick)["choices"][0]["text"] == [TEXT]


def read_answer(sock: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\r\n0\r\n\r\n"):
        part = sock.recv(1 << 16)
        assert part, "the connection was closed"
        received += part
    return bytes(received)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_leaves_in_mid_stream_is_cancelled(
    is_reset: bool, reads: bool, backend: ScriptedBackend, text_ids: list[int]
) -> None:
    """Also one whose events wait for it to read."""
    backend.script = Script((text_ids * 9)[:180], then=asyncio.Event())
    with served(backend, is_direct=True, send_buffer_bytes=SMALL_BUFFER_BYTES) as server:
        sock = connect(server, SMALL_BUFFER_BYTES)
        sock.sendall(posted("/v1/completions", {**ASKED, "logprobs": 20}))
        stream: ScriptedStream = backend.wait_for_stream()
        if reads:
            assert sock.recv(1 << 16)
        assert stream.waiting.wait(WAIT_S)
        assert not stream.cancelled.is_set()
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        sock.close()
        assert stream.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("padding_bytes", [0, 90_000])
def test_a_client_that_leaves_before_the_first_token_is_cancelled(
    padding_bytes: int, shared_server: LocalServer, backend: ScriptedBackend
) -> None:
    """Also one whose request is so long that reading its connection may be paused."""
    backend.script = Script([], then=asyncio.Event())
    sock = connect(shared_server)
    sock.sendall(posted("/v1/completions", ASKED, padding_bytes=padding_bytes))
    stream = backend.wait_for_stream()
    assert stream.waiting.wait(WAIT_S)
    assert not stream.cancelled.is_set()
    sock.close()
    assert stream.cancelled.wait(WAIT_S)
