"""Cores for replicas: the regression, and what a reclaim may cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.compensation import (
    compensate,
    cores_needed,
    fit_cores,
    with_cores,
)
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns
from livescale.values.scaling_policies import CoresModel

MS = 1_000_000
profiles = st.lists(
    st.tuples(st.integers(1, 64), st.integers(MS, 1000 * MS)), min_size=2, max_size=12
).filter(lambda its: len({cores for cores, _ in its}) > 1)
models = st.builds(CoresModel, st.floats(MS, 100 * MS), st.floats(0, 200 * MS))
loads = st.builds(
    StageLoad,
    stage=st.just(3),
    replicas=st.integers(1, 10),
    arrivals_per_s=st.floats(0, 60),
    service_ns=st.integers(10 * MS, 300 * MS),
    waiting=st.integers(0, 5),
    arrival_cv=st.floats(0, 3),
)


@given(fixed=st.integers(0, 10**9), shared=st.integers(1, 10**9))
def test_the_regression_finds_what_made_the_profile(fixed: int, shared: int) -> None:
    points = [(cores, fixed + shared // cores) for cores in (1, 2, 4, 8, 16) if fixed + shared > 16]
    if not points:
        return
    model = fit_cores(points)
    for cores, service_ns in points:
        assert model.service_ns(cores) == pytest.approx(service_ns, rel=1e-3, abs=2)


@given(profile=profiles)
def test_the_regression_is_the_least_squares_of_others(profile: list[tuple[int, int]]) -> None:
    model = fit_cores(profile)
    assert model.fixed_ns >= 0 <= model.shared_ns
    xs = np.array([1 / cores for cores, _ in profile])
    ys = np.array([float(service_ns) for _, service_ns in profile])
    slope, fixed = np.polyfit(xs, ys, 1)
    if slope > 1 and fixed > 1:
        assert model.shared_ns == pytest.approx(slope, rel=1e-6, abs=10)
        assert model.fixed_ns == pytest.approx(fixed, rel=1e-6, abs=10)
    elif slope < -1:
        assert model.service_ns(1) == model.service_ns(64) == pytest.approx(ys.mean())


@pytest.mark.parametrize(
    "profile", [[], [(2, 5)], [(2, 5), (2, 6)], [(0, 5), (2, 6)], [(1, 0), (2, 6)]]
)
def test_what_is_no_profile_is_refused(profile: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="profile"):
        fit_cores(profile)


@given(load=loads, model=models, cores=st.integers(1, 8), more=st.integers(0, 24), data=st.data())
def test_a_reclaim_keeps_the_target_or_does_not_happen(
    load: StageLoad, model: CoresModel, cores: int, more: int, data: st.DataObject
) -> None:
    to_replicas = data.draw(st.integers(0, load.replicas))
    asked_ns = data.draw(st.integers(load.service_ns // 2, 4 * load.service_ns))
    its = compensate(load, model, to_replicas, asked_ns, cores, lambda _: cores + more)
    target_ns = load.service_ns + wait_allowed_ns(asked_ns, load.service_ns)
    assert cores <= its.to_cores <= cores + more
    assert max(to_replicas, 1) <= its.to_replicas <= load.replicas
    if its.to_replicas < load.replicas:
        after = with_cores(load, model, cores, its.to_cores)
        assert after.sojourn_ns(its.to_replicas) <= target_ns
        assert its.sojourn_ns is not None
    else:
        assert its.to_cores == cores
    for fewer in range(max(to_replicas, 1), its.to_replicas):
        assert cores_needed(load, model, fewer, target_ns, cores, cores + more) is None
    if its.reason == "more_cores":
        before = with_cores(load, model, cores, its.to_cores - 1)
        assert before.sojourn_ns(its.to_replicas) > target_ns


def test_each_reason() -> None:
    model = CoresModel(50.0 * MS, 100.0 * MS)
    load = StageLoad(0, 4, 25.0, 100 * MS)
    assert with_cores(load, model, 2, 4).service_ns == 75 * MS

    def reason(to_replicas: int, target_ms: int, cores_max: int) -> tuple[str, int, int]:
        its = compensate(load, model, to_replicas, target_ms * MS, 2, lambda _: cores_max)
        return its.reason, its.to_replicas, its.to_cores

    assert reason(4, 300, 8) == ("nothing_to_reclaim", 4, 2)
    assert reason(3, 300, 8) == ("enough_cores", 3, 2)
    assert reason(3, 130, 8) == ("more_cores", 3, 3)
    assert reason(3, 130, 2) == ("too_few_cores", 4, 2)
    assert reason(1, 130, 8) == ("fewer_reclaimed", 3, 3)
    without = compensate(load, None, 3, 130 * MS, 2, lambda _: 8)
    assert (without.reason, without.to_replicas) == ("too_few_cores", 4)
