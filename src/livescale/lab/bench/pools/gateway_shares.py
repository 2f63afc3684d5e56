"""The shares of gateways and of streams in a run of `bench gateway`, as figures and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def share_figures(seen: Mapping[str, Any]) -> dict[str, object]:
    """From the load's own report; what is worst among streams tells whether one was forgotten."""
    return {
        "by_gateway": list(seen["by_gateway"].values()),
        "events_per_stream": seen["events_per_stream"],
        "worst_gap_ms": {at: ns / 1e6 for at, ns in seen["worst_gap_ns"].items()},
    }


def share_lines(figures: Mapping[str, Any]) -> list[str]:
    """What `share_figures` has, for people."""
    events, gaps = figures["events_per_stream"], figures["worst_gap_ms"]
    lines = [
        f"of a stream      {events['min']} to {events['max']} events; its longest gap"
        f" {gaps['p50']:.0f} ms in the median, {gaps['max']:.0f} ms at most"
    ]
    if len(figures["by_gateway"]) > 1:
        total = sum(share["events"] for share in figures["by_gateway"])
        shares = [
            f"{share['streams']} streams with {share['events'] / max(total, 1):.1%} of the events"
            for share in figures["by_gateway"]
        ]
        lines.append(f"of a gateway     {'; '.join(shares)}")
    return lines
