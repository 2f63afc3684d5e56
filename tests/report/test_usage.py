"""What models took, from the lines of a record, against a slow recount."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from livescale.messages.commands import StartHolding
from livescale.messages.events import AnyEvent, HoldingDropped, HoldingFailed, WorkerLost
from livescale.report.run.usage import usage_by_model
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty
from livescale.values.types import FromStorage, HoldingId, LayerSpan, Outcome, WorkerRef

MODELS = ("a", "b")
ENDS = ("released", "failed", "lost")

#: a worker, what it is given if it is free or else how it ends, and the time until then
moves = st.lists(
    st.tuples(
        *(st.integers(0, 3), st.sampled_from(MODELS), st.sampled_from(ENDS), st.integers(0, 9))
    ),
    max_size=25,
)
requests = st.lists(
    st.tuples(st.sampled_from(MODELS), st.integers(1, 9), st.integers(0, 4), st.booleans()),
    max_size=10,
)


def load(worker: int, instance: int, model: str) -> StartHolding:
    """The order whose plan has the number of its instance."""
    feeds = (Feed(FromStorage(), (ChunkRange(0, 1),)),)
    holding, duty = HoldingId(instance, WorkerRef(worker)), Duty(instance, (WorkerRef(worker),))
    return StartHolding(holding, model, LayerSpan(0, 1), feeds, 1, duty=duty)


def end(how: str, worker: int, instance: int) -> AnyEvent:
    holding = HoldingId(instance, WorkerRef(worker))
    if how == "released":
        return HoldingDropped(holding)
    return HoldingFailed(holding, "") if how == "failed" else WorkerLost(holding.member, "")


@given(moves, requests)
def test_sums_are_those_of_the_lines(
    story: list[tuple[int, str, str, int]], asked: list[tuple[str, int, int, bool]]
) -> None:
    now_ns, numbers = 0, itertools.count(1)
    holding: dict[int, tuple[int, str]] = {}
    expected = dict.fromkeys(MODELS, 0)
    lines: list[AnyLine] = []
    for worker, model, how, passed_ns in story:
        now_ns += passed_ns
        for _, held in holding.values():
            expected[held] += passed_ns
        if worker in holding:
            instance, _ = holding.pop(worker)
            lines.append(StepLine(now_ns, (end(how, worker, instance),), (), now_ns))
        else:
            holding[worker] = (next(numbers), model)
            lines.append(StepLine(now_ns, (), (load(worker, *holding[worker]),), now_ns))
    for number, (model, prompt, tokens, is_met) in enumerate(asked):
        times = tuple(range(tokens))
        lines.append(
            RequestLine(
                *(f"r{number}", model, prompt, 9, 0, 9, Outcome.FINISHED, 1),
                token_ns=times,
                slo_met=is_met,
            )
        )
    usage = usage_by_model(read_history(lines))
    assert list(usage) == sorted(usage)
    for model in MODELS:
        mine = [entry for entry in asked if entry[0] == model]
        if model not in usage:
            assert not mine
            assert expected[model] == 0
            continue
        assert usage[model].device_ns == expected[model]
        assert usage[model].requests == len(mine)
        assert usage[model].prompt_tokens == sum(prompt for _, prompt, _, _ in mine)
        assert usage[model].generated_tokens == sum(tokens for _, _, tokens, _ in mine)
        assert usage[model].slo_met == (sum(is_met for *_, is_met in mine) if mine else None)
