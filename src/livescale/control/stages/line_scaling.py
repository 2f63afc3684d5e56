"""How many replicas each stage of a line gets: Corrector, Smoother and limits, one after the other.

Of a graph of stages as well: only that even stages share one queue is true of lines alone.
`is_uniform` is the comparison: whole pipelines, as many as the stage that needs most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from livescale.control.stages.core_budget import CoresSeen
from livescale.control.stages.corrector import Corrector, CorrectorSettings, StageDecision
from livescale.control.stages.formulas.attention import learned_cvs
from livescale.control.stages.formulas.graph import StageGraph, line
from livescale.control.stages.formulas.smoother import smooth
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import split_slo, wait_allowed_ns
from livescale.control.stages.formulas.variation import StageTraits, arrivals, flows_in, graph_of
from livescale.control.stages.key_stages import KeyStage
from livescale.control.stages.limits import even, within
from livescale.control.stages.line_cores import LineCores
from livescale.control.stages.shared_queue import without_moving
from livescale.values.scaling_policies import StagesByQueue

_SLO_PASSES = 4
"""Without an SLO a request may take so many times what its pass takes if it never waits."""


class LineScaling:
    """Of one line of stages, or (`graph`) of stages each of which a request goes through."""

    def __init__(self, policy: StagesByQueue, graph: StageGraph | None = None) -> None:
        self._policy = policy
        self._graph = graph
        self._corrector = Corrector(
            CorrectorSettings(
                period_ns=policy.period_ns, scale_down_timeout_ns=policy.scale_down_timeout_ns
            )
        )
        self._cores = LineCores(policy)

    def step(
        self,
        now_ns: int,
        loads: Sequence[StageLoad],
        limits: Sequence[tuple[int, int]],
        total: int,
        cores: CoresSeen | None = None,
    ) -> list[StageDecision]:
        """A decision per stage. Each stage stays within its `limits`, and all together have at most
        `total` replicas, unless the least numbers alone are more. `cores` are those that there are
        (None: they are left alone)."""
        services_ns = self._cores.look(loads, cores)
        graph = self._graph or line(len(loads))
        slo_ns = self._policy.slo_ns or _SLO_PASSES * graph.longest_path(services_ns)
        targets_ns = split_slo(slo_ns, services_ns, graph)
        decided = self._corrector.step(now_ns, loads, targets_ns, total)
        if graph.is_line:
            decided = without_moving(decided, loads, targets_ns, self._policy.period_ns)
        has_queue = _has_queue(loads, targets_ns)
        if self._policy.is_uniform:
            counts = even([its.to_replicas for its in decided], total)
            decided = [
                _changed(its, n, "whole_pipelines") for its, n in zip(decided, counts, strict=True)
            ]
        elif self._policy.smooths and not has_queue:
            decided = self._smoothed(graph, decided, loads, targets_ns)
        counts = within([its.to_replicas for its in decided], limits, total)
        decided = [_changed(its, n, "limits") for its, n in zip(decided, counts, strict=True)]
        return self._cores.settle(now_ns, decided, loads, targets_ns, has_queue=has_queue)

    @property
    def key_stages(self) -> Mapping[int, KeyStage]:
        """As of the last step, by number."""
        return self._corrector.key_stages

    @property
    def idle_counts(self) -> Mapping[int, int]:
        """None: only load needs more than one."""
        return {}

    def _smoothed(
        self,
        graph: StageGraph,
        decided: Sequence[StageDecision],
        loads: Sequence[StageLoad],
        targets_ns: Sequence[int],
    ) -> list[StageDecision]:
        """What even arrivals make needless goes, as far as that keeps the targets, or more cores
        make up for it."""
        counts = [its.to_replicas for its in decided]
        cvs = self._cvs(graph, loads, counts)
        here = [replace(load, replicas=count) for load, count in zip(loads, counts, strict=True)]
        floors = [self._cores.least_stable(number, load) for number, load in enumerate(here)]
        found = []
        smoother = smooth(graph, counts, cvs, floors)
        for its, load, target_ns, smoothed in zip(decided, here, targets_ns, smoother, strict=True):
            count = its.to_replicas
            figures = {
                "predicted_cv_permille": round(1000 * smoothed.cv),
                "smooth_permille": round(1000 * smoothed.smooth),
            }
            if smoothed.to_replicas < count:
                to_replicas = smoothed.to_replicas
                after = self._cores.reclaim(smoothed.stage, load, to_replicas, target_ns)
                count = after.to_replicas
                if after.sojourn_ns is not None:
                    figures["sojourn_after_ns"] = after.sojourn_ns
            found.append(
                _changed(replace(its, values=its.values | figures), count, "even_arrivals")
            )
        return found

    def _cvs(
        self, graph: StageGraph, loads: Sequence[StageLoad], counts: Sequence[int]
    ) -> list[float]:
        """The CV of arrivals at each stage, predicted from that of the first one's."""
        traits = [
            StageTraits(load.served_per_s, _or_one(load.service_cv), max(count, 1))
            for load, count in zip(loads, counts, strict=True)
        ]
        stages = graph_of(traits, graph)
        source = arrivals(loads[0].arrivals_per_s, _or_one(loads[0].arrival_cv))
        if self._policy.weights is None:
            return [flow.cv for flow in flows_in(stages, source)]
        return learned_cvs(stages, source, self._policy.weights)


def _has_queue(loads: Sequence[StageLoad], targets_ns: Sequence[int]) -> bool:
    """Requests wait too long somewhere. They come to the other stages later: what these need is
    more than what arrives now."""
    return any(
        load.wait_ns(load.replicas) > wait_allowed_ns(target_ns, load.service_ns)
        for load, target_ns in zip(loads, targets_ns, strict=True)
    )


def _changed(its: StageDecision, count: int, reason: str) -> StageDecision:
    if count == its.to_replicas:
        return its
    return replace(its, to_replicas=count, reason=reason)


def _or_one(cv: float | None) -> float:
    return 1.0 if cv is None else cv
