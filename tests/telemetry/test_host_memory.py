"""Host copies over time, from what agents were told and said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.topology import Host
from livescale.control.state.config import ControllerConfig
from livescale.messages.commands import AnyCommand, StartHolding
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    HoldingDropped,
    HoldingFailed,
    HoldingReport,
    ModelAdded,
    WorkerLost,
)
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import RECORD_VERSION, AnyLine, RunLine, StepLine
from livescale.telemetry.timeline import HostCopyUse, host_copy_use
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import FromStorage, HoldingId, LayerSpan, ModelSpec, agent_ref

H = [agent_ref(number) for number in range(3)]
HOST = Host("h", "l", 1000)


def policy(name: str, size_bytes: int, tp_size: int = 1) -> ModelPolicy:
    return ModelPolicy(ModelSpec(name, (size_bytes,), 1, 1, tp_size), 0, 1)


MODELS = (policy("m", 10), policy("n", 5))
BEGIN = RunLine(RECORD_VERSION, "sim", ControllerConfig(MODELS, 0))


def copy(agent: int, plan: int = 1) -> HoldingId:
    return HoldingId(plan, H[agent])


def start(model: str, agent: int, plan: int = 1, rank: int = 0) -> StartHolding:
    feeds = (Feed(FromStorage(), (ChunkRange(0, 1),)),)
    return StartHolding(copy(agent, plan), model, LayerSpan(0, 1), feeds, 10, rank)


def line(now_ns: int, *items: AnyEvent | AnyCommand) -> StepLine:
    events = tuple(item for item in items if isinstance(item, AnyEvent))
    commands = tuple(item for item in items if isinstance(item, AnyCommand))
    return StepLine(now_ns, events, commands, now_ns)


def test_a_story_by_hand() -> None:
    lines: list[AnyLine] = [
        BEGIN,
        line(100),
        line(110, start("m", 0)),
        line(130, start("m", 1)),  # 20 ns with one copy
        line(140, HoldingDropped(copy(0))),  # 10 ns with two
        line(160, HoldingFailed(copy(1), "x")),  # 20 ns with one
        line(200),
    ]
    assert host_copy_use(read_history(lines)) == {
        "m": HostCopyUse(0.6, 2, 6.0, 20),
        "n": HostCopyUse(0, 0, 0, 0),
    }


def test_ranks_of_a_copy_count_as_one_with_their_bytes() -> None:
    begin = RunLine(RECORD_VERSION, "sim", ControllerConfig((), 0))
    added = ModelAdded(policy("p", 7, tp_size=2))
    lines = [begin, line(0, added, start("p", 0), start("p", 0, 2, rank=1)), line(10)]
    assert host_copy_use(read_history(lines)) == {"p": HostCopyUse(1.0, 1, 14.0, 14)}


def test_a_lost_host_keeps_nothing_and_a_new_life_hears_what_is_there() -> None:
    lines = [
        BEGIN,
        line(0, start("m", 0), start("n", 1)),
        line(10, WorkerLost(H[0], "gone")),
        BEGIN,
        line(20, AgentJoined(H[1], HOST, (HoldingReport(start("n", 1), 1, is_whole=True),))),
        line(40),
    ]
    use = host_copy_use(read_history(lines))
    assert use["m"] == HostCopyUse(0.25, 1, 2.5, 10)
    # Between the lives of the controller nothing is known to have changed.
    assert use["n"] == HostCopyUse(1.0, 1, 5.0, 5)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans()), max_size=30))
def test_averages_lie_below_maxima_and_agree_with_sums(
    changes: list[tuple[int, int, bool]],
) -> None:
    now_ns, held, copy_ns, most = 0, set[int](), 0, 0
    lines: list[AnyLine] = [BEGIN, line(0)]
    for gap_ns, agent, is_there in changes:
        copy_ns += len(held) * gap_ns
        now_ns += gap_ns
        change = start("m", agent) if is_there else HoldingDropped(copy(agent))
        # What is held is not ordered again.
        lines.append(line(now_ns, *([] if is_there and agent in held else [change])))
        held = held | {agent} if is_there else held - {agent}
        most = max(most, len(held))
    use = host_copy_use(read_history(lines))["m"]
    assert use.copies_max == most
    assert use.copies_mean == pytest.approx(copy_ns / max(now_ns, 1))
    assert use.copies_mean <= use.copies_max
    assert use.bytes_mean == pytest.approx(10 * use.copies_mean)
    assert use.bytes_max == 10 * use.copies_max
