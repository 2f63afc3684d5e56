"""Cores of a line's stages: more for what is reclaimed, fewer when fewer do (QUART §5.3)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from livescale.control.stages.compensation import Compensated, compensate, with_cores
from livescale.control.stages.core_budget import CoreBudget, CoresSeen, StageCores
from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns
from livescale.control.stages.recent_need import RecentNeed
from livescale.values.scaling_policies import CoresModel, StagesByQueue

_LOWER_PERMILLE = 800
"""Cores go when with fewer of them requests would still wait no longer than this part of the time
that they may wait."""


class LineCores:
    """Of one line. Without a model of cores all stages keep what they have."""

    def __init__(self, policy: StagesByQueue) -> None:
        self._policy = policy
        self._needs: dict[int, RecentNeed] = {}
        self._stages: Sequence[StageCores] = ()
        self._budget = CoreBudget({})
        #: by stage, what was raised in this step
        self._raised: dict[int, Compensated] = {}

    def look(self, loads: Sequence[StageLoad], seen: CoresSeen | None) -> list[int]:
        """A step begins. Returns the service times that the stages would have with the cores that
        their workers began with: targets follow from them, and do not fall when cores come."""
        none = StageCores(1, ())
        self._stages = [none] * len(loads) if seen is None else seen.stages
        self._budget = CoreBudget({} if seen is None else seen.free)
        self._raised = {}
        pairs = zip(loads, self._stages, strict=True)
        return [self._with_own(load, stage).service_ns for load, stage in pairs]

    def least_stable(self, number: int, load: StageLoad) -> int:
        """The fewest replicas that are faster than the arrivals, with all cores that they can
        have."""
        stage, model = self._stages[number], self._model(self._stages[number])
        if model is None:
            return max(load.least_stable, 1)
        for count in range(1, load.replicas):
            most = self._budget.most(stage, count)
            if with_cores(load, model, stage.level, most).least_stable <= count:
                return count
        return max(load.least_stable, 1)

    def reclaim(
        self, number: int, load: StageLoad, to_replicas: int, target_ns: int
    ) -> Compensated:
        """As much of the reclaim as more cores make up for; these are taken."""
        stage = self._stages[number]
        model, level = self._model(stage), stage.level
        its = compensate(
            load,
            model,
            to_replicas,
            target_ns,
            level,
            lambda count: level if model is None else self._budget.most(stage, count),
        )
        if its.to_cores > its.from_cores:
            self._budget.take(stage, its.to_replicas, its.to_cores)
            self._raised[number] = its
        return its

    def settle(
        self,
        now_ns: int,
        decided: Sequence[StageDecision],
        loads: Sequence[StageLoad],
        targets_ns: Sequence[int],
        *,
        has_queue: bool,
    ) -> list[StageDecision]:
        """The decisions with the cores of each replica. With a queue somewhere none go."""
        if self._policy.cores is None:
            return list(decided)
        found = []
        for number, its in enumerate(decided):
            stage = self._stages[number]
            raised = self._raised.get(number)
            # Another rule may have kept more replicas meanwhile, which need no more cores.
            if raised is not None and raised.to_replicas == its.to_replicas:
                cores = needed = raised.to_cores
                self._lately(now_ns, number, stage, needed)
            else:
                needed = stage.level
                if not has_queue:
                    needed = self._needed(stage, loads[number], its.to_replicas, targets_ns[number])
                cores = min(self._lately(now_ns, number, stage, needed), stage.level)
            reason = "more_cores" if cores > stage.level else "fewer_do"
            figures = {"cores": stage.level, "to_cores": cores}
            found.append(
                replace(
                    its,
                    from_cores=stage.level,
                    to_cores=cores,
                    cores_reason=reason if cores != stage.level else "",
                    values=its.values | figures,
                )
            )
        return found

    # -- helpers ------------------------------------------------------------------------------

    def _model(self, stage: StageCores) -> CoresModel | None:
        """What cores do for the stage; not known while its instances have different ones."""
        return self._policy.cores if stage.is_even and stage.instances else None

    def _with_own(self, load: StageLoad, stage: StageCores) -> StageLoad:
        """The load as it would be with the cores that the workers began with."""
        model, instances = self._policy.cores, stage.instances
        if model is None or not instances:
            return load
        # Runs take the mean of what they take at each instance.
        mean_ns = sum(model.service_ns(its.cores) for its in instances) / len(instances)
        service_ns = round(load.service_ns * model.service_ns(stage.own) / mean_ns)
        return replace(load, service_ns=max(service_ns, 1))

    def _needed(self, stage: StageCores, load: StageLoad, replicas: int, target_ns: int) -> int:
        """The fewest cores with which requests wait no longer than they may, with some to spare."""
        model = self._policy.cores
        assert model is not None
        begun = self._with_own(load, stage)
        for cores in range(stage.own, stage.level):
            its = with_cores(begun, model, stage.own, cores)
            allowed_ns = wait_allowed_ns(target_ns, its.service_ns) * _LOWER_PERMILLE // 1000
            if its.wait_ns(max(replicas, 1)) <= allowed_ns:
                return cores
        return stage.level

    def _lately(self, now_ns: int, number: int, stage: StageCores, needed: int) -> int:
        timeout_ns = self._policy.scale_down_timeout_ns
        need = self._needs.setdefault(number, RecentNeed())
        if need.is_empty:
            # As long as nothing else is known, what is there has been needed until now.
            need.after(now_ns, timeout_ns, stage.level)
        return need.after(now_ns, timeout_ns, needed)
