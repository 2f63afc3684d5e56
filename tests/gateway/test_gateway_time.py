"""Time limits of requests and of their clients, to the instant, by a clock that the test drives."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence

import pytest
from gateway_double import LIMITS, Script, ScriptedBackend, sse_data
from starlette.types import Receive, Scope, Send
from virtual_connections import Client, VirtualGateway

from livescale.gateway.contract.limits import HEAD_BYTES_MAX, Limits
from livescale.gateway.contract.pacing import PACED_BYTES_PER_S
from livescale.gateway.http.bodies import BODIES_BYTES_MAX, SLOW_S
from livescale.gateway.http.server import LINGER_S, REFUSED_S
from livescale.lab.bench.attacks.attack_bodies import ATTACKS, Attack
from virtual_loop import VirtualLoop, passes, run, settled

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 190}
LIMIT_S = 60.0
JUST_S = 0.001
ANSWERED_WITHIN = dataclasses.replace(LIMITS, request_timeout_s=LIMIT_S)
HASTY = dataclasses.replace(LIMITS, receive_timeout_s=LIMIT_S, stalled_client_s=LIMIT_S)
TIMEOUTS = 'livescale_requests_total{model="tiny",outcome="timeout"}'
TOKENS = 'livescale_generation_tokens_total{model="tiny"}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: 900\r\n"
)


def request_of(body: dict[str, object]) -> tuple[bytes, bytes]:
    """Head and body."""
    raw = json.dumps(body).encode()
    return HEAD.replace(b"900", b"%d" % len(raw)) + b"\r\n", raw


def events_of(client: Client) -> list[str]:
    """The data of the events of a streamed answer that is over."""
    head, _, body = client.received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    text = b""
    while not body.startswith(b"0\r\n"):
        size, _, rest = body.partition(b"\r\n")
        text, body = text + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return sse_data(text.decode())


def check_refused(client: Client, status: int) -> dict[str, object]:
    """The only answer, with which the connection ends."""
    assert client.received.startswith(b"HTTP/1.1 %d " % status), client.received
    assert b"connection: close" in client.received.lower()
    assert client.is_lost
    error = client.error()
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture
def backend(shared_backend: ScriptedBackend, text_ids: list[int]) -> ScriptedBackend:
    """Of a model without a chat template: none is tried, in a process, when it is published."""
    [_, plain] = shared_backend.models()
    return ScriptedBackend((dataclasses.replace(plain, name="tiny"),), text_ids)


# -- a request that takes too long ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body_s", [0.0, 20.0])
def test_time_is_over_before_the_first_token(
    stream: bool, body_s: float, backend: ScriptedBackend
) -> None:
    """It began when the request's head had come."""
    backend.script = Script([], then=asyncio.Event())

    async def story() -> None:
        gateway = VirtualGateway(backend, ANSWERED_WITHIN)
        client = gateway.connect()
        head, body = request_of({**PROMPT, "stream": stream})
        await client.send(head)
        await passes(body_s)
        await client.send(body)
        await passes(LIMIT_S - body_s - JUST_S)
        assert not client.received
        await passes(2 * JUST_S)
        assert client.status() == 504
        error = client.error()
        assert (error["code"], error["type"]) == ("request_timeout", "server_error")
        assert "60 s" in error["message"]
        assert backend.streams[0].cancelled.is_set()
        assert await gateway.counted(TIMEOUTS) == 1

    run(story())


def test_time_is_over_in_mid_stream(backend: ScriptedBackend) -> None:
    backend.script = Script(backend.script.token_ids[:3], then=asyncio.Event())

    async def story() -> None:
        client = VirtualGateway(backend, ANSWERED_WITHIN).connect()
        await client.send(*request_of({**PROMPT, "stream": True}))
        begun = bytes(client.received)
        await passes(LIMIT_S - JUST_S)
        assert client.received == begun
        await passes(JUST_S)
        *pieces, last = map(json.loads, events_of(client))
        assert len(pieces) == 3
        assert last["error"]["code"] == "request_timeout"
        assert backend.streams[0].cancelled.is_set()

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_in_time_notices_nothing(stream: bool, backend: ScriptedBackend) -> None:
    async def story() -> None:
        gate = asyncio.Event()
        backend.script = Script(backend.script.token_ids[:3], then=gate)
        client = VirtualGateway(backend, ANSWERED_WITHIN).connect()
        await client.send(*request_of({**PROMPT, "stream": stream}))
        await passes(LIMIT_S - JUST_S)
        gate.set()
        await passes(LIMIT_S)
        assert client.status() == 200
        assert b"error" not in client.received
        assert b"[DONE]" in client.received or not stream

    run(story())


# -- a request that does not arrive ---------------------------------------------------------------


def test_a_body_that_does_not_come(backend: ScriptedBackend) -> None:
    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(HEAD + b"x-request-id: mine\r\n\r\n{")
        await passes(LIMIT_S - JUST_S)
        assert not client.received
        await passes(JUST_S)
        assert check_refused(client, 408)["code"] == "request_incomplete"
        assert b"x-request-id: mine" in client.received

    run(story())
    assert not backend.streams


@pytest.mark.parametrize(
    "parts", [[HEAD + b"\r\n", *[b" "] * 800], [b"%c" % byte for byte in HEAD]]
)
def test_a_request_that_trickles(parts: Sequence[bytes], backend: ScriptedBackend) -> None:
    """Each byte in time, and never the last one."""

    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(parts[0])
        for part in parts[1 : int(LIMIT_S)]:
            await passes(1.0)
            await client.send(part)
        assert not client.received
        await passes(1.0)
        check_refused(client, 408)

    run(story())


@pytest.mark.parametrize("part", [b"", b"POST /v1/comp", HEAD, HEAD + b"x-more: "])
def test_a_head_that_does_not_come(part: bytes, backend: ScriptedBackend) -> None:
    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(*[part] * bool(part))
        await passes(LIMIT_S - JUST_S)
        assert not client.received
        await passes(JUST_S)
        check_refused(client, 408)

    run(story())


def test_empty_lines_do_not_hold_a_connection(backend: ScriptedBackend) -> None:
    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.status() == 200
        await passes(LIMIT_S)
        await client.send(b"\r\n")
        await passes(LIMIT_S - JUST_S)
        assert not client.is_lost
        await passes(JUST_S)
        assert client.is_lost

    run(story())


@pytest.mark.parametrize("start", [b"POST /nowhere", b"PUT /v1/completions"])
def test_the_rest_of_a_refused_body_is_not_waited_for(
    start: bytes, backend: ScriptedBackend
) -> None:
    """The answer is there at once; then whoever goes on sending nothing is cut off."""

    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(start + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
        assert client.status() in (404, 405)
        await passes(REFUSED_S - JUST_S)
        assert not client.is_lost
        await passes(JUST_S)
        assert client.is_lost

    run(story())


def test_endless_headers(backend: ScriptedBackend) -> None:
    lines = [b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100)]
    assert sum(map(len, lines)) > HEAD_BYTES_MAX

    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(HEAD, *lines)
        check_refused(client, 431)

    run(story())


@pytest.mark.parametrize(
    "raw", [b"\x00\x01\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"hello\r\n"]
)
def test_what_is_not_http(raw: bytes, backend: ScriptedBackend) -> None:
    async def story() -> None:
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(raw)
        assert check_refused(client, 400)["code"] == "invalid_http"

    run(story())


@pytest.mark.parametrize("behind", [b"GET /hea", HEAD + b"\r\n{"])
def test_an_answer_may_take_longer_than_a_request(behind: bytes, backend: ScriptedBackend) -> None:
    """What is behind it on the connection, complete or not, does not end it."""

    async def story() -> None:
        gate = asyncio.Event()
        backend.script = Script(backend.script.token_ids[:2], then=gate)
        client = VirtualGateway(backend, HASTY).connect()
        await client.send(*request_of({**PROMPT, "stream": True}))
        await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
        await passes(10 * LIMIT_S)
        assert not client.is_lost
        gate.set()
        await passes(2 * LIMIT_S + LINGER_S)
        streamed, _, rest = client.received.partition(b"[DONE]")
        assert streamed.startswith(b"HTTP/1.1 200")
        assert b'{"status":"ok"}' in rest
        assert b"HTTP/1.1 408" in rest
        assert client.is_lost

    run(story())


# -- large bodies ---------------------------------------------------------------------------------

PART_BYTES = 64 << 10
TURN_BYTES = 32 << 10
"""So much of a body is looked at in one turn of the event loop."""
HOSTILE = [attack for attack in ATTACKS if attack.statuses == (413,)][:2]


def large_request(size_bytes: int) -> bytes:
    _, body = request_of({"model": "tiny", "prompt": "x", "max_tokens": 1})
    body = body[:-1] + b" " * (size_bytes - len(body)) + b"}"
    return HEAD.replace(b"900", b"%d" % len(body)) + b"\r\n" + body


@pytest.mark.parametrize("bodies", [1, 4])
def test_large_bodies_are_read_at_a_rate_that_they_share(
    bodies: int, backend: ScriptedBackend
) -> None:
    size_bytes = 2 << 20

    async def story() -> float:
        gateway = VirtualGateway(backend, Limits())
        clients = [gateway.connect() for _ in range(bodies)]
        begin_s = asyncio.get_running_loop().time()
        request = large_request(size_bytes)
        await asyncio.gather(*(client.pour(request, PART_BYTES) for client in clients))
        assert {client.status() for client in clients} == {200}
        return asyncio.get_running_loop().time() - begin_s

    # The first part of each is read at once, and the last one has not to be waited for.
    paced_bytes = bodies * (size_bytes - 2 * PART_BYTES)
    assert paced_bytes <= run(story()) * PACED_BYTES_PER_S <= bodies * (size_bytes + PART_BYTES)


def test_a_large_body_leaves_many_turns_to_others(backend: ScriptedBackend) -> None:
    """However much of it comes at once."""
    size_bytes = 4 << 20

    async def story() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        client = VirtualGateway(backend, Limits()).connect()
        before = loop.turns
        await client.pour(large_request(size_bytes), size_bytes + 1000)
        assert client.status() == 200
        return loop.turns - before

    assert run(story()) >= size_bytes // TURN_BYTES


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.name)
def test_small_requests_are_answered_between_the_parts_of_a_hostile_body(
    attack: Attack, backend: ScriptedBackend
) -> None:
    """All of its parts, also those that come after it was refused."""
    request = attack.request("tiny")

    async def story() -> int:
        gateway = VirtualGateway(backend, Limits())
        hostile, small = gateway.connect(), gateway.connect()
        attacking = asyncio.create_task(hostile.pour(request, PART_BYTES))
        served = 0
        while not attacking.done():
            await small.send(*request_of({"model": "tiny", "prompt": "x", "max_tokens": 1}))
            served += 1
            assert small.received.count(b"HTTP/1.1 200") == served
            await passes(PART_BYTES / PACED_BYTES_PER_S)
        assert hostile.status() == 413
        return served

    assert run(story()) >= 1


@pytest.mark.parametrize("begun_bytes", [0, 1000, 2 * PART_BYTES])
@pytest.mark.parametrize(
    "framing", [b"content-length: %d" % (8 << 20), b"transfer-encoding: chunked"]
)
def test_bodies_that_do_not_come_hold_nobody_up_for_long(
    begun_bytes: int, framing: bytes, backend: ScriptedBackend
) -> None:
    """As many as fill the gateway, begun and left."""
    count = 2 * BODIES_BYTES_MAX // (8 << 20)
    head = HEAD.replace(b"content-length: 900", framing) + b"\r\n"
    begun = b" " * begun_bytes
    if b"chunked" in framing and begun:
        begun = b"%x\r\n%b\r\n" % (len(begun), begun)

    async def story() -> float:
        gateway = VirtualGateway(backend, Limits())
        idle = [gateway.connect() for _ in range(count)]
        for client in idle:
            await client.pour(head + begun, PART_BYTES)
        begin_s = asyncio.get_running_loop().time()
        client = gateway.connect()
        await client.pour(large_request(2 << 20), PART_BYTES)
        await passes(SLOW_S)
        while not client.received:
            await passes(1)
        assert client.status() == 200
        return asyncio.get_running_loop().time() - begin_s

    # Those that hold a place are looked at twice: at first they have brought enough.
    rounds = count * (8 << 20) // BODIES_BYTES_MAX if begun_bytes > PART_BYTES else 0
    assert run(story()) <= (2 * rounds + 1) * SLOW_S + 2


# -- a client that does not read ------------------------------------------------------------------

MANY = 2000


@pytest.fixture
def endless(backend: ScriptedBackend) -> ScriptedBackend:
    """Its answers are longer than what a connection keeps."""
    [card] = backend.models()
    token_ids = (backend.script.token_ids * MANY)[:MANY]
    card = dataclasses.replace(card, model_tokens_max=3 * MANY)
    endless = ScriptedBackend((card,), token_ids)
    endless.script.then = asyncio.Event()
    return endless


async def asked_by_a_deaf_client(gateway: VirtualGateway) -> Client:
    client = gateway.connect()
    client.is_deaf = True
    await client.send(*request_of({**PROMPT, "max_tokens": 2 * MANY, "stream": True}))
    return client


def test_a_client_that_reads_nothing_is_cut_off_and_delays_nobody(
    endless: ScriptedBackend,
) -> None:
    async def story() -> None:
        gateway = VirtualGateway(endless, HASTY)
        deaf = await asked_by_a_deaf_client(gateway)
        endless.script.then = None
        other = gateway.connect()
        await other.send(*request_of({**PROMPT, "stream": True}))
        assert events_of(other)[-1] == "[DONE]"
        await passes(LIMIT_S - JUST_S)
        assert not deaf.is_lost
        await passes(JUST_S)
        assert deaf.was_reset
        await settled()
        assert endless.streams[0].cancelled.is_set()
        # What waited for the client was bounded by the buffers, not by its answer.
        assert 0 < await gateway.counted(TOKENS) < MANY

    run(story())


def test_a_client_that_reads_slowly_is_not_cut_off(endless: ScriptedBackend) -> None:
    """Something each time that it is looked at."""

    async def story() -> None:
        client = await asked_by_a_deaf_client(VirtualGateway(endless, HASTY))
        for _ in range(20):
            await passes(LIMIT_S / 2)
            await client.read(1000)
        assert not client.is_lost
        await passes(2 * LIMIT_S)
        assert client.was_reset

    run(story())


def test_an_answer_that_nobody_reads_is_not_kept_after_its_end(backend: ScriptedBackend) -> None:
    """The application is done with it: no request is left that could be cancelled."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(32 << 10)})

    async def story() -> None:
        client = VirtualGateway(backend, HASTY, app).connect()
        client.is_deaf = True
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await passes(LIMIT_S - JUST_S)
        assert not client.is_lost
        await passes(JUST_S)
        assert client.was_reset

    run(story())
