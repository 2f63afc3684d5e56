"""What a line of stages did in a window: from sums that instances report to a StageLoad each.

A leader keeps few Runs on their way, so that the queue of a slow stage waits with the requests,
before the first one; and what a stage gets is what the slowest lets through. So arrivals are those
of prompt tokens to the line, and what waits, waits for the narrowest stages, wherever that is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.control.stages.core_budget import CoresSeen
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.messages.events import StageCounts
from livescale.messages.stage_windows import COUNTED_MIN, cv_of_gaps, differences, squared_cv
from livescale.values.types import InstanceId, Value
from livescale.values.units import NS_PER_S

_ALIKE_PERMILLE = 900
"""Stages that have the least capacity but for this are as narrow."""
_OTHERS_PERMILLE = 950
"""Runs without prompts come round as fast as they can, and are no overload: reports that are late
may have more of them than a window has time for."""


class StageSeen(Value, frozen=True):
    """A stage at some time: `replicas` that serve or will, `serving` ones of them, and what each
    instance has reported in all."""

    replicas: int
    serving: int
    counts: dict[InstanceId, StageCounts]


class LineSeen(Value, frozen=True):
    """A line at some time; `queued_tokens` of prompts are not computed yet, anywhere. `cores` are
    those of its stages (None: they are left alone)."""

    queued_tokens: int
    stages: tuple[StageSeen, ...]
    cores: CoresSeen | None = None


@dataclass(slots=True)
class _Pace:
    """What one Run, and one token of a prompt, takes at a stage."""

    service_ns: float
    token_ns: float


@dataclass(slots=True)
class LineWindow:
    """Measures one line, window after window."""

    _began_ns: int = 0
    _first: LineSeen | None = None
    #: token-nanoseconds in the queue until `_noted_ns`
    _queued: int = 0
    _noted_ns: int = 0
    _noted_tokens: int = 0
    #: by stage, as measured last
    _paces: dict[int, _Pace] = field(default_factory=dict)

    def begin(self, now_ns: int, seen: LineSeen) -> None:
        """A window begins."""
        self._began_ns = self._noted_ns = now_ns
        self._first, self._queued, self._noted_tokens = seen, 0, seen.queued_tokens

    def note(self, now_ns: int, queued_tokens: int) -> None:
        """So many prompt tokens are queued from now on."""
        self._queued += self._noted_tokens * (now_ns - self._noted_ns)
        self._noted_ns, self._noted_tokens = now_ns, queued_tokens

    def end(self, now_ns: int, seen: LineSeen) -> list[StageLoad] | None:
        """The load of each stage in this window; the next one begins. None: it is not known yet how
        fast they all are."""
        first, took_ns = self._first, now_ns - self._began_ns
        self.note(now_ns, seen.queued_tokens)
        queued = self._queued
        self.begin(now_ns, seen)
        if first is None or took_ns <= 0:
            return None
        windows = [
            differences(before.counts, after.counts)
            for before, after in zip(first.stages, seen.stages, strict=True)
        ]
        for number, parts in enumerate(windows):
            self._measure(number, parts)
        if len(self._paces) < len(windows):
            return None
        paces = [self._paces[number] for number in range(len(windows))]
        computed = sum(part.prompt_tokens for part in windows[0])
        arrived = max(computed + seen.queued_tokens - first.queued_tokens, 0)
        capacities = [
            stage.serving / pace.service_ns for stage, pace in zip(seen.stages, paces, strict=True)
        ]
        narrowest = _narrowest(capacities)
        waiting_ns = sum(part.waited_ns for parts in windows for part in parts)
        loads = []
        for number, (stage, pace, parts) in enumerate(
            zip(seen.stages, paces, windows, strict=True)
        ):
            others_ns = sum(max(part.busy_ns - part.prompt_ns, 0) for part in parts)
            most_ns = stage.serving * took_ns * _OTHERS_PERMILLE // 1000
            offered_ns = arrived * pace.token_ns + min(others_ns, most_ns)
            waiting = 0.0
            if number in narrowest:
                on_their_way = computed * sum(its.token_ns for its in paces)
                behind = (queued * pace.token_ns - on_their_way * pace.service_ns) / took_ns
                waiting = max(behind / pace.service_ns, waiting_ns / took_ns)
            loads.append(
                StageLoad(
                    stage=number,
                    replicas=stage.replicas,
                    arrivals_per_s=offered_ns / pace.service_ns * NS_PER_S / took_ns,
                    service_ns=max(round(pace.service_ns), 1),
                    waiting=round(waiting),
                    arrival_cv=cv_of_gaps(parts),
                    service_cv=_cv_of_services(parts),
                )
            )
        return loads

    def _measure(self, number: int, parts: Sequence[StageCounts]) -> None:
        done, busy_ns = sum(p.done for p in parts), sum(p.busy_ns for p in parts)
        tokens, prompt_ns = sum(p.prompt_tokens for p in parts), sum(p.prompt_ns for p in parts)
        known = self._paces.get(number)
        if done > 0 and busy_ns > 0:
            token_ns = known.token_ns if known is not None else 0.0
            self._paces[number] = _Pace(
                busy_ns / done, prompt_ns / tokens if tokens > 0 else token_ns
            )


# -- helpers --------------------------------------------------------------------------------------


def _narrowest(capacities: Sequence[float]) -> list[int]:
    """The stages that are narrower than all others."""
    least = min(capacities)
    return [
        number for number, own in enumerate(capacities) if own * _ALIKE_PERMILLE <= least * 1000
    ]


def _cv_of_services(parts: Sequence[StageCounts]) -> float | None:
    done, busy_ns = sum(p.done for p in parts), sum(p.busy_ns for p in parts)
    if done < COUNTED_MIN or busy_ns <= 0:
        return None
    return math.sqrt(squared_cv(done, busy_ns, sum(p.busy_squared_ns_s for p in parts)))
