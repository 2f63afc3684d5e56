"""A record cut in two anywhere: both parts together replay, and the second alone is understood."""

from __future__ import annotations

import io
import random
from functools import cache
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Host
from livescale.latency.shapes import LLAMA_3_8B
from livescale.load.traces import TraceRow as Row
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import AnyLine, RunLine, StepLine, read_record, write_record
from livescale.telemetry.record.record_parts import part_path
from livescale.telemetry.replay import ReplayError, replay
from livescale.telemetry.timeline import copies_over_time, instances_over_time

_S = 1_000_000_000


@cache
def recorded(seed: int) -> tuple[AnyLine, ...]:
    """A pool that grows, loses workers and shrinks again, with copies on two hosts."""
    config = SimConfig.default(LLAMA_3_8B, workers=4)
    controller = msgspec.structs.replace(config.controller, agents_expected=2)
    hosts = tuple(Host(f"host-{n}", "leaf-0", 192 * 10**9) for n in range(2))
    faults = FaultConfig(worker_losses=2, until_ns=26 * _S)
    config = msgspec.structs.replace(config, controller=controller, hosts=hosts, faults=faults)
    rng = random.Random(seed)
    rows = [Row(20 * _S + rng.randrange(4 * _S), 1500, 20) for _ in range(60)]
    rows.sort(key=lambda row: row.arrival_ns)
    file = io.BytesIO()
    simulate(rows, config, seed, file)
    decoder = msgspec.json.Decoder(AnyLine)
    return tuple(decoder.decode(line) for line in file.getvalue().splitlines())


def cut(lines: tuple[AnyLine, ...], at: int) -> list[AnyLine]:
    """What a part holds that begins before the line of this number."""
    follower, now_ns = Follower(), 0
    begun: RunLine | None = None
    for line in lines[:at]:
        if isinstance(line, RunLine):
            follower, begun = Follower(), line
            follower.begin(line.config)
        elif isinstance(line, StepLine):
            follower.step(line.now_ns, line.events, line.commands)
            now_ns = line.now_ns
    assert begun is not None
    run = msgspec.structs.replace(begun, is_continued=True)
    joined, draining = follower.opening()
    return [run, StepLine(now_ns, tuple(joined), tuple(draining), now_ns), *lines[at:]]


def at_the_end(changes: list[tuple[int, int]], from_ns: int) -> list[tuple[int, int]]:
    """The changes behind this time, and what held there."""
    before = [count for now_ns, count in changes if now_ns <= from_ns]
    after = [change for change in changes if change[0] > from_ns]
    there = [(from_ns, before[-1] if before else 0), *after]
    return [there[0], *(new for old, new in pairwise(there) if old[1] != new[1])]


@settings(max_examples=examples(25))
@given(st.data())
def test_a_part_alone_knows_who_serves_and_who_has_copies(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = recorded(data.draw(st.integers(1, 3)))
    at = data.draw(st.integers(1, len(lines) - 1))
    part = cut(lines, at)
    assert isinstance(part[1], StepLine)
    from_ns = part[1].now_ns
    of_whole, of_part = read_history(lines), read_history(part)
    whole, alone = instances_over_time(of_whole), instances_over_time(of_part)
    assert at_the_end(alone, from_ns) == at_the_end(whole, from_ns)
    copies, copies_alone = copies_over_time(of_whole), copies_over_time(of_part)
    for model, changes in copies.items():
        there = at_the_end(copies_alone.get(model, []), from_ns)
        assert there == at_the_end(changes, from_ns)

    path = tmp_path_factory.mktemp("parts") / "run.jsonl"
    write_record(path, lines[:at])
    write_record(part_path(path, 2), part)
    assert list(read_record(path)) == list(lines)
    assert replay(read_record(path)).steps == sum(isinstance(line, StepLine) for line in lines)


def test_a_part_alone_is_not_replayed_and_says_why() -> None:
    lines = recorded(1)
    part = cut(lines, len(lines) // 2)
    with pytest.raises(ReplayError, match="by the name of its first part"):
        replay(part)
    # A life that begins in the part is replayed all the same.
    result = replay([*part, *lines])
    assert result.lives == 1
    assert result.left_out == sum(isinstance(line, StepLine) for line in part)
