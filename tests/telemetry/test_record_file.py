"""Files of records: continued, divided, compressed, claimed, and closed when the disk fails."""

from __future__ import annotations

import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.messages.events import Tick, WorkerJoined
from livescale.telemetry.record.record import (
    RECORD_VERSION,
    AnyLine,
    RunLine,
    StepLine,
    encode_line,
    read_record,
    starts_of,
    write_record,
)
from livescale.telemetry.record.record_file import RecordClaim, RecordFile, create_record
from livescale.telemetry.record.record_parts import RecordError, part_path, parts_of, record_name
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import ModelSpec, WorkerRef

CONFIG = ControllerConfig((ModelPolicy(ModelSpec("m", (1, 2, 3), 1, 10), 1, 2),), 2)
JOINED = WorkerJoined(WorkerRef(0), Device("cpu", "host", "leaf", 1000, 1000))
NAMES = ("record.jsonl", "record.jsonl.zst")
by_name = pytest.mark.parametrize("name", NAMES)


def begun(start: str = "a") -> RunLine:
    return RunLine(RECORD_VERSION, "real", CONFIG, {}, start)


def steps(first: int, count: int) -> list[StepLine]:
    return [StepLine(now, (Tick(),), (), now) for now in range(first, first + count)]


def write(path: Path, lines: list[AnyLine], bytes_max: int | None = None) -> RecordFile:
    """One life that writes these lines, one at a time."""
    file = RecordFile(path, bytes_max)
    for line in lines:
        if file.is_full:
            file.begin_part()
            file.write(encode_line(RunLine(RECORD_VERSION, "real", CONFIG, {}, "a", True)))
            file.write(encode_line(StepLine(0, (JOINED,), (), 0)))
        file.write(encode_line(line))
        file.flush()
    return file


# -- lives ----------------------------------------------------------------------------------------


@by_name
def test_lives_follow_one_another_in_one_record(tmp_path: Path, name: str) -> None:
    first, second = [begun(), *steps(1, 3)], [begun("b"), *steps(1, 2)]
    for lines in (first, second):
        write(tmp_path / name, lines).close()
    assert list(read_record(tmp_path / name)) == first + second
    assert starts_of(first + second) == [first, second]


def test_lives_of_one_controller_are_one_start() -> None:
    lines = [begun(), *steps(1, 2), begun(), *steps(3, 2)]
    assert starts_of(lines) == [lines]


@by_name
@settings(max_examples=examples(60))
@given(st.data())
def test_wherever_a_writer_is_killed_the_next_life_goes_on_behind_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / name
    first = [begun(), *steps(1, data.draw(st.integers(0, 20)))]
    write(path, first).close() if data.draw(st.booleans()) else write(path, first)
    size = data.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, size)
    kept = list(read_record(path))
    assert kept == first[: len(kept)]
    write(path, [begun("b")]).close()
    assert list(read_record(path)) == [*kept, begun("b")]


@by_name
def test_lines_can_be_read_as_soon_as_they_are_flushed(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, [begun(), *steps(1, 5)])
    assert list(read_record(tmp_path / name)) == [begun(), *steps(1, 5)]
    file.close()


def test_a_compressed_record_of_many_frames_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl.zst"
    # Text that hardly compresses: more than is looked at from the end at once.
    noise = [StepLine(n, (), (), int.from_bytes(os.urandom(7), "big")) for n in range(60_000)]
    file = RecordFile(path)
    for number, line in enumerate([begun(), *noise]):
        file.write(encode_line(line))
        if number % 1000 == 0:
            file.flush()
    file.flush()
    os.truncate(path, path.stat().st_size - 3)
    kept = list(read_record(path))
    assert 59_000 < len(kept) <= len(noise)
    write(path, [begun("b")]).close()
    assert list(read_record(path)) == [*kept, begun("b")]


def test_a_long_record_is_continued_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, [begun()]).close()
    os.truncate(path, 1 << 40)  # a hole of a terabyte: whoever reads it does not come back
    with path.open("ab") as file:
        file.write(b"\n" + encode_line(begun("b")) + b'{"kind":"st')
    write(path, [begun("c")]).close()
    with path.open("rb") as file:
        file.seek(1 << 40)
        assert file.read() == b"\n" + encode_line(begun("b")) + encode_line(begun("c"))


# -- parts ----------------------------------------------------------------------------------------


@by_name
def test_parts_together_are_the_record_and_each_is_readable_alone(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    lines = [begun(), *steps(1, 200)]
    write(path, lines, bytes_max=2000).close()
    parts = parts_of(path)
    assert len(parts) >= 3
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))
    assert list(read_record(path)) == lines
    alone = [list(read_record(part)) for _, part in parts[1:]]
    for of_part in alone:
        assert isinstance(of_part[0], RunLine)
        assert of_part[0].is_continued
        assert of_part[1] == StepLine(0, (JOINED,), (), 0)
    assert sum(len(of_part) - 2 for of_part in alone) < len(lines)
    sizes = [part.stat().st_size for _, part in parts[:-1]]
    assert min(sizes) >= 2000


def test_a_missing_part_is_told_by_the_members_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, [begun(), *steps(1, 200)], bytes_max=2000).close()
    part_path(path, 2).unlink()
    opened = [line for line in read_record(path) if isinstance(line, RunLine)]
    assert [line.is_continued for line in opened] == [False, True]
    path.unlink()
    opened = [line for line in read_record(path) if isinstance(line, RunLine)]
    assert [line.is_continued for line in opened] == [True]


def test_a_further_life_goes_on_in_the_last_part(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, [begun(), *steps(1, 100)], bytes_max=2000).close()
    count = len(parts_of(path))
    write(path, [begun("b")]).close()
    assert len(parts_of(path)) == count
    assert list(read_record(path))[-1] == begun("b")
    write(path, [begun("c")], bytes_max=1).close()
    assert len(parts_of(path)) == count + 1
    assert list(read_record(path))[-1] == begun("c")


def test_a_record_written_anew_has_no_parts_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, [begun(), *steps(1, 100)], bytes_max=2000).close()
    lines = list(read_record(path))
    write_record(path, lines)
    assert parts_of(path) == [(1, path)]
    assert list(read_record(path)) == lines


def test_parts_are_named_after_the_record() -> None:
    assert part_path(Path("a/run.jsonl"), 3) == Path("a/run.3.jsonl")
    assert part_path(Path("a/run.jsonl.zst"), 2) == Path("a/run.2.jsonl.zst")
    assert part_path(Path("run"), 2) == Path("run.2")
    assert record_name(Path("a/run.jsonl.zst")) == "run"


# -- compression ----------------------------------------------------------------------------------


def test_a_compressed_record_is_small_and_damage_in_it_is_named(tmp_path: Path) -> None:
    plain, packed = (tmp_path / name for name in NAMES)
    lines: list[AnyLine] = [begun(), *steps(1, 2000)]
    for path in (plain, packed):
        write_record(path, lines)
        assert list(read_record(path)) == lines
    assert packed.stat().st_size < plain.stat().st_size / 5
    packed.write_bytes(b"x" + packed.read_bytes())
    with pytest.raises(RecordError, match=r"record\.jsonl\.zst: not a compressed run record"):
        list(read_record(packed))


# -- a disk that fails ----------------------------------------------------------------------------


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@by_name
def test_a_record_that_cannot_be_written_is_closed_with_one_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [begun(), *steps(1, 1000)]
    with files_no_larger_than(3000), caplog.at_level(logging.ERROR):
        file = write(tmp_path / name, lines)
        assert file.problem is not None
        file.close()
    (said,) = caplog.records
    assert "failed and stopped" in said.getMessage()
    assert str(tmp_path / name) in said.getMessage()
    read = list(read_record(tmp_path / name))
    assert read == lines[: len(read)]
    assert read
    # With room again, the next life goes on.
    write(tmp_path / name, [begun("b")]).close()
    assert list(read_record(tmp_path / name)) == [*read, begun("b")]


def test_a_device_that_is_full_closes_the_record(caplog: pytest.LogCaptureFixture) -> None:
    file = write(Path("/dev/full"), [begun(), *steps(1, 3)])
    file.close()
    assert file.problem == "No space left on device"
    assert len(caplog.records) == 1


def test_a_part_that_cannot_be_begun_closes_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    part_path(path, 2).mkdir()
    file = write(path, [begun(), *steps(1, 200)], bytes_max=2000)
    assert file.problem == "Is a directory"
    file.close()


def test_a_disk_far_behind_closes_the_record(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record.jsonl")
    block = b"x" * (1 << 20) + b"\n"
    for _ in range(70):
        file.write(block)
    assert file.problem is not None
    file.flush()
    assert (tmp_path / "record.jsonl").stat().st_size == 0
    file.close()


# -- who may write --------------------------------------------------------------------------------


@by_name
def test_a_claimed_record_is_refused_to_all_others_and_stays_as_it_is(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    write_record(path, [begun(), *steps(1, 3)])
    before = path.read_bytes()
    claim = RecordClaim(path)
    with pytest.raises(RecordError, match=f"{path}: is being written by another pool"):
        RecordClaim(path)
    with pytest.raises(RecordError, match="is being written"), create_record(path):
        raise AssertionError("it was given away twice")
    claim.close()
    RecordClaim(path).close()
    assert path.read_bytes() == before


@pytest.mark.usefixtures("machine")
def test_the_claim_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    holds = (
        "import sys, pathlib\n"
        "from livescale.telemetry.record.record_file import RecordClaim\n"
        "claim = RecordClaim(pathlib.Path(sys.argv[1]))\n"
        "print('claimed', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(RecordError, match="is being written"):
            RecordClaim(path)
        other.kill()
        other.wait()
        RecordClaim(path).close()


@by_name
def test_only_the_user_may_read_a_new_record(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    RecordClaim(path).close()
    write(path, [begun(), *steps(1, 100)], bytes_max=500).close()
    write_record(tmp_path / name, [begun()])
    for _, file in [*parts_of(path), (1, tmp_path / name)]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [*NAMES, "notes.txt"])
def test_another_file_is_no_record_and_is_not_touched(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("something else\n")
    with pytest.raises(RecordError, match="exists and is not a run record"):
        RecordClaim(path)
    assert path.read_text() == "something else\n"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=f"{tmp_path}: cannot be written: Is a directory"):
        RecordClaim(tmp_path)
