"""How bursty arrivals are at each stage of a pipeline: the coefficient of variation (CV) of gaps.

A stage's departures are the next stage's arrivals. `qna_departures` is the textbook's formula
(Whitt's Queueing Network Analyzer), `departures` is for the gaps themselves and remembers what
was smoothed before: behind a stage that is as busy, bursts pass as they come. Splits and joins of
a graph follow the Queueing Network Analyzer. `livescale bench variation` measures both, and the
learned predictor of `control/stages/formulas/attention.py`, beside simulated lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from livescale.control.stages.formulas.graph import StageGraph

#: bursts of gaps with a CV above 1 last: with gamma gaps of CV c a stage of load r leaves
#: (1 - r) (1 + r c ** -0.6) of their variance; 1 - r for c without bounds, as for batches
_BURST_POWER = 0.6
#: a displacement with standard deviation d in mean gaps adds 2 d^2 to the squared CV, if small
_DISPLACED = 2.0
_CV_LEAST = 0.02


class Flow(Struct, frozen=True):
    """Requests that come to a stage: how many per second, and the CV of the gaps between them.

    `burst_cv` is the CV with which they came to the graph, `kept` the part of that variance that
    no stage has smoothed yet (0 to 1). A flow that was measured is made by `arrivals`.
    """

    rate_per_s: float
    cv: float
    burst_cv: float
    kept: float = 1.0


class StageTraits(Struct, frozen=True):
    """One stage: services per second of one replica, the CV of service times, replicas, and whence
    its requests come: pairs of an earlier stage's index and the part of that stage's departures
    that comes here (0 to 1). Without such pairs it gets the graph's arrivals. With `waits_for_all`
    these have the same requests, each of which comes here when all of them are done with it; else
    they have different ones."""

    services_per_s: float
    service_cv: float
    replicas: int
    after: tuple[tuple[int, float], ...] = ()
    waits_for_all: bool = False


def arrivals(rate_per_s: float, cv: float) -> Flow:
    """Requests as they come to a graph. Raises ValueError if the rate or the CV is negative."""
    if not (rate_per_s >= 0 and cv >= 0):
        raise ValueError(f"rate {rate_per_s} and CV {cv} must not be negative")
    return Flow(rate_per_s, cv, cv)


def line(stages: Sequence[StageTraits]) -> tuple[StageTraits, ...]:
    """These stages one behind the other, whatever their `after` says."""
    return tuple(
        replace(stage, after=((number - 1, 1.0),) if number else (), waits_for_all=False)
        for number, stage in enumerate(stages)
    )


def graph_of(stages: Sequence[StageTraits], graph: StageGraph) -> tuple[StageTraits, ...]:
    """These stages in a graph in which each request goes to all stages: from one to all of its
    followers, and to one when all that stand before it are done."""
    return tuple(
        replace(stage, after=tuple((n, 1.0) for n in graph.before(number)), waits_for_all=True)
        for number, stage in enumerate(stages)
    )


def load(flow: Flow, stage: StageTraits) -> float:
    """Offered work over capacity, at most 1: more only makes the queue longer."""
    return min(1.0, flow.rate_per_s / (stage.services_per_s * stage.replicas))


def qna_departures(flow: Flow, stage: StageTraits) -> Flow:
    """What leaves a stage by the Queueing Network Analyzer (Whitt 1983):

    cd^2 = 1 + (1 - r^2) (ca^2 - 1) + r^2 / sqrt(m) (max(cs^2, 0.2) - 1).
    """
    squared, variance = load(flow, stage) ** 2, max(stage.service_cv**2, 0.2)
    queued = 1 + (variance - 1) / math.sqrt(stage.replicas)
    cv = math.sqrt((1 - squared) * flow.cv**2 + squared * queued)
    return _left(flow, stage, cv, flow.kept)


def departures(flow: Flow, stage: StageTraits) -> Flow:
    """What leaves a stage, for the CV of gaps.

    Three effects: service times that vary displace requests, which pulls gaps towards chance;
    requests that wait lose their bursts, but only those that no earlier stage took; in a queue,
    what leaves is `queued_variance`. Exact are M/M/m (CV 1 stays 1), M/D/1 (1 - r^2), an idle
    stage (nothing changes) and a single full server (the CV of its services).
    """
    busy, queued = load(flow, stage), queued_variance(stage)
    # Regular requests meet where services vary, too.
    meeting_cv = math.hypot(flow.burst_cv, stage.service_cv / math.sqrt(stage.replicas))
    kept = min(flow.kept, kept_variance(busy, meeting_cv, stage.replicas))
    passed = kept / flow.kept if flow.kept else 1.0
    displaced = _displaced(flow.cv**2, 1 - busy * (1 - queued), busy, stage)
    return _left(flow, stage, math.sqrt(passed * displaced + (1 - passed) * queued), kept)


def kept_variance(busy: float, cv: float, replicas: int) -> float:
    """The part of the variance of gaps that a stage of load `busy` (0 to 1) does not smooth, if it
    is the first; 1 - busy^2 for Poisson arrivals.

    Fitted to simulations: above CV 1 more is smoothed, as bursts outlast the queue; below it
    less, as requests hardly meet, and less still with more replicas.
    """
    least = max(cv, _CV_LEAST)
    power = _BURST_POWER if least >= 1 else math.sqrt(replicas)
    return min(1.0, (1 - busy) * (1 + busy * math.pow(least, -power)))


def queued_variance(stage: StageTraits) -> float:
    """Squared CV of gaps behind a stage that is never idle.

    Ends of services of m constant servers lie like m random points on a circle: (m - 1) / (m + 1).
    Exponential services give 1, one server gives the variance of its services.
    """
    return (stage.replicas - 1 + 2 * stage.service_cv**2) / (stage.replicas + 1)


def split(flow: Flow, part: float) -> Flow:
    """The requests of a flow that chance sends one way: c^2 becomes p c^2 + 1 - p."""
    if part >= 1:
        return flow
    cv, burst = (math.sqrt(part * value**2 + 1 - part) for value in (flow.cv, flow.burst_cv))
    return Flow(flow.rate_per_s * part, cv, burst, flow.kept)


def join(flows: Sequence[Flow], stage: StageTraits) -> Flow:
    """Flows that come to one stage (Queueing Network Analyzer): the mean of
    squared CVs by rates, nearer to 1 the more flows there are and the idler the stage is."""
    rate = math.fsum(flow.rate_per_s for flow in flows)
    if len(flows) == 1 or rate == 0:
        return flows[0]
    parts = [flow.rate_per_s / rate for flow in flows]
    evenness = 1 / math.fsum(part**2 for part in parts)
    busy = load(Flow(rate, 1.0, 1.0), stage)
    weight = 1 / (1 + 4 * (1 - busy) ** 2 * (evenness - 1))
    cv, burst = (
        math.sqrt(weight * math.fsum(p * v**2 for p, v in zip(parts, values, strict=True)) + rest)
        for rest in (1 - weight,)
        for values in ([flow.cv for flow in flows], [flow.burst_cv for flow in flows])
    )
    kept = math.fsum(p * flow.kept for p, flow in zip(parts, flows, strict=True))
    return Flow(rate, cv, burst, kept)


def gather(flows: Sequence[Flow]) -> Flow:
    """Flows of the same requests, which come to one stage when all have come: as those that come
    last do. In a burst these are those of the busiest way, which has smoothed most of it."""
    last = min(flows, key=lambda flow: (flow.kept, flow.cv))
    return Flow(min(flow.rate_per_s for flow in flows), last.cv, last.burst_cv, last.kept)


def flows_in(stages: Sequence[StageTraits], source: Flow, *, is_qna: bool = False) -> list[Flow]:
    """What comes to each stage of a graph whose stages stand behind those that feed them.

    With `is_qna` by the Queueing Network Analyzer alone. Raises ValueError if a stage is fed by
    one that stands behind it.
    """
    leave = qna_departures if is_qna else departures
    entering: list[Flow] = []
    leaving: list[Flow] = []
    for number, stage in enumerate(stages):
        if any(before >= number for before, _ in stage.after):
            raise ValueError(f"stage {number} is fed by one that stands behind it")
        fed = [split(leaving[before], part) for before, part in stage.after]
        come = gather(fed) if fed and stage.waits_for_all else source
        entering.append(join(fed, stage) if fed and not stage.waits_for_all else come)
        leaving.append(leave(entering[-1], stage))
    return entering


# -- helpers --------------------------------------------------------------------------------------


def _left(flow: Flow, stage: StageTraits, cv: float, kept: float) -> Flow:
    rate = min(flow.rate_per_s, stage.services_per_s * stage.replicas)
    return Flow(rate, cv, flow.burst_cv, kept)


def _displaced(squared: float, towards: float, busy: float, stage: StageTraits) -> float:
    """Squared CV of gaps whose requests take times of different length: from `squared` to what
    many displacements make of any gaps. Bursts are longer than a displacement and resist."""
    deviation_gaps = stage.service_cv * stage.replicas * busy
    moved = _DISPLACED * deviation_gaps**2 / max(1.0, squared) ** 2
    return (squared + moved * towards) / (1 + moved)
