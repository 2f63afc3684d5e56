"""What a client's pace costs: how slowly it reads is in no measured time, and how much it sends
while it is answered is kept within a bound."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from gateway_double import LIMITS, Script, ScriptedBackend
from virtual_connections import VirtualGateway

from livescale.gateway.http.server import AHEAD_BYTES_MAX
from virtual_loop import passes, run, settled

ASKED = {"model": "tiny", "prompt": "x", "max_tokens": 190}
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
TIMES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time")


def posted(body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


@pytest.fixture
def backend(shared_backend: ScriptedBackend, text_ids: list[int]) -> ScriptedBackend:
    """Of a model without a chat template: none is tried, in a process, when it is published."""
    [_, plain] = shared_backend.models()
    return ScriptedBackend((dataclasses.replace(plain, name="tiny"),), text_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_how_slowly_a_client_reads_is_in_no_time(stream: bool, backend: ScriptedBackend) -> None:
    """The last token comes 10 s after the others; one client reads it at once, the other late."""
    tokens = backend.script.token_ids

    async def story(read_late: bool) -> dict[str, float]:
        gate = asyncio.Event()
        backend.script = Script(tokens, then=gate)
        gateway = VirtualGateway(backend, LIMITS)
        client = gateway.connect()
        client.is_deaf = read_late
        await client.send(posted({**ASKED, "stream": stream}))
        await passes(10)
        gate.set()
        await settled()
        if read_late:
            await passes(30)
            client.is_deaf = False
            await client.read(1 << 20)
        assert client.received.count(b'"finish_reason":"stop"') == 1
        series = 'livescale_{}_seconds_{}{{model="tiny"}}'
        return {
            f"{name}_{end}": await gateway.counted(series.format(name, end))
            for name in TIMES
            for end in ("sum", "count")
        }

    at_once = run(story(False))
    assert at_once["inter_token_latency_count"] == len(tokens)
    assert run(story(True)) == pytest.approx(at_once, abs=0.1)
    assert at_once["e2e_request_latency_sum"] == pytest.approx(10, abs=0.1)


def test_no_more_than_a_bound_is_read_behind_a_request_that_is_answered(
    backend: ScriptedBackend,
) -> None:
    part_bytes = 1 << 14
    behind = VERSION * (10 * AHEAD_BYTES_MAX // len(VERSION))

    async def story() -> None:
        gate = asyncio.Event()
        backend.script = Script(backend.script.token_ids[:2], then=gate)
        client = VirtualGateway(backend, LIMITS).connect()
        await client.send(posted({**ASKED, "stream": True}))
        pouring = asyncio.create_task(client.pour(behind, part_bytes))
        await passes(30)
        assert AHEAD_BYTES_MAX < client.poured_bytes <= AHEAD_BYTES_MAX + part_bytes
        assert b'"version"' not in client.received
        gate.set()
        await pouring
        streamed, _, rest = bytes(client.received).partition(b"[DONE]")
        assert b'"version"' not in streamed
        assert rest.count(b'"version"') == behind.count(VERSION)

    run(story())
