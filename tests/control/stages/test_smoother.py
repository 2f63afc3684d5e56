"""Eq. 7 as it is printed, and what must hold of what comes out."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.formulas.graph import StageGraph, line
from livescale.control.stages.formulas.smoother import beta, smooth

cvs_of = st.floats(0, 10)
lines = st.lists(st.tuples(st.integers(0, 20), cvs_of, st.integers(0, 5)), min_size=1, max_size=8)


@given(stages=lines)
def test_it_only_reclaims_and_never_below_the_floor(
    stages: list[tuple[int, float, int]],
) -> None:
    """So R_total holds afterwards if it held before."""
    replicas, cvs, floors = zip(*stages, strict=True)
    found = smooth(line(len(stages)), replicas, cvs, floors)
    for its, before, floor in zip(found, replicas, floors, strict=True):
        assert its.to_replicas <= before
        assert its.to_replicas >= min(floor, before)


@given(stages=lines)
def test_it_is_the_formula_in_whole_replicas(stages: list[tuple[int, float, int]]) -> None:
    """In exact fractions, neighbours written out for a line."""
    replicas, cvs, floors = zip(*stages, strict=True)
    found = smooth(line(len(stages)), replicas, cvs, floors)
    for i, its in enumerate(found):
        near = [replicas[j] for j in (i - 1, i + 1) if 0 <= j < len(stages)]
        own = Fraction(beta(cvs[i]))
        mean = Fraction(sum(near), len(near)) if near else Fraction(replicas[i])
        exact = own * replicas[i] + (1 - own) * mean
        assert its.smooth == pytest.approx(float(exact))
        whole = math.ceil(exact - Fraction(1, 10**8))
        assert its.to_replicas in (
            min(replicas[i], max(whole, floors[i])),
            min(replicas[i], max(math.ceil(exact), floors[i])),
        )


@given(low=cvs_of, high=cvs_of)
def test_beta_rises_with_the_cv(low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert 0 <= beta(low) <= beta(high) < 1
    assert beta(1) == 0.5
    assert beta(0) == 0


@given(stages=lines, other=cvs_of)
def test_burstier_arrivals_keep_more_of_a_stage_above_its_neighbours(
    stages: list[tuple[int, float, int]], other: float
) -> None:
    replicas, cvs, floors = zip(*stages, strict=True)
    bursty = [max(cv, other) for cv in cvs]
    graph = line(len(stages))
    for calm, wild in zip(
        smooth(graph, replicas, cvs, floors), smooth(graph, replicas, bursty, floors), strict=True
    ):
        assert wild.to_replicas >= calm.to_replicas


def test_the_ends_of_a_line_do_not_keep_the_sum() -> None:
    """So that Eq. 7 itself could exceed R_total: 4 + 1 + 4 would become 1 + 4 + 1, 1 + 4 + 1 the
    reverse, three more."""
    found = smooth(line(3), (1, 4, 1), (0.0, 0.0, 0.0), (1, 1, 1))
    assert [its.smooth for its in found] == [4, 1, 4]
    assert [its.to_replicas for its in found] == [1, 1, 1]


def test_neighbours_in_a_graph_are_all_before_and_after() -> None:
    fork = StageGraph(((1, 2), (3,), (3,), ()))
    found = smooth(fork, (2, 8, 3, 4), (1.0,) * 4, (1,) * 4)
    # Halfway to the means of the neighbours, which are 5.5, 3, 3 and 5.5.
    assert [its.smooth for its in found] == [3.75, 5.5, 3.0, 4.75]
    assert [its.to_replicas for its in found] == [2, 6, 3, 4]


def test_what_is_no_cv_is_refused() -> None:
    with pytest.raises(ValueError, match="CV"):
        beta(-1.0)
