"""The counts of all gateways behind one port, added up: a page that is asked for comes from any of
them.

Counters and histograms are added, and so are amounts of a gateway's own requests. What the
controller tells all gateways alike is shown once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from livescale.gateway.contract.backend import Backend, Reading
from livescale.gateway.metrics.kept_counts import KeptCounts, SiblingCounts, Siblings
from livescale.gateway.metrics.metrics import Metrics, ModelCounts


@dataclass(frozen=True, slots=True)
class Sums:
    """At one time: what was counted, by model, and all readings."""

    models: dict[str, ModelCounts]
    readings: Sequence[Reading]


class Totals:
    """Of one application, and of its `siblings` if it has some."""

    def __init__(self, metrics: Metrics, backend: Backend, siblings: Siblings | None) -> None:
        self._metrics = metrics
        self._backend = backend
        self._siblings = siblings
        if siblings is not None:
            siblings.answer_with(self.own)

    def own(self) -> KeptCounts:
        """Of this gateway alone."""
        models = tuple(counts.kept() for counts in self._metrics.models.values())
        return KeptCounts(models, tuple(r for r in self._backend.readings() if r.is_own))

    async def now(self) -> Sums:
        """Of all of them."""
        if self._siblings is None:
            return Sums(self._metrics.models, self._backend.readings())
        # What is shown is what was kept: counts that went on meanwhile come with the next page, or
        # they could go back when this process is lost.
        own = self.own()
        readings = self._backend.readings()
        others = await self._siblings.others(own)
        every = (own, *(other.counts for other in others))
        models = {name: ModelCounts(name) for name in self._metrics.models}
        for kept in (kept for counts in every for kept in counts.models):
            if kept.model in models:
                models[kept.model].add(kept)
        return Sums(models, [*_added(readings, others), *_answering(self._siblings.name, others)])

    def __repr__(self) -> str:
        return f"<Totals of {self._metrics!r}>"


def _added(readings: Iterable[Reading], others: Sequence[SiblingCounts]) -> list[Reading]:
    """Amounts of own requests with those of the others' requests to the same models."""
    more: dict[tuple[object, ...], float] = {}
    for reading in (reading for other in others for reading in other.counts.readings):
        key = reading.name, reading.labels
        more[key] = more.get(key, 0.0) + reading.value
    return [
        Reading(r.name, r.value + more.get((r.name, r.labels), 0.0), r.labels) if r.is_own else r
        for r in readings
    ]


def _answering(own_name: str, others: Sequence[SiblingCounts]) -> list[Reading]:
    """Which gateways the page has current figures of."""
    answering = {own_name: True} | {other.name: other.answers for other in others}
    return [
        Reading("gateway_answers", float(answering[name]), (("gateway", name),))
        for name in sorted(answering)
    ]
