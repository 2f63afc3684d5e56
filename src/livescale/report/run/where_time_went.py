"""Where the time of devices and of the slowest requests went, as figures and in words."""

from __future__ import annotations

from dataclasses import asdict

from livescale.report.run.terminal import seconds
from livescale.telemetry.history.device_time import DeviceTime
from livescale.telemetry.history.waiting import SlowRequests
from livescale.values.units import NS_PER_S

_ABSENT = ("lost_ns", "left_ns")


def device_figures(spent: DeviceTime) -> dict[str, float]:
    """Device-seconds by use, called as the fields are: "device_load_s" for `load_ns`. Those of
    absent workers are left out where there are none."""
    parts_ns = {name: ns for name, ns in asdict(spent).items() if ns or name not in _ABSENT}
    return {f"device_{_called(name)}_s": ns / NS_PER_S for name, ns in parts_ns.items()}


def slow_figures(slow: SlowRequests) -> dict[str, float]:
    """How many requests are the slowest, and the means of their times in seconds, called as the
    fields are: "slow_ttft_s" for `ttft_ns`. Without any, nothing."""
    if not slow.requests:
        return {}
    sums_ns = {name: ns for name, ns in asdict(slow).items() if name != "requests"}
    means = {f"slow_{_called(n)}_s": ns / slow.requests / NS_PER_S for n, ns in sums_ns.items()}
    return {"slow_requests": slow.requests, **means}


def device_text(spent: DeviceTime) -> str:
    """Shares of all device time, in a line."""
    total_ns = max(spent.total_ns, 1)
    words = {
        "serving": spent.serve_ns,
        "loading": spent.load_ns,
        "draining": spent.drain_ns,
        "spare": spent.spare_ns,
        "idle": spent.idle_ns,
        "lost": spent.lost_ns,
        "left": spent.left_ns,
    }
    words = {name: ns for name, ns in words.items() if ns or f"{name}_ns" not in _ABSENT}
    return ", ".join(f"{name} {100 * ns / total_ns:.1f} %" for name, ns in words.items())


def slow_text(slow: SlowRequests) -> str:
    """The slowest requests in a line; empty without any."""
    if not slow.requests:
        return ""
    words = {
        "while the model loaded": slow.loading_ns,
        "while devices were full": slow.full_ns,
        "while neither": slow.held_back_ns,
        "computing": slow.compute_ns,
    }
    parts = [f"{seconds(ns / slow.requests / NS_PER_S)} {name}" for name, ns in words.items()]
    mean_s = slow.ttft_ns / slow.requests / NS_PER_S
    return f"{seconds(mean_s)} to the first token on average: {', '.join(parts)}"


def _called(field: str) -> str:
    return field.removesuffix("_ns")
