"""How slow this machine is here and now, and deadlines that follow from it.

Tests of the real stage wait for processes, sockets and timers. `patient(5.0)` is five seconds on a
quiet machine, and as much longer as starting a process or waking up takes on this one. What a test
gives the product (`lost_after_ms`, `lease_ms`) goes through it as well.
"""

from __future__ import annotations

import subprocess
import sys
import time

#: What these take on a quiet machine: the start of an interpreter with some imports, and how late
#: a timer is, but for the latest few.
_START_S = 0.1
_LATE_S = 0.002
_TIMERS, _LATEST = 20, 3
_MOST = 16.0

#: a measurement holds for so long
_HOLDS_S = 20.0

_slowness = 1.0
_measured_s = -_HOLDS_S


def measure() -> None:
    """Before each test, anew when the last measurement is old. The slowest of a run counts: pools
    that several tests share keep the deadlines that they were started with."""
    global _slowness, _measured_s
    if time.monotonic() - _measured_s >= _HOLDS_S:
        _slowness = min(max(_slowness, _start_s() / _START_S, _late_s() / _LATE_S), _MOST)
        _measured_s = time.monotonic()


def patient(seconds: float) -> float:
    """A deadline for this machine."""
    return seconds * _slowness


def patient_ms(milliseconds: float) -> int:
    """The same as a setting of the product."""
    return round(milliseconds * _slowness)


def _start_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import asyncio, json, ssl"], check=True)
    return time.perf_counter() - began_s


def _late_s() -> float:
    """But for a few: one timer that was late says nothing of all that follow in this run."""
    late_s = []
    for _ in range(_TIMERS):
        began_s = time.perf_counter()
        time.sleep(0.001)
        late_s.append(time.perf_counter() - began_s - 0.001)
    return sorted(late_s)[-1 - _LATEST]
