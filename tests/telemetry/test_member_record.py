"""Records of simulated members: what is written replays, and what was altered is refused."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples, mostly_long
from livescale.batching.runs.batcher import BatcherConfig
from livescale.common.interpreter import module_words
from livescale.main import main
from livescale.member.effects import Effect
from livescale.member.inputs import FirstByteCame, RunEnded
from livescale.sim.swarm.seeds import draw_world, run_world
from livescale.sim.world import member_shell as member_module
from livescale.telemetry.member_record import (
    MemberLine,
    MemberStepLine,
    RecordedMember,
    encode_effect,
    read_member_record,
)
from livescale.telemetry.record.record_parts import RecordError
from livescale.telemetry.replay import ReplayError, replay_member
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Partner, Pipeline, Team, TeamMember
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import LayerSpan, ModelSpec, Upstream, WorkerRef

SEEDS = mostly_long(range(12), [0, 2, 5])


def record_seed(seed: int, folder: Path) -> list[Path]:
    """The records of all members of a swarm world, one file per life."""
    sinks: dict[WorkerRef, io.BytesIO] = {}

    def make(ref: WorkerRef, *rest: Any, **more: Any) -> RecordedMember:
        assert ref not in sinks, f"{ref} lives twice"
        sinks[ref] = io.BytesIO()
        return RecordedMember(sinks[ref], ref, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member_module, "Member", make)
        run_world(draw_world(seed))
    files = []
    for ref, sink in sinks.items():
        files.append(folder / f"{ref}.jsonl")
        files[-1].write_bytes(sink.getvalue())
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The records of a world in which a worker takes a batch over, and a member dies."""
    for seed in range(200):
        files = record_seed(seed, tmp_path_factory.mktemp("members"))
        has_second_life = any(file.stem.endswith(".1") for file in files)
        if has_second_life and any(b'"TakeOver"' in file.read_bytes() for file in files):
            return files
    raise AssertionError("no seed draws such a world")


@pytest.fixture(scope="module")
def busiest(files: list[Path]) -> list[bytes]:
    """The lines of the longest record."""
    return max(files, key=lambda file: file.stat().st_size).read_bytes().splitlines(True)


def steps_of(file: Path) -> list[MemberStepLine]:
    return [line for line in read_member_record(file) if isinstance(line, MemberStepLine)]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("seed", SEEDS)
def test_records_replay_whatever_the_hash_seed(seed: int, tmp_path: Path) -> None:
    files = record_seed(seed, tmp_path)
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            module_words("livescale.main", "replay", *map(str, files)),
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(": the same ") == len(files)


def test_a_replay_counts_what_it_compared(files: list[Path]) -> None:
    for file in files:
        steps = steps_of(file)
        check = replay_member(read_member_record(file))
        assert f"{check.ref}.jsonl" == file.name
        assert check.steps == len(steps)
        assert check.inputs == sum(len(step.inputs) for step in steps)
        assert check.effects == sum(len(step.effects) for step in steps)


# -- altered records ----------------------------------------------------------------------------


def altered(busiest: list[bytes], tmp_path: Path, old: bytes, new: bytes) -> tuple[int, Path]:
    """The record with the first of these words replaced, and the number of its step."""
    lines = list(busiest)
    index = next(index for index, line in enumerate(lines) if old in line)
    lines[index] = lines[index].replace(old, new, 1)
    file = tmp_path / "altered.jsonl"
    file.write_bytes(b"".join(lines))
    return sum(b'"kind":"step"' in line for line in lines[:index]), file


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"type":"Execute","run":3,', b'{"type":"Execute","run":4,'),
        (b'"digest":"', b'"digest":"0'),
        (b'"event":{"type":"LayerArrived",', b'"event":{"type":"FirstByteArrived",'),
    ],
)
def test_an_altered_effect_is_refused_and_its_step_named(
    busiest: list[bytes], tmp_path: Path, old: bytes, new: bytes
) -> None:
    step, file = altered(busiest, tmp_path, old, new)
    ref = next(line.ref for line in read_member_record(file) if isinstance(line, MemberLine))
    wanted = rf"^{ref}, step {step} at \d+ ns, effect \d+: recorded \{{.*, replayed \{{"
    with pytest.raises(ReplayError, match=wanted) as caught:
        replay_member(read_member_record(file))
    recorded, replayed = str(caught.value).split("recorded ")[1].split(", replayed ")
    assert recorded != replayed
    assert max(len(recorded), len(replayed)) <= 250


def test_an_altered_input_has_other_effects(busiest: list[bytes], tmp_path: Path) -> None:
    step, file = altered(busiest, tmp_path, b'"output_tokens_max":', b'"output_tokens_max":1')
    with pytest.raises(ReplayError) as caught:
        replay_member(read_member_record(file))
    assert int(str(caught.value).split(" step ")[1].split()[0]) >= step


def test_a_missing_effect_is_refused(busiest: list[bytes], tmp_path: Path) -> None:
    lines = list(busiest)
    index = next(n for n, line in enumerate(lines) if b'"effects":[{' in line)
    step = msgspec.json.decode(lines[index])
    lines[index] = msgspec.json.encode({**step, "effects": step["effects"][:-1]}) + b"\n"
    file = tmp_path / "missing.jsonl"
    file.write_bytes(b"".join(lines))
    with pytest.raises(ReplayError, match="recorded nothing, replayed"):
        replay_member(read_member_record(file))


def test_a_step_that_raised_is_recorded_and_raises_again(tmp_path: Path) -> None:
    sink = io.BytesIO()
    member = RecordedMember(sink, WorkerRef(3), 1000, address_bytes=2000)
    member.step(1, [FirstByteCame(7)])
    with pytest.raises(AssertionError, match="has no instance"):
        member.step(2, [RunEnded([], 5)])
    file = tmp_path / "w3.0.jsonl"
    file.write_bytes(sink.getvalue())
    first, second = steps_of(file)
    assert (first.error, second.effects) == ("", ())
    assert second.error.startswith("AssertionError: ")
    assert replay_member(read_member_record(file)).steps == 2
    file.write_bytes(sink.getvalue().replace(b"AssertionError: ", b"AssertionError: not "))
    with pytest.raises(ReplayError, match="step 1 at 2 ns: recorded AssertionError: not"):
        replay_member(read_member_record(file))


# -- records that cannot be read ----------------------------------------------------------------


def test_an_unfinished_last_line_is_left_out(busiest: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "torn.jsonl"
    file.write_bytes(b"".join(busiest)[:-10])
    whole = replay_member(read_member_record(file))
    assert whole.steps == sum(b'"kind":"step"' in line for line in busiest[:-1])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "the record has no run line"),
        (b'{"kind":"member"', "the record has no run line"),
        (
            b'{"kind":"member","version":10}\n',
            "version 10 of a worker's or agent's record. This program reads",
        ),
        (b'{"kind":"member","version":9}\n', r"jsonl:1: not a line of a member's record: .*`ref`"),
        (b"what\n", "jsonl:1: not a line of a record"),
    ],
)
def test_what_is_no_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, error: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(text)
    assert main(["replay", str(file)]) == 1
    said = capsys.readouterr().err
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(said)
    assert said.count(str(file)) == 1


def test_a_damaged_line_is_named(busiest: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "damaged.jsonl"
    for damage in (b"\n", busiest[3].replace(b'"now_ns"', b'"now"')):
        file.write_bytes(b"".join([*busiest[:3], damage, *busiest[4:]]))
        with pytest.raises(RecordError, match=r"damaged\.jsonl:4: not a line of a member's record"):
            replay_member(read_member_record(file))
    file.write_bytes(busiest[0] * 2)
    with pytest.raises(ReplayError, match="a second worker or agent begins after 0 steps"):
        replay_member(read_member_record(file))


# -- encoding -----------------------------------------------------------------------------------


COUNTS = st.integers(1, 99)
# One after the other: a strategy looks up those of its parts when it is made.
st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(
    Sequence, lambda kind: st.lists(st.from_type(kind.__args__[0]), max_size=3)
)
st.register_type_strategy(
    msgspec.Raw, st.sampled_from([msgspec.Raw(b"{}"), msgspec.Raw(b'{"type":"Measure"}')])
)
st.register_type_strategy(
    LayerSpan, st.builds(lambda start, size: LayerSpan(start, start + size), COUNTS, COUNTS)
)


CUTS = st.lists(COUNTS, max_size=3)


def _way(cuts: list[int]) -> list[TeamMember]:
    spans = [LayerSpan(a, b) for a, b in pairwise((0, *sorted({*cuts, 100, 101})))]
    return [TeamMember(Partner(n, WorkerRef(n)), span) for n, span in enumerate(spans)]


def _pipeline(number: int, cuts: list[int], replicas: int) -> Pipeline:
    leader, *later = _way(cuts)
    stages = [
        tuple(
            TeamMember(Partner(100 * n + stage.partner.instance, stage.partner.worker), stage.span)
            for n in range(replicas)
        )
        for stage in later
    ]
    return Pipeline(number, ((leader,), *stages), shares=replicas)


st.register_type_strategy(Team, st.builds(lambda n, cuts: Team(n, tuple(_way(cuts))), COUNTS, CUTS))
st.register_type_strategy(Pipeline, st.builds(_pipeline, COUNTS, CUTS, st.integers(1, 3)))
st.register_type_strategy(
    ChunkRange, st.builds(lambda start, size: ChunkRange(start, start + size), COUNTS, COUNTS)
)
st.register_type_strategy(
    Feed,
    st.builds(
        Feed,
        st.from_type(Upstream),
        st.lists(st.from_type(ChunkRange), min_size=1, max_size=3).map(tuple),
    ),
)
st.register_type_strategy(
    BatcherConfig, st.builds(BatcherConfig, COUNTS, COUNTS, st.just(99), COUNTS)
)
# Of the events of a controller: no member reports one that has a policy.
st.register_type_strategy(
    ModelPolicy,
    st.just(ModelPolicy(ModelSpec("m", (1, 1), 1, 1), instances_min=0, instances_max=1)),
)


@given(st.from_type(MemberStepLine))
@settings(max_examples=examples(200))
def test_steps_are_the_same_when_they_were_read(step: MemberStepLine) -> None:
    text = msgspec.json.encode(step)
    assert msgspec.json.encode(msgspec.json.decode(text, type=MemberStepLine)) == text


@given(st.from_type(Effect))
@settings(max_examples=examples(200))
def test_equal_effects_have_equal_bytes(effect: Effect) -> None:
    text = msgspec.json.encode(effect)
    assert encode_effect(msgspec.json.decode(text, type=Effect)) == encode_effect(effect)
