"""Where the time of devices and of the slowest requests went, as figures and in words."""

from __future__ import annotations

from livescale.report.run.terminal import seconds
from livescale.telemetry.history.device_time import DeviceTime
from livescale.telemetry.history.waiting import SlowRequests
from livescale.values.units import NS_PER_S


def device_figures(spent: DeviceTime) -> dict[str, float]:
    """Device-seconds by use. Those of absent workers are left out where there are none."""
    parts_ns = {
        "load": spent.load_ns,
        "serve": spent.serve_ns,
        "drain": spent.drain_ns,
        "spare": spent.spare_ns,
        "idle": spent.idle_ns,
    }
    parts_ns |= _absent_ns(spent)
    return {f"device_{name}_s": part_ns / NS_PER_S for name, part_ns in parts_ns.items()}


def slow_figures(slow: SlowRequests) -> dict[str, float]:
    """How many requests are the slowest, and the means of their times in seconds; without any,
    nothing."""
    if not slow.requests:
        return {}
    sums_ns = {
        "ttft": slow.ttft_ns,
        "loading": slow.loading_ns,
        "full": slow.full_ns,
        "held_back": slow.held_back_ns,
        "compute": slow.compute_ns,
    }
    means = {f"slow_{name}_s": ns / slow.requests / NS_PER_S for name, ns in sums_ns.items()}
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
        **_absent_ns(spent),
    }
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


# -- helpers --------------------------------------------------------------------------------------


def _absent_ns(spent: DeviceTime) -> dict[str, int]:
    """Why workers were absent, and for how long, where any were."""
    absent_ns = {"lost": spent.lost_ns, "left": spent.left_ns}
    return {name: ns for name, ns in absent_ns.items() if ns}
