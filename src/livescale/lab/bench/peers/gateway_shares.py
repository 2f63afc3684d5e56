"""What each of several gateways behind one port had of a load, and what each stream got."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import psutil

from livescale.config.slo import percentile
from livescale.lab.bench.base.machine import own_cpu_s

_ID = re.compile(rb'"id":"\w+-g(\d+)\.')


class SeenStream(Protocol):
    """What was seen of a stream in the window: of which gateway it was, its events, and the longest
    time between two of them."""

    gateway: str
    window_events: int
    worst_gap_ns: int


class GatewayProcesses:
    """All gateways of a pool, as processes. Raises psutil.NoSuchProcess when one is gone."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def cpu_s(self) -> float:
        """CPU seconds of all of them together."""
        return sum(map(own_cpu_s, self._processes))

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)


def gateway_of(answer: bytes) -> str:
    """Number of the gateway whose answer begins so ("": there is only one)."""
    found = _ID.search(answer)
    return "" if found is None else found[1].decode()


def shares_of(streams: Iterable[SeenStream]) -> dict[str, Any]:
    """Streams and events by gateway, and events and longest gap of the streams one by one."""
    by_gateway: dict[str, dict[str, int]] = {}
    events, gaps_ns = [], []
    for stream in streams:
        share = by_gateway.setdefault(stream.gateway, {"streams": 0, "events": 0})
        share["streams"] += 1
        share["events"] += stream.window_events
        events.append(stream.window_events)
        gaps_ns.append(stream.worst_gap_ns)
    return {
        "by_gateway": dict(sorted(by_gateway.items())),
        "events_per_stream": _spread(events),
        "worst_gap_ns": _spread(gaps_ns),
    }


def _spread(values: list[int]) -> dict[str, int]:
    return {"min": min(values), "p50": round(percentile(values, 50)), "max": max(values)}
