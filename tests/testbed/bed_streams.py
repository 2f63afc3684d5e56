"""Small TCP streams between emulated hosts, in processes of their own, with bounded waits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from livescale.lab.testbed.bed import Testbed
from slowness import patient

# Receives until the end on the address given, and says how many bytes per second came.
_SINK = """
import json, socket, sys, time
listening = socket.create_server((sys.argv[1], 0))
listening.settimeout(60)
print(json.dumps(listening.getsockname()[1]), flush=True)
connection, _ = listening.accept()
connection.settimeout(60)
buffer = bytearray(1 << 18)
got, began = 0, None
while (count := connection.recv_into(buffer)):
    began = began or time.monotonic()
    got += count
print(json.dumps(got / max(time.monotonic() - began, 1e-9)), flush=True)
"""

# Sends so many bytes from one address to another.
_SOURCE = """
import socket, sys
own, to, port, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
stream = socket.create_connection((to, port), 60, source_address=(own, 0))
stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
block = bytes(1 << 16)
while size > 0:
    stream.sendall(block[:size])
    size -= len(block)
stream.shutdown(socket.SHUT_WR)
stream.recv(1)
"""

# Says whether anything answers at an address within the time given: also a refusal is an answer.
_PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[2], 9), float(sys.argv[3]), source_address=(sys.argv[1], 0))
except ConnectionRefusedError:
    print("true")
except OSError:
    print("false")
"""

_SLOWED_MOST = 4

Place = tuple[str, int]
"""(host, device)"""


def slowed(rate: int) -> int:
    """The rate of a link that is the narrowest thing on this machine: a busy one carries less."""
    return int(rate / min(patient(1), _SLOWED_MOST))


def bytes_per_s(testbed: Testbed, streams: list[tuple[Place, Place, int]]) -> list[float]:
    """Rates of streams (from, to, bytes) that run at once, seen by their receivers."""
    sinks = [_start(testbed, to, _SINK) for _, to, _ in streams]
    sources = []
    for (place, to, size), sink in zip(streams, sinks, strict=True):
        port = str(_line(sink))
        sources.append(_start(testbed, place, _SOURCE, _address(testbed, to), port, str(size)))
    rates = [_line(sink) for sink in sinks]
    for process in (*sinks, *sources):
        assert process.wait(patient(60)) == 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    return rates


def is_reached(testbed: Testbed, start: Place, to: Place, wait_s: float) -> bool:
    """Whether a packet comes back from there in time."""
    with _start(testbed, start, _PROBE, _address(testbed, to), str(wait_s)) as process:
        return bool(_line(process))


def _start(testbed: Testbed, place: Place, code: str, *more: str) -> subprocess.Popen[Any]:
    words = [sys.executable, "-c", code, _address(testbed, place), *more]
    return testbed.exec(place[0], words, stdout=subprocess.PIPE)


def _address(testbed: Testbed, place: Place) -> str:
    host, device = place
    return testbed.host(host).devices[device].address


def _line(process: subprocess.Popen[Any]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())
