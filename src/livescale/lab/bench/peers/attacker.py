"""Sends one attack again and again, at a bounded rate, for a bounded time.

A process of its own with the least claim to the processor: what the attacker computes is not to be
mistaken for harm that is done to the gateway, also where both have the same cores.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

from livescale.lab.bench.attacks.attack_bodies import BENCH_ATTACKS
from livescale.lab.bench.peers.line_server import Job, serve_lines

_NICENESS = 10
_HEAD_BYTES = 12  # HTTP/1.1 400
_STATUS_AT = 9


class _Sent(asyncio.Protocol):
    """One connection with one request. Goes on sending when it is answered, as no client with
    manners would."""

    def __init__(self, request: bytes, statuses: Counter[str]) -> None:
        self._request = request
        self._statuses = statuses
        self._transport: Any = None  # uvloop's are no asyncio.Transport
        self._answer = b""
        self._is_counted = False
        self.is_over = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._is_counted:
            self._answer += data
            if len(self._answer) >= _HEAD_BYTES:
                self._count(self._answer[_STATUS_AT:_HEAD_BYTES].decode("latin-1"))
                self._transport.close()  # when all is sent

    def connection_lost(self, error: Exception | None) -> None:
        self._count("closed")
        self.is_over = True

    def leave(self) -> None:
        """Go away, whatever has come of it."""
        self._is_counted = True
        self._transport.abort()

    def _count(self, status: str) -> None:
        if not self._is_counted:
            self._statuses[status] += 1
            self._is_counted = True


async def _attack(job: Job, request: bytes) -> Job:
    """`rate` connections per second for `seconds`, at most `connections` of them at a time."""
    loop = asyncio.get_running_loop()
    statuses: Counter[str] = Counter()
    open_ones: set[_Sent] = set()
    offered = 0
    begin_s = loop.time()
    for number in range(round(job["rate"] * job["seconds"])):
        await asyncio.sleep(max(0.0, begin_s + number / job["rate"] - loop.time()))
        if loop.time() > begin_s + job["seconds"]:
            break
        open_ones = {sent for sent in open_ones if not sent.is_over}
        if len(open_ones) < job["connections"]:
            offered += 1
            made = partial(_Sent, request, statuses)
            open_ones.add((await loop.create_connection(made, job["host"], job["port"]))[1])
    await asyncio.sleep(max(0.0, begin_s + job["seconds"] - loop.time()))
    elapsed_s = loop.time() - begin_s
    ended = dict(statuses)
    for sent in open_ones:
        sent.leave()
    await asyncio.sleep(0)  # connections are closed in the loop's next turn
    return {"offered": offered, "statuses": ended, "elapsed_s": elapsed_s}


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """The first line names the gateway, every further line an attack by its number."""
    os.nice(_NICENESS)
    requests: dict[int, bytes] = {}

    def answer(window: Job) -> Job:
        """The bytes of an attack are made when it is named without `seconds`."""
        number = window["attack"]
        if number not in requests:
            requests.clear()
            requests[number] = BENCH_ATTACKS[number].request(job["model"])
        if "seconds" not in window:
            return {"request_bytes": len(requests[number])}
        return uvloop.run(_attack({**job, **window}, requests[number]))

    return "raw connections", answer


if __name__ == "__main__":
    serve_lines(load)
