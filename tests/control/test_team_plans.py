"""The chain or teams, for one load: what is reckoned of both, and which plan comes of that."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Device, Topology
from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.control.scaling.team_plans import (
    PlannedTeam,
    Queue,
    mean_live_ns,
    mean_teams_ns,
    teams_of,
)
from livescale.control.together.team_spans import TeamModel
from livescale.messages.scale_plan import ScalePlan
from livescale.values.types import WorkerRef

MS = 1_000_000
LAYERS = 16


def played_ns(work_ns: int, rates: Sequence[tuple[int, float]]) -> float:
    """The mean of when work is done, a thousandth of it after the other. `rates`: instances from a
    time on, the first one from 0."""
    bounds = [at_ns for at_ns, _ in rates[1:]] + [1 << 60]
    done, total, parts = 0.0, 0.0, 1000
    now, place = 0.0, 0
    for _ in range(parts):
        left = work_ns / parts
        while left > 0:
            room = (bounds[place] - now) * rates[place][1]
            step = min(left, room)
            now += step / rates[place][1]
            left -= step
            if left > 0:
                place += 1
        total += now
        done += work_ns / parts
    return total / parts


@settings(max_examples=examples(100))
@given(
    st.integers(1, 200),
    st.integers(1, 6),
    st.integers(2, 12),
    st.integers(100, 9000),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(2, 4)), max_size=4),
)
def test_teams_are_reckoned_as_they_would_be_played(
    prompts: int, serving: int, loading: int, load_ms: int, teams: list[tuple[int, int]]
) -> None:
    """Each team as fast as 0.9 times its members: its first Run fills it."""
    queue = Queue(prompts * 90 * MS, serving, 90 * MS)
    load_ns = load_ms * MS
    began = [PlannedTeam(ready * MS, members, 900 * members) for ready, members in teams]
    rates: list[tuple[int, float]] = [(0, serving)]
    ready_ns = [(t.ready_ns + 90 * MS - 90 * MS * 1000 // t.rate_permille, t) for t in began]
    for filled_ns, team in sorted(ready_ns, key=lambda one: one[0]):
        rates.append((min(filled_ns, load_ns), rates[-1][1] + team.rate_permille / 1000))
    rates.append((load_ns, serving + loading))
    found = mean_teams_ns(queue, loading, load_ns, began)
    assert found == pytest.approx(played_ns(queue.work_ns, rates), rel=0.01)


@settings(max_examples=examples(100))
@given(st.integers(1, 400), st.integers(1, 6), st.integers(1, 12), st.integers(0, 6), st.data())
def test_live_instances_are_between_none_and_all_at_once(
    prompts: int, serving: int, loading: int, pairs: int, data: st.DataObject
) -> None:
    """Never sooner than if all were loaded already; never later than if those that load did
    nothing, unless some of those that serve are idle because pairs have what is left."""
    queue = Queue(prompts * 90 * MS, serving, 90 * MS)
    pairs = min(pairs, serving, loading)
    load_ms = data.draw(st.integers(1, 9000))
    mean_ns = mean_live_ns(queue, loading, load_ms * MS, pairs)
    at_once = queue.work_ns / (2 * (serving + loading))
    assert mean_ns >= at_once * 0.999 - 1
    if pairs in (0, serving):
        idle_ns = mean_teams_ns(queue, loading, load_ms * MS)
        assert mean_ns <= idle_ns * 1.01 + MS


@pytest.mark.parametrize(("pairs", "mean_ms"), [(2, 437), (0, 364)])
def test_a_short_queue_is_the_pairs(pairs: int, mean_ms: int) -> None:
    """60 prompts at four instances, two of which become sources: these have 26 prompts each, the
    two others 4, and are idle after these. As simulated, less half a prompt: a fluid is not in
    whole ones."""
    queue = Queue(60 * 48_667_373, 4, 48_667_373)
    found = mean_live_ns(queue, 2, 1_078_146_498, pairs) / MS
    assert found == pytest.approx(mean_ms - 48.7 / 2 * (pairs > 0), rel=0.04)


def planned(
    sources: int, targets: int, strategy: str = "binomial", chunk_bytes: int = 1_000_000
) -> ScalePlan:
    """Sixteen equal layers over equal links."""
    refs = [WorkerRef(number) for number in range(sources + targets)]
    rate = 10**9
    devices = {
        ref: Device("a100", f"h{ref.worker}", "leaf", 1 << 40, 1 << 30, rate, rate) for ref in refs
    }
    request = PlanRequest(
        plan=1,
        model="m",
        layer_bytes=(0, *[1_000_000] * LAYERS, 0),
        chunk_bytes=chunk_bytes,
        instances=targets,
        sources=tuple(Source((ref,)) for ref in refs[:sources]),
        targets=tuple((ref,) for ref in refs[sources:]),
    )
    return make_plan(request, Topology(devices=devices), strategy)


@pytest.mark.parametrize(
    ("strategy", "sources", "steps", "teams"),
    [
        ("pairs", 1, 18, []),
        ("pairs", 2, 17, [(8, 2), (8, 2), (8, 2)]),
        ("cover", 2, 17, [(8, 2), (8, 2), (8, 2)]),
        ("pairs", 4, 16, [(4, 4)]),
    ],
)
def test_teams_of_a_plan_begin_when_their_layers_are_there(
    strategy: str, sources: int, steps: int, teams: list[tuple[int, int]]
) -> None:
    """λScale §4.3, N = 8 and b = 16: a layer is a block, and takes a step of a millisecond. Chunks
    are forwarded at once, so targets of a source have its part without the steps before, and those
    of a single source have the same layers at all times."""
    plan = planned(sources, 8 - sources)
    assert plan.predicted_ns == steps * MS
    found = teams_of(plan, strategy, TeamModel(LAYERS))
    assert [(team.ready_ns / MS, team.members) for team in found] == teams


@pytest.mark.parametrize(
    ("nodes", "sources", "steps"), [(8, 1, 18), (8, 2, 17), (8, 4, 16), (12, 4, 17)]
)
def test_a_chain_is_full_after_the_steps_of_one_copy(nodes: int, sources: int, steps: int) -> None:
    """Sixteen, where the binomial pipeline of sixteen blocks has so many: a chain of small chunks
    has no step more than the bytes of the model, but one chunk for each hop."""
    targets = nodes - sources
    chain = planned(sources, targets, "chain", chunk_bytes=1_000)
    hops = -(-targets // sources) - 1
    assert chain.predicted_ns == 16 * MS + hops * MS // 1000
    assert planned(sources, targets).predicted_ns == steps * MS


def test_an_empty_plan_of_unknown_rates_has_no_teams() -> None:
    plan = planned(2, 6)
    unknown = tuple(msgspec.structs.replace(load, layer_ns=()) for load in plan.loads)
    assert teams_of(msgspec.structs.replace(plan, loads=unknown), "pairs", TeamModel(LAYERS)) == []


def test_prompts_of_unknown_length_bound_no_line() -> None:
    """Nothing waits in the router, all with instances: their lengths are not known."""
    known, unknown = (Queue(9_000 * MS, 3, run_ns) for run_ns in (90 * MS, 0))
    idle_ns = mean_teams_ns(unknown, 5, 1_000 * MS)
    assert mean_live_ns(unknown, 5, 1_000 * MS, 0) < idle_ns
    known_ns = mean_live_ns(known, 5, 1_000 * MS, 0)
    assert mean_live_ns(unknown, 5, 1_000 * MS, 0) == pytest.approx(known_ns, rel=0.01)
