"""What devices did over time: every nanosecond of every worker counts once.

Works on histories alone. Nothing is decided here.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from livescale.telemetry.history.holding_history import HoldingHistory
from livescale.telemetry.history.reading import Absence, History
from livescale.values.types import InstanceState


class DeviceUse(enum.IntEnum):
    """What a device is doing, the least important first: of several uses at a time the last counts.

    LOST: its worker died or fell silent. LEFT: its worker left in order. SPARE: it holds
    parameters, whole or in part, of no instance that is there. LOADING counts until everything has
    arrived, live work included.
    """

    IDLE = 0
    LOST = 1
    LEFT = 2
    SPARE = 3
    LOADING = 4
    DRAINING = 5
    SERVING = 6


class DeviceStretch(NamedTuple):
    """A device does this from `start_ns` to `stop_ns`, for the model if it has parameters."""

    start_ns: int
    stop_ns: int
    use: DeviceUse
    model: str


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Device time by use, in ns summed up over the devices: the parts sum to all of it."""

    load_ns: int = 0
    serve_ns: int = 0
    drain_ns: int = 0
    spare_ns: int = 0
    idle_ns: int = 0
    lost_ns: int = 0
    left_ns: int = 0

    @property
    def held_ns(self) -> int:
        """How long instances held devices, loading included."""
        return self.load_ns + self.serve_ns + self.drain_ns

    @property
    def total_ns(self) -> int:
        return self.held_ns + self.spare_ns + self.idle_ns + self.lost_ns + self.left_ns


def device_time(history: History, from_ns: int, to_ns: int) -> DeviceTime:
    """The time of all workers of the record from `from_ns` to `to_ns`, by use."""
    sums = dict.fromkeys(DeviceUse, 0)
    for stretches in device_stretches(history, from_ns, to_ns).values():
        for start_ns, stop_ns, use, _ in stretches:
            sums[use] += stop_ns - start_ns
    return DeviceTime(
        load_ns=sums[DeviceUse.LOADING],
        serve_ns=sums[DeviceUse.SERVING],
        drain_ns=sums[DeviceUse.DRAINING],
        spare_ns=sums[DeviceUse.SPARE],
        idle_ns=sums[DeviceUse.IDLE],
        lost_ns=sums[DeviceUse.LOST],
        left_ns=sums[DeviceUse.LEFT],
    )


def device_stretches(
    history: History, from_ns: int, to_ns: int
) -> dict[int, tuple[DeviceStretch, ...]]:
    """By worker: what it did, without gaps or overlaps from `from_ns` to `to_ns`.

    A holding that is there when the record ends is there until `to_ns`.
    """
    claims: dict[int, list[DeviceStretch]] = {worker: [] for worker in history.workers}
    for held in (*history.holdings, *history.spares):
        claims.setdefault(held.member.worker, []).extend(_claims(held, to_ns))
    for worker, absences in history.absences.items():
        claims.setdefault(worker, []).extend(_absent(absence, to_ns) for absence in absences)
    return {
        worker: tuple(_resolved(of_worker, from_ns, to_ns))
        for worker, of_worker in sorted(claims.items())
    }


# -- helpers, in the order used -------------------------------------------------------------------

_USES = {
    InstanceState.LOADING: DeviceUse.LOADING,
    InstanceState.LIVE: DeviceUse.LOADING,
    InstanceState.SERVING: DeviceUse.SERVING,
    InstanceState.DRAINING: DeviceUse.DRAINING,
}


def _absent(absence: Absence, to_ns: int) -> DeviceStretch:
    until_ns = to_ns if absence.until_ns is None else absence.until_ns
    use = DeviceUse.LEFT if absence.has_left else DeviceUse.LOST
    return DeviceStretch(absence.from_ns, until_ns, use, "")


def _claims(held: HoldingHistory, to_ns: int) -> Iterator[DeviceStretch]:
    """What a holding makes of its device: SPARE, but for the time of its instance."""
    ended_ns = to_ns if held.ended_ns is None else held.ended_ns
    yield DeviceStretch(held.begun_ns, ended_ns, DeviceUse.SPARE, held.model)
    if held.instance is None:
        return
    for state, start_ns, stop_ns in held.instance.stretches(ended_ns):
        left_ns, right_ns = max(start_ns, held.begun_ns), min(stop_ns, ended_ns)
        yield DeviceStretch(left_ns, right_ns, _USES[state], held.model)


def _resolved(claims: Sequence[DeviceStretch], from_ns: int, to_ns: int) -> Iterator[DeviceStretch]:
    """Of claims that overlap, the most important; IDLE where there is none."""
    cut = [
        DeviceStretch(max(start_ns, from_ns), min(stop_ns, to_ns), use, model)
        for start_ns, stop_ns, use, model in claims
    ]
    kept = [claim for claim in cut if claim.start_ns < claim.stop_ns]
    begin = sorted(kept, key=lambda claim: claim.start_ns, reverse=True)
    end = sorted(kept, key=lambda claim: claim.stop_ns, reverse=True)
    active: Counter[tuple[DeviceUse, str]] = Counter()
    start_ns, now = from_ns, (DeviceUse.IDLE, "")
    for at_ns in sorted({from_ns, to_ns, *(at for claim in kept for at in claim[:2])}):
        while end and end[-1].stop_ns == at_ns:
            active[end.pop()[2:]] -= 1
        while begin and begin[-1].start_ns == at_ns:
            active[begin.pop()[2:]] += 1
        here = max((key for key, count in active.items() if count), default=(DeviceUse.IDLE, ""))
        if here != now or at_ns == to_ns:
            if start_ns < at_ns:
                yield DeviceStretch(start_ns, at_ns, *now)
            start_ns, now = at_ns, here
