"""Corrector, Smoother and compensation one after the other, in a closed loop over a line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.compensation import compensate
from livescale.control.stages.corrector import Corrector, CorrectorSettings
from livescale.control.stages.formulas.graph import line
from livescale.control.stages.formulas.smoother import smooth
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import split_slo
from livescale.values.scaling_policies import CoresModel

S = 1_000_000_000
STAGES = 5
CORES, CORES_MAX = 2, 8
TOTAL = 120

per_stage = {"min_size": STAGES, "max_size": STAGES}


@given(
    services_ms=st.lists(st.integers(20, 200), **per_stage),
    cvs=st.lists(st.floats(0, 4), **per_stage),
    rate=st.floats(1, 60),
    slack=st.floats(1.3, 4),
    shared_part=st.none() | st.floats(0, 1),
)
def test_with_a_constant_load_all_three_come_to_rest_within_the_targets(
    services_ms: list[int], cvs: list[float], rate: float, slack: float, shared_part: float | None
) -> None:
    """What the Smoother takes, the Corrector does not give back for ever: each reclaim has kept
    the target."""
    corrector = Corrector(CorrectorSettings())
    replicas, cores = [1] * STAGES, [CORES] * STAGES
    seen = []
    for period in range(60):
        services_ns = [
            round(ms * S / 1000 * _factor(shared_part, its))
            for ms, its in zip(services_ms, cores, strict=True)
        ]
        slo_ns = int(slack * sum(services_ms) * S / 1000)
        targets_ns = split_slo(slo_ns, services_ns)
        loads = [
            StageLoad(i, replicas[i], rate, services_ns[i], arrival_cv=cvs[i])
            for i in range(STAGES)
        ]
        decided = corrector.step(period * S, loads, targets_ns, TOTAL)
        corrected = [its.to_replicas for its in decided]
        floors = [load.least_stable for load in loads]
        for its in smooth(line(STAGES), corrected, cvs, floors):
            after = compensate(
                StageLoad(
                    its.stage,
                    corrected[its.stage],
                    rate,
                    services_ns[its.stage],
                    arrival_cv=cvs[its.stage],
                ),
                _model(shared_part),
                its.to_replicas,
                targets_ns[its.stage],
                cores[its.stage],
                lambda _: CORES_MAX,
            )
            replicas[its.stage], cores[its.stage] = after.to_replicas, after.to_cores
        assert sum(replicas) <= TOTAL
        assert max(cores) <= CORES_MAX
        seen.append((tuple(replicas), tuple(cores)))
    assert len(set(seen[-10:])) == 1
    if sum(replicas) < TOTAL:
        assert all(its.reason in ("within_target", "small_surplus") for its in decided)


# -- helpers --------------------------------------------------------------------------------------


def _model(shared_part: float | None) -> CoresModel | None:
    """So much of the service time with one core is shared by cores."""
    return None if shared_part is None else CoresModel(1 - shared_part, shared_part)


def _factor(shared_part: float | None, cores: int) -> float:
    model = _model(shared_part)
    return 1.0 if model is None else model.service_ns(cores) / model.service_ns(CORES)
