"""What runs of pools say over time, as curves: a point per second of the load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from livescale.config.slo import percentile
from livescale.lab.reproduce.base.claim import Curve
from livescale.sim.pools.runs import PoolRun
from livescale.telemetry.record.record import RequestLine
from livescale.values.units import NS_PER_S

_PERCENTS = (*range(1, 100), 100)


def arrivals(run: PoolRun, label: str) -> Curve:
    """Requests that arrived in each second."""
    counts = dict.fromkeys(range(_seconds(run)), 0)
    for line in run.result.requests:
        counts[_second(run, line.queued_ns)] += 1
    return Curve(label, tuple((float(s), float(n)) for s, n in counts.items()), is_step=True)


def ttft_means(run: PoolRun, label: str) -> Curve:
    """Mean time (seconds) to the first token of what arrived in each second."""
    timings = [(line.queued_ns, line.token_ns[0] - line.queued_ns) for line in _answered(run)]
    return Curve(label, _means(run, timings))


def tbt_means(run: PoolRun, label: str) -> Curve:
    """Mean gap (milliseconds) of the tokens that came in each second."""
    gaps = [
        (at_ns, (at_ns - before_ns) * 1000)
        for line in _answered(run)
        for before_ns, at_ns in zip(line.token_ns, line.token_ns[1:], strict=False)
    ]
    return Curve(label, _means(run, gaps))


def ttft_shares(run: PoolRun, label: str) -> Curve:
    """The cumulative distribution of TTFT: seconds, and percent of the requests."""
    return _shares([t.ttft_ns for t in run.timings() if t.ttft_ns is not None], NS_PER_S, label)


def tbt_shares(run: PoolRun, label: str) -> Curve:
    """The cumulative distribution of all gaps between tokens: milliseconds, and percent."""
    gaps = [gap for timing in run.timings() for gap in timing.tbt_ns]
    return _shares(gaps, NS_PER_S // 1000, label)


def devices(run: PoolRun, label: str, *, decode: bool | None = None) -> Curve:
    """Devices that instances held at each change, loading included: all of them, those of decode
    instances, or (False) the others. Of a pool with one model."""
    (policy,) = run.config.policies
    points: dict[float, float] = {0.0: 0.0}
    for count in run.result.instances:
        of_decode = count.decode
        held = {None: count.living, True: of_decode, False: count.living - of_decode}[decode]
        at_s = max((count.now_ns - run.started_ns) / NS_PER_S, 0.0)
        if count.now_ns <= run.ended_ns:
            points[at_s] = float(held * policy.spec.tp_size)
    points[(run.ended_ns - run.started_ns) / NS_PER_S] = list(points.values())[-1]
    return Curve(label, tuple(points.items()), is_step=True)


def kv_sent(run: PoolRun) -> list[tuple[int, int]]:
    """(time, bytes) of the KV that prefill instances of a pool with one model sent decode
    instances: when the second token came."""
    (policy,) = run.config.policies
    token_bytes = policy.spec.kv_bytes_per_token * policy.spec.tp_size
    return [
        (line.token_ns[1], line.prompt_tokens * token_bytes)
        for line in _answered(run)
        if len(line.token_ns) > 1
    ]


def kv_percents(run: PoolRun, label: str) -> Curve:
    """That KV in each second, in percent of what all NICs can send: as if all crossed NICs."""
    sent = dict.fromkeys(range(_seconds(run)), 0)
    for at_ns, amount in kv_sent(run):
        sent[_second(run, at_ns)] += amount
    return _percents(run, sent, label)


def per_second(run: PoolRun, carried: Mapping[int, int], label: str) -> Curve:
    """Bytes that were carried by each time (nanoseconds), as percent of all NICs in each second."""
    sent = dict.fromkeys(range(_seconds(run)), 0.0)
    before = 0
    last_ns = run.started_ns
    for now_ns, total in sorted(carried.items()):
        if now_ns <= run.started_ns:
            before = total
            continue
        first, last = (_second(run, t) for t in (last_ns, min(now_ns, run.ended_ns)))
        for second in range(first, last + 1):
            sent[second] += (total - before) / (last - first + 1)
        before, last_ns = total, min(now_ns, run.ended_ns)
    return _percents(run, sent, label)


def nic_bytes_per_s(run: PoolRun) -> float:
    """What all devices' NICs can send together."""
    rates = [run.config.device(number).uplink_bytes_per_s for number in range(run.config.workers)]
    return float(sum(rate for rate in rates if rate is not None))


# -- helpers --------------------------------------------------------------------------------------


def _percents(run: PoolRun, sent: Mapping[int, float], label: str) -> Curve:
    """Bytes by second, in percent of what the NICs can send."""
    room = nic_bytes_per_s(run)
    points = tuple((float(s), 100 * amount / room) for s, amount in sent.items())
    return Curve(label, points, is_step=True)


def _seconds(run: PoolRun) -> int:
    """Seconds from the load's start to its last answer."""
    return max(math.ceil((run.ended_ns - run.started_ns) / NS_PER_S), 1)


def _second(run: PoolRun, at_ns: int) -> int:
    return min(max((at_ns - run.started_ns) // NS_PER_S, 0), _seconds(run) - 1)


def _answered(run: PoolRun) -> list[RequestLine]:
    return [line for line in run.result.requests if line.token_ns]


def _means(run: PoolRun, values: Iterable[tuple[int, int]]) -> tuple[tuple[float, float], ...]:
    """Seconds of the load, and the mean of the values (nanoseconds) of each that has some."""
    by_second: dict[int, list[int]] = {}
    for at_ns, value in values:
        by_second.setdefault(_second(run, at_ns), []).append(value)
    return tuple((float(s), sum(v) / len(v) / NS_PER_S) for s, v in sorted(by_second.items()))


def _shares(values: list[int], unit_ns: int, label: str) -> Curve:
    points = tuple((percentile(values, q) / unit_ns, float(q)) for q in _PERCENTS)
    return Curve(label, points, is_step=True)
