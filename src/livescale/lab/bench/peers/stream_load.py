"""Many concurrent streams against a gateway: the load of `bench gateway`, in its own process.

Answers are not decoded: an event ends with an empty line, which cannot stand inside its JSON, and
an answer ends with the last chunk of HTTP. Cheap enough that the gateway is the limit, and it
reports its own CPU time to show that.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
from array import array
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns, process_time
from typing import Any

import uvloop

from livescale.config.slo import percentile
from livescale.lab.bench.peers.gateway_shares import GatewayProcesses, gateway_of, shares_of
from livescale.lab.bench.peers.light_client import completion_request
from livescale.lab.bench.peers.line_server import Job, serve_lines

_EVENT_END = b"\n\n"
_ANSWER_END = b"0\r\n\r\n"
_DONE = b"[DONE]"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
# Longer than the last event with numbers, [DONE] and the end of the answer.
_TAIL_BYTES = 1000
_FIRST_TOKENS_S_MAX = 120.0
# A stream that never reads: a small buffer, so that the gateway notices soon.
_STALLED_BUFFER_BYTES = 4096
_ERRORS_MAX = 5


class _Counts:
    """What all streams saw together. Gaps and first tokens count inside the window only."""

    def __init__(self) -> None:
        self.is_open = False
        self.gaps_ns = array("q")
        self.ttft_ns = array("q")
        #: of each answer that ended: from its first token to its last one, by token
        self.steps_ns = array("q")
        self.requests = 0
        self.events = 0
        self.event_bytes = 0
        #: of answers that ended, to learn how many tokens an event holds
        self.answer_events = 0
        self.answer_tokens = 0
        self.errors: list[str] = []


class _Stream(asyncio.Protocol):
    """One connection that asks again and again, `requests` times (None: until it is closed)."""

    def __init__(self, request: bytes, counts: _Counts, requests: int | None = None) -> None:
        self._request = request
        self._counts = counts
        self._left = requests
        self._transport: Any = None  # uvloop's are no asyncio.Transport
        self._asked_ns = 0
        self._first_ns = 0
        self._last_ns = 0
        self._events = 0
        self._tail = b""
        self.is_over = False
        self.has_token = False
        self.window_events = 0
        self.worst_gap_ns = 0
        self.gateway = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        now_ns = perf_counter_ns()
        if self._last_ns == 0 and not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data[:300].decode(errors="replace"))
            return
        if not self.has_token:
            self.gateway = gateway_of(data) or self.gateway
        events = data.count(_EVENT_END)
        if self._tail[-1:] == b"\n" and data[:1] == b"\n":
            events += 1
        if _DONE in data:
            events -= 1
        if _USAGE.search(data):
            events -= 1
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if events > 0:
            self._count(events, now_ns)
        if self._counts.is_open:
            self._counts.event_bytes += len(data)
        if self._tail.endswith(_ANSWER_END):
            self._answered()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_over:
            self._fail(f"the connection was closed: {error}")

    def close(self) -> None:
        """Leave: what is under way is cancelled by the gateway."""
        self.is_over = True
        self._transport.abort()

    # -- helpers, in the order used ---------------------------------------------------------

    def _ask(self) -> None:
        self._tail, self._events = b"", 0
        self._asked_ns, self._last_ns = perf_counter_ns(), 0
        self._transport.write(self._request)

    def _fail(self, reason: str) -> None:
        if len(self._counts.errors) < _ERRORS_MAX:
            self._counts.errors.append(reason)
        self.close()

    def _count(self, events: int, now_ns: int) -> None:
        counts = self._counts
        self._events += events
        if counts.is_open:
            counts.events += events
            self.window_events += events
            if self._last_ns:
                gap_ns = now_ns - self._last_ns
                counts.gaps_ns.append(gap_ns)
                self.worst_gap_ns = max(self.worst_gap_ns, gap_ns)
            else:
                counts.ttft_ns.append(now_ns - self._asked_ns)
        if not self._last_ns:
            self._first_ns = now_ns
        self.has_token = True
        self._last_ns = now_ns

    def _answered(self) -> None:
        counts = self._counts
        usage = _USAGE.findall(self._tail)
        if not usage or _DONE not in self._tail:
            self._fail(self._tail[-300:].decode(errors="replace"))
            return
        counts.answer_events += self._events
        tokens = int(usage[-1])
        counts.answer_tokens += tokens
        counts.requests += counts.is_open
        if counts.is_open and tokens > 1:
            counts.steps_ns.append((self._last_ns - self._first_ns) // (tokens - 1))
        if self._left is not None:
            self._left -= 1
        if self._left == 0:
            self.close()
        else:
            self._ask()


class _Stalled(asyncio.Protocol):
    """One connection that asks once and never reads."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: Any = None  # uvloop's are no asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.pause_reading()
        transport.write(self._request)

    def close(self) -> None:
        """Leave at last."""
        self._transport.abort()


class _Load:
    """One run: connect, warm up, measure, leave; or connect, and ask so many times."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rng = random.Random(job["seed"])
        self._counts = _Counts()

    async def play(self) -> Job:
        job = self._job
        loop, gateways = asyncio.get_running_loop(), GatewayProcesses(job["gateway_pids"])
        stalled: list[_Stalled] = []
        streams: list[_Stream] = []
        # Made before any is sent, so that making them costs no time later.
        idle = [partial(_Stalled, self._request("stalled_tokens")) for _ in range(job["stalled"])]
        busy = [
            partial(_Stream, self._request("output_tokens"), self._counts)
            for _ in range(job["streams"])
        ]
        rss_bytes = gateways.rss_bytes()
        try:
            for made in idle:
                connected = await loop.create_connection(made, sock=await self._socket(True))
                stalled.append(connected[1])
            for each in busy:
                streams.append((await loop.create_connection(each, sock=await self._socket()))[1])
                await asyncio.sleep(job["ramp_s"] / len(busy))
            await self._first_tokens(streams)
            figures = await self._measure(gateways)
        finally:
            for stream in streams:
                stream.close()
            for silent in stalled:
                silent.close()
        counts = self._counts
        return {
            **figures,
            "rss_before_bytes": rss_bytes,
            "errors": counts.errors,
            "streams_held": sum(stream.window_events > 0 for stream in streams),
            **shares_of(streams),
        }

    async def play_out(self) -> Job:
        """Every stream asks `requests` times; the figures are those of all of it."""
        job, counts = self._job, self._counts
        loop = asyncio.get_running_loop()
        idle = [
            partial(_Stream, self._request("output_tokens"), counts, job["requests"])
            for _ in range(job["streams"])
        ]
        own_s, began_ns = process_time(), perf_counter_ns()
        deadline_ns = began_ns + int(job["patience_s"] * 1e9)
        counts.is_open = True
        streams: list[_Stream] = []
        try:
            for each in idle:
                streams.append((await loop.create_connection(each, sock=await self._socket()))[1])
                await asyncio.sleep(job["ramp_s"] / len(idle))
            while not all(stream.is_over for stream in streams):
                if counts.errors or perf_counter_ns() > deadline_ns:
                    break  # the figures will say what was answered
                await asyncio.sleep(0.02)
        finally:
            for stream in streams:
                stream.close()
        return {
            "elapsed_s": (perf_counter_ns() - began_ns) / 1e9,
            "load_cpu_s": process_time() - own_s,
            "requests": counts.requests,
            "tokens": counts.answer_tokens,
            "tokens_per_event": counts.answer_tokens / max(counts.answer_events, 1),
            "errors": counts.errors,
            **self._percentiles(),
        }

    def _request(self, tokens: str) -> bytes:
        """A whole HTTP request for as many tokens as this entry of the job says."""
        return completion_request(
            self._job,
            self._rng,
            self._job[tokens],
            stream_options={"include_usage": True},
            return_token_ids=True,
        )

    async def _socket(self, is_stalled: bool = False) -> socket.socket:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_stalled:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STALLED_BUFFER_BYTES)
        address = (self._job["host"], self._job["port"])
        await asyncio.get_running_loop().sock_connect(connection, address)
        return connection

    async def _first_tokens(self, streams: list[_Stream]) -> None:
        """Wait until every stream has got on."""
        deadline_ns = perf_counter_ns() + int(_FIRST_TOKENS_S_MAX * 1e9)
        while not all(stream.has_token for stream in streams):
            if self._counts.errors or perf_counter_ns() > deadline_ns:
                return  # the figures will say how many streams were held
            await asyncio.sleep(0.05)

    async def _measure(self, gateways: GatewayProcesses) -> Job:
        counts = self._counts
        gateways_s, own_s = gateways.cpu_s(), process_time()
        began_ns = perf_counter_ns()
        counts.is_open = True
        await asyncio.sleep(self._job["seconds"])
        counts.is_open = False
        elapsed_s = (perf_counter_ns() - began_ns) / 1e9
        figures: Job = {
            "elapsed_s": elapsed_s,
            "gateway_cpu_s": gateways.cpu_s() - gateways_s,
            "load_cpu_s": process_time() - own_s,
            "rss_after_bytes": gateways.rss_bytes(),
            "requests": counts.requests,
            "events": counts.events,
            "event_bytes": counts.event_bytes / max(counts.events, 1),
            "tokens_per_event": counts.answer_tokens / max(counts.answer_events, 1),
        }
        return {**figures, **self._percentiles()}

    def _percentiles(self) -> Job:
        counts = self._counts
        return {
            name: {"p50": percentile(values, 50), "p99": percentile(values, 99)}
            for name, values in (
                ("gap_ns", counts.gaps_ns),
                ("ttft_ns", counts.ttft_ns),
                ("steps_ns", counts.steps_ns),
            )
            if values
        }


def load(_: Job) -> tuple[str, Callable[[Job], Job]]:
    """Nothing to load; every further line is a run: for a while, or of so many `requests`."""
    return "raw sockets", _run


def _run(job: Job) -> Job:
    made = _Load(job)
    return uvloop.run(made.play_out() if "requests" in job else made.play())


if __name__ == "__main__":
    serve_lines(load)
