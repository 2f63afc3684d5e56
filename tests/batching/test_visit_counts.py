"""What an instance of a stage counts: sums over visits, and reports of them that are no flood."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.batching.contract.visit_counts import VisitCounts
from livescale.batching.runs.reports import ReportPace
from livescale.batching.runs.run import BatchKey, Run, Segment
from livescale.messages.events import InstanceReported, StageCounts
from livescale.values.types import LayerSpan, SamplingParams

S = 1_000_000_000
REPORT = InstanceReported(
    instance=7,
    started=(),
    running=1,
    queued_prefill_tokens=0,
    kv_blocks_used=0,
    kv_blocks=8,
    emitted_tokens=0,
    stage=StageCounts(),
)


def _run(number: int, tokens: int) -> Run:
    segment = Segment(
        request=f"r{number}",
        attempt=1,
        token_ids=(0,) * tokens,
        first_position=0,
        block_table=(0,),
        samples=True,
        sampling=SamplingParams(1),
    )
    return Run(number, LayerSpan(0, 4), (segment,), batch=BatchKey(1, number), is_visit=True)


visits = st.lists(
    st.tuples(st.integers(0, 3 * S), st.integers(1, S), st.integers(1, 64)), min_size=1, max_size=20
)


@given(visits=visits)
def test_counts_are_those_of_a_line_with_one_server(visits: list[tuple[int, int, int]]) -> None:
    """Visits come with these gaps, take so long, and compute so many tokens."""
    counts, now_ns, free_ns, waits_ns, came = VisitCounts(), 0, 0, 0, []
    steps = []
    for number, (gap_ns, service_ns, tokens) in enumerate(visits):
        now_ns += gap_ns
        came.append(now_ns)
        start_ns = max(now_ns, free_ns)
        free_ns = start_ns + service_ns
        waits_ns += start_ns - now_ns
        steps += [(now_ns, 0, number), (free_ns, 1, number)]
        assert tokens
    for at_ns, is_end, number in sorted(steps):
        _, service_ns, tokens = visits[number]
        if is_end:
            counts.done(_run(number, tokens), service_ns)
        else:
            counts.came(BatchKey(1, number))
        counts.look(at_ns)
    found = counts.counts()
    gaps_ns = [after - before for before, after in itertools.pairwise(came)]
    assert (found.came, found.done) == (len(visits), len(visits))
    assert found.gaps_ns == sum(gaps_ns)
    assert found.gaps_squared_ns_s == sum(gap * gap for gap in gaps_ns) // S
    assert found.busy_ns == sum(service for _, service, _ in visits)
    assert found.busy_squared_ns_s == sum(service**2 for _, service, _ in visits) // S
    assert found.waited_ns == waits_ns
    with_prompts = [(service, tokens) for _, service, tokens in visits if tokens > 1]
    assert found.prompt_tokens == sum(tokens for _, tokens in with_prompts)
    assert found.prompt_ns == sum(service for service, _ in with_prompts)


def test_visits_that_left_are_forgotten() -> None:
    counts = VisitCounts()
    counts.came(BatchKey(1, 1))
    counts.look(S)
    counts.keep(lambda _key: False)
    counts.done(_run(1, 2), 1)
    counts.look(5 * S)
    assert counts.counts().waited_ns == 0


@pytest.mark.parametrize("gap_ns", [S // 10, S])
def test_more_visits_are_reported_once_per_gap(gap_ns: int) -> None:
    """While they go on; the last ones are not forgotten."""
    pace, sent = ReportPace(gap_ns), []
    for number in range(1000):
        report = replace(REPORT, stage=StageCounts(came=number))
        if pace.is_due(number * S // 100, report):
            sent.append(number)
    assert 10 * S // gap_ns <= len(sent) <= 10 * S // gap_ns + 1
    assert pace.is_behind
    assert pace.is_due(pace.progress_due_ns, replace(REPORT, stage=StageCounts(came=999)))
